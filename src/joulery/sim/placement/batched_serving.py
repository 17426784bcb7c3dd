"""Simulate a plan of services on shared GPUs, request by request; the GPUs may differ from the planner's model.

The plan states the service, share and batch of each instance. The simulation draws arrivals and service-time
noise, runs every instance, and reports latency quantiles, throughput, utilisation and energy: SLO violations are
counted on the latencies of requests. All results are simulated and labelled so.

Interference has two modes. ``always``: an instance is slowed as if all its neighbours executed all the time;
the planner's assumption, and the fast path (instances become independent). ``busy``: it is slowed only by neighbours
that execute at that moment (:mod:`joulery.sim.placement.colocation`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import ConfigError
from joulery.domain.serving.service import Slo
from joulery.sim.core.arrivals import ArrivalSource
from joulery.sim.core.streams import Streams
from joulery.sim.placement.colocation import GpuRun, Tenant, serve_together
from joulery.sim.placement.gpu import GpuTruth, SimulatedProcess
from joulery.sim.queues.batching import Batches, BatchRule, serve_timed


class Neighbours(StrEnum):
    """Times at which a neighbour slows an instance."""

    ALWAYS = "always"
    """All the time, as the planner assumes."""
    BUSY = "busy"
    """Only while it executes."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service: its arrivals and its SLO.

    Attributes:
        name: Unique.
        arrivals: Source of its arrival times.
        slo: The latency SLO and its quantile.
    """

    name: str
    arrivals: ArrivalSource
    slo: Slo


@dataclass(frozen=True, slots=True)
class ServingProcess:
    """One serving process of the plan.

    Attributes:
        service: The service whose requests it serves.
        model: Which model it runs.
        share_ratio: Its share of the GPU, 0 to 1.
        rule: When its batches form.
        weight: Its part of the service's requests, against the service's other instances.
    """

    service: str
    model: str
    share_ratio: float
    rule: BatchRule
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the plan.

    Attributes:
        truth: How it behaves.
        instances: The instances on it.
        parts: Groups of indices of instances, where a GPU with a set clock is partitioned (MIG): instances affect only
            others of their group. Empty where all instances share the GPU.
    """

    truth: GpuTruth
    instances: tuple[ServingProcess, ...]
    parts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """Conditions under which a plan is judged.

    Attributes:
        warmup_s: Requests before this are served but not counted.
        end_s: Requests from here on only fill batches that hold earlier ones.
        noise_cv: Coefficient of variation of the service time from batch to batch.
        neighbours: When a neighbour slows an instance.
        at_random: Whether requests reach the replicas of a service at random; in strict turns when not.
    """

    warmup_s: float = 2.0
    end_s: float = 32.0
    noise_cv: float = 0.0
    neighbours: Neighbours = Neighbours.ALWAYS
    at_random: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_s < self.end_s < math.inf:
            raise ConfigError("a trial ends after its warm-up", got=f"{self.warmup_s} s to {self.end_s} s")
        if not 0 <= self.noise_cv < math.inf:
            raise ConfigError("the variation of service times is 0 or more", got=str(self.noise_cv))


@dataclass(frozen=True, slots=True)
class ServiceOutcome:
    """Result for the counted requests of a service.

    Attributes:
        name: The service.
        requests: Requests that arrived within the window.
        unanswered: How many of them were never answered (their batch never filled).
        offered_rps: Requests a second that arrived.
        throughput_rps: Answers a second within the window.
        p50_s: Median latency, arrival to answer; infinite if half were never answered.
        tail_s: Latency at the SLO quantile.
        slo: The SLO.
    """

    name: str
    requests: int
    unanswered: int
    offered_rps: float
    throughput_rps: float
    p50_s: float
    tail_s: float
    slo: Slo

    @property
    def violated(self) -> bool:
        """Whether the SLO was violated."""
        return not self.tail_s <= self.slo.latency_s


@dataclass(frozen=True, slots=True)
class InstanceOutcome:
    """Result for one instance within the window.

    Attributes:
        service: The service whose requests it served.
        requests: Requests it answered, warm-up included.
        mean_batch: Requests in a batch.
        utilisation_ratio: Part of the window it executed.
        dynamic_j: Energy above idle; simulated.
    """

    service: str
    requests: int
    mean_batch: float
    utilisation_ratio: float
    dynamic_j: float


@dataclass(frozen=True, slots=True)
class GpuOutcome:
    """Result for one GPU within the window; ``energy_j`` is idle energy plus that of its instances, simulated."""

    clock_mhz: float
    idle_j: float
    instances: tuple[InstanceOutcome, ...]

    @property
    def energy_j(self) -> float:
        """Idle and dynamic energy."""
        return self.idle_j + math.fsum(each.dynamic_j for each in self.instances)


@dataclass(frozen=True, slots=True)
class ServiceVerdict:
    """Result for a plan under one seed."""

    services: tuple[ServiceOutcome, ...]
    gpus: tuple[GpuOutcome, ...]
    window_s: float

    @property
    def violations(self) -> tuple[str, ...]:
        """Services that violated their SLO."""
        return tuple(service.name for service in self.services if service.violated)

    @property
    def energy_j(self) -> float:
        """Energy of all GPUs over the window; simulated."""
        return math.fsum(gpu.energy_j for gpu in self.gpus)

    @property
    def power_w(self) -> float:
        """Mean power of all GPUs."""
        return self.energy_j / self.window_s


def judge(services: Sequence[Service], gpus: Sequence[Gpu], trial: Trial, streams: Streams) -> ServiceVerdict:
    """Simulate a plan once.

    Args:
        services: The services and their arrivals; each needs at least one instance.
        gpus: The plan.
        trial: Conditions of the simulation.
        streams: Randomness; arrivals depend on the service's name alone, noise on the service and the instance's
            number within it, so plans compared under one seed face the same requests.

    Raises:
        ConfigError: A service has no instance, an instance no service, names repeat, or a truth lacks a model.
        InfeasibleError: The processes of a GPU need so much power that no clock is left.
    """
    routed = _route(services, gpus, trial, streams)
    served: dict[str, list[tuple[FloatArray, Batches]]] = {service.name: [] for service in services}
    outcomes = []
    for gpu, tenants in zip(gpus, routed, strict=True):
        run = _served(gpu, tenants, trial)
        outcomes.append(_gpu_outcome(gpu, run, trial))
        for instance, tenant, batches in zip(gpu.instances, tenants, run.batches, strict=True):
            served[instance.service].append((tenant.arrival_s, batches))
    return ServiceVerdict(
        services=tuple(_service_outcome(service, served[service.name], trial) for service in services),
        gpus=tuple(outcomes),
        window_s=trial.end_s - trial.warmup_s,
    )


def spread(count: int, weights: Sequence[float]) -> IntArray:
    """Recipients of requests 0, 1 ... ``count - 1``: in proportion to the weights, spread as evenly as possible."""
    total = math.fsum(weights)
    due, owner = [], []
    for index, weight in enumerate(weights):
        turns = np.arange(math.ceil(count * weight / total) + 1)
        due.append((turns + 0.5) * total / weight)
        owner.append(np.full(len(turns), index, np.int64))
    order = np.argsort(np.concatenate(due), kind="stable")[:count]
    return np.asarray(np.concatenate(owner)[order], np.int64)


def scatter(count: int, weights: Sequence[float], random: np.random.Generator) -> IntArray:
    """Recipients of requests 0, 1 ... ``count - 1``: each request at random, in proportion to the weights."""
    edges = np.cumsum(np.asarray(weights, np.float64) / math.fsum(weights))[:-1]
    return np.asarray(np.searchsorted(edges, random.random(count), side="right"), np.int64)


def _route(services: Sequence[Service], gpus: Sequence[Gpu], trial: Trial, streams: Streams) -> list[list[Tenant]]:
    """The tenants of each GPU, each with its part of its service's requests and its own noise."""
    replicas: dict[str, list[ServingProcess]] = {service.name: [] for service in services}
    if len(replicas) != len(services):
        raise ConfigError("services need distinct names", got=", ".join(service.name for service in services))
    for gpu in gpus:
        for instance in gpu.instances:
            if instance.service not in replicas:
                raise ConfigError(f"no service {instance.service!r} for an instance", expected=", ".join(replicas))
            if not 0 < instance.weight < math.inf:
                raise ConfigError("an instance needs a positive weight", pointer=instance.service)
            replicas[instance.service].append(instance)
    parts = {service.name: _split(service, replicas[service.name], trial, streams) for service in services}
    turn = dict.fromkeys(replicas, 0)
    routed: list[list[Tenant]] = []
    for gpu in gpus:
        tenants = []
        for instance in gpu.instances:
            number = turn[instance.service]
            turn[instance.service] += 1
            arrival_s = parts[instance.service][number]
            noise = _noise(trial.noise_cv, len(arrival_s), streams, instance.service, str(number))
            tenants.append(Tenant(instance.model, instance.share_ratio, instance.rule, arrival_s, noise))
        routed.append(tenants)
    return routed


def _split(service: Service, replicas: Sequence[ServingProcess], trial: Trial, streams: Streams) -> list[FloatArray]:
    """A service's requests by instance, continued past the end until batches that hold counted requests are full."""
    if not replicas:
        raise ConfigError(f"service {service.name!r} has no instance in the plan", pointer=service.name)
    times = service.arrivals.times_s(trial.end_s + (trial.end_s - trial.warmup_s), streams("arrivals", service.name))
    filling = 4 * sum(replica.rule.batch for replica in replicas) * len(replicas)
    times = times[: int(np.searchsorted(times, trial.end_s)) + filling]
    weights = [replica.weight for replica in replicas]
    if trial.at_random:
        owner = scatter(len(times), weights, streams("balancer", service.name))
    else:
        owner = spread(len(times), weights)
    return [times[owner == number] for number in range(len(replicas))]


def _noise(cv: float, count: int, streams: Streams, *name: str) -> FloatArray:
    """Lognormal factors of mean 1."""
    if cv == 0:
        return np.ones(count)
    sigma = math.sqrt(math.log1p(cv * cv))
    return streams("service noise", *name).lognormal(-sigma * sigma / 2, sigma, count)


def _served(gpu: Gpu, tenants: Sequence[Tenant], trial: Trial) -> GpuRun:
    """Simulate a GPU; groups of instances that do not affect one another are simulated separately."""
    parts = gpu.parts or (tuple(range(len(tenants))),)
    runs = [_part_served(gpu.truth, [tenants[index] for index in part], trial) for part in parts]
    if len(runs) == 1:
        return runs[0]
    order = np.argsort([index for part in parts for index in part], kind="stable").tolist()
    batches = [each for run in runs for each in run.batches]
    busy_s, dynamic_j = [each for run in runs for each in run.busy_s], [each for run in runs for each in run.dynamic_j]
    # The clock is set, so it is the same wherever anything executes.
    clock_mhz = next((run.clock_mhz for run in runs if not math.isnan(run.clock_mhz)), math.nan)
    return GpuRun(
        tuple(batches[at] for at in order),
        tuple(busy_s[at] for at in order),
        tuple(dynamic_j[at] for at in order),
        runs[0].idle_j,
        clock_mhz,
    )


def _part_served(truth: GpuTruth, tenants: Sequence[Tenant], trial: Trial) -> GpuRun:
    """Simulate instances that affect one another."""
    # Without a neighbour the two readings are one, and the fast path serves.
    alone = trial.neighbours is Neighbours.ALWAYS or len(tenants) == 1
    return (_always if alone else serve_together)(truth, tenants, trial.warmup_s, trial.end_s)


def _always(truth: GpuTruth, tenants: Sequence[Tenant], begin_s: float, end_s: float) -> GpuRun:
    """Every instance slowed by full batches of all others, all the time: the instances are independent."""
    full = [SimulatedProcess(tenant.model, tenant.share_ratio, tenant.rule.batch) for tenant in tenants]
    clock = truth.conditions(full).clock_mhz if full else math.nan
    batches, busy, dynamic = [], [], []
    for index, tenant in enumerate(tenants):
        sizes = range(1, tenant.rule.batch + 1)
        effects = [
            truth.conditions([*full[:index], full[index]._replace(batch=size), *full[index + 1 :]]).effects[index]
            for size in (sizes if tenant.rule.max_delay_s < math.inf else sizes[-1:])
        ]
        served = serve_timed(
            tenant.arrival_s,
            tenant.rule,
            [effect.load_s for effect in effects],
            [effect.busy_s for effect in effects],
            tenant.noise,
        )
        inside = np.clip(served.finish_s, begin_s, end_s) - np.clip(served.start_s, begin_s, end_s)
        watts = np.array([effect.dynamic_w for effect in effects])[served.size - 1 if len(effects) > 1 else 0]
        batches.append(served)
        busy.append(float(inside.sum()))
        dynamic.append(float((inside * watts).sum()))
    return GpuRun(tuple(batches), tuple(busy), tuple(dynamic), truth.idle_w * (end_s - begin_s), clock)


def _gpu_outcome(gpu: Gpu, run: GpuRun, trial: Trial) -> GpuOutcome:
    window_s = trial.end_s - trial.warmup_s
    instances = tuple(
        InstanceOutcome(
            service=instance.service,
            requests=batches.served,
            mean_batch=float(batches.size.mean()) if len(batches.size) else 0.0,
            utilisation_ratio=busy_s / window_s,
            dynamic_j=dynamic_j,
        )
        for instance, batches, busy_s, dynamic_j in zip(
            gpu.instances, run.batches, run.busy_s, run.dynamic_j, strict=True
        )
    )
    return GpuOutcome(run.clock_mhz, run.idle_j, instances)


def _service_outcome(service: Service, parts: Sequence[tuple[FloatArray, Batches]], trial: Trial) -> ServiceOutcome:
    latencies, answers, requests = [], 0, 0
    for arrival_s, batches in parts:
        answered_s = np.full(len(arrival_s), math.inf)
        answered_s[: batches.served] = batches.answered_s()
        counted = (arrival_s >= trial.warmup_s) & (arrival_s < trial.end_s)
        latencies.append(answered_s[counted] - arrival_s[counted])
        requests += int(counted.sum())
        answers += int(((answered_s >= trial.warmup_s) & (answered_s < trial.end_s)).sum())
    latency = np.concatenate(latencies)
    window_s = trial.end_s - trial.warmup_s
    quantiles = (0.5, service.slo.quantile)
    # No interpolation: between two latencies there is no third, and beyond an unanswered request there is none at all.
    p50_s, tail_s = np.quantile(latency, quantiles, method="inverted_cdf").tolist() if requests else (0.0, 0.0)
    return ServiceOutcome(
        name=service.name,
        requests=requests,
        unanswered=int(np.isinf(latency).sum()),
        offered_rps=requests / window_s,
        throughput_rps=answers / window_s,
        p50_s=p50_s,
        tail_s=tail_s,
        slo=service.slo,
    )
