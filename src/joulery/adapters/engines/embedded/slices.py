"""Which cores a replica is bound to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from joulery.domain.errors import CapabilityError
from joulery.domain.serving.engine import ReplicaSpec
from joulery.domain.serving.service import Slice, SliceKind


def limited(slice_: Slice) -> bool:
    """True where a replica gets a quota of its cores' time."""
    return slice_.kind is SliceKind.CPU and slice_.share_ratio < 1


def on_gpu(spec: ReplicaSpec) -> bool:
    """True where a replica runs on a GPU or a part of one."""
    return spec.slice.kind is not SliceKind.CPU


def assign_cores(
    wanted: Sequence[Slice],
    cores: Sequence[int],
    taken: Iterable[tuple[tuple[int, ...], float]] = (),
    pinned: Sequence[tuple[int, ...]] = (),
) -> list[tuple[int, ...]]:
    """The cores of each slice: always the least loaded ones, lowest number first; large slices choose first.

    Slices share cores only where there are not enough of them.

    Args:
        wanted: CPU slices.
        cores: The cores that may be used.
        taken: Cores that others are bound to, with their share of each.
        pinned: For each slice the cores it must have; empty for any.

    Returns:
        Sorted cores, one tuple a slice, in the order of ``wanted``.

    Raises:
        CapabilityError: A slice is no CPU slice, needs more cores than there are, or one that may not be used.
    """
    load = dict.fromkeys(cores, 0.0)
    for bound, share_ratio in taken:
        for core in bound:
            if core in load:
                load[core] += share_ratio
    given: list[tuple[int, ...]] = [()] * len(wanted)
    fixed = list(pinned) or [()] * len(wanted)
    for index in sorted(range(len(wanted)), key=lambda i: (not fixed[i], -wanted[i].cores, -wanted[i].share_ratio, i)):
        slice_ = wanted[index]
        if slice_.kind is not SliceKind.CPU:
            raise CapabilityError(f"this machine's engine has no {slice_} slice", hint="use CPU slices: cpu:1")
        if slice_.cores > len(load):
            raise CapabilityError(
                f"a slice of {slice_.cores} cores does not fit: {len(load)} may be used here",
                hint=f"use at most {len(load)} cores a slice",
            )
        if outside := set(fixed[index]) - load.keys():
            raise CapabilityError(
                f"a slice is to be bound to core {min(outside)}, which may not be used here",
                hint=f"cores that may be used: {', '.join(map(str, cores))}",
            )
        chosen = fixed[index] or sorted(load, key=lambda core: (load[core], core))[: slice_.cores]
        for core in chosen:
            load[core] += slice_.share_ratio
        given[index] = tuple(sorted(chosen))
    return given
