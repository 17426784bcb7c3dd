"""Order of a cluster's nodes in which replicas are placed while others are empty."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from joulery.domain.gpu.layout import SliceAssignment
from joulery.domain.serving.engine import NODE, ReplicaSpec
from joulery.domain.serving.service import Slice
from joulery.policies.placement.pools.gpu_groups import on_first
from joulery.runtime.serving.nodes.sleep import SleepingNodes, nodes_of


class NodePlaces:
    """Order of a site's nodes for the placement of replicas.

    Args:
        names: All of them, in the order of the site file.
        sleep: Those that may sleep.
        specs: Returns every present replica.

    Attributes:
        ranks: The order of their grids, 0 for the cleanest.
        sleep: As given.
    """

    def __init__(self, names: Sequence[str], sleep: SleepingNodes, specs: Callable[[], Iterable[ReplicaSpec]]) -> None:
        self._names, self.sleep, self._specs = tuple(names), sleep, specs
        self.ranks: dict[str, int] = {}

    def order(self) -> tuple[str, ...]:
        """The nodes in the order in which replicas are placed on them while others are empty.

        Nodes that cannot sleep come first, because they draw their power anyway; then cleaner grids; then nodes that
        have replicas already.
        """
        running = nodes_of(self._specs())
        places = {name: at for at, name in enumerate(self._names)}
        return tuple(
            sorted(
                self._names,
                key=lambda name: (name in self.sleep.names, self.ranks.get(name, 0), name not in running, places[name]),
            )
        )

    def assigned(self, used: SliceAssignment, partition: tuple[Slice, ...]) -> tuple[tuple[Slice, str], ...]:
        """The slices of a partition, sorted, each with its node."""
        return on_first(used, partition, [f"{NODE}{name}" for name in self.order()])
