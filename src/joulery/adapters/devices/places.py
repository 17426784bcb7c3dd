"""Which part of which GPU a replica runs on, and having GPUs cut and shared so that there are enough parts.

Large instances are placed first, on the first GPU that has one already or can be cut so; MPS shares go to the first GPU
with room. What is cut already stays cut while it suffices: cutting costs seconds and empties instances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from joulery.adapters.devices.nvidia_mig import NvidiaMig, cuda_environment
from joulery.adapters.devices.nvidia_mps import NvidiaMps
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.gpu.device import DeviceSlice, DeviceSpec, MigSetting, MpsSetting
from joulery.domain.serving.service import Slice, SliceKind

Wanted = Sequence[tuple[Slice, str]]
Turn = Callable[["NvidiaMig | NvidiaMps", DeviceSpec, MigSetting | MpsSetting, str], object]
"""Sets a device; a running controller sets it under a lease."""
_FULL = 1.0 + 1e-9
"""Shares of one GPU, rounding allowed for."""


@dataclass(slots=True)
class GpuPlaces:
    """The GPUs of this machine that replicas may run on. Implements :class:`joulery.domain.ports.Places`.

    Attributes:
        turn: Sets a device.
        cut: GPUs that may be cut, by name.
        shared: GPUs that processes may share, by name.
        whole: UUIDs of GPUs that are used whole, by name.
        specs: How the watchdog opens a device to reset it, by name.
        alone: Ids of the parts that take one process at a time (exclusive-process mode).
    """

    turn: Turn
    cut: Mapping[str, NvidiaMig] = field(default_factory=dict)
    shared: Mapping[str, NvidiaMps] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    specs: Mapping[str, DeviceSpec] = field(default_factory=dict)
    alone: frozenset[str] = frozenset()

    def only(self, names: Collection[str]) -> GpuPlaces:
        """Some of these GPUs alone."""
        return replace(
            self,
            cut={name: device for name, device in self.cut.items() if name in names},
            shared={name: device for name, device in self.shared.items() if name in names},
            whole={name: uuid for name, uuid in self.whole.items() if name in names},
        )

    def vacate(self, wanted: Wanted, /) -> frozenset[str]:
        """Ids of the instances that another cut would destroy.

        Raises:
            CapabilityError, ConfigError: No cut of these GPUs has all that is wanted.
        """
        found: set[str] = set()
        for name, setting in self._cuts(wanted).items():
            device = self.cut[name]
            gone = {(place.profile, place.start) for place in device.price(setting).destroyed}
            found |= {part.id for part in device.observe().slices if (part.slice.profile, part.start) in gone}
        return frozenset(found)

    def settle(self, wanted: Wanted, /) -> str:
        """Cut the GPUs, and start the daemons of those that are shared.

        Raises:
            JouleryError: It cannot be; each GPU is as it was, those before it in the order of names are set.
        """
        said = []
        for name, cut in self._cuts(wanted).items():
            said.append(str(self.turn(self.cut[name], self.specs[name], cut, "replicas run on its instances")))
        for name in sorted(self._shares([(piece, device) for piece, device in wanted if piece.kind is SliceKind.MPS])):
            device = self.shared[name]
            if not device.observe().setting.running:
                share = MpsSetting(True)
                said.append(str(self.turn(device, self.specs[name], share, "replicas share it")))
        return "; ".join(said)

    def assign(self, wanted: Wanted, taken: Sequence[DeviceSlice], /) -> tuple[DeviceSlice, ...]:
        """A part for each, in the order of ``wanted``."""
        held = list(taken)
        given: list[DeviceSlice | None] = [None] * len(wanted)
        for index in sorted(range(len(wanted)), key=lambda i: (not wanted[i][1], -wanted[i][0].share_ratio, i)):
            piece, device = wanted[index]
            part = {SliceKind.MIG: self._instance, SliceKind.MPS: self._share}.get(piece.kind, self._board)(
                piece, device, held
            )
            held.append(part)
            given[index] = part
        return tuple(part for part in given if part is not None)

    def _instance(self, piece: Slice, device: str, held: Sequence[DeviceSlice]) -> DeviceSlice:
        used = {part.id for part in held}
        for name, cut in self.cut.items():
            if device in ("", name):
                for part in cut.observe().slices:
                    if part.slice == piece and part.id not in used:
                        return part
        raise self._none(piece, device)

    def _share(self, piece: Slice, device: str, held: Sequence[DeviceSlice]) -> DeviceSlice:
        for name, shared in self.shared.items():
            given = sum(part.slice.share_ratio for part in held if part.id == name)
            if device in ("", name) and given + piece.share_ratio <= _FULL:
                return DeviceSlice(piece, name, shared.environment(piece.share_ratio), share_ratio=piece.share_ratio)
        raise self._none(piece, device)

    def _board(self, piece: Slice, device: str, held: Sequence[DeviceSlice]) -> DeviceSlice:
        used = {part.id for part in held}
        for name, uuid in self.whole.items():
            if device in ("", name) and uuid not in used:
                return DeviceSlice(piece, uuid, cuda_environment(uuid))
        raise self._none(piece, device)

    def _cuts(self, wanted: Wanted) -> dict[str, MigSetting]:
        """The cut of each GPU that has to change."""
        lists: dict[str, list[str]] = {name: [] for name in self.cut}
        present = {name: Counter(device.observe().setting.profiles) for name, device in self.cut.items()}
        pieces = [(piece, device) for piece, device in wanted if piece.kind is SliceKind.MIG]
        for piece, device in sorted(pieces, key=lambda pair: (not pair[1], -_size(pair[0].profile))):
            names = [name for name in self.cut if device in ("", name)]
            ready = [name for name in names if present[name][piece.profile] > lists[name].count(piece.profile)]
            fits = [name for name in names if self._fits(name, [*lists[name], piece.profile])]
            chosen = next(iter([name for name in ready if name in fits] or fits), None)
            if chosen is None:
                raise self._none(piece, device)
            lists[chosen].append(piece.profile)
        return {name: MigSetting(tuple(cut)) for name, cut in lists.items() if Counter(cut) - present[name]}

    def _fits(self, name: str, profiles: Sequence[str]) -> bool:
        try:
            self.cut[name].price(MigSetting(tuple(profiles)))
        except ConfigError:
            return False
        return True

    def _shares(self, wanted: Wanted) -> set[str]:
        """The GPUs that are shared."""
        held: list[DeviceSlice] = []
        for piece, device in sorted(wanted, key=lambda pair: (not pair[1], -pair[0].share_ratio)):
            held.append(self._share(piece, device, held))
        return {part.id for part in held}

    def _none(self, piece: Slice, device: str) -> CapabilityError:
        kind = {SliceKind.MIG: "mig", SliceKind.MPS: "mps"}.get(piece.kind, "whole")
        return CapabilityError(
            f"no GPU here has room for {piece}" + (f" on {device}" if device else ""),
            resource=device or "GPUs",
            hint=f"name this machine's GPUs under fleet.devices, with mode: {kind}",
        )


def _size(profile: str) -> int:
    """Compute slices of a profile, read off its name."""
    head = profile.partition("g.")[0]
    return int(head) if head.isdigit() else 0
