"""The machines of a site in simulations: its nodes, and the power of its own jobs where that is known.

What is known of a job is its power per GPU with its share of the node, while it ran on the GPUs that it had. Its kind
stays unknown and is drawn among the measured ones; the drawn kind's scaling and its response to power limits are kept,
and its power on one GPU is set so that on those GPUs the job takes what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.perf.power.training_power import RTX3090_CLASSES, JobClass, NodePower, widened
from joulery.sim.training.node_groups import NodeGroup

_STEP_W = 10.0
"""Powers on one GPU are rounded to this: jobs of equal power share a row of the power table."""
_SHARE_STATIC_W = NodePower().static_w / NodePower().gpus


@dataclass(frozen=True, slots=True, eq=False)
class SiteMachines:
    """What is known of a site's machines.

    Attributes:
        node: One of its nodes.
        job_w: Power per GPU of each job with its share of the node, W, float64[n]; NaN where unknown; None where
            nothing is known of any.
        placed: Whether jobs need nodes with room for them; otherwise GPUs are counted.
        groups: Its groups of nodes with a GPU type each, on which jobs are placed; none where all nodes are alike.
        reach: The groups that each job may run on, as bits, int64[n]; None without groups.
    """

    node: NodePower = field(default_factory=NodePower)
    job_w: FloatArray | None = None
    placed: bool = False
    groups: tuple[NodeGroup, ...] = ()
    reach: IntArray | None = None


def node_of(gpus: int) -> NodePower:
    """A node of so many GPUs; every part of it grows in proportion: assumed."""
    usual = NodePower()
    return replace(usual, gpus=gpus, static_w=_SHARE_STATIC_W * gpus, asleep_w=usual.asleep_w / usual.gpus * gpus)


def classes_of(kind: IntArray, gpus: IntArray, machines: SiteMachines, widest: int) -> tuple[
    tuple[JobClass, ...], IntArray
]:  # fmt: skip
    """The job classes of a workload, and each job's row: the measured kinds, then one for each kind at a known power.

    Args:
        kind: The kind drawn for each job, a row of ``RTX3090_CLASSES``.
        gpus: On how many GPUs each ran.
        machines: What is known.
        widest: Most GPUs of any job.
    """
    usual = widened(RTX3090_CLASSES, widest)
    if machines.job_w is None:
        return usual, kind
    busy = np.array([job.busy_ratio for job in usual])[kind, gpus - 1]
    single_w = _single_w(machines.job_w, busy, machines.node)
    rows, found = kind.copy(), list(usual)
    index: dict[tuple[int, float], int] = {}
    for at in np.flatnonzero(~np.isnan(single_w)).tolist():
        key = int(kind[at]), float(single_w[at])
        if key not in index:
            base = usual[key[0]]
            index[key] = len(found)
            found.append(replace(base, name=f"{base.name} at {key[1]:g} W", gpu_w=key[1], measured_as=base.name))
        rows[at] = index[key]
    return tuple(found), rows


def _single_w(job_w: FloatArray, busy: FloatArray, node: NodePower) -> FloatArray:
    """Power of the GPU of a job on one GPU, from its power per GPU on several, with its share of the node."""
    gpu_w = np.maximum(job_w - node.cpu_w - node.static_w / node.gpus, node.idle_gpu_w)
    waiting_w = np.minimum(node.waiting_gpu_w, gpu_w)
    single_w = waiting_w + (gpu_w - waiting_w) / busy
    return np.asarray(np.maximum(np.rint(single_w / _STEP_W), 1.0) * _STEP_W, np.float64)
