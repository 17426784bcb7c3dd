"""Assignment of CPU cores and GPU slices to replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.device import DeviceSlice, WantedPart
from joulery.domain.ports import Places
from joulery.domain.serving.engine import ReplicaSpec
from joulery.domain.serving.service import Slice, SliceKind


def limited(slice_: Slice) -> bool:
    """True where a replica gets a quota of its cores' time."""
    return slice_.kind is SliceKind.CPU and slice_.share_ratio < 1


def on_gpu(spec: ReplicaSpec) -> bool:
    """True where a replica runs on a GPU or a slice of one."""
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
        CapabilityError: A slice is not a CPU slice, needs more cores than there are, or a core that may not be used.
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


@dataclass(frozen=True, slots=True)
class GpuParts:
    """GPU slices for replicas, partitioned as they need them.

    Attributes:
        places: Partitions GPUs and assigns slices; None where there are no GPUs.
    """

    places: Places | None

    def alone(self, missing: Sequence[ReplicaSpec]) -> frozenset[str]:
        """Ids of the slices whose process must end before one of these replicas starts."""
        return self.places.alone if self.places is not None and _wanted(missing) else frozenset()

    async def slices_to_empty(self, target: Sequence[ReplicaSpec]) -> frozenset[str]:
        """Ids of the slices that must be empty before :meth:`settle`.

        Raises:
            CapabilityError, ConfigError: This machine can never run the target.
        """
        wanted = _wanted(target)
        if self.places is None or not wanted:
            return frozenset()
        return await asyncio.to_thread(self.places.vacate, wanted)

    async def settle(self, target: Sequence[ReplicaSpec]) -> None:
        """Partition and share the GPUs for the target.

        Raises:
            CapabilityError: There are no GPUs to run on here.
            JouleryError: The change failed; every GPU is as it was before.
        """
        wanted = _wanted(target)
        if not wanted:
            return
        if self.places is None:
            raise CapabilityError(
                f"this machine's engine has no {wanted[0][0]} slice",
                hint="use CPU slices (cpu:1), or name this machine's GPUs under fleet.devices",
            )
        await asyncio.to_thread(self.places.settle, wanted)

    def assign(
        self, missing: Sequence[ReplicaSpec], held: Sequence[DeviceSlice]
    ) -> Iterator[tuple[ReplicaSpec, DeviceSlice]]:
        """Assign a GPU slice to each replica that runs on one, beside the slices that are held.

        A standby takes no capacity: it runs requests only after another replica has ended.

        Raises:
            CapabilityError: There are not enough slices.
        """
        if self.places is None:
            return
        active = [spec for spec in missing if on_gpu(spec) and not spec.standby]
        yield from zip(active, self.places.assign(_wanted(active), held), strict=True)
        for spec in missing:
            if on_gpu(spec) and spec.standby:
                (place,) = self.places.assign(_wanted([replace(spec, standby=False)]), ())
                yield spec, place


def _wanted(specs: Sequence[ReplicaSpec]) -> list[WantedPart]:
    return [WantedPart(spec.slice, spec.device, spec.together) for spec in specs if on_gpu(spec) and not spec.standby]
