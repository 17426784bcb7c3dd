"""Tracer for PyTorch programs: starts the recorder and reads the recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from joulery.adapters.tracers.kineto.compiled import read_compiled
from joulery.adapters.tracers.kineto.names import name_events
from joulery.adapters.tracers.kineto.reader import EventKind, read_columns
from joulery.adapters.tracers.kineto.stacks import CLOCK_RANGE
from joulery.adapters.tracers.recordings import RecordingTracer
from joulery.domain.arrays import IntArray
from joulery.domain.trace.events import EventTrace


class TorchTracer(RecordingTracer):
    """Tracer that records PyTorch programs from inside."""

    def __init__(self) -> None:
        super().__init__("torch", "PyTorch module", _read)


def _read(file: Path, calls: bool) -> tuple[EventTrace, IntArray]:
    columns = read_columns(file)
    named = [number for number, name in enumerate(columns.names) if name == CLOCK_RANGE]
    rows = (columns.kind == EventKind.RANGE) & np.isin(columns.name, named)
    compiled = read_compiled(file.with_name(f"{file.stem.rpartition('-')[0]}.compiled"))
    return name_events(columns, calls=calls, compiled=compiled), columns.start_ns[rows]
