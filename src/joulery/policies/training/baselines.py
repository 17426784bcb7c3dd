"""Training schedulers that GREEN is compared with, on the same cluster and the same power (NSDI'25, section 8).

Each is a pure policy over :class:`~joulery.policies.training.allocation.ClusterView`. ``Tiresias``: discretised
two-dimensional least attained service. ``Fifo``: first come, first served, never preempted; in clean hours only, it is
EcoVisor's rule, and behind :class:`CarbonTime`, which chooses a start time at submission, it is GAIA. ``Backfill``: the
same with a reservation for the first job that waits (EASY). ``zeus_limits``: the power limit of each kind of job at the
least of Zeus's cost (NSDI'23, section 3.1), at its own batch size. Pollux has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import ConfigError
from joulery.perf.power.training_power import POWER_LIMITS, JobClass, limited
from joulery.policies.training.allocation import Allocation, ClusterView

_NO_PRESET: Mapping[int, int] = MappingProxyType({})


def _step(allocation: Allocation, policy: str, reason: str, wake_s: float | None = None) -> Step[object]:
    return Step(None, (Decision("allocate", "cluster", allocation, policy, reason),), wake_s)


def _pack(wanted: Sequence[tuple[int, int]], gpus: int) -> tuple[dict[int, int], tuple[tuple[int, int], ...]]:
    """Place the jobs in order, each if it still fits; the others wait."""
    run: dict[int, int] = {}
    left: list[tuple[int, int]] = []
    for job, want in wanted:
        if want <= gpus:
            run[job], gpus = want, gpus - want
        else:
            left.append((job, want))
    return run, tuple(left)


def _wants(view: ClusterView, preset: Mapping[int, int]) -> list[int]:
    """GPUs of each job: its kind's preset, or what its owner requested."""
    rows = zip(view.kind.tolist(), view.requested.tolist(), view.max_gpus.tolist(), strict=True)
    return [min(preset.get(kind, requested), most) for kind, requested, most in rows]


@dataclass(frozen=True, slots=True)
class Tiresias:
    """Two queues by attained GPU time, first come first served inside each, preemptive every round (NSDI'19).

    Attributes:
        preset: GPUs of each kind of job; a kind that is absent gets what its owner requested.
        threshold_gpu_s: Attained service at which a job falls to the second queue.
    """

    preset: Mapping[int, int] = field(default_factory=lambda: _NO_PRESET)
    threshold_gpu_s: float = 16 * 3600.0
    name: str = "tiresias"

    def initial(self) -> object:
        """The initial state: this policy keeps none."""
        return None

    def step(self, state: object, view: ClusterView, /) -> Step[object]:
        """Rank by queue, then by submission."""
        second = view.attained_gpu_s >= self.threshold_gpu_s
        order = np.lexsort((view.job, view.submit_s, second)).tolist()
        jobs, wants = view.job.tolist(), _wants(view, self.preset)
        run, left = _pack([(jobs[row], wants[row]) for row in order], view.gpus)
        reason = f"least attained service first: {int(np.sum(~second))} in the first queue"
        return _step(Allocation(run, left, self.preset, True), self.name, reason, None if left else float("inf"))


@dataclass(frozen=True, slots=True)
class Fifo:
    """First come, first served, with backfill; a running job is not moved.

    Attributes:
        preset: GPUs of each kind of job; a kind that is absent gets what its owner requested.
        clean_below_g_per_kwh: Start jobs only while the intensity is at most this (EcoVisor: its 10th percentile).
    """

    preset: Mapping[int, int] = field(default_factory=lambda: _NO_PRESET)
    clean_below_g_per_kwh: float = float("inf")
    name: str = "fifo"

    def initial(self) -> object:
        """The initial state: this policy keeps none."""
        return None

    def step(self, state: object, view: ClusterView, /) -> Step[object]:
        """Keep the running jobs, and start others in a clean hour."""
        clean = view.g_per_kwh <= self.clean_below_g_per_kwh
        running = {job: gpus for job, gpus in zip(view.job.tolist(), view.running.tolist(), strict=True) if gpus}
        queue = [
            (job, want)
            for job, want in zip(view.job.tolist(), _wants(view, self.preset), strict=True)
            if job not in running
        ]
        started, left = _pack(queue, view.gpus - sum(running.values())) if clean else ({}, tuple(queue))
        allocation = Allocation(running | started, left, self.preset, True, passive=clean)
        return _step(allocation, self.name, f"{'clean' if clean else 'dirty'} hour, {len(left)} wait")


@dataclass(frozen=True, slots=True, eq=False)
class Backfill:
    """EASY backfill (Lifka, JSSPP'95): first come, first served, and no later job delays the first one that waits.

    To be stepped at every submission and completion. It has the exact length of each job, an advantage over the other
    policies.

    Attributes:
        length_s: How long each job runs on the GPUs requested, by job number, float64[jobs].
    """

    length_s: FloatArray
    name: str = "backfill"

    def initial(self) -> Mapping[int, float]:
        """The initial state: no job has started."""
        return {}

    def step(self, state: Mapping[int, float], view: ClusterView, /) -> Step[Mapping[int, float]]:
        """Start jobs in order, and behind the first that does not fit those that end in time or leave it its GPUs."""
        running = {job: gpus for job, gpus in zip(view.job.tolist(), view.running.tolist(), strict=True) if gpus}
        ends_s, free = {job: state[job] for job in running}, view.gpus - sum(running.values())
        run, start_s, spare = dict(running), float("inf"), view.gpus
        left: list[tuple[int, int]] = []
        for job, want in zip(view.job.tolist(), _wants(view, _NO_PRESET), strict=True):
            if job in running:
                continue
            end_s = view.now_s + float(self.length_s[job])
            in_time = end_s <= start_s
            if want <= free and (in_time or want <= spare):
                run[job], ends_s[job], free = want, end_s, free - want
                spare -= 0 if in_time else want
                continue
            if not left:
                start_s, spare = _reservation(free, want, sorted((ends_s[one], run[one]) for one in run))
            left.append((job, want))
        allocation = Allocation(run, tuple(left), newcomers_as_requested=True, passive=False)
        reason = f"{len(left)} wait, the first until {start_s:g} s at the latest" if left else "none waits"
        return Step(ends_s, (Decision("allocate", "cluster", allocation, self.name, reason),))


def _reservation(free: int, want: int, ends: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Time at which ``want`` GPUs are free, and the number of further free GPUs then.

    Args:
        free: GPUs free now.
        want: Number of GPUs wanted.
        ends: Times at which running jobs end, in order, with their GPUs.
    """
    for end_s, gpus in ends:
        free += gpus
        if free >= want:
            return end_s, free - want
    return float("inf"), free


@dataclass(frozen=True, slots=True, eq=False)
class CarbonTime:
    """GAIA's start time (ASPLOS'24): the delay that saves most carbon per hour of completion time.

    For a job of expected length L submitted now, the start ``s`` in 0 … W hours that maximises
    ``(C(0) - C(s)) / (s + L)``, where ``C(s)`` is the intensity summed over ``[s, s + L]``.

    Attributes:
        integral: Integral of the intensity from 0 to a time, g·s/kWh: a forecast, or hindsight.
        short_s, long_s: Expected length of the jobs in the short and the long queue.
        wait_h: Longest delay, hours (W).
        short_below_s: Jobs up to this length belong to the short queue.
    """

    integral: Callable[[float], float]
    short_s: float
    long_s: float
    wait_h: int = 12
    short_below_s: float = 7200.0

    def start_s(self, submit_s: float, work_s: float) -> float:
        """Time from which a job submitted at ``submit_s`` may start."""
        length_s = self.short_s if work_s <= self.short_below_s else self.long_s
        delays_s = [3600.0 * hour for hour in range(self.wait_h + 1)]
        begin = [self.integral(submit_s + delay_s) for delay_s in delays_s]
        cost = [self.integral(submit_s + d + length_s) - b for d, b in zip(delays_s, begin, strict=True)]
        worth = [(cost[0] - c) / (d + length_s) for d, c in zip(delays_s, cost, strict=True)]
        return submit_s + delays_s[int(np.argmax(worth))]


def zeus_limits(classes: tuple[JobClass, ...], board_w: float, eta: float = 0.5) -> dict[str, float]:
    """The limit of each class, as a share of the board's, that minimises ``eta · energy + (1 - eta) · board · time``.

    Args:
        classes: The jobs, at full power.
        board_w: Power limit of the board, W (MAXPOWER).
        eta: Weight of energy against time: 1 for energy alone, 0 for time alone.

    Raises:
        ConfigError: ``eta`` is not between 0 and 1.
    """
    if not 0 <= eta <= 1:
        raise ConfigError("eta weighs energy against time", got=str(eta), expected="0 to 1")

    def cost(job: JobClass) -> float:
        return job.time_ratio * (eta * job.gpu_w + (1.0 - eta) * board_w)

    chosen = {}
    for job in classes:
        menu = {1.0: job} | {
            ratio: limited((job,), ratio)[0] for ratio in POWER_LIMITS if job.measured_name in POWER_LIMITS[ratio]
        }
        chosen[job.name] = min(menu, key=lambda ratio: (cost(menu[ratio]), -ratio))
    return chosen
