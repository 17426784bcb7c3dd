"""The layouts there are to choose from: ways to cut a machine's cores, times what runs on each piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, groupby, product

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.serving.service import Slice, SliceKind

MOST_LAYOUTS = 5000
"""Beyond this an exhaustive search is the wrong tool."""


def core_partitions(cores: int) -> tuple[tuple[int, ...], ...]:
    """Every way to cut ``cores`` into slices of 1, 2, 4, 8 ... cores that leaves none over; fewest slices first.

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


def layouts(partitions: Sequence[Sequence[Slice]], variants: Sequence[str]) -> tuple[Layout, ...]:
    """Every assignment of a variant to each slice of each partition, equal ones once.

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


def cpu_slices(partition: Sequence[int]) -> tuple[Slice, ...]:
    """CPU slices of so many cores each."""
    return tuple(Slice(SliceKind.CPU, cores=cores) for cores in partition)
