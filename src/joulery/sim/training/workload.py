"""The jobs of a training workload: when they come, how long they take, how many GPUs they may have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """A workload of training jobs, in order of submission.

    Attributes:
        submit_s: Non-decreasing, float64[n].
        work_s: Duration on one GPU, float64[n], > 0.
        kind: Row of the power table, int64[n].
        requested: GPUs the owner asked for, int64[n], at least 1.
        max_gpus: Most GPUs it may use, int64[n].
    """

    submit_s: FloatArray
    work_s: FloatArray
    kind: IntArray
    requested: IntArray
    max_gpus: IntArray

    def __post_init__(self) -> None:
        if bool(np.any(np.diff(self.submit_s) < 0)):
            raise DataError("jobs must be in order of submission", hint="sort the trace by submit_s")
        if not bool(np.all(self.work_s > 0) and np.all(np.isfinite(self.work_s))):
            at = int(np.argmax(~(self.work_s > 0)))
            raise DataError(f"job {at} has a duration of {self.work_s[at]} s, expected more than 0", row=at + 2)

    def __len__(self) -> int:
        return len(self.submit_s)
