"""A plan and the devices it runs on: the GPU or cores for each GPU of the plan, and the processes of its instances.

Where CPU cores stand for the plan's GPUs, a group of cores stands for each GPU and an instance's share of the GPU is a
quota of those cores' time. On GPUs a share is one of MPS, and a slice is a MIG instance, which the instance's
processes share under MPS where there are several. The plan's batch is the replica's batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.plan_change import RunningGpu
from joulery.domain.gpu.provisioning import PlannedGpu, PlannedInstance
from joulery.domain.serving.engine import ModelRef, Outcome, ReplicaSpec, RequestRecord
from joulery.domain.serving.mix import OWN, MixStep, VariantMix
from joulery.domain.serving.service import Slice, SliceKind, Slo
from joulery.policies.placement.provisioning.difference import running_of
from joulery.policies.placement.standby import (
    REFUSED_S,
    StandbyPolicy,
    Tail,
    WatchedInstance,
    watched_instances,
)

Models = Mapping[tuple[str, str], ModelRef]
"""Loaded models, by service and variant."""
MIG, MPS = "mig", "mps"
"""Ways to divide a GPU of this machine."""
_ROUNDING_PERCENT = 1e-6
_LATE = frozenset({Outcome.DEADLINE, Outcome.OVERLOADED, Outcome.UNAVAILABLE, Outcome.CRASHED})


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    """One instance of a running plan.

    Attributes:
        watched: Its SLO, and the share of its standby.
        original: Its process as planned.
        standby: Its standby process; None where the plan leaves no room for one, and on slices.
        count: How many such processes it has.
    """

    watched: WatchedInstance
    original: ReplicaSpec
    standby: ReplicaSpec | None
    count: int = 1

    def answering(self, active: Collection[str]) -> ReplicaSpec:
        """The process that answers: the standby where it is active."""
        return self.standby if self.standby is not None and self.watched.key in active else self.original

    def processes(self, active: Collection[str], renewed: Collection[str] = ()) -> list[ReplicaSpec]:
        """Its processes: the one that answers, with a standby beside it.

        Args:
            active: Instances whose standby answers.
            renewed: Those of them that have a new standby: one that answers if the active one dies.
        """
        if self.standby is None:
            return [self.original] * self.count
        beside = [replace(self.standby, standby=True)]
        if self.watched.key not in active:
            return [self.original, *beside]
        return [self.standby, *(beside if self.watched.key in renewed else [])]


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan and the devices it runs on.

    Attributes:
        gpus: The plan.
        cores: The CPU cores that stand for each GPU; its index in ``shared``, where that names any.
        replicas: Its instances.
        shared: GPUs of this machine that it may run on; empty where cores stand for GPUs.
        partitioned: Those of them with a MIG partition; processes share the others under MPS.
        switched_s: When standbys became active, by instance; grows while the plan runs.
        renewed: Instances with a new standby beside the active one; grows while the plan runs.
    """

    gpus: tuple[PlannedGpu, ...]
    cores: tuple[tuple[int, ...], ...]
    replicas: tuple[PlannedReplica, ...]
    shared: tuple[str, ...] = ()
    partitioned: frozenset[str] = frozenset()
    switched_s: dict[str, float] = field(default_factory=dict)
    renewed: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        gpus: Sequence[PlannedGpu],
        cores: tuple[tuple[int, ...], ...],
        models: Models,
        slos: Mapping[str, Slo],
        shared: tuple[str, ...] = (),
        partitioned: frozenset[str] = frozenset(),
    ) -> PlanInForce:
        """A plan on these cores or GPUs; ``models`` by service and variant, ``slos`` by service."""
        devices = [shared[mine[0]] if shared else "" for mine in cores]
        watched = watched_instances(gpus, slos)
        return cls(
            tuple(gpus),
            cores,
            planned_replicas(gpus, cores, models, watched, devices, partitioned),
            shared,
            partitioned,
        )

    @property
    def clock_bounds_mhz(self) -> dict[str, tuple[float, float]]:
        """The lowest and highest clock of each of this machine's GPUs whose clock the plan sets, by device."""
        if not self.shared:
            return {}
        placed = zip(self.gpus, self.cores, strict=True)
        return {
            self.shared[cores[0]]: gpu.clock_bounds_mhz for gpu, cores in placed if gpu.clock_bounds_mhz is not None
        }

    def services_on(self, device: str) -> frozenset[str]:
        """The services with an instance on one of this machine's GPUs."""
        return frozenset(
            each.workload
            for gpu, cores in zip(self.gpus, self.cores, strict=True)
            for each in gpu.instances
            if self.shared and self.shared[cores[0]] == device
        )

    @property
    def variant_shares(self) -> dict[str, dict[str, float]]:
        """Share of each service's requests that each of its variants answers, as the plan's flows have it."""
        return variant_shares(self.gpus)

    @property
    def mixes(self) -> dict[str, VariantMix]:
        """Mixes with which the engine keeps those shares, by service."""
        return {name: mix_of(shares) for name, shares in self.variant_shares.items()}

    @property
    def policy(self) -> StandbyPolicy:
        """The policy that watches its instances."""
        return StandbyPolicy(tuple(one.watched for one in self.replicas), taken_over=tuple(self.switched_s.items()))

    def keep_corrections(self, before: PlanInForce) -> None:
        """Keep standbys active that took over under the previous plan, where this plan changes nothing for them.

        The planning model was wrong about these instances: planned afresh, they would be late again.
        """
        was = {one.watched.key: one for one in before.replicas}
        used = [100.0 * gpu.share_ratio for gpu in self.gpus]
        for one in self.replicas:
            key, old = one.watched.key, was.get(one.watched.key)
            if key not in before.switched_s or old is None or one.standby is None or old.original != one.original:
                continue
            used[one.watched.gpu] += one.watched.standby_percent - one.watched.share_percent
            if used[one.watched.gpu] <= 100 + _ROUNDING_PERCENT:
                self.switched_s[key] = before.switched_s[key]
                if old.standby == one.standby and key in before.renewed:
                    self.renewed.add(key)

    @property
    def running(self) -> tuple[RunningGpu, ...]:
        """The plan as it runs; an instance with an active standby has the standby's share."""
        active = {one.watched.key: one.watched.standby_percent for one in self.replicas}
        return tuple(
            gpu._replace(
                processes=tuple(
                    process._replace(share_percent=active[f"{process.workload}/{process.replica}"])
                    if f"{process.workload}/{process.replica}" in self.switched_s
                    else process
                    for process in gpu.processes
                )
            )
            for gpu in running_of(self.gpus)
        )

    def summary(self) -> str:
        """One line: the instances of each GPU with their shares or slices and batches, and the shares of variants."""
        text = " | ".join(
            " + ".join(_instance_text(each) for each in gpu.instances)
            + ("" if gpu.clock_set_mhz is None or not self.shared else f" at {gpu.clock_set_mhz:g} MHz")
            for gpu in self.gpus
        )
        mixed = [(name, shares) for name, shares in variant_shares(self.gpus).items() if len(shares) > 1]
        weights = "; ".join(
            f"{name}: " + ", ".join(f"{variant} {100 * share:.3g} %" for variant, share in shares.items())
            for name, shares in mixed
        )
        return f"{text}; requests of {weights}" if weights else text


def _instance_text(each: PlannedInstance) -> str:
    """An instance as text: its share and batch, or its variant, slice and processes."""
    if not each.slice:
        return f"{each.workload} {100 * each.share_ratio:g} % x{each.batch}"
    several = f" by {each.processes} processes" if each.processes > 1 else ""
    return f"{each.workload} {each.model} on {each.slice} x{each.batch}{several}"


def variant_shares(gpus: Sequence[PlannedGpu]) -> dict[str, dict[str, float]]:
    """Share of each service's requests that a plan has each of its variants answer; they sum to 1."""
    flows: dict[str, dict[str, float]] = {}
    for each in (one for gpu in gpus for one in gpu.instances):
        mine = flows.setdefault(each.workload, {})
        mine[each.model] = mine.get(each.model, 0.0) + each.rate_rps
    totals = {name: math.fsum(mine.values()) for name, mine in flows.items()}
    return {
        name: {variant: rate / totals[name] if totals[name] > 0 else 1 / len(mine) for variant, rate in mine.items()}
        for name, mine in flows.items()
    }


def mix_of(shares: Mapping[str, float]) -> VariantMix:
    """The mix that keeps shares of the requests; each replica's own variant where there is only one."""
    if len(shares) < 2:
        return OWN
    # The last step of a mix holds in front of any queue: rate and delay do not matter.
    return VariantMix((MixStep(1.0, 0.0, tuple(shares.items())),))


def tail_of(
    planned: PlannedReplica, records: Sequence[RequestRecord], ids: Collection[str], switched_s: Mapping[str, float]
) -> Tail:
    """The latency tail of an instance's requests since its standby became active; refused ones count as late."""
    watched = planned.watched
    since_s = switched_s.get(watched.key, -math.inf)
    of_it = frozenset(ids) | {""}
    mine = [record for record in records if record.replica in of_it and record.arrival_s >= since_s]
    latency_s = [record.latency_s for record in mine if record.outcome is Outcome.OK]
    latency_s += [REFUSED_S for record in mine if record.outcome in _LATE]
    quantile = float(np.quantile(latency_s, watched.quantile)) if latency_s else math.nan
    return Tail(watched.key, quantile, len(latency_s))


def cores_for(
    gpus: Sequence[PlannedGpu],
    cores: Sequence[int],
    size: Mapping[str, int],
    kept: Mapping[int, tuple[int, ...]] = {},
) -> tuple[tuple[int, ...], ...]:
    """The cores that stand for each GPU of a plan.

    Args:
        gpus: The plan.
        cores: The cores that may be used.
        size: Cores that stand for one GPU, by its type; 1 where it is not named.
        kept: GPUs that continue, with their present cores.

    Raises:
        CapabilityError: There are not enough cores.
    """
    free = [core for core in cores if not any(core in bound for bound in kept.values())]
    wanted = sum(size.get(gpu.type, 1) for index, gpu in enumerate(gpus) if index not in kept)
    if wanted > len(free):
        raise CapabilityError(
            f"the plan has {len(gpus)} GPUs, which takes {wanted - len(free)} CPU cores more than may be used here",
            resource="CPU cores",
            hint="plan for fewer GPUs (fleet.gpus.*.available), or run it on a larger machine",
        )
    found = []
    for index, gpu in enumerate(gpus):
        bound = kept.get(index)
        if bound is None:
            count = size.get(gpu.type, 1)
            bound, free = tuple(free[:count]), free[count:]
        found.append(bound)
    return tuple(found)


def devices_for(
    gpus: Sequence[PlannedGpu],
    names: Sequence[str],
    partitioned: Collection[str],
    kept: Mapping[int, tuple[int, ...]] = {},
    running: Collection[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """The GPU of this machine that stands for each GPU of a plan, by its index in ``names``.

    A GPU with slices, or with several processes of one model, needs one that may have a MIG partition; shares need one
    that may not. An instance with a GPU to itself first takes one that may not, because slices cannot use those.

    Args:
        gpus: The plan.
        names: GPUs of this machine.
        partitioned: Those that may have a MIG partition.
        kept: GPUs of the plan that continue, with their present places.
        running: GPUs of this machine that another plan runs on meanwhile: none of them gets a new partition.

    Raises:
        CapabilityError: There are not enough of a kind.
    """
    free = {
        kind: [at for at, name in enumerate(names) if (name in partitioned) == (kind == MIG)] for kind in (MIG, MPS)
    }
    for (taken,) in kept.values():
        free[MIG if names[taken] in partitioned else MPS].remove(taken)
    free[MIG] = [at for at in free[MIG] if at not in running]
    found = dict(kept)
    missing: Counter[str] = Counter()
    order = sorted((at for at in range(len(gpus)) if at not in kept), key=lambda at: len(kinds_for(gpus[at])))
    for at in order:
        kinds = kinds_for(gpus[at])
        kind = next((each for each in kinds if free[each]), None)
        if kind is None:
            missing[kinds[0]] += 1
        else:
            found[at] = (free[kind].pop(0),)
    if missing:
        kind, count = next(iter(missing.items()))
        idle = " that nothing runs on, for none in use is partitioned again" if running else ""
        what = f"GPUs to partition into MIG slices{idle}" if kind == MIG else "GPUs to share under MPS"
        raise CapabilityError(
            f"the plan has {len(gpus)} GPUs, which takes {count} GPUs more than may be used here: {what}",
            resource="GPUs",
            hint=f"name them under fleet.devices with mode: {kind}, or plan for fewer (fleet.gpus.*.available)",
        )
    return tuple(found[at] for at in range(len(gpus)))


def kinds_for(gpu: PlannedGpu) -> tuple[str, ...]:
    """Divisions of a GPU of this machine that suit a GPU of a plan, the best first."""
    if gpu.sliced:
        return (MIG,)
    return (MPS, MIG) if all(each.slice for each in gpu.instances) else (MPS,)


def goes_on(old: PlannedGpu, new: PlannedGpu) -> bool:
    """Whether the old GPU's partition already has the slices of the new one: no instance has to be destroyed."""
    if not (old.sliced or new.sliced):
        return True
    return not Counter(each.slice for each in new.instances) - Counter(each.slice for each in old.instances)


def held_places(
    before: PlanInForce, gpus: Sequence[PlannedGpu], same_gpu: Sequence[int | None]
) -> dict[int, tuple[int, ...]]:
    """Places where GPUs of the next plan continue: with their processes, or on a partition that has their slices.

    A GPU in use never gets a new partition, because its processes would have to end first.

    Args:
        before: The plan in force.
        gpus: The next plan.
        same_gpu: For each of its GPUs the one that it continues; None for another.
    """
    kept = {
        new: before.cores[was]
        for new, was in enumerate(same_gpu)
        if was is not None and goes_on(before.gpus[was], gpus[new])
    }
    for new, gpu in enumerate(gpus):
        if new not in kept and gpu.sliced:
            there = (
                mine
                for old, mine in zip(before.gpus, before.cores, strict=True)
                if old.sliced and mine not in kept.values() and goes_on(old, gpu)
            )
            if (found := next(there, None)) is not None:
                kept[new] = found
    return kept


def planned_replicas(
    gpus: Sequence[PlannedGpu],
    cores: Sequence[tuple[int, ...]],
    models: Models,
    watched: Sequence[WatchedInstance],
    devices: Sequence[str] = (),
    partitioned: Collection[str] = (),
) -> tuple[PlannedReplica, ...]:
    """The processes of a plan.

    Args:
        gpus: The plan.
        cores: The cores of each GPU.
        models: What is loaded, by service and variant.
        watched: Its instances, in order.
        devices: For each GPU the one of this machine that it runs on; empty where cores stand for it.
        partitioned: Those of them with a MIG partition.
    """
    instances = [(index, each) for index, gpu in enumerate(gpus) for each in gpu.instances]
    return tuple(
        _planned_replica(
            each,
            cores[index],
            models[(each.workload, each.model)],
            one,
            devices[index] if devices else "",
            sliced=bool(devices) and devices[index] in partitioned,
        )
        for (index, each), one in zip(instances, watched, strict=True)
    )


def _planned_replica(
    each: PlannedInstance,
    cores: tuple[int, ...],
    model: ModelRef,
    watched: WatchedInstance,
    device: str,
    *,
    sliced: bool,
) -> PlannedReplica:
    def process(piece: Slice, together: str = "") -> ReplicaSpec:
        on = () if device else cores
        return ReplicaSpec(
            each.workload, each.model, piece, model, 0, each.batch, delay_s(each), on, device=device, together=together
        )

    def share(percent: float) -> ReplicaSpec:
        ratio = min(1.0, round(percent / 100, 9))
        if device:
            return process(Slice(SliceKind.MPS, share_ratio=ratio))
        return process(Slice(SliceKind.CPU, cores=len(cores), share_ratio=ratio))

    if sliced:
        piece = Slice(SliceKind.MIG, profile=each.slice, share_ratio=1 / each.processes)
        return PlannedReplica(watched, process(piece, watched.key), None, each.processes)
    larger = watched.standby_percent > watched.share_percent + 1e-9
    return PlannedReplica(watched, share(watched.share_percent), share(watched.standby_percent) if larger else None)


def delay_s(each: PlannedInstance) -> float:
    """Time that a live batch waits to fill: as planned; for a plan of evenly spaced requests, as long as they take.

    A plan for evenly spaced requests lets them wait for a full batch. Live ones are never quite even: a batch that has
    waited that long goes as it is.
    """
    if math.isfinite(each.max_delay_s):
        return each.max_delay_s
    return (each.batch - 1) / each.rate_rps
