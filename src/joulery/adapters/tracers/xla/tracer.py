"""JAX and TensorFlow 2 programs: how to have them recorded, and what the recording says."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from joulery.adapters.tracers.kineto.stacks import CLOCK_RANGE
from joulery.adapters.tracers.recordings import RecordingTracer
from joulery.adapters.tracers.xla.xplane import profile_trace, read_profile
from joulery.domain.arrays import IntArray
from joulery.domain.trace.events import EventTrace

_CALLED = {"jax": "function of jax.jit", "tensorflow": "tf.function"}


class XlaTracer(RecordingTracer):
    """Has JAX or TensorFlow programs record themselves.

    Args:
        framework: Which of the two.
    """

    def __init__(self, framework: Literal["jax", "tensorflow"]) -> None:
        super().__init__(framework, _CALLED[framework], _read)


def _read(file: Path, _calls: bool) -> tuple[EventTrace, IntArray]:
    """The events of a file; a compiled program has no calls of modules that could be numbered."""
    profile = read_profile(file)
    starts = [profile.start_ns + event.start_ps // 1000 for event in profile.events if event.name == CLOCK_RANGE]
    return profile_trace(profile, file), np.array(starts, np.int64)
