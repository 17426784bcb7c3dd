"""The machines of a site in simulations: its nodes, and the power and speed of its own jobs where they are known.

What may be known of a job is its power per GPU with its share of the node, while it ran on the GPUs that it had, and
its speed on some numbers of GPUs over that on the smallest of them. Its kind stays unknown and is drawn among the
measured ones. The drawn kind's response to power limits is kept; its scaling up to the smallest known number of GPUs,
too, and from there on the job scales as known, with the ratio to the drawn kind's scaling interpolated between. Its
power on one GPU is set so that on the GPUs it had the job takes what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.perf.power.training_power import RTX3090_CLASSES, JobClass, NodePower, widened
from joulery.sim.training.node_groups import NodeGroup

_STEP_W = 10.0
"""Step to which powers on one GPU are rounded: jobs of equal power share a row of the power table."""
_SHARE_STATIC_W = NodePower().static_w / NodePower().gpus


@dataclass(frozen=True, slots=True, eq=False)
class SiteMachines:
    """Known facts of a site's machines.

    Attributes:
        node: One of its nodes.
        job_w: Power per GPU of each job with its share of the node, W, float64[n]; NaN where unknown; None where
            unknown for all.
        placed: Whether jobs need nodes with room for them; otherwise GPUs are counted.
        groups: Its groups of nodes with a GPU type each, on which jobs are placed; none where all nodes are alike.
        reach: The groups that each job may run on, as bits, int64[n]; None without groups.
        speedups: Speed-ups by number of GPUs over the smallest one, one for each kind of which any is known.
        speedup_of: Index in ``speedups`` of each job, int64[n], -1 where unknown; None where unknown for all.
        limits: Effects of power limits on the jobs of each kind for which they are known: limit, step time and power.
        limits_of: Index in ``limits`` of each job, int64[n], -1 where unknown; None where unknown for all.
        type_speed, type_watts: Speed and power of the GPUs that each job ran on over those of the type of reference,
            float64[n]; None where all count as alike.
        keeps_gpus: Whether each job runs on as many GPUs as it had; otherwise the scheduler chooses.
    """

    node: NodePower = field(default_factory=NodePower)
    job_w: FloatArray | None = None
    placed: bool = False
    groups: tuple[NodeGroup, ...] = ()
    reach: IntArray | None = None
    speedups: tuple[Mapping[int, float], ...] = ()
    speedup_of: IntArray | None = None
    limits: tuple[tuple[tuple[float, float, float], ...], ...] = ()
    limits_of: IntArray | None = None
    type_speed: FloatArray | None = None
    type_watts: FloatArray | None = None
    keeps_gpus: bool = False


def node_of(gpus: int) -> NodePower:
    """A node of so many GPUs; its static and sleeping power are assumed to grow in proportion."""
    usual = NodePower()
    return replace(usual, gpus=gpus, static_w=_SHARE_STATIC_W * gpus, asleep_w=usual.asleep_w / usual.gpus * gpus)


def classes_of(kind: IntArray, gpus: IntArray, machines: SiteMachines, widest: int) -> tuple[
    tuple[JobClass, ...], IntArray
]:  # fmt: skip
    """The job classes of a workload, and each job's row: the measured kinds, then kinds adapted to known facts.

    Args:
        kind: The kind drawn for each job, a row of ``RTX3090_CLASSES``.
        gpus: On how many GPUs each ran.
        machines: Known facts of the machines.
        widest: Most GPUs of any job.
    """
    usual = widened(RTX3090_CLASSES, widest)
    if machines.job_w is None and machines.speedup_of is None and machines.limits_of is None:
        return usual, kind
    unknown = np.full(len(kind), -1, np.int64)
    speedup_of = (unknown if machines.speedup_of is None else machines.speedup_of).tolist()
    pairs = list(zip(kind.tolist(), speedup_of, strict=True))
    busy = {
        (at, known): usual[at].busy_ratio if known < 0 else scaled(usual[at].busy_ratio, machines.speedups[known])
        for at, known in set(pairs)
    }
    job_w = np.full(len(kind), np.nan) if machines.job_w is None else machines.job_w
    had = np.array([busy[pair][count - 1] for pair, count in zip(pairs, gpus.tolist(), strict=True)])
    single_w = _single_w(job_w, had, machines.node)
    if machines.type_watts is not None:
        single_w = single_w / machines.type_watts
    rows, found = kind.copy(), list(usual)
    limits_of = unknown if machines.limits_of is None else machines.limits_of
    index: dict[tuple[int, int, float | None, int], int] = {}
    for at in np.flatnonzero(~np.isnan(single_w) | (np.array(speedup_of) >= 0) | (limits_of >= 0)).tolist():
        base, known, limits = usual[pairs[at][0]], pairs[at][1], int(limits_of[at])
        gpu_w = None if np.isnan(single_w[at]) else float(single_w[at])
        key = *pairs[at], gpu_w, limits
        if key not in index:
            index[key] = len(found)
            own = replace(
                base,
                name=_name(base, gpu_w, known, limits),
                gpu_w=base.gpu_w if gpu_w is None else gpu_w,
                busy_ratio=busy[pairs[at]],
                measured_as=base.name,
                limits=() if limits < 0 else machines.limits[limits],
            )
            found.append(own)
        rows[at] = index[key]
    return tuple(found), rows


def _name(base: JobClass, gpu_w: float | None, known: int, limits: int) -> str:
    """Name of a class: its measured kind and the known facts of its jobs."""
    at_w, scaling = "" if gpu_w is None else f" at {gpu_w:g} W", "" if known < 0 else f", scaling {known}"
    return f"{base.name}{at_w}{scaling}" + ("" if limits < 0 else f", limits {limits}")


def scaled(busy_ratio: FloatArray, speedup: Mapping[int, float]) -> FloatArray:
    """The busy ratios of a kind of job whose speed is known on some numbers of GPUs.

    Up to the smallest known number of GPUs they do not change; a known speed above that of busy GPUs counts as that of
    busy ones.

    Args:
        busy_ratio: Of the drawn kind, with 1, 2, … GPUs, float64[max GPUs].
        speedup: Speed by number of GPUs over that on the smallest of them.
    """
    least = min(speedup)
    points = sorted(gpus for gpus in speedup if gpus <= len(busy_ratio))
    if len(points) < 2:
        return busy_ratio
    drawn = {gpus: gpus * busy_ratio[gpus - 1] for gpus in points}
    factor = [np.log(drawn[least] * speedup[gpus] / drawn[gpus]) for gpus in points]
    counts = np.arange(1, len(busy_ratio) + 1)
    return np.asarray(np.clip(busy_ratio * np.exp(np.interp(counts, points, factor)), 0.01, 1.0), np.float64)


def _single_w(job_w: FloatArray, busy: FloatArray, node: NodePower) -> FloatArray:
    """Power of the GPU of a job on one GPU, from its power per GPU on several, with its share of the node."""
    gpu_w = np.maximum(job_w - node.cpu_w - node.static_w / node.gpus, node.idle_gpu_w)
    waiting_w = np.minimum(node.waiting_gpu_w, gpu_w)
    single_w = waiting_w + (gpu_w - waiting_w) / busy
    return np.asarray(np.maximum(np.rint(single_w / _STEP_W), 1.0) * _STEP_W, np.float64)
