"""CPU time of the threads of a traced program, read at intervals while it was recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray, readonly
from joulery.domain.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class ThreadTimes:
    """Cumulative CPU time of threads, one row a reading.

    Attributes:
        t_ns: Unix nanoseconds of each reading, int64[n].
        process, thread: The system's numbers, int64[n].
        cpu_s: CPU seconds of the thread since it began, float64[n].
        sweep: Readings of one pass over all threads have one number, not decreasing, int64[n].
        wait_s: Seconds it was ready and waited for a CPU since it began; NaN where they were not read, float64[n].

    Raises:
        DataError: The columns differ in length.
    """

    t_ns: IntArray
    process: IntArray
    thread: IntArray
    cpu_s: FloatArray
    sweep: IntArray
    wait_s: FloatArray

    def __init__(
        self,
        t_ns: npt.ArrayLike,
        process: npt.ArrayLike,
        thread: npt.ArrayLike,
        cpu_s: npt.ArrayLike,
        sweep: npt.ArrayLike,
        wait_s: npt.ArrayLike | None = None,
    ) -> None:
        columns = {"t_ns": t_ns, "process": process, "thread": thread, "sweep": sweep}
        for name, values in columns.items():
            object.__setattr__(self, name, readonly(values, np.int64))
        object.__setattr__(self, "cpu_s", readonly(cpu_s, np.float64))
        unknown = np.full(len(self.cpu_s), np.nan)
        object.__setattr__(self, "wait_s", readonly(unknown if wait_s is None else wait_s, np.float64))
        lengths = {name: len(getattr(self, name)) for name in (*columns, "cpu_s", "wait_s")}
        if len(set(lengths.values())) > 1:
            raise DataError(f"columns of thread times differ in length: {lengths}")

    def __len__(self) -> int:
        return len(self.t_ns)

    def between(self, t0_ns: int, t1_ns: int) -> ThreadTimes:
        """The readings of a window, and the sweeps just before and after it."""
        if not len(self):
            return self
        inside = (self.t_ns >= t0_ns) & (self.t_ns < t1_ns)
        if not inside.any():
            return ThreadTimes([], [], [], [], [])
        first, last = int(self.sweep[inside].min()) - 1, int(self.sweep[inside].max()) + 1
        kept = (self.sweep >= first) & (self.sweep <= last)
        names = ("t_ns", "process", "thread", "cpu_s", "sweep", "wait_s")
        return ThreadTimes(*(getattr(self, name)[kept] for name in names))
