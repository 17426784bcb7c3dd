"""JAX and TensorFlow 2 programs: how to have them recorded, and what the recording says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from joulery.adapters.tracers import recordings
from joulery.adapters.tracers.kineto_stacks import CLOCK_RANGE
from joulery.adapters.tracers.xplane import profile_trace, read_profile
from joulery.domain.arrays import IntArray
from joulery.domain.events import EventTrace
from joulery.domain.tracing import Steps, TracedSession

_CALLED = {"jax": "function of jax.jit", "tensorflow": "tf.function"}


class XlaTracer:
    """Has JAX or TensorFlow programs record themselves through their environment (a Tracer of the ports).

    Args:
        framework: Which of the two.
    """

    def __init__(self, framework: Literal["jax", "tensorflow"]) -> None:
        self._framework = framework

    def environment(self, folder: str, steps: Steps, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables that have a Python program recorded into ``folder`` (which exists), on top of those it inherits."""
        return recordings.environment(self._framework, folder, steps, inherited)

    def recorded(
        self, folder: str, sampler_offset_ns: int | None, *, calls: bool = False
    ) -> tuple[list[TracedSession], list[str]]:
        """The sessions of every process that recorded itself into a folder, and what went wrong, one sentence each.

        Args:
            folder: Where they recorded.
            sampler_offset_ns: Unix minus monotonic nanoseconds on the clock of the power readings; None where there
                are none.
            calls: Has no meaning here: a compiled program has no calls of modules.

        Raises:
            DataError: A file is damaged.
        """
        return recordings.recorded(folder, self._framework, _CALLED[self._framework], sampler_offset_ns, _read)

    def leftovers(self, folder: str) -> None:
        """Delete what was recorded, after it has been read.

        Raises:
            DataError: A file cannot be deleted.
        """
        recordings.leftovers(folder, self._framework)


def _read(file: Path) -> tuple[EventTrace, IntArray]:
    profile = read_profile(file)
    starts = [profile.start_ns + event.start_ps // 1000 for event in profile.events if event.name == CLOCK_RANGE]
    return profile_trace(profile, file), np.array(starts, np.int64)
