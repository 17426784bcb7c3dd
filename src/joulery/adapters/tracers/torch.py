"""PyTorch programs: how to have them recorded, and what the recording says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from joulery.adapters.tracers import recordings
from joulery.adapters.tracers.kineto import Kind, read_columns
from joulery.adapters.tracers.kineto_names import name_events
from joulery.adapters.tracers.kineto_stacks import CLOCK_RANGE
from joulery.domain.arrays import IntArray
from joulery.domain.events import EventTrace
from joulery.domain.tracing import Steps, TracedSession


class TorchTracer:
    """Has PyTorch programs record themselves through their environment (:class:`joulery.domain.ports.Tracer`)."""

    def environment(self, folder: str, steps: Steps, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables that have a Python program recorded into ``folder`` (which exists), on top of those it inherits."""
        return recordings.environment("torch", folder, steps, inherited)

    def recorded(
        self, folder: str, sampler_offset_ns: int | None, *, calls: bool = False
    ) -> tuple[list[TracedSession], list[str]]:
        """The sessions of every process that recorded itself into a folder, and what went wrong, one sentence each.

        Args:
            folder: Where they recorded.
            sampler_offset_ns: Unix minus monotonic nanoseconds on the clock of the power readings; None where there
                are none.
            calls: Number repeated calls of one module.

        Raises:
            DataError: A file is damaged.
        """
        return recordings.recorded(
            folder, "torch", "PyTorch module", sampler_offset_ns, lambda file: _read(file, calls)
        )

    def leftovers(self, folder: str) -> None:
        """Delete what was recorded, after it has been read.

        Raises:
            DataError: A file cannot be deleted.
        """
        recordings.leftovers(folder, "torch")


def _read(file: Path, calls: bool) -> tuple[EventTrace, IntArray]:
    columns = read_columns(file)
    named = [number for number, name in enumerate(columns.names) if name == CLOCK_RANGE]
    rows = (columns.kind == Kind.RANGE) & np.isin(columns.name, named)
    return name_events(columns, calls=calls), columns.start_ns[rows]
