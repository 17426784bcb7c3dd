"""Which cores a replica is bound to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from joulery.domain.errors import CapabilityError
from joulery.domain.serving import Slice, SliceKind


def assign_cores(
    wanted: Sequence[Slice], cores: Sequence[int], taken: Iterable[tuple[tuple[int, ...], float]] = ()
) -> list[tuple[int, ...]]:
    """The cores of each slice: always the least loaded ones, lowest number first; large slices choose first.

    Slices share cores only where there are not enough of them.

    Args:
        wanted: CPU slices.
        cores: The cores that may be used.
        taken: Cores that others are bound to, with their share of each.

    Returns:
        Sorted cores, one tuple a slice, in the order of ``wanted``.

    Raises:
        CapabilityError: A slice is no CPU slice, or needs more cores than there are.
    """
    load = dict.fromkeys(cores, 0.0)
    for bound, share_ratio in taken:
        for core in bound:
            if core in load:
                load[core] += share_ratio
    given: list[tuple[int, ...]] = [()] * len(wanted)
    for index in sorted(range(len(wanted)), key=lambda i: (-wanted[i].cores, -wanted[i].share_ratio, i)):
        slice_ = wanted[index]
        if slice_.kind is not SliceKind.CPU:
            raise CapabilityError(f"this machine's engine has no {slice_} slice", hint="use CPU slices: cpu:1")
        if slice_.cores > len(load):
            raise CapabilityError(
                f"a slice of {slice_.cores} cores does not fit: {len(load)} may be used here",
                hint=f"use at most {len(load)} cores a slice",
            )
        chosen = sorted(load, key=lambda core: (load[core], core))[: slice_.cores]
        for core in chosen:
            load[core] += slice_.share_ratio
        given[index] = tuple(sorted(chosen))
    return given
