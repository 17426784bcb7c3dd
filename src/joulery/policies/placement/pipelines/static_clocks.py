"""The static clock of each device that costs least within the SLOs, judged by the fast recursion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.perf.queues.pipeline_queue import (
    PipelineOutcome,
    PipelineWorkload,
    Routes,
    goodput_by_model,
    serve_pipelines,
)


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a model on some devices.

    Attributes:
        model: Index of the service.
        devices: Device of each stage.
        stage_s: Time of each stage at the highest clock.
        slowdown: Time of each stage at each clock relative to that, float64[stages, clocks].
    """

    model: int
    devices: tuple[int, ...]
    stage_s: tuple[float, ...]
    slowdown: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """A fleet of devices of one type.

    Attributes:
        devices: Number of devices.
        clocks_mhz: Supported clocks, ascending, float64[clocks].
        busy_w, idle_w: Board power at each, float64[clocks].
        boards: Boards of each device (shards), int64[devices].
    """

    devices: int
    clocks_mhz: FloatArray
    busy_w: FloatArray
    idle_w: FloatArray
    boards: IntArray

    @property
    def top(self) -> int:
        """Index of the highest clock."""
        return len(self.clocks_mhz) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """Judges placements and clocks on one workload.

    Attributes:
        fleet: The devices.
        workload: The requests.
        aimed: Target share of each service's requests in time, float64[models].
        request_s: Time outside the devices.
    """

    fleet: Fleet
    workload: PipelineWorkload
    aimed: FloatArray
    request_s: float

    @property
    def horizon_s(self) -> float:
        """Length of the workload."""
        return max(float(self.workload.arrival_s[-1]), 1e-9)

    def serve(self, replicas: Sequence[Replica], clocks: IntArray, *, exact: bool = False) -> PipelineOutcome:
        """Outcome under some clocks, int64[candidates, devices]."""
        return serve_pipelines(
            self.workload, self.routes(replicas, clocks), self.request_s, passes=None if exact else 1
        )

    def routes(self, replicas: Sequence[Replica], clocks: IntArray) -> Routes:
        """Routes of a placement under some clocks, int64[candidates, devices]."""
        stages = max(len(each.devices) for each in replicas)
        models = len(self.workload.slo_s)
        most = max(np.bincount([each.model for each in replicas], minlength=models))
        device = np.full((models, most, stages), -1, np.int64)
        stage_s = np.zeros((len(clocks), models, most, stages))
        slot = np.zeros(models, np.int64)
        for each in replicas:
            at, count = int(slot[each.model]), len(each.devices)
            device[each.model, at, :count] = each.devices
            for stage, where in enumerate(each.devices):
                stage_s[:, each.model, at, stage] = each.stage_s[stage] * each.slowdown[stage, clocks[:, where]]
            slot[each.model] += 1
        return Routes(stage_s, np.broadcast_to(device, stage_s.shape), self.fleet.devices)

    def attainment(self, outcome: PipelineOutcome) -> FloatArray:
        """Share of each service's requests in time, float64[candidates, models]; 1 where it had none."""
        asked, answered = goodput_by_model(self.workload, outcome)
        return np.divide(answered, asked, out=np.ones_like(answered), where=asked > 0)

    def busy_s(self, replicas: Sequence[Replica], clocks: IntArray, outcome: PipelineOutcome) -> FloatArray:
        """Time each device is busy, float64[candidates, devices]."""
        routes = self.routes(replicas, clocks)
        busy = np.zeros((len(clocks), self.fleet.devices))
        models, most = routes.device.shape[1:3]
        for at in range(len(clocks)):
            served = outcome.accepted[at]
            path = self.workload.model[served] * most + outcome.route[at, served]
            count = np.bincount(path, minlength=models * most).reshape(models, most)
            work = routes.stage_s[at] * count[..., None]
            real = routes.device[at] >= 0
            busy[at] = np.bincount(routes.device[at][real], work[real], minlength=self.fleet.devices)
        return busy

    def power_w(self, clocks: IntArray, busy_s: FloatArray) -> FloatArray:
        """Mean power of each device, all its boards, float64[candidates, devices]."""
        share = np.minimum(busy_s / self.horizon_s, 1.0)
        each = share * self.fleet.busy_w[clocks] + (1.0 - share) * self.fleet.idle_w[clocks]
        return np.asarray(each * self.fleet.boards, np.float64)

    def attained_at_top(self, replicas: Sequence[Replica]) -> FloatArray:
        """Share of each service's requests in time at full clock, float64[models]."""
        return np.asarray(self.attainment(self.serve(replicas, np.full((1, self.fleet.devices), self.fleet.top)))[0])

    def power_under(self, replicas: Sequence[Replica], clocks: IntArray) -> FloatArray:
        """Mean power of each device under its clock, float64[devices]."""
        one = clocks[None, :]
        return np.asarray(self.power_w(one, self.busy_s(replicas, one, self.serve(replicas, one)))[0])

    def best_clocks(self, replicas: Sequence[Replica], rounds: int = 2) -> IntArray:
        """For each device in turn, the clock of least power that is within every SLO; int64[devices].

        An SLO that full clock itself violates is not made worse.

        Args:
            replicas: The placement.
            rounds: How often each device has its turn.
        """
        devices, top = self.fleet.devices, self.fleet.top
        chosen = np.full(devices, top)
        if not replicas:
            return chosen
        needed = np.minimum(self.aimed, self.attained_at_top(replicas)) - 1e-12
        used = sorted({device for each in replicas for device in each.devices})
        for device in set(range(devices)) - set(used):
            chosen[device] = 0
        for _ in range(rounds):
            before = chosen.copy()
            for device in used:
                tried = np.repeat(chosen[None, :], top + 1, axis=0)
                tried[:, device] = np.arange(top + 1)
                outcome = self.serve(replicas, tried)
                power = self.power_w(tried, self.busy_s(replicas, tried, outcome)).sum(axis=1)
                kept = np.all(self.attainment(outcome) >= needed, axis=1)
                kept[chosen[device]] = True
                chosen[device] = int(np.argmin(np.where(kept, power, np.inf)))
            if bool(np.all(before == chosen)):
                break
        return chosen
