"""Accounts of the jobs of a simulated cluster so far: time, service, work done, energy and carbon."""

from __future__ import annotations

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray, IntArray
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.perf.power.training_power import PowerTable

MEASURE_S = 300.0
"""Undisturbed run time on its GPUs after which a job's efficiency there counts as measured (section 5.1)."""


class JobAccounts:
    """Accounts of jobs, one entry a job; those of a running job are updated at its events and at every round.

    Between two updates its power and speed are constant, and the integral of the intensity is exact.

    Attributes:
        gpus: GPUs it holds, 0 while it waits, int64[n].
        ready_s: When it makes progress again after its last start, float64[n].
        left_s: Work left, in seconds on one GPU, float64[n].
        executed_s: Time it has held GPUs, float64[n].
        attained_s: GPU-seconds it has held, float64[n].
        job_j, job_kg: Its energy and carbon, float64[n].
        gpu_w: Power of one of its GPUs when last measured, W, float64[n]; NaN before.

    Args:
        work_s: Duration of each job on one GPU, float64[n].
    """

    __slots__ = (
        "_gpu_w", "_job_w", "_since_integral", "_since_s", "_speedup",
        "attained_s", "executed_s", "gpu_w", "gpus", "job_j", "job_kg", "left_s", "ready_s",
    )  # fmt: skip

    def __init__(self, work_s: FloatArray) -> None:
        n = len(work_s)
        self.gpus, self.left_s = np.zeros(n, np.int64), work_s.copy()
        self.ready_s, self.executed_s, self.attained_s, self.job_j, self.job_kg = (np.zeros(n) for _ in range(5))
        self.gpu_w = np.full(n, np.nan)
        # When it was brought up to date, and the integral of the intensity up to then.
        self._since_s, self._since_integral = np.zeros(n), np.zeros(n)
        # Of the present run.
        self._job_w, self._speedup, self._gpu_w = np.zeros(n), np.zeros(n), np.zeros(n)

    def start(self, job: int, now_s: float, integral: float, gpus: int, ready_s: float) -> None:
        """Record that a job gets GPUs; :meth:`set_rates` then sets its power and speed."""
        self.gpus[job], self.ready_s[job] = gpus, ready_s
        self._since_s[job], self._since_integral[job] = now_s, integral

    def set_rates(self, job: int, table: PowerTable, row: int) -> float:
        """Set the power and speed of a job from now on; it must be up to date. Returns the power of its GPUs, W."""
        gpus = self.gpus.item(job)
        job_w = table.job_w.item(row, gpus)
        self._job_w[job], self._speedup[job], self._gpu_w[job] = job_w, table.speedup[row, gpus], table.gpu_w[row, gpus]
        return job_w

    def job_w(self, job: int) -> float:
        """Power of a running job, W."""
        return self._job_w.item(job)

    def work_left_s(self, job: int) -> float:
        """Time until a running job ends at its present speed; it must be up to date."""
        return self.left_s.item(job) / self._speedup.item(job)

    def update(self, job: int, now_s: float, integral: float) -> None:
        """Bring one running job up to date.

        The result equals that of :meth:`update_all` to the last bit, in a tenth of the time for a single job.

        Args:
            job: Its number.
            now_s: Time.
            integral: Integral of the intensity from 0 until now, g·s/kWh.
        """
        since_s, ready_s, job_w = self._since_s.item(job), self.ready_s.item(job), self._job_w.item(job)
        elapsed_s = now_s - since_s
        grams = job_w * (integral - self._since_integral.item(job)) / JOULES_PER_KWH
        productive_s = max(0.0, now_s - max(since_s, ready_s))
        self.job_j[job] = self.job_j.item(job) + job_w * elapsed_s
        self.job_kg[job] = self.job_kg.item(job) + grams / 1e3
        self.left_s[job] = max(0.0, self.left_s.item(job) - productive_s * self._speedup.item(job))
        self.executed_s[job] = self.executed_s.item(job) + elapsed_s
        self.attained_s[job] = self.attained_s.item(job) + elapsed_s * self.gpus.item(job)
        if now_s - ready_s >= MEASURE_S:
            self.gpu_w[job] = self._gpu_w[job]
        self._since_s[job], self._since_integral[job] = now_s, integral

    def update_all(self, jobs: IntArray, now_s: float, integral: float) -> None:
        """Bring running jobs up to date.

        Args:
            jobs: Their numbers, int64[m], each once.
            now_s: Time.
            integral: Integral of the intensity from 0 until now, g·s/kWh.
        """
        since_s, ready_s, job_w = self._since_s[jobs], self.ready_s[jobs], self._job_w[jobs]
        elapsed_s = now_s - since_s
        grams = job_w * (integral - self._since_integral[jobs]) / JOULES_PER_KWH
        productive_s = np.maximum(0.0, now_s - np.maximum(since_s, ready_s))
        self.job_j[jobs] += job_w * elapsed_s
        self.job_kg[jobs] += grams / 1e3
        self.left_s[jobs] = np.maximum(0.0, self.left_s[jobs] - productive_s * self._speedup[jobs])
        self.executed_s[jobs] += elapsed_s
        self.attained_s[jobs] += elapsed_s * self.gpus[jobs]
        measured = jobs[now_s - ready_s >= MEASURE_S]
        self.gpu_w[measured] = self._gpu_w[measured]
        self._since_s[jobs], self._since_integral[jobs] = now_s, integral

    def measured(self, jobs: IntArray, now_s: float) -> BoolArray:
        """Mask of the jobs that run, undisturbed for long enough that their efficiency is known, bool[m]."""
        return np.asarray((self.gpus[jobs] > 0) & (now_s - self.ready_s[jobs] >= MEASURE_S), np.bool_)
