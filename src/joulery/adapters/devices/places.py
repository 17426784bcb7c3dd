"""Placement of replicas on slices of GPUs; GPUs are partitioned and shared so that there are enough slices.

Large instances are placed first, on the first GPU that has one already or can be partitioned for it; MPS shares are
placed on the first GPU with room. An existing partition stays while it suffices: partitioning takes seconds and empties
instances. Processes that belong together share one MIG instance, with its own MPS daemon where there are several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from joulery.adapters.devices.nvidia_mig import NvidiaMig, cuda_environment
from joulery.adapters.devices.nvidia_mps import NvidiaMps
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.gpu.device import DeviceSlice, DeviceSpec, MigSetting, MpsSetting, WantedPart
from joulery.domain.serving.service import Slice, SliceKind

Wanted = Sequence[WantedPart]
Turn = Callable[["NvidiaMig | NvidiaMps", DeviceSpec, MigSetting | MpsSetting, str], object]
"""Sets a device; a running controller sets it under a lease."""
_FULL = 1.0 + 1e-9
"""Shares of one GPU, rounding allowed for."""


@dataclass(slots=True)
class GpuPlaces:
    """The GPUs of this machine that replicas may run on. Implements :class:`joulery.domain.ports.Places`.

    Attributes:
        turn: Sets a device.
        mig_devices: GPUs that may be partitioned, by name.
        shared: GPUs that processes may share, by name.
        whole: UUIDs of GPUs that are used whole, by name.
        specs: Specification with which the watchdog opens a device to reset it, by name.
        alone: Ids of the slices that accept one process at a time (exclusive-process mode).
        within: Opens the MPS daemon of a MIG instance: the GPU's name and the instance's UUID.
    """

    turn: Turn
    mig_devices: Mapping[str, NvidiaMig] = field(default_factory=dict)
    shared: Mapping[str, NvidiaMps] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    specs: Mapping[str, DeviceSpec] = field(default_factory=dict)
    alone: frozenset[str] = frozenset()
    within: Callable[[str, str], tuple[NvidiaMps, DeviceSpec]] | None = None
    _homes: dict[str, str] = field(default_factory=dict)
    _daemons: dict[str, tuple[NvidiaMps, DeviceSpec]] = field(default_factory=dict)

    def only(self, names: Collection[str]) -> GpuPlaces:
        """The places on only some of these GPUs."""
        return replace(
            self,
            mig_devices={name: device for name, device in self.mig_devices.items() if name in names},
            shared={name: device for name, device in self.shared.items() if name in names},
            whole={name: uuid for name, uuid in self.whole.items() if name in names},
        )

    def vacate(self, wanted: Wanted, /) -> frozenset[str]:
        """The ids of the instances that a partition for ``wanted`` would destroy.

        Raises:
            CapabilityError, ConfigError: No partition of these GPUs has all wanted slices.
        """
        found: set[str] = set()
        for name, setting in self._mig_settings(wanted).items():
            device = self.mig_devices[name]
            gone = {(place.profile, place.start) for place in device.price(setting).destroyed}
            found |= {part.id for part in device.observe().slices if (part.slice.profile, part.start) in gone}
        return frozenset(found)

    def settle(self, wanted: Wanted, /) -> str:
        """Partition the GPUs, and start the MPS daemons of those that are shared.

        Raises:
            JouleryError: A GPU could not be set and is as before; the GPUs that were set before it keep their setting.
        """
        changes = []
        for name, setting in self._mig_settings(wanted).items():
            self._end_daemons(name, setting)
            why = "replicas run on its instances"
            changes.append(str(self.turn(self.mig_devices[name], self.specs[name], setting, why)))
        for name in sorted(self._shares([one for one in wanted if one.slice.kind is SliceKind.MPS])):
            device = self.shared[name]
            if not device.observe().setting.running:
                share = MpsSetting(True)
                changes.append(str(self.turn(device, self.specs[name], share, "replicas share it")))
        changes += self._choose_instances(wanted)
        return "; ".join(changes)

    def assign(self, wanted: Wanted, taken: Sequence[DeviceSlice], /) -> tuple[DeviceSlice, ...]:
        """Assign a slice to each, in the order of ``wanted``."""
        held = list(taken)
        given: list[DeviceSlice | None] = [None] * len(wanted)
        for index in sorted(range(len(wanted)), key=lambda i: (not wanted[i].device, -wanted[i].slice.share_ratio, i)):
            piece, device, together = wanted[index]
            if together:
                part = self._home(piece, device, together)
            else:
                part = {SliceKind.MIG: self._instance, SliceKind.MPS: self._share}.get(piece.kind, self._board)(
                    piece, device, held
                )
            held.append(part)
            given[index] = part
        return tuple(part for part in given if part is not None)

    def _choose_instances(self, wanted: Wanted) -> list[str]:
        """Choose the instance of each group of processes, and start its MPS daemon where they are several.

        A group that has an instance keeps it. Others prefer an instance that no group has had, then one whose processes
        are about to end.
        """
        changes: list[str] = []
        keys = {one.together: one for one in wanted if one.together}
        parts = {name: device.observe().slices for name, device in self.mig_devices.items()} if keys else {}
        there = {part.id for mine in parts.values() for part in mine}
        before = {key: home for key, home in self._homes.items() if home in there}
        homes: dict[str, str] = {}
        for key, (piece, device, _) in keys.items():
            fitting = [part.id for part in parts.get(device, ()) if part.slice.profile == piece.profile]
            if before.get(key) in fitting:
                homes[key] = before[key]
        for key, (piece, device, _) in keys.items():
            if key in homes:
                continue
            fitting = [part.id for part in parts.get(device, ()) if part.slice.profile == piece.profile]
            free = [each for each in fitting if each not in homes.values()]
            if not free:
                raise self._none(piece, device)
            homes[key] = next((each for each in free if each not in before.values()), free[0])
        for key, (piece, device, _) in keys.items():
            if piece.share_ratio < 1:
                changes += self._start_daemon(device, homes[key])
        self._homes = {**before, **homes}
        return changes

    def _start_daemon(self, device: str, instance: str) -> list[str]:
        """Start the MPS daemon of a MIG instance where it does not run, and return what was done."""
        if self.within is None:
            raise CapabilityError(f"processes cannot share the slices of {device} here", resource=device)
        if instance not in self._daemons:
            self._daemons[instance] = self.within(device, instance)
        mps, spec = self._daemons[instance]
        if mps.observe().setting.running:
            return []
        return [str(self.turn(mps, spec, MpsSetting(True), "replicas share the slice"))]

    def _end_daemons(self, device: str, wanted: MigSetting) -> None:
        """Stop the MPS daemons of the instances that a new partition destroys: their servers would keep them busy."""
        gone = {(place.profile, place.start) for place in self.mig_devices[device].price(wanted).destroyed}
        for part in self.mig_devices[device].observe().slices if gone and self._daemons else ():
            if (part.slice.profile, part.start) in gone and part.id in self._daemons:
                mps, spec = self._daemons.pop(part.id)
                self.turn(mps, spec, MpsSetting(), "its slice is removed")

    def _home(self, piece: Slice, device: str, together: str) -> DeviceSlice:
        """The instance of a group of processes, with one process's share of it."""
        for part in self.mig_devices[device].observe().slices if device in self.mig_devices else ():
            if part.id == self._homes.get(together) and part.slice.profile == piece.profile:
                several = piece.share_ratio < 1
                environ = self._daemons[part.id][0].environment(1.0) if several else part.environ
                return replace(part, slice=piece, environ=environ, share_ratio=part.share_ratio * piece.share_ratio)
        raise self._none(piece, device)

    def _instance(self, piece: Slice, device: str, held: Sequence[DeviceSlice]) -> DeviceSlice:
        used = {part.id for part in held}
        for name, mig in self.mig_devices.items():
            if device in ("", name):
                for part in mig.observe().slices:
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

    def _mig_settings(self, wanted: Wanted) -> dict[str, MigSetting]:
        """The new partition of each GPU that has to change."""
        lists: dict[str, list[str]] = {name: [] for name in self.mig_devices}
        present = {name: Counter(device.observe().setting.profiles) for name, device in self.mig_devices.items()}
        # Processes that go together take one instance.
        alone = [one for one in wanted if not one.together]
        pieces = [one for one in (*alone, *_first_of_each(wanted)) if one.slice.kind is SliceKind.MIG]
        for piece, device, _ in sorted(pieces, key=lambda one: (not one.device, -_size(one.slice.profile))):
            names = [name for name in self.mig_devices if device in ("", name)]
            ready = [name for name in names if present[name][piece.profile] > lists[name].count(piece.profile)]
            fits = [name for name in names if self._fits(name, [*lists[name], piece.profile])]
            chosen = next(iter([name for name in ready if name in fits] or fits), None)
            if chosen is None:
                raise self._none(piece, device)
            lists[chosen].append(piece.profile)
        return {
            name: MigSetting(tuple(profiles)) for name, profiles in lists.items() if Counter(profiles) - present[name]
        }

    def _fits(self, name: str, profiles: Sequence[str]) -> bool:
        try:
            self.mig_devices[name].price(MigSetting(tuple(profiles)))
        except ConfigError:
            return False
        return True

    def _shares(self, wanted: Wanted) -> set[str]:
        """The names of the GPUs that the wanted MPS shares are placed on."""
        held: list[DeviceSlice] = []
        for piece, device, _ in sorted(wanted, key=lambda one: (not one.device, -one.slice.share_ratio)):
            held.append(self._share(piece, device, held))
        return {part.id for part in held}

    def _none(self, piece: Slice, device: str) -> CapabilityError:
        kind = {SliceKind.MIG: "mig", SliceKind.MPS: "mps"}.get(piece.kind, "whole")
        return CapabilityError(
            f"no GPU here has room for {piece}" + (f" on {device}" if device else ""),
            resource=device or "GPUs",
            hint=f"name this machine's GPUs under fleet.devices, with mode: {kind}",
        )


def _first_of_each(wanted: Wanted) -> list[WantedPart]:
    """One wanted part for each group of processes that belong together."""
    return list({one.together: one for one in reversed(wanted) if one.together}.values())


def _size(profile: str) -> int:
    """The number of compute slices of a profile, from its name; 0 where the name has none."""
    head = profile.partition("g.")[0]
    return int(head) if head.isdigit() else 0
