"""A service's table of trials, indexed by the rows of its configuration space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.domain.gpu.mig import MigMenu
from joulery.domain.serving.variant_table import VariantTable
from joulery.perf.queues.pull_costs import ServiceCosts
from joulery.policies.serving.annealing import TrialMetrics
from joulery.policies.serving.configuration_graph import GraphSpace, one_gpu, published_odds


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A service's table, indexed by the rows of its configuration space.

    Attributes:
        table: The table.
        space: Configurations that can run; edges that appear nowhere in the table do not exist.
        menu: How a GPU is cut.
        metrics: What each row does under the load served, by row.
        same_gpus_j: Joules a request of each row with every GPU powered, by row.
        interarrival_s: The load served.
        accuracy_ratio: Accuracy of each variant of the space alone, least first.
        costs: What a request costs, for pools that are not in the table; None where only the table is known.
        odds: How likely the published search proposes each row.
        copies: How often a row runs: on every GPU, or once where the rows are configurations of all GPUs together.
        promising: Rows among which the best is looked for where there are too many to try each; None for all.
    """

    table: VariantTable
    space: GraphSpace
    menu: MigMenu
    metrics: Sequence[TrialMetrics]
    same_gpus_j: Sequence[float]
    interarrival_s: float
    accuracy_ratio: tuple[float, ...]
    odds: FloatArray
    costs: ServiceCosts | None = None
    copies: int = 1
    promising: tuple[int, ...] | None = None

    @property
    def pool_gpus(self) -> int:
        """GPUs of the yardstick, at the demand served: those that stay powered in the accounting of the same GPUs."""
        return round(self.table.gpus * self.table.loads_s[0] / self.interarrival_s)

    @property
    def smallest(self) -> str:
        """The least accurate variant."""
        return self.space.variants[0]

    @property
    def largest(self) -> str:
        """The most accurate variant."""
        return self.space.variants[-1]

    @property
    def base_row(self) -> int:
        """The most accurate variant on whole GPUs."""
        whole = (self.largest, self.menu.profiles[0].name)
        return self.space.index(self.space.vector([whole] * (self.table.gpus // self.copies)))


def bench(
    table: VariantTable, menu: MigMenu, interarrival_s: float | None = None, costs: ServiceCosts | None = None
) -> Bench:
    """Index a table.

    Args:
        table: What every configuration does.
        menu: How a GPU is cut.
        interarrival_s: The load served; the heaviest of the table when None.
        costs: What a request costs, where that is known too.

    Raises:
        DataError: The table lacks a load, or a configuration of the space.
    """
    loads = table.loads_s
    served = loads[-1] if interarrival_s is None else interarrival_s
    if served not in loads:
        raise DataError(f"the table of {table.service!r} has no load of {served} s between requests; it has {loads}")
    accuracy = _accuracies(table)
    edges = {(variant, profile.name) for variant in accuracy for profile in menu.profiles}
    space = one_gpu(menu, tuple(accuracy), edges - {edge for entry in table.entries for edge in entry.instances})
    return Bench(
        table=table,
        space=space,
        menu=menu,
        metrics=_at_load(table, space, served),
        same_gpus_j=tuple(metrics.energy_j for metrics in _at_load(table, space, loads[0])),
        interarrival_s=served,
        accuracy_ratio=tuple(accuracy.values()),
        odds=published_odds(space, menu),
        costs=costs,
        copies=table.gpus,
    )


def _accuracies(table: VariantTable) -> dict[str, float]:
    """Accuracy of each variant alone, least accurate first."""
    alone = {
        entry.instances[0][0]: entry.accuracy_ratio
        for entry in table.entries
        if len({variant for variant, _ in entry.instances}) == 1
    }
    return dict(sorted(alone.items(), key=lambda item: (item[1], item[0])))


def _at_load(table: VariantTable, space: GraphSpace, interarrival_s: float) -> tuple[TrialMetrics, ...]:
    """What each row of the space does under one load."""
    row_of = {tuple(row): number for number, row in enumerate(space.graphs.tolist())}
    found: dict[int, TrialMetrics] = {}
    for entry in table.entries:
        if entry.interarrival_s == interarrival_s:
            row = row_of.get(space.vector(entry.instances))
            if row is None:
                raise DataError(f"the table of {table.service!r} holds {entry.instances}, which no partition carries")
            found[row] = TrialMetrics(entry.accuracy_ratio, entry.latency_s, entry.energy_j)
    for row in range(len(space)):
        if row not in found:
            missing = space.describe(space.graphs[row])
            raise DataError(f"the table of {table.service!r} lacks {missing} at {interarrival_s} s between requests")
    return tuple(found[row] for row in range(len(space)))
