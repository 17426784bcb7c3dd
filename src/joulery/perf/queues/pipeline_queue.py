"""Queueing in pipelines that share devices, in one pass over the requests (AlpaServe, OSDI'23).

First come, first served. A request goes to the route of its model whose last device is free first; at each stage
``t = max(t, device is free) + stage``; it is accepted if it ends within its SLO, and has no effect if it does not.
The recursion is sequential; here it runs over blocks of the workload at once, each from an estimate of its first state
(found from a few requests before it). Blocks with a wrong estimate run again from the right state, until every block
started where its predecessor ended: then the result is that of the sequential recursion, to the last bit. Many
candidate placements run at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import BoolArray, FloatArray, IntArray
from joulery.domain.errors import ConfigError, DataError

_LANES = 3072
"""Blocks times candidates that run at once: enough to amortise a step, few enough to stay in the cache."""
_SHORTEST_BLOCK = 48
_WARM_UP = 48


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Routes for the requests of each model, for one or more candidate placements.

    Attributes:
        stage_s: Time of each stage, s, float64[candidates, models, routes, stages]; 0 where a route has fewer stages.
        device: Device of each stage, int64 of the same shape; -1 where there is no stage. A missing route has -1 in its
            first stage; real routes precede missing ones.
        devices: Number of devices.
    """

    stage_s: FloatArray
    device: IntArray
    devices: int

    def __post_init__(self) -> None:
        if self.stage_s.shape != self.device.shape or self.stage_s.ndim != 4:
            raise DataError(f"routes have shapes {self.stage_s.shape} and {self.device.shape}")
        if self.device.size and int(self.device.max()) >= self.devices:
            raise DataError(f"a route runs on device {int(self.device.max())} of {self.devices}")

    @property
    def candidates(self) -> int:
        """Number of placements."""
        return int(self.stage_s.shape[0])

    def one(self, candidate: int) -> Routes:
        """The routes of a single candidate."""
        return Routes(self.stage_s[candidate : candidate + 1], self.device[candidate : candidate + 1], self.devices)


@dataclass(frozen=True, slots=True, eq=False)
class PipelineWorkload:
    """Requests in order of arrival.

    Attributes:
        arrival_s: Non-decreasing, >= 0, float64[n].
        model: Model of each, int64[n].
        slo_s: Latency allowance of each model, s, float64[models]; infinite for none.

    Raises:
        DataError: Arrivals decrease or begin before 0, or a request has no model or a model no SLO.
    """

    arrival_s: FloatArray
    model: IntArray
    slo_s: FloatArray

    def __post_init__(self) -> None:
        if len(self.arrival_s) != len(self.model) or (len(self.model) and int(self.model.max()) >= len(self.slo_s)):
            raise DataError("each request needs a model, each model an SLO")
        if bool(np.any(np.diff(self.arrival_s) < 0)) or (len(self.arrival_s) and self.arrival_s[0] < 0):
            raise DataError("requests must be in order of arrival, from 0 s on")

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, slots=True, eq=False)
class PipelineOutcome:
    """Latency and route of each request under each candidate.

    Attributes:
        latency_s: Arrival to answer, float64[candidates, n]; infinite for a request that was refused.
        route: Index of the route taken or tried, int64[candidates, n]; -1 where the model has none.
        passes: Number of passes over the blocks.
    """

    latency_s: FloatArray
    route: IntArray
    passes: int

    @property
    def accepted(self) -> BoolArray:
        """Whether each request was answered in time, bool[candidates, n]."""
        return np.isfinite(self.latency_s)


def serve_pipelines(
    workload: PipelineWorkload, routes: Routes, overhead_s: float = 0.0, *, passes: int | None = None
) -> PipelineOutcome:
    """Serve a workload under every candidate.

    Args:
        workload: The requests.
        routes: The candidates.
        overhead_s: Time outside the devices, part of the latency.
        passes: Largest number of passes, after which some blocks may have started in a slightly wrong state: enough to
            compare candidates. None continues until the result is exact.

    Raises:
        ConfigError: The overhead is negative.
    """
    if not overhead_s >= 0:
        raise ConfigError("an overhead cannot be negative", got=f"{overhead_s} s")
    count, n = routes.candidates, len(workload)
    if n == 0 or count == 0:
        return PipelineOutcome(np.empty((count, n)), np.empty((count, n), np.int64), 0)
    blocks = int(np.clip(_LANES // count, 1, max(n // _SHORTEST_BLOCK, 1)))
    return _Lanes(workload, routes, overhead_s, blocks).settle(passes)


class _Lanes:
    """Blocks × candidates in flight; lane = candidate · blocks + block."""

    def __init__(self, workload: PipelineWorkload, routes: Routes, overhead_s: float, blocks: int) -> None:
        self.workload, self.overhead_s, self.candidates = workload, overhead_s, routes.candidates
        self.length = -(-len(workload) // blocks)
        self.blocks = -(-len(workload) // self.length)
        self.starts = np.arange(self.blocks) * self.length
        self.models, self.routes, self.stages = routes.stage_s.shape[1:]
        # Three devices that are not there: a padding stage reads one that is always free and writes one that no
        # other stage reads; a route that is not there ends on one that is never free.
        free, never = routes.devices, routes.devices + 2
        self.width = routes.devices + 3
        missing = routes.device < 0
        reads = np.where(missing, free, routes.device).reshape(-1, self.stages)
        stage_s = np.where(missing[..., :1], np.inf, routes.stage_s).reshape(-1, self.stages)
        self.reads, self.shift = reads, missing.reshape(-1, self.stages).astype(np.int64)
        self.read, self.stage_rows = np.ascontiguousarray(reads.T), stage_s
        self.stage_s = np.ascontiguousarray(stage_s.T)
        final = np.where(missing, -1, np.arange(self.stages)).max(axis=3)
        last = np.take_along_axis(routes.device, np.maximum(final, 0)[..., None], 3)[..., 0]
        self.last = np.where(missing[..., 0], never, last).reshape(-1, self.routes)
        self.refused = missing[..., 0, 0].reshape(-1)
        self.never = never
        lanes = self.candidates * self.blocks
        self.latency_s = np.empty((lanes, self.length))
        self.chosen = np.empty((lanes, self.length), np.int64)

    def settle(self, most: int | None) -> PipelineOutcome:
        """Run all blocks, then again those that started in the wrong state, until none did or passes run out."""
        lanes = np.arange(self.candidates * self.blocks)
        started = self._warmed(lanes)
        ended = np.empty_like(started)
        passes = 0
        while len(lanes) and passes != most:
            passes += 1
            state = started[lanes].copy()
            self._advance(lanes, state, self.starts[lanes % self.blocks], self.length, 0)
            ended[lanes] = state
            right = np.empty_like(started)
            right[1:] = ended[:-1]
            right[:: self.blocks] = self._empty(self.candidates)
            lanes = np.flatnonzero(np.any(right != started, axis=1))
            started[lanes] = right[lanes]
        n = len(self.workload)
        latency_s, chosen = self.latency_s.reshape(self.candidates, -1), self.chosen.reshape(self.candidates, -1)
        return PipelineOutcome(latency_s[:, :n], chosen[:, :n], passes)

    def _empty(self, lanes: int) -> FloatArray:
        """The state in which every device is free from the beginning."""
        state = np.zeros((lanes, self.width))
        state[:, self.never] = np.inf
        return state

    def _warmed(self, lanes: IntArray) -> FloatArray:
        """Estimate each block's first state by serving the requests just before it on empty devices."""
        state = self._empty(len(lanes))
        before = min(_WARM_UP, self.length)
        later = lanes[lanes % self.blocks > 0]
        if len(later):
            warm = self._empty(len(later))
            self._served(later, warm, self.starts[later % self.blocks] - before, before)
            state[later] = warm
        return state

    def _advance(
        self,
        lanes: IntArray,
        state: FloatArray,
        first: IntArray,
        steps: int,
        done: int,
    ) -> None:
        """Serve ``steps`` requests from ``first`` on in each lane, after ``done`` requests of its block.

        ``state`` contains the time at which each device is free.
        """
        full = int(min(steps, len(self.workload) - first.max()))
        latency_s, chosen = self._served(lanes, state, first, full)
        self.latency_s[lanes, done : done + full], self.chosen[lanes, done : done + full] = latency_s.T, chosen.T
        inside = first + full < len(self.workload)
        if full < steps and inside.any():  # the last block of each candidate is shorter
            rest = state[inside]
            self._advance(lanes[inside], rest, first[inside] + full, steps - full, done + full)
            state[inside] = rest

    def _served(self, lanes: IntArray, state: FloatArray, first: IntArray, steps: int) -> tuple[FloatArray, IntArray]:
        """Latency and route of each request, float64[steps, lanes] and int64[steps, lanes]."""
        flat = state.reshape(-1)
        base = np.arange(len(lanes)) * self.width
        offset = lanes // self.blocks * self.models
        at = first + np.arange(steps)[:, None]
        arrivals, models = self.workload.arrival_s[at], self.workload.model[at]
        limits, rows = self.workload.slo_s[models], offset + models
        latency_s = np.empty(arrivals.shape)
        chosen = np.zeros(arrivals.shape, np.int64)
        for step in range(steps):
            row = rows[step]
            path = row
            if self.routes > 1:
                device = self.last.take(row, axis=0)
                device += base[:, None]
                flat.take(device).argmin(axis=1, out=chosen[step])
                path = row * self.routes + chosen[step]
            latency_s[step] = self._through(flat, base, path, arrivals[step], limits[step])
        refused = self.refused[rows]
        chosen[refused] = -1
        return latency_s, chosen

    def _through(
        self, flat: FloatArray, base: IntArray, path: IntArray, arrival: FloatArray, limit_s: FloatArray
    ) -> FloatArray:
        """Send one request a lane along its path; the latency, infinite where it was refused."""
        latency: FloatArray
        if self.stages == 1:
            where = self.read[0].take(path)
            where += base
            before = flat.take(where)
            t = np.maximum(before, arrival)
            t += self.stage_s[0].take(path)
            latency = t - arrival
            latency += self.overhead_s
            late = latency > limit_s
            np.copyto(t, before, where=late)
            flat[where] = t
        else:
            reads = self.reads.take(path, axis=0)
            reads += base[:, None]
            before = flat.take(reads)
            after = self.stage_rows.take(path, axis=0)
            t = arrival
            for stage in range(self.stages):
                t = np.maximum(t, before[:, stage])
                t += after[:, stage]
                after[:, stage] = t
            latency = t - arrival
            latency += self.overhead_s
            late = latency > limit_s
            np.copyto(after, before, where=late[:, None])
            reads += self.shift.take(path, axis=0)
            flat[reads] = after
        latency[late] = np.inf
        return latency


def goodput_by_model(workload: PipelineWorkload, outcome: PipelineOutcome) -> tuple[FloatArray, FloatArray]:
    """Requests of each model and how many were answered in time: float64[models], float64[candidates, models]."""
    models = len(workload.slo_s)
    asked = np.bincount(workload.model, minlength=models).astype(np.float64)
    answered = np.stack(
        [np.bincount(workload.model[row], minlength=models).astype(np.float64) for row in outcome.accepted]
    )
    return asked, answered


def score_candidates(outcome: PipelineOutcome, replicas: npt.ArrayLike) -> FloatArray:
    """AlpaServe's score: share answered in time, then a low mean latency, then many replicas; float64[candidates].

    Args:
        outcome: Outcome of the requests.
        replicas: Replicas of each candidate.
    """
    accepted = outcome.accepted
    answered = accepted.sum(axis=1)
    total_s = np.where(accepted, outcome.latency_s, 0.0).sum(axis=1)
    mean_s = np.divide(total_s, answered, out=np.zeros(len(answered)), where=answered > 0)
    goodput = answered / max(accepted.shape[1], 1)
    return np.asarray(goodput - mean_s / 1e4 + np.asarray(replicas, np.float64) / 1e6, np.float64)
