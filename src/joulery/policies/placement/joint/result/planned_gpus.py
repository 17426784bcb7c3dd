"""GPUs of a plan from patterns and flows, with predictions for every instance."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from joulery.domain.gpu.provisioning import LatencyParts, PlannedGpu, PlannedInstance, ProvisionPlan
from joulery.perf.instances import ServingInstance, neighbourhood, predict_gpu
from joulery.perf.interference.model import Latency, demand_w
from joulery.policies.placement.joint.master import Flow, JointSolution, KnownPattern
from joulery.policies.placement.joint.problem import JointProblem, JointRequest
from joulery.policies.placement.joint.result.partitioned_gpus import numbered, partitioned_gpus
from joulery.policies.placement.joint.slice_options import part_scv
from joulery.policies.placement.provisioning.gpu_shares import on_hosts, shared_domains_of
from joulery.policies.placement.provisioning.options import FailureDomain
from joulery.policies.placement.provisioning.packing import PackedGpu

_EVEN = 1e-9
"""Variation of gaps below which requests count as evenly spaced."""


def gpus_of(
    problem: JointProblem,
    chosen: Sequence[tuple[KnownPattern, int]],
    flows: Mapping[Flow, float],
    sliced: JointSolution | None = None,
) -> tuple[PlannedGpu, ...]:
    """The GPUs of some patterns, with predictions for every instance.

    Args:
        problem: The problem.
        chosen: Patterns and how many GPUs of each.
        flows: Requests a second of every flow; spread over its instances by the rates they are provided for.
        sliced: The solution whose partitioned GPUs come first; None for none.
    """
    first, started = ([], {}) if sliced is None else partitioned_gpus(problem, sliced)
    provided: dict[Flow, float] = defaultdict(float)
    for known, count in chosen:
        for item in known.layout.pattern:
            provided[_flow(problem, known, item)] += count * problem.items[item].rate_rps
    filled = {flow: min(1.0, flows.get(flow, 0.0) / rate) for flow, rate in provided.items()}
    gpus, replicas = [], _Replicas(problem, chosen, filled, started)
    for known, count in chosen:
        layout = problem.packings[known.machine].tightest(known.layout.pattern) or known.layout
        gpus += [gpu for _ in range(count) if (gpu := _gpu(problem, known, layout, filled, replicas)) is not None]
    names = {problem.services[at].workload.id: count for at, count in replicas.count.items()}
    return (*numbered(first, names), *gpus)


def _flow(problem: JointProblem, known: KnownPattern, item: int) -> Flow:
    each = problem.items[item]
    return Flow(each.service, each.variant, known.machine)


class _Replicas:
    """Numbers the instances of every service."""

    def __init__(
        self,
        problem: JointProblem,
        chosen: Sequence[tuple[KnownPattern, int]],
        filled: Mapping[Flow, float],
        started: Mapping[int, int],
    ) -> None:
        self.count: dict[int, int] = defaultdict(int, started)
        self._next: dict[int, int] = defaultdict(int, started)
        for known, count in chosen:
            for item in known.layout.pattern:
                if filled[_flow(problem, known, item)] > 0:
                    self.count[problem.items[item].service] += count

    def number(self, service: int) -> int:
        """The next instance's number, from 0."""
        self._next[service] += 1
        return self._next[service] - 1


class ChosenInstance(NamedTuple):
    """A chosen instance on a GPU.

    Attributes:
        service, variant: Indices.
        units: Its share, in units of the GPU type.
        batch: Largest batch.
        limit_ms: Longest execution of a full batch, ms.
        provided_rps: The rate that it keeps within the SLO.
        rate_rps: The rate that it gets.
        replica, replicas: Its number, and how many its service has.
        name: Name of the service it serves, among several that are alike; empty for the service itself.
    """

    service: int
    variant: int
    units: int
    batch: int
    limit_ms: float
    provided_rps: float
    rate_rps: float
    replica: int = 0
    replicas: int = 1
    name: str = ""


def _gpu(
    problem: JointProblem, known: KnownPattern, layout: PackedGpu, filled: Mapping[Flow, float], replicas: _Replicas
) -> PlannedGpu | None:
    """One GPU of the plan; None where it gets no requests."""
    placed = []
    for item, option, units in zip(layout.pattern, layout.options, layout.units, strict=True):
        each = problem.items[item]
        ratio = filled[_flow(problem, known, item)]
        if ratio > 0:
            count = replicas.count[each.service]
            number = replicas.number(each.service)
            limit_ms, batch, rate = option.process.limit_ms, option.process.batch, each.rate_rps
            placed.append(
                ChosenInstance(each.service, each.variant, units, batch, limit_ms, rate, ratio * rate, number, count)
            )
    return gpu_of(problem, known.machine, placed) if placed else None


def gpu_of(problem: JointProblem, machine_index: int, placed: Sequence[ChosenInstance]) -> PlannedGpu:
    """A GPU with these instances, and the predictions for each."""
    machine = problem.machines[machine_index]
    gpu, unit = machine.clocked, machine.gpu_type.profile.gpu.unit_percent
    models = [problem.services[each.service].variants[each.variant].model for each in placed]
    serving = [
        ServingInstance(model, each.units * unit, each.batch, each.rate_rps)
        for model, each in zip(models, placed, strict=True)
    ]
    found = predict_gpu(gpu, serving)
    shared = len(serving) > 1
    instances = []
    for each, one, times, power in zip(placed, serving, found.times, found.powers, strict=True):
        service = problem.services[each.service]
        part = min(1.0, each.provided_rps / service.workload.rate_rps)
        evenly = part_scv(service.workload.arrivals.scv, part, problem.request.rules.balancer) < _EVEN
        wait_s = (one.batch - 1) / each.provided_rps if evenly else 0.0
        coefficients = gpu.profile[one.model]
        transfer = one.batch / gpu.profile.gpu.pcie_bytes_per_ms * (coefficients.pcie_contention if shared else 1.0)
        instances.append(
            PlannedInstance(
                workload=each.name or service.workload.id,
                model=one.model,
                replica=each.replica,
                replicas=each.replicas,
                rate_rps=one.rate_rps,
                share_ratio=one.share_percent / 100.0,
                batch=one.batch,
                max_delay_s=wait_s,
                wait_s=wait_s if evenly else math.nan,
                parts=_parts(times),
                limit_s=(each.limit_ms + (coefficients.load_bytes + coefficients.feedback_bytes) * transfer) / 1e3,
                throughput_rps=times.throughput_rps(one.batch),
                slo_s=service.workload.slo.latency_s,
                accuracy_ratio=service.variants[each.variant].accuracy_ratio,
                overhead_w=power.overhead_w,
                requests_w=power.requests_w,
                provided_rps=each.provided_rps,
                memory_bytes=service.memory_bytes(each.variant),
            )
        )
    demand = demand_w(gpu.profile.gpu, neighbourhood(gpu, serving))
    return PlannedGpu(
        type=machine.gpu_type.name,
        usd_per_hour=machine.gpu_type.usd_per_hour,
        clock_mhz=found.clock_mhz,
        clock_max_mhz=gpu.clock_max_mhz,
        demand_w=demand,
        power_w=found.board_w,
        instances=tuple(instances),
        clock_set_mhz=gpu.clock_mhz,
        # Under a cap on watts a higher clock would take what other GPUs need.
        clock_ceiling_mhz=gpu.clock_max_mhz if problem.power_cap_w is None else gpu.clock_mhz,
        idle_w=found.idle_w,
        host_w=found.host_w,
        memory_limit_bytes=math.nan if machine.gpu_type.memory_bytes is None else machine.gpu_type.memory_bytes,
    )


def _parts(times: Latency) -> LatencyParts:
    return LatencyParts(
        load_s=times.load_ms / 1e3,
        schedule_s=times.schedule_ms / 1e3,
        active_s=times.active_ms / 1e3,
        throttle_s=(times.gpu_ms - times.schedule_ms - times.active_ms) / 1e3,
        feedback_s=times.feedback_ms / 1e3,
    )


def on_hosts_of(request: JointRequest, plan: ProvisionPlan) -> ProvisionPlan:
    """The plan with its GPUs on hosts, as preset ``best`` puts them there; unchanged where hosts do not matter.

    Hosts, or GPUs, that replicas would have to share are violations of the plan.
    """
    if not request.rules.apart:
        return plan
    types = [each.gpu_type for each in request.fleet]
    gpus: Sequence[PlannedGpu] = plan.gpus
    if request.rules.domain is FailureDomain.HOST:
        gpus = on_hosts(gpus, types)
    kept = tuple(each for each in plan.violations if each.what not in ("gpu", "host"))
    return replace(plan, gpus=tuple(gpus), violations=(*kept, *shared_domains_of(gpus, types)))
