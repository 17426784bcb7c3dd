"""Groups of equal nodes, and the pools of groups that jobs compete for.

As on a live cluster, groups that one job may run on belong to one pool, and a policy plans each pool by itself. On a
live cluster two groups belong to one pool only while such a job is unfinished; in simulations, for the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from joulery.perf.power.training_power import RTX3090_W, NodePower


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """A group of equal nodes.

    Attributes:
        type: Type of their GPUs.
        nodes: How many nodes.
        node: Power of one node without its computing GPUs.
        limit_w: Power limit of a GPU, W.
        speed_ratio: Speed of a GPU over that on which durations are stated.
        partition: Partition of the cluster that they belong to; empty for none.
    """

    type: str
    nodes: int
    node: NodePower
    limit_w: float = RTX3090_W
    speed_ratio: float = 1.0
    partition: str = ""

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.nodes * self.node.gpus


def members(bits: int) -> tuple[int, ...]:
    """Indices of the groups in a bit set."""
    return tuple(at for at in range(bits.bit_length()) if bits >> at & 1)


def pools_of(groups: Sequence[NodeGroup], requests: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """The pools, each as the places of its groups; in order of their first group.

    Args:
        groups: All groups.
        requests: The groups that each job, or each sort of job, may run on, as bits.
    """
    pools = [1 << at for at in range(len(groups))]
    for bits in set(requests):
        joined = [pool for pool in pools if pool & bits]
        if len(joined) > 1:
            pools = [pool for pool in pools if not pool & bits] + [sum(joined)]
    return tuple(sorted(members(pool) for pool in pools))


def groups_of(groups: Sequence[NodeGroup], type_name: str, partition: str) -> int:
    """The groups that a request may run on, as bits: of its type and partition; any matches where either names none."""
    return sum(
        1 << at
        for at, group in enumerate(groups)
        if type_name in ("", group.type) and (not group.partition or partition in ("", group.partition))
    )
