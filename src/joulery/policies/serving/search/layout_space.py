"""The layouts a search chooses from: partitions of a machine's cores or GPUs, with a variant on each slice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, groupby, product

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.gpu.mig import GIB, MigMenu, MigProfile
from joulery.domain.serving.service import Slice, SliceKind
from joulery.policies.serving.search.configuration_graph import Edge, GraphSpace, one_gpu, published_odds, summed_odds

MOST_LAYOUTS = 5000
"""Largest number of layouts for an exhaustive search."""
_SAMPLED_ROWS = 1500
"""Rows from all over a large space that a search considers beside the neighbours of the best."""


def core_partitions(cores: int) -> tuple[tuple[int, ...], ...]:
    """Every partition of ``cores`` into slices of 1, 2, 4, 8 ... cores that leaves none over; fewest slices first.

    ``core_partitions(2)`` is ``((2,), (1, 1))``.
    """
    sizes = [1 << k for k in range(cores.bit_length()) if 1 << k <= cores]
    return tuple(sorted(_sums(cores, sizes[::-1]), key=lambda pieces: (len(pieces), [-piece for piece in pieces])))


def _sums(total: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
        return
    for k, size in enumerate(sizes):
        if size <= total:
            for rest in _sums(total - size, sizes[k:]):
                yield (size, *rest)


def cpu_slices(partition: Sequence[int]) -> tuple[Slice, ...]:
    """CPU slices with the given numbers of cores."""
    return tuple(Slice(SliceKind.CPU, cores=cores) for cores in partition)


def layouts(partitions: Sequence[Sequence[Slice]], variants: Sequence[str]) -> tuple[Layout, ...]:
    """Every distinct assignment of a variant to each slice of each partition.

    Args:
        partitions: Each a set of slices that exist together.
        variants: Names to choose from.

    Raises:
        InfeasibleError: There are more than ``MOST_LAYOUTS``.
    """
    found: dict[Layout, None] = {}
    for slices in partitions:
        groups = [(piece, len(list(same))) for piece, same in groupby(sorted(slices))]
        choices = [combinations_with_replacement(sorted(variants), count) for _, count in groups]
        for choice in product(*choices):
            pairs = zip(groups, choice, strict=True)
            found[Layout(Instance(name, piece) for (piece, _), names in pairs for name in names)] = None
            if len(found) > MOST_LAYOUTS:
                raise InfeasibleError(
                    f"more than {MOST_LAYOUTS} layouts of {len(variants)} variants to try one by one",
                    binding="number of layouts",
                    hint="name the partitions to consider, fewer variants or fewer cores",
                )
    return tuple(found)


def slice_menu(partitions: Sequence[Sequence[Slice]]) -> MigMenu:
    """The partitions of this machine's cores or GPUs in the form of a MIG menu.

    Args:
        partitions: Partitions of the same cores or GPUs.

    Raises:
        InfeasibleError: There is no slice.
    """
    pieces = sorted({piece for partition in partitions for piece in partition}, key=lambda piece: -size_of(piece))
    if not pieces:
        raise InfeasibleError("no slices to try layouts on", binding="partitions", hint="name fleet.cpu.slices")
    whole = max(sum(map(size_of, partition)) for partition in partitions)
    return MigMenu(
        gpu=f"{pieces[0].kind} slices, {whole} in all",
        compute_slices=whole,
        memory_slices=whole,
        profiles=tuple(_profile(piece) for piece in pieces),
        partitions=tuple(tuple(str(piece) for piece in partition) for partition in partitions),
        source="the partitions of this machine",
    )


def size_of(piece: Slice) -> int:
    """Size of a slice among its kind: cores, compute slices, percent of the SMs, or 1 for a whole GPU."""
    if piece.kind is SliceKind.CPU:
        return piece.cores
    if piece.kind is SliceKind.MPS:
        return max(1, round(100 * piece.share_ratio))
    head = piece.profile.partition("g.")[0]
    return int(head) if head.isdigit() else 1


def _profile(piece: Slice) -> MigProfile:
    """A slice as an entry of a menu; only the name of a MIG slice states its memory."""
    memory = piece.profile.partition(".")[2].partition("gb")[0]
    return MigProfile(str(piece), size_of(piece), size_of(piece), int(memory) * GIB if memory.isdigit() else 0)


def unfit_edges(menu: MigMenu, memory_bytes: Mapping[str, int]) -> tuple[Edge, ...]:
    """The variants that do not fit a slice's memory, as edges to leave out.

    Args:
        menu: Profiles; one without memory holds any variant.
        memory_bytes: Memory of one replica of each variant; 0 while unknown.
    """
    return tuple(
        (variant, profile.name)
        for variant, needed in memory_bytes.items()
        for profile in menu.profiles
        if 0 < profile.memory_bytes < needed
    )


@dataclass(slots=True, eq=False)
class LayoutSpace:
    """Layouts and their rows in Clover's configuration graph; immutable except for its caches.

    Attributes:
        graph: The configurations of one device, or of all devices together.
        menu: Partitions of a device.
        copies: How often a configuration runs: once on each device, or once where it covers all devices.
        odds: How likely the published search proposes each row, float64[rows].
    """

    graph: GraphSpace
    menu: MigMenu
    copies: int
    odds: FloatArray
    _layouts: dict[int, Layout] = field(default_factory=dict, repr=False)
    _rows: dict[Layout, int | None] = field(default_factory=dict, repr=False)
    _interned: dict[int, int] = field(default_factory=dict, repr=False)
    _vectors: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False)
    _accurate: dict[float, LayoutSpace] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, menu: MigMenu, variants: Sequence[str], disabled: Collection[Edge], devices: int, *, alike: bool = True
    ) -> LayoutSpace:
        """The space of every configuration.

        Args:
            menu: Partitions of a device.
            variants: Least accurate first.
            disabled: Edges that do not exist.
            devices: Number of devices.
            alike: Whether all devices are partitioned and filled alike; else each has a configuration of its own.

        Raises:
            InfeasibleError: Every partition has a slice that no variant fits.
        """
        graph = one_gpu(menu, variants, disabled)
        odds = published_odds(graph, menu)
        if alike:
            return cls(graph, menu, devices, odds)
        total, total_odds = graph, odds
        for _ in range(devices - 1):
            more = total.plus(graph)
            total, total_odds = more, summed_odds(more, total, total_odds, graph, odds)
        return cls(total, menu, 1, total_odds)

    def __len__(self) -> int:
        return len(self.graph)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each row."""
        return tuple(self.layout(row) for row in range(len(self)))

    def layout(self, row: int) -> Layout:
        """The layout of a row, on all devices."""
        if row not in self._layouts:
            edges = self.graph.instances(self.graph.graphs[row].tolist())
            layout = Layout(Instance(name, Slice.parse(piece)) for name, piece in edges for _ in range(self.copies))
            self._layouts[row] = layout
            self._interned[id(layout)] = row
        return self._layouts[row]

    def row(self, layout: Layout) -> int | None:
        """The row of a layout; None where it is not of this space."""
        row = self._interned.get(id(layout))  # hashing a layout of many instances takes longer than all else here
        if row is not None and self._layouts[row] is layout:
            return row
        if layout not in self._rows:
            self._rows[layout] = self._find(layout)
        return self._rows[layout]

    def _find(self, layout: Layout) -> int | None:
        counts = Counter((item.variant, str(item.slice)) for item in layout.instances)
        known = {(name, piece) for name in self.graph.variants for piece in self.graph.profiles}
        if any(edge not in known or count % self.copies for edge, count in counts.items()):
            return None
        edges = [edge for edge, count in counts.items() for _ in range(count // self.copies)]
        return self.row_of_vector(self.graph.vector(edges))

    def row_of_vector(self, vector: tuple[int, ...]) -> int | None:
        """The row of edge weights; None where the space does not hold them."""
        if not self._vectors:
            self._vectors.update((tuple(weights), row) for row, weights in enumerate(self.graph.graphs.tolist()))
        return self._vectors.get(vector)

    def without(self, layouts: Collection[Layout]) -> LayoutSpace:
        """The space without some of its layouts; itself where it holds none of them."""
        gone = {row for layout in layouts if (row := self.row(layout)) is not None}
        if not gone:
            return self
        return self._of_rows([row for row in range(len(self)) if row not in gone])

    def _of_rows(self, rows: Sequence[int] | IntArray) -> LayoutSpace:
        graph = GraphSpace(self.graph.variants, self.graph.profiles, self.graph.graphs[rows])
        return LayoutSpace(graph, self.menu, self.copies, self.odds[rows])

    def as_accurate(self, accuracy_ratio: Mapping[str, float], least_ratio: float) -> LayoutSpace:
        """The layouts whose instances, each answering an equal count of requests, reach a mean accuracy.

        Below saturation every instance answers an equal count (longest idle first); near it the fast, less accurate
        ones answer more. A layout that misses the accuracy on equal counts therefore misses it anywhere.

        Args:
            accuracy_ratio: Accuracy of each variant.
            least_ratio: The mean accuracy to reach; a thousandth less passes, because shares of a finite trial vary.
        """
        if least_ratio not in self._accurate:
            each = np.array([accuracy_ratio[name] for name in self.graph.variants])
            counts = self.graph.graphs.reshape(len(self), len(each), -1).sum(axis=2)
            mean = counts @ each / counts.sum(axis=1)
            self._accurate[least_ratio] = self._of_rows(np.flatnonzero(mean >= least_ratio * (1 - 1e-3)))
        return self._accurate[least_ratio]

    def whole(self, variant: str) -> int:
        """The row of one variant on whole devices: on the first slice of the menu.

        Raises:
            InfeasibleError: The variant does not fit it.
        """
        devices = int(self.graph.graphs.sum(axis=1).min()) if self.copies == 1 else 1
        return self.graph.index(self.graph.vector([(variant, self.menu.profiles[0].name)] * devices))

    def candidate_rows(self, centres: Sequence[int]) -> IntArray:
        """The neighbours of some rows, and rows from all over the space, in order: the candidates in a large space."""
        step = max(1, len(self) // _SAMPLED_ROWS)
        near = [self.graph.neighbours(row) for row in centres]
        return np.asarray(np.unique(np.concatenate([np.arange(0, len(self), step), *near])), np.int64)
