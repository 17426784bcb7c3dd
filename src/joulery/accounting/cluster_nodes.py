"""Energy of a machine that several nodes of a cluster share, divided between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from joulery.domain.quality import Quality


@dataclass(frozen=True, slots=True)
class NodeReading:
    """Counts of a node's meters since they were opened.

    Attributes:
        machine: Identity of the machine that the node runs on.
        energy_j: Joules of the whole machine.
        own_j: Joules of the node's own processes.
        covered_s: Seconds that the meters covered.
        quality: Weakest quality of the meters.
        meters: Their names.
        opened: Identifier of the opening of the meters: it changes when they are opened again and count from zero.
    """

    machine: str
    energy_j: float
    own_j: float
    covered_s: float
    quality: Quality
    meters: tuple[str, ...] = ()
    opened: str = ""

    def since(self, before: NodeReading | None) -> NodeReading | None:
        """The difference to an earlier reading; None where the meters were opened again meanwhile, or are new."""
        if before is None or self.opened != before.opened:
            return None
        return replace(
            self,
            energy_j=max(0.0, self.energy_j - before.energy_j),
            own_j=max(0.0, self.own_j - before.own_j),
            covered_s=max(0.0, self.covered_s - before.covered_s),
        )


def by_node(readings: Mapping[str, NodeReading]) -> dict[str, tuple[float, float]]:
    """Joules of each node, and of its own processes; the nodes of a machine add up to the reading of one of them.

    A machine's joules beyond those of its nodes' processes (idle, other programs) are divided equally.

    Args:
        readings: Reading of each node, over the same time.
    """
    found: dict[str, tuple[float, float]] = {}
    for machine in dict.fromkeys(reading.machine for reading in readings.values()):
        names = [name for name, reading in readings.items() if reading.machine == machine]
        total_j = readings[names[0]].energy_j
        own_j = [readings[name].own_j for name in names]
        found |= dict(zip(names, machine_parts(total_j, own_j), strict=True))
    return found


def machine_parts(total_j: float, own_j: Sequence[float]) -> list[tuple[float, float]]:
    """Joules of each node on a machine, and of its own processes.

    Args:
        total_j: Joules of the machine, not negative.
        own_j: Joules of the processes of each node; nodes are read at slightly different times, so that these may
            exceed the machine's: they are then scaled to it.
    """
    own_sum_j = math.fsum(own_j)
    scale = min(1.0, total_j / own_sum_j) if own_sum_j > 0 else 1.0
    mine_j = [each * scale for each in own_j]
    rest_j = max(0.0, total_j - math.fsum(mine_j)) / len(mine_j)
    return [(each + rest_j, each) for each in mine_j]
