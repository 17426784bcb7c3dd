"""The parts of GPUs that replicas of the embedded engine run on; on a machine without, refused in one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from joulery.adapters.engines.embedded.slices import on_gpu
from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.device import DeviceSlice
from joulery.domain.ports import Places
from joulery.domain.serving.engine import ReplicaSpec
from joulery.domain.serving.service import Slice


@dataclass(frozen=True, slots=True)
class GpuParts:
    """Asks for parts of GPUs as replicas need them.

    Attributes:
        places: Hands them out; None where there are none.
    """

    places: Places | None

    async def to_vacate(self, target: Sequence[ReplicaSpec]) -> frozenset[str]:
        """Ids of the parts that must be empty before :meth:`settle`.

        Raises:
            CapabilityError, ConfigError: The target cannot be had here at all.
        """
        wanted = _wanted(target)
        if self.places is None or not wanted:
            return frozenset()
        return await asyncio.to_thread(self.places.vacate, wanted)

    async def settle(self, target: Sequence[ReplicaSpec]) -> None:
        """Have the GPUs cut and shared for the target.

        Raises:
            CapabilityError: There are no GPUs to run on here.
            JouleryError: It cannot be; every GPU is as it was.
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
        """A part for each replica that runs on one, beside those that are held.

        One that stands by takes no room: it works only when another has gone.

        Raises:
            CapabilityError: There are not enough.
        """
        if self.places is None:
            return
        active = [spec for spec in missing if on_gpu(spec) and not spec.standby]
        yield from zip(active, self.places.assign(_wanted(active), held), strict=True)
        for spec in missing:
            if on_gpu(spec) and spec.standby:
                (place,) = self.places.assign([(spec.slice, spec.device)], ())
                yield spec, place


def _wanted(specs: Sequence[ReplicaSpec]) -> list[tuple[Slice, str]]:
    return [(spec.slice, spec.device) for spec in specs if on_gpu(spec) and not spec.standby]
