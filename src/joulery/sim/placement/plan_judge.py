"""Simulate a plan of shares and clocks request by request, on GPUs that may differ from the planner's model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from joulery.domain.gpu.provisioning import Arrivals, PlannedGpu, Workload
from joulery.perf.instances import at_clock
from joulery.perf.interference.model import InterferenceProfile
from joulery.perf.power.clock_curves import V100
from joulery.perf.slice_table import SlicedGpu
from joulery.policies.placement.joint.slice_options import part_scv
from joulery.policies.placement.provisioning.options import Balancer
from joulery.sim.core.arrivals import ArrivalSource, constant, gamma
from joulery.sim.core.streams import Streams
from joulery.sim.placement.batched_serving import Gpu, Neighbours, Service, ServiceVerdict, ServingProcess, Trial, judge
from joulery.sim.placement.gpu import InterferenceTruth, SlicedTruth, SliceTenants
from joulery.sim.queues.batching import BatchRule


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """Result for the requests of a plan, over all seeds.

    Attributes:
        truth: Names of the coefficients that the simulated GPUs followed.
        seeds: Number of seeds.
        power_w: Mean power of all boards, hosts included; simulated.
        tail_ratio: For each service the worst latency at its quantile, as a ratio of its SLO; above 1 it is violated.
        layouts: Number of different GPUs, where equal ones were simulated once; 0 where every GPU was simulated.
    """

    truth: str
    seeds: int
    power_w: float
    tail_ratio: Mapping[str, float]
    layouts: int = 0

    @property
    def violated(self) -> tuple[str, ...]:
        """Services that violated their SLO under some seed."""
        return tuple(name for name, ratio in self.tail_ratio.items() if not ratio <= 1)


def judge_plan(
    gpus: Sequence[PlannedGpu],
    workloads: Sequence[Workload],
    truths: Mapping[str, InterferenceProfile],
    *,
    seeds: int = 3,
    noise_cv: float = 0.05,
    length_s: float = 60.0,
    sliced: Mapping[str, SlicedGpu] | None = None,
    balancer: Balancer = Balancer.TURNS,
) -> PlanVerdict:
    """Simulate random requests on a plan; instances slow one another only while they execute.

    The truth is stricter than the planner's model: all of an execution depends on the clock, launches included, and an
    instance slows its neighbours only while it executes.

    Args:
        gpus: The plan.
        workloads: The services.
        truths: How each GPU type behaves.
        seeds: Number of simulations, each with different requests.
        noise_cv: Variation of a batch's time from batch to batch.
        length_s: Simulated seconds that count.
        sliced: Measurements of the slices of each GPU type that can be partitioned. The simulation uses a fit of each
            curve with three numbers; the planner does not.
        balancer: How requests reach the instances of a service.
    """
    simulated = [_simulated(gpu, truths, sliced or {}) for gpu in gpus]
    trial = Trial(2.0, 2.0 + length_s, noise_cv, Neighbours.BUSY, at_random=balancer is Balancer.RANDOM)
    verdicts, tails = _judged(workloads, simulated, seeds, trial)
    host_w = math.fsum(0.0 if math.isnan(gpu.host_w) else gpu.host_w for gpu in gpus)
    power_w = math.fsum(verdict.power_w for verdict in verdicts) / len(verdicts) + host_w
    return PlanVerdict(_names(gpus, truths, sliced or {}), seeds, power_w, tails)


def judge_layouts(
    gpus: Sequence[PlannedGpu],
    workloads: Sequence[Workload],
    truths: Mapping[str, InterferenceProfile],
    *,
    seeds: int = 3,
    noise_cv: float = 0.05,
    length_s: float = 60.0,
    balancer: Balancer = Balancer.TURNS,
) -> PlanVerdict:
    """As :func:`judge_plan`, but GPUs that are alike are simulated only once.

    Every instance gets its own requests, with the rate and variability of its part of the service's requests.
    A service is within its SLO if each of its instances is: no quantile over all its requests exceeds the greatest
    of its instances.

    Args:
        gpus: The plan; no GPU is partitioned.
        workloads: The services.
        truths: How each GPU type behaves.
        seeds, noise_cv, length_s, balancer: As for :func:`judge_plan`.
    """
    known = {each.id: each for each in workloads}
    layouts: dict[object, list[PlannedGpu]] = {}
    for gpu in gpus:
        layouts.setdefault(_look(gpu, known), []).append(gpu)
    first, own = list[PlannedGpu](), list[Workload]()
    for at, alike in enumerate(layouts.values()):
        instances = []
        for place, one in enumerate(alike[0].instances):
            workload, name = known[one.workload], f"{at}/{place}"
            instances.append(replace(one, workload=name, replica=0, replicas=1))
            part = min(1.0, one.rate_rps / workload.rate_rps)
            arrivals = Arrivals.general(part_scv(workload.arrivals.scv, part, balancer))
            own.append(replace(workload, id=name, rate_rps=one.rate_rps, arrivals=arrivals))
        first.append(replace(alike[0], instances=tuple(instances)))
    simulated = [_simulated(gpu, truths, {}) for gpu in first]
    verdicts, tails = _judged(own, simulated, seeds, Trial(2.0, 2.0 + length_s, noise_cv, Neighbours.BUSY))
    worst, power_w = dict.fromkeys(known, 0.0), 0.0
    for at, alike in enumerate(layouts.values()):
        board_w = math.fsum(each.gpus[at].energy_j / each.window_s for each in verdicts) / seeds
        host_w = 0.0 if math.isnan(alike[0].host_w) else alike[0].host_w
        power_w += len(alike) * (board_w + host_w)
        for gpu in alike:
            for place, one in enumerate(gpu.instances):
                worst[one.workload] = max(worst[one.workload], tails[f"{at}/{place}"])
    return PlanVerdict(_names(gpus, truths, {}), seeds, power_w, worst, len(layouts))


def _judged(
    workloads: Sequence[Workload], gpus: Sequence[Gpu], seeds: int, trial: Trial
) -> tuple[list[ServiceVerdict], dict[str, float]]:
    """Verdicts under each seed, and each service's worst tail over its SLO."""
    services = [Service(each.id, _arrivals(each), each.slo) for each in workloads]
    verdicts = [judge(services, gpus, trial, Streams(seed)) for seed in range(seeds)]
    tails = {
        each.id: max(verdict.services[at].tail_s for verdict in verdicts) / each.slo.latency_s
        for at, each in enumerate(workloads)
    }
    return verdicts, tails


def _look(gpu: PlannedGpu, workloads: Mapping[str, Workload]) -> object:
    """Key of GPUs that are alike: everything but the names of the services."""
    return (
        gpu.type,
        gpu.clock_set_mhz,
        tuple(
            (
                (one.model, one.share_ratio, one.batch, one.max_delay_s, round(one.rate_rps, 9)),
                (workloads[one.workload].slo, workloads[one.workload].rate_rps, workloads[one.workload].arrivals),
            )
            for one in gpu.instances
        ),
    )


def _simulated(gpu: PlannedGpu, truths: Mapping[str, InterferenceProfile], sliced: Mapping[str, SlicedGpu]) -> Gpu:
    """The simulated GPU of a planned one; each process of a slice is an instance affected by those of its slice."""
    if any(one.slice for one in gpu.instances):
        processes = [
            ServingProcess(
                one.workload,
                tenant_name(one.workload, one.replica),
                one.share_ratio,
                BatchRule(one.batch, one.max_delay_s),
                one.rate_rps / one.processes,
            )
            for one in gpu.instances
            for _ in range(one.processes)
        ]
        names = [each.model for each in processes]
        parts = tuple(tuple(at for at, each in enumerate(names) if each == name) for name in dict.fromkeys(names))
        return Gpu(sliced_truth(gpu, sliced[gpu.type]), tuple(processes), parts)
    return Gpu(
        truth_at(truths[gpu.type], gpu.clock_set_mhz),
        tuple(
            ServingProcess(
                one.workload, one.model, one.share_ratio, BatchRule(one.batch, one.max_delay_s), one.rate_rps
            )
            for one in gpu.instances
        ),
    )


def _names(
    gpus: Sequence[PlannedGpu], truths: Mapping[str, InterferenceProfile], sliced: Mapping[str, SlicedGpu]
) -> str:
    """Names of the coefficients that the simulated GPUs followed."""
    sliced_types = {gpu.type for gpu in gpus if any(one.slice for one in gpu.instances)}
    found = {f"{name} (three numbers a curve of {sliced[name].table.source})" for name in sliced_types}
    return ", ".join(sorted(found | {truths[gpu.type].gpu.name for gpu in gpus if gpu.type not in sliced_types}))


def truth_at(profile: InterferenceProfile, set_mhz: float | None) -> InterferenceTruth:
    """A GPU that behaves by these coefficients at a clock that is set; the highest when None."""
    highest = profile.gpu.clock_max_mhz
    if set_mhz is None or set_mhz >= highest * (1 - 1e-9):
        return InterferenceTruth(profile)
    idle_w = at_clock(profile, set_mhz).idle_w
    held = replace(profile, gpu=replace(profile.gpu, idle_w=idle_w))
    return InterferenceTruth(held, set_mhz, lambda ratio: float(V100.dynamic_ratio(ratio * V100.max_mhz)[0]))


def sliced_truth(gpu: PlannedGpu, sliced: SlicedGpu) -> SlicedTruth:
    """True behaviour of a planned GPU: a fit with three numbers to each measured curve, unlike the planner's model.

    Args:
        gpu: A GPU of a plan, each instance on a slice.
        sliced: Measurements of its GPU type.
    """
    clock_mhz = gpu.clock_mhz if gpu.clock_set_mhz is None else gpu.clock_set_mhz
    speed = clock_mhz / gpu.clock_max_mhz
    tenants = {}
    for each in gpu.instances:
        profile = sliced.menu[each.slice]
        curves = tuple(curve.fitted() for curve in sliced.table.of(each.model, profile.size))
        tenants[tenant_name(each.workload, each.replica)] = SliceTenants(curves, sliced.slice_w(profile, speed))
    return SlicedTruth(tenants, gpu.idle_w, clock_mhz, speed)


def tenant_name(workload: str, replica: int) -> str:
    """The name under which the processes of an instance run in the simulation."""
    return f"{workload}#{replica}"


def _arrivals(workload: Workload) -> ArrivalSource:
    scv = workload.arrivals.scv
    return constant(workload.rate_rps) if scv == 0 else gamma(workload.rate_rps, math.sqrt(scv))
