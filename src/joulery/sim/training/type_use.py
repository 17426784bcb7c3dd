"""Energy and carbon of a training cluster by GPU type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from joulery.sim.training.mixed_plant import MixedPlant
from joulery.sim.training.plant import Plant


@dataclass(frozen=True, slots=True)
class TypeUse:
    """What came of the nodes of one GPU type, until the cluster's last job ended.

    Attributes:
        type: Its name.
        gpus: GPUs of that type.
        job_j, job_kg: Energy and carbon of jobs while they ran there.
        idle_j, idle_kg: Energy and carbon of its GPUs and nodes without a job.
        gpu_s: GPU-seconds that jobs held.
    """

    type: str
    gpus: int
    job_j: float
    job_kg: float
    idle_j: float
    idle_kg: float
    gpu_s: float


def group_uses(plant: Plant) -> list[TypeUse]:
    """The use of each group of a pool; nothing where its groups are not named."""
    groups = plant.cluster.groups
    if isinstance(plant, MixedPlant):
        columns = (
            plant.group_j, plant.group_kg, plant.group_idle_j, plant.group_idle_kg, plant.group_gpu_s
        )  # fmt: skip
        rows = zip(groups, *(column.tolist() for column in columns), strict=True)
        return [TypeUse(group.type, group.gpus, *values) for group, *values in rows]
    accounts = plant.accounts
    sums = (float(accounts.job_j.sum()), float(accounts.job_kg.sum()), float(plant.idle_j), float(plant.idle_kg))
    return [TypeUse(group.type, group.gpus, *sums, float(accounts.attained_s.sum())) for group in groups]


def by_type(uses: Sequence[TypeUse]) -> tuple[TypeUse, ...]:
    """Uses of one type added up, in order of the first of each type."""
    found: dict[str, TypeUse] = {}
    for use in uses:
        before = found.get(use.type)
        found[use.type] = use if before is None else TypeUse(
            use.type, before.gpus + use.gpus, before.job_j + use.job_j, before.job_kg + use.job_kg,
            before.idle_j + use.idle_j, before.idle_kg + use.idle_kg, before.gpu_s + use.gpu_s,
        )  # fmt: skip
    return tuple(found.values())
