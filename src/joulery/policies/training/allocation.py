"""A training policy's view of the cluster, its decision, and the jobs that start between rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from joulery.domain.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class ClusterView:
    """A training policy's view of the cluster in a round; one entry per unfinished job, in order of submission.

    Attributes:
        now_s: Time.
        gpus: GPUs of the cluster.
        g_per_kwh: Carbon intensity now.
        mean_g_per_kwh: Its mean over the active window; 0 where it is unknown, as where nothing is emitted.
        restart_s: Time a job loses when it is moved.
        job: Job number, int64[n].
        submit_s: When it was submitted.
        running: GPUs it runs on now, 0 while it waits, int64[n].
        max_gpus: Most GPUs it may use, int64[n].
        requested: GPUs its owner asked for, int64[n].
        kind: Recurring class of the job, for profiles that carry over; -1 when unknown, int64[n].
        executed_s: Time it has held GPUs.
        attained_gpu_s: GPU-seconds it has held.
        remaining_s: Work left, in seconds on one GPU.
        footprint_kg: Carbon so far.
        degradation: Efficiency at its present number of GPUs over that on one; NaN until measured there.
        gpu_w: Power of one of its GPUs when last measured; NaN before.
        min_gpus: Fewest GPUs it may use, int64[n]; 1 each when None.
        deadline_s: Latest end that its owner accepts, float64[n]; infinite for no deadline, None where no job has one.
        longest_s: Work in all at most, as its owner states, in seconds on one GPU, float64[n]; NaN where unknown, None
            where nothing is known of any job. It is used where progress does not show the work left.
        slowdown: Time a step takes under the power limits in force, against full power, float64[n]; 1 each when None.
        ahead_g_per_kwh: Carbon intensity expected in the hours ahead, the first from now on, float64[hours]; None
            where it is unknown.
        expected_g_per_kwh: Intensity now by the same forecast: a forecast that is too low as a whole still shows which
            hours are cleaner.
        round_s: Time until the next round.
        wake_s: Time a suspended node takes to wake.
        ended_gpu_s: GPU-seconds of the jobs that ended last, oldest first, float64[ended]; None where unknown.
        job_w: Power of the whole job at its present number of GPUs, W, float64[n]; NaN until measured there, None where
            nothing measures it.
    """

    now_s: float
    gpus: int
    g_per_kwh: float
    mean_g_per_kwh: float
    restart_s: float
    job: IntArray
    submit_s: FloatArray
    running: IntArray
    max_gpus: IntArray
    requested: IntArray
    kind: IntArray
    executed_s: FloatArray
    attained_gpu_s: FloatArray
    remaining_s: FloatArray
    footprint_kg: FloatArray
    degradation: FloatArray
    gpu_w: FloatArray
    min_gpus: IntArray | None = None
    deadline_s: FloatArray | None = None
    longest_s: FloatArray | None = None
    slowdown: FloatArray | None = None
    ahead_g_per_kwh: FloatArray | None = None
    expected_g_per_kwh: float = 0.0
    round_s: float = 1800.0
    wake_s: float = 0.0
    ended_gpu_s: FloatArray | None = None
    job_w: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.job)

    @property
    def hour(self) -> Literal["green", "dirty"] | None:
        """``green`` while the intensity is below its mean, else ``dirty``; None where the mean is 0."""
        if self.mean_g_per_kwh == 0:
            return None
        return "green" if self.g_per_kwh < self.mean_g_per_kwh else "dirty"


@dataclass(frozen=True, slots=True)
class Allocation:
    """The decision of a round.

    Attributes:
        run: GPUs of every job that is to run now; a running job that is absent is preempted.
        waiting: Jobs to start next when GPUs come free, in order, with the GPUs each wants.
        newcomer_gpus: GPUs a job submitted before the next round starts on, by its kind.
        newcomers_as_requested: Newcomers of other kinds start on the GPUs that their owners requested; on one GPU
            otherwise.
        passive: False when no job may start between rounds, new ones included.
        full_power: Jobs that start from now on start without their power limit, where there is one.
        held: Jobs that wait for a cleaner hour; those that run are suspended, whether or not another takes their GPUs.
        hold_slack_s: Newcomers that need not start for longer than this to meet their deadline wait for the next
            round.
        hold_gpus: How many newcomers with a deadline may so wait, the first that come.
    """

    run: Mapping[int, int]
    waiting: tuple[tuple[int, int], ...] = ()
    newcomer_gpus: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    newcomers_as_requested: bool = False
    passive: bool = True
    held: tuple[int, ...] = ()
    hold_slack_s: float = float("inf")
    hold_gpus: int = 0
    full_power: bool = False


def start_waiting(waiting: Sequence[tuple[int, int]], free: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Passive scheduling: the waiting jobs that start now, in order, each on its own number of GPUs if it fits.

    Returns:
        Jobs that start, with their GPUs; jobs that keep waiting, in order.
    """
    started: list[tuple[int, int]] = []
    left: list[tuple[int, int]] = []
    for at, (job, want) in enumerate(waiting):
        if free <= 0:
            left.extend(waiting[at:])
            break
        if want <= free:
            started.append((job, want))
            free -= want
        else:
            left.append((job, want))
    return started, left
