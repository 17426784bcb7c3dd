"""The pools of a cluster, each with its own jobs; a policy plans each pool by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import DataError
from joulery.perf.power.training_power import stacked
from joulery.sim.training.node_groups import NodeGroup, members, pools_of
from joulery.sim.training.plant import Cluster, Jobs

Part = tuple[tuple[NodeGroup, ...], Jobs, IntArray]
"""Groups, none where the cluster has none; the jobs; their places among all jobs."""


def parts_of(groups: tuple[NodeGroup, ...], jobs: Jobs, kinds: int, gpus: int) -> list[Part]:
    """The pools of a cluster, with their jobs.

    Args:
        groups: Its groups of nodes; none where its nodes are all alike.
        jobs: All jobs.
        kinds: How many kinds of jobs there are.
        gpus: GPUs of a cluster without groups.

    Raises:
        DataError: A job requests more GPUs than there are of a type on which it may run, or may run on no node.
    """
    if not groups:
        _check_width(jobs.requested, np.full(len(jobs), gpus), "the cluster has")
        return [((), jobs, np.arange(len(jobs)))]
    bits = np.full(len(jobs), (1 << len(groups)) - 1) if jobs.groups is None else jobs.groups
    if bool(np.any(bits == 0)):
        at = int(np.argmax(bits == 0))
        raise DataError(f"job {at} may run on no node: none has its GPU type in its partition", row=at + 2)
    largest = {mask: max(groups[at].gpus for at in members(mask)) for mask in set(bits.tolist())}
    most = np.array([largest[mask] for mask in bits.tolist()], np.int64)
    _check_width(jobs.requested, most, "a group of nodes on which it may run has at most")
    jobs = replace(jobs, max_gpus=np.minimum(jobs.max_gpus, most))
    parts: list[Part] = []
    for pool in pools_of(groups, bits.tolist()):
        numbers = np.flatnonzero(bits & sum(1 << at for at in pool))
        first = _local(bits[numbers], pool)
        parts.append((tuple(groups[at] for at in pool), _some(jobs, numbers, first, kinds), numbers))
    return parts


def joined(clusters: Sequence[Cluster]) -> Cluster:
    """Join several clusters into one, with the rows of their power tables one after another."""
    if len(clusters) == 1:
        return clusters[0]
    first = clusters[0]
    full = [cluster.full_table for cluster in clusters if cluster.full_table is not None]
    learning = [cluster.learning_s for cluster in clusters if cluster.learning_s is not None]
    together: tuple[FloatArray, FloatArray] | None = None
    if learning:
        new, again = (np.concatenate(columns) for columns in zip(*learning, strict=True))
        together = new, again
    return replace(
        first,
        table=stacked([cluster.table for cluster in clusters]),
        full_table=stacked(full) if full else None,
        learning_s=together,
    )


def _check_width(requested: IntArray, most: IntArray, what: str) -> None:
    too_wide = np.flatnonzero(requested > most)
    if len(too_wide):
        at = int(too_wide[0])
        raise DataError(f"job {at} asks for {requested[at]} GPUs, {what} {most[at]}", row=at + 2)


def _local(bits: IntArray, pool: tuple[int, ...]) -> IntArray:
    """Convert sets of groups into bits of the pool's own groups."""
    own = np.zeros(len(bits), np.int64)
    for place, at in enumerate(pool):
        own |= (bits >> at & 1) << place
    return own


def _some(jobs: Jobs, numbers: IntArray, groups: IntArray, kinds: int) -> Jobs:
    """Some of the jobs; each one's kind is the power table's row for the first group on which it may run."""
    first = np.array([members(mask)[0] for mask in groups.tolist()], np.int64)
    return Jobs(
        jobs.submit_s[numbers],
        jobs.work_s[numbers],
        jobs.kind[numbers] + kinds * first,
        jobs.requested[numbers],
        jobs.max_gpus[numbers],
        None if jobs.deadline_s is None else jobs.deadline_s[numbers],
        groups,
        None if jobs.min_gpus is None else jobs.min_gpus[numbers],
    )
