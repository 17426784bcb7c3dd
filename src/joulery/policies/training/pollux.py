"""Pollux on the cluster that GREEN is compared on: GPUs go where they add most goodput (Qiao et al., OSDI'21).

Goodput is throughput times statistical efficiency: a larger batch makes less progress a sample. A round maximises the
weighted power mean of the jobs' speed-ups with p = -1, the weight of a job falling with the GPU time it has had, a new
number of GPUs counting only as far as the time lost to re-allocations leaves it. The published search is genetic; at
p = -1 the objective is a sum of one term a job, which handing out GPUs one by one solves where returns diminish. Where
they do not (a third GPU on another node), a job stops growing there.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.decisions import Decision, Step
from joulery.perf.power.training_power import PowerTable
from joulery.policies.training.allocation import Allocation, ClusterView

BATCH_TOLERANCE: Mapping[str, float] = MappingProxyType(
    {
        "resnet50-imagenet": 78.0, "resnet18-cifar": 40.0, "shufflenet-cifar": 40.0, "deepspeech2": 52.0,
        "ncf": 1000.0, "bert-squad": 342.0, "bert-sentiment": 342.0, "gpt2": 342.0,
    }
)  # fmt: skip
"""Gradient noise scale of each class in units of its first batch: the value that gives the iterations to the end at
eight times that batch (Pollux's artifact, full trainings). ShuffleNet uses the value of ResNet-18, GPT-2 that of
BERT."""


def goodput(table: PowerTable, tolerance: Mapping[str, float] = BATCH_TOLERANCE) -> FloatArray:
    """Progress a second of each class on 0 … max GPUs, in seconds of one GPU, the batch growing with the GPUs.

    Throughput times ``(phi + 1) / (phi + n)``; a class of unknown ``phi`` loses nothing. float64[classes, max + 1].
    """
    gpus = np.arange(table.speedup.shape[1])
    phi = np.array([[tolerance.get(job.measured_name, np.inf)] for job in table.classes])
    known = np.isfinite(phi)
    scale = np.where(known, phi, 1.0)
    efficiency = np.where(known, (scale + 1.0) / (scale + np.maximum(gpus, 1)), 1.0)
    return np.asarray(table.speedup * efficiency, np.float64)


_LOOK_AGAIN_S = 600.0


@dataclass(frozen=True, slots=True)
class PolluxState:
    """Number of re-allocations of each unfinished job."""

    moved: Mapping[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Pollux:
    """Pollux's policy: reallocates all GPUs every round, by the weighted power mean of goodput speed-ups.

    Attributes:
        goodput: Goodput of each class by number of GPUs, float64[classes, max + 1].
        cap: Most GPUs of a job.
        weight_gpu_s: GPU time up to which a job has full weight (4 GPU-hours).
        weight_power: Exponent with which the weight falls beyond that (0.5).
        inertia: A job that waits takes the GPU of one that runs when its weight is larger by this share: without it
            two jobs of like age would change places every minute.
    """

    goodput: FloatArray
    cap: int = 8
    weight_gpu_s: float = 4 * 3600.0
    weight_power: float = 0.5
    inertia: float = 0.2
    name: str = "pollux"

    def initial(self) -> PolluxState:
        """The state before the first round."""
        return PolluxState(MappingProxyType({}))

    def step(self, state: PolluxState, view: ClusterView, /) -> Step[PolluxState]:
        """Allocate the GPUs; move the jobs for which a move pays."""
        jobs, running = view.job.tolist(), view.running.tolist()
        speedup = self.goodput[view.kind] / self.goodput[view.kind, 1][:, None] if len(view) else np.zeros((0, 2))
        weight = np.minimum(1.0, self.weight_gpu_s / np.maximum(view.attained_gpu_s, 1.0)) ** self.weight_power
        caps = np.minimum(self.cap, view.max_gpus).tolist()
        gpus = self._share(speedup, weight, running, caps, view.gpus)
        moved = [state.moved.get(job, 0) for job in jobs]
        self._keep(gpus, running, speedup, _left_of_time(view, moved), view.gpus)
        run = {job: n for job, n in zip(jobs, gpus, strict=True) if n > 0}
        waiting = sorted((row for row, n in enumerate(gpus) if n == 0), key=lambda row: -weight[row])
        allocation = Allocation(run, tuple((jobs[row], 1) for row in waiting))
        reason = f"{len(run)} run, {len(waiting)} wait for their first GPU"
        counts = {job: n + (0 < have != want) for job, n, have, want in zip(jobs, moved, running, gpus, strict=True)}
        decision = Decision("allocate", "cluster", allocation, self.name, reason)
        # Between arrivals and ends only ages change, and they change slowly.
        return Step(PolluxState(MappingProxyType(counts)), (decision,), view.now_s + _LOOK_AGAIN_S)

    def _share(
        self, speedup: FloatArray, weight: FloatArray, running: Sequence[int], caps: Sequence[int], total: int
    ) -> list[int]:
        """GPUs of each job: one each by weight while they last; every further one where the objective falls most."""
        favoured = weight * np.where(np.asarray(running) > 0, 1.0 + self.inertia, 1.0)
        first = np.argsort(-favoured, kind="stable")[:total].tolist()
        gpus = [0] * len(caps)
        for row in first:
            gpus[row] = 1
        free = total - len(first)
        heap: list[tuple[float, int]] = []

        def offer(row: int) -> None:
            have = gpus[row]
            if have < caps[row]:
                gain = float(weight[row]) * (1.0 / speedup[row, have] - 1.0 / speedup[row, have + 1])
                if gain > 0:
                    heapq.heappush(heap, (-float(gain), row))

        if free > 0:
            for row in first:
                offer(row)
        while free > 0 and heap:
            _, row = heapq.heappop(heap)
            gpus[row] += 1
            free -= 1
            offer(row)
        return gpus

    @staticmethod
    def _keep(gpus: list[int], running: Sequence[int], speedup: FloatArray, left_ratio: FloatArray, total: int) -> None:
        """Take back, in place, every move that costs its job more time than it gains, as far as GPUs are free."""
        free = total - sum(gpus)
        moving = [row for row, have in enumerate(running) if 0 < have != gpus[row] > 0]
        for row in sorted(moving, key=lambda row: running[row] - gpus[row]):
            have, want = running[row], gpus[row]
            pays = speedup[row, want] * left_ratio[row] > speedup[row, have]
            if not pays and have - want <= free:
                gpus[row], free = have, free - (have - want)


def _left_of_time(view: ClusterView, moved: Sequence[int]) -> FloatArray:
    """The share of a job's life that one more re-allocation leaves it: ``(T - R d) / (T + d)``."""
    age_s = np.maximum(view.now_s - view.submit_s, 1.0)
    lost_s = np.asarray(moved, np.float64) * view.restart_s
    return np.asarray(np.clip((age_s - lost_s) / (age_s + view.restart_s), 0.0, 1.0), np.float64)
