"""The configurations that live trials choose from: Clover's graph over the slices of a device, as layouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.gpu.mig import GIB, MigMenu, MigProfile
from joulery.domain.serving.service import Slice, SliceKind
from joulery.policies.serving.configuration_graph import Edge, GraphSpace, one_gpu


def slice_menu(partitions: Sequence[Sequence[Slice]]) -> MigMenu:
    """The cuts of this machine's cores or GPUs in the form of a MIG menu: profiles, sizes, partitions.

    Args:
        partitions: Ways to cut the same cores or GPUs.

    Raises:
        InfeasibleError: There is none.
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
        source="the cuts of this machine",
    )


def size_of(piece: Slice) -> int:
    """How large a slice is among its kind: cores, compute slices, percent of the SMs, or 1 for a whole GPU."""
    if piece.kind is SliceKind.CPU:
        return piece.cores
    if piece.kind is SliceKind.MPS:
        return max(1, round(100 * piece.share_ratio))
    head = piece.profile.partition("g.")[0]
    return int(head) if head.isdigit() else 1


def _profile(piece: Slice) -> MigProfile:
    """A slice as an entry of a menu; memory is read off a MIG slice's name, others have none of their own."""
    memory = piece.profile.partition(".")[2].partition("gb")[0]
    return MigProfile(str(piece), size_of(piece), size_of(piece), int(memory) * GIB if memory.isdigit() else 0)


def misfits(menu: MigMenu, memory_bytes: Mapping[str, int]) -> tuple[Edge, ...]:
    """The variants that are known not to fit a slice's memory, as edges to leave out.

    Args:
        menu: Profiles; one without memory holds anything.
        memory_bytes: What one replica of each variant takes; 0 while unknown.
    """
    return tuple(
        (variant, profile.name)
        for variant, needed in memory_bytes.items()
        for profile in menu.profiles
        if 0 < profile.memory_bytes < needed
    )


@dataclass(frozen=True, slots=True, eq=False)
class TrialSpace:
    """Layouts and their rows in the graph.

    Attributes:
        graph: The configurations of one device.
        layouts: The layout of each row, on all devices alike.
    """

    graph: GraphSpace
    layouts: tuple[Layout, ...]

    @classmethod
    def of(cls, menu: MigMenu, variants: Sequence[str], disabled: Collection[Edge], devices: int) -> TrialSpace:
        """Every configuration.

        Args:
            menu: How a device is cut.
            variants: Least accurate first.
            disabled: Edges that do not exist.
            devices: How many there are, all cut and filled alike.

        Raises:
            InfeasibleError: However a device is cut, some slice stays empty.
        """
        graph = one_gpu(menu, variants, disabled)
        rows = (graph.instances(row) for row in graph.graphs.tolist())
        return cls(graph, tuple(_layout(edges, devices) for edges in rows))

    def without(self, layouts: Collection[Layout]) -> TrialSpace:
        """The same with some of its layouts left out; at least one must stay."""
        keep = [row for row, layout in enumerate(self.layouts) if layout not in layouts]
        graph = GraphSpace(self.graph.variants, self.graph.profiles, self.graph.graphs[keep])
        return TrialSpace(graph, tuple(self.layouts[row] for row in keep))

    def rows(self) -> dict[Layout, int]:
        """The row of each layout."""
        return {layout: row for row, layout in enumerate(self.layouts)}


def _layout(edges: Sequence[Edge], devices: int) -> Layout:
    return Layout(Instance(variant, Slice.parse(profile)) for variant, profile in edges for _ in range(devices))
