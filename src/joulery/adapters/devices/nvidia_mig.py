"""MIG partitioning of one NVIDIA GPU: A30, A100, H100, H200 and their kin.

A change keeps every instance that can stay in its place, and is refused while an instance that it would destroy is in
use. It ends in the old partition or the new one: if a step fails, the old partition is restored, slice by slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from joulery.adapters.devices.change import Surface, change
from joulery.adapters.devices.mig_smi import GRANT as SMI_GRANT
from joulery.adapters.devices.mig_smi import SmiDenied, SmiMig, SmiRefused, smi_command
from joulery.adapters.devices.mig_surface import Blocked, GpuInstance, MigDevice, MigState, MigSurface, NvmlMig
from joulery.adapters.devices.nvidia_board import HINT, NvidiaBoard, open_board
from joulery.adapters.privileges import may_administer
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError, DataError, JouleryError
from joulery.domain.gpu.device import DEVICE, DeviceCapability, DeviceChange, DeviceSlice, DeviceState, Knob, MigSetting
from joulery.domain.gpu.mig import MigPlace, MigProfile, MigTransition, find_places, menu_for
from joulery.domain.serving.service import Slice, SliceKind

ASSUMED_STEP_S = 0.5
"""Time to create or destroy one instance until it was measured on this device; assumed."""
ASSUMED_MODE_S = 5.0
"""The same for MIG mode itself."""


class NvidiaMig:
    """The MIG partition of one board. Implements :class:`joulery.domain.ports.Device`.

    Args:
        gpu: Its index or UUID.
        nvml: The module ``pynvml``, or one that behaves like it.
        surface: Interface that partitions the board; by default NVML, or ``sudo nvidia-smi`` if only that is granted.

    Raises:
        CapabilityError: No driver, or a GPU that cannot be partitioned.
        ConfigError: No such board.
    """

    def __init__(self, gpu: int | str = 0, nvml: Any = None, surface: MigSurface | None = None) -> None:
        self._board: NvidiaBoard = open_board(gpu, nvml)
        self.device = self._board.device
        self._surface = surface or _surface(self._board)
        self._steps: list[float] = []
        try:
            self._surface.mode()
            profiles = NvmlMig(self._board).profiles(places=False)
            self._sizes = {profile.name: profile.compute_slices for profile in profiles}
        except self._failures as error:
            self._board.close()
            raise self._refused(error) or self._board.trouble(error) from error

    def capability(self) -> DeviceCapability:
        """The profiles of the board, and whether this process may partition it."""
        through = isinstance(self._surface, SmiMig)
        may = may_administer() or through
        try:
            enabled, pending = self._surface.mode()
        except self._failures as error:
            raise self._board.trouble(error) from error
        mode = "on" if enabled else ("off, on after a reset" if pending else "off")
        return DeviceCapability(
            device=self.device,
            name=self._board.name,
            knob=Knob.MIG,
            settable=may,
            detail=f"MIG mode {mode}" + _how(may=may, through=through),
            grant="" if may else SMI_GRANT,
            profiles=tuple(self._sizes),
            uuid=self._board.uuid,
        )

    def observe(self) -> DeviceState[MigSetting]:
        """The instances, with the environment variables that a program needs to run on each.

        Without permission to list GPU instances (only root has it), the devices are returned without their places.
        """
        try:
            devices = self._surface.devices()
            state = self._state()
            places = dict(self._surface.instances()) if state.enabled else {}
        except self._failures as error:
            if self._refused(error) is None:
                raise self._board.trouble(error) from error
            return self._seen_without_permission()
        slices = tuple(
            self._slice(device, places[device.instance_id].place.start)
            for device in devices
            if device.instance_id in places
        )
        return DeviceState(
            _setting(state), _state_document(state), slices=tuple(sorted(slices, key=lambda part: part.start))
        )

    def price(self, wanted: MigSetting) -> MigTransition:
        """The steps and time of a change to another partition, and the processes that block it.

        Raises:
            ConfigError, CapabilityError: As :meth:`apply`.
        """
        try:
            old = self._state()
            return self._transition(old, self._target(old, wanted))
        except self._failures as error:
            raise self._refused(error) or self._board.trouble(error) from error

    def apply(self, wanted: MigSetting, /) -> DeviceChange[MigSetting]:
        """Partition the board; an empty setting switches MIG mode off."""
        try:
            old = self._state()
            new = self._target(old, wanted)
        except self._failures as error:
            raise self._refused(error) or self._board.trouble(error) from error
        return self._change(old, new, str(wanted))

    def reset(self, memento: Mapping[str, Any] | None = None, /) -> DeviceChange[MigSetting]:
        """Restore a MIG partition, slice by slice; switch MIG mode off when None."""
        try:
            old = self._state()
        except self._failures as error:
            raise self._refused(error) or self._board.trouble(error) from error
        return self._change(old, MigState(False, False) if memento is None else _remembered(memento), "what it was")

    def close(self) -> None:
        """Shut down the connection to the driver; the partition remains."""
        self._board.close()

    def _change(self, old: MigState, new: MigState, asked: str) -> DeviceChange[MigSetting]:
        before = _setting(old)
        if old == new:
            return DeviceChange(before, before, 0.0, "it had this partition already")
        price = self._guarded_transition(old, new)
        if price.busy_pids:
            raise ActuationError(
                f"{self.device} is busy: process {', '.join(map(str, price.busy_pids))} would lose its instance; "
                "nothing was changed",
                hint="end or move what runs there first",
            )
        surface = Surface(
            f"the MIG partition of {self.device}", self._converge, self._state, self._failures, self._refused
        )
        took_s = change(surface, old, new, asked)
        steps = len(price.destroyed) + len(price.created)
        if steps and not price.mode_change:
            self._steps.append(took_s / steps)
        detail = f"{len(price.kept)} instances kept, {len(price.destroyed)} destroyed, {len(price.created)} created"
        return DeviceChange(before, _setting(new), took_s, detail)

    def _converge(self, wanted: MigState) -> None:
        """Create a partition, from any current one."""
        surface = self._surface
        enabled, pending = surface.mode()
        if wanted.enabled and not enabled:
            surface.set_mode(True)
        if wanted.enabled or enabled:
            present = surface.instances()
            for number, instance in present:
                if instance not in wanted.instances:
                    surface.destroy(number)
            there = {instance for _, instance in present}
            for instance in wanted.instances:
                if instance not in there:
                    surface.create(instance)
        if not wanted.enabled and (enabled or pending != wanted.pending):
            surface.set_mode(wanted.pending)

    def _state(self) -> MigState:
        enabled, pending = self._surface.mode()
        return MigState(enabled, pending, tuple(item for _, item in self._surface.instances()) if enabled else ())

    def _target(self, old: MigState, wanted: MigSetting) -> MigState:
        if not wanted.profiles:
            return MigState(False, False)
        profiles = self._placed_profiles(old, wanted)
        known = {profile.name: profile for profile in profiles}
        strange = sorted(set(wanted.profiles) - known.keys())
        if strange:
            raise ConfigError(
                f"{self.device} ({self._board.name}) has no MIG profile {strange[0]!r}",
                got=" + ".join(wanted.profiles),
                expected=", ".join(known),
            )
        most = max(profile.compute_slices for profile in profiles)
        whole = [item for item in old.instances if item.compute == (known[item.place.profile].compute_slices,)]
        used = self._used(old)
        places = find_places(
            wanted.profiles,
            profiles,
            most,
            keep=[item.place for item in whole],
            used=[item.place for item in whole if item in used],
        )
        if places is None:
            raise ConfigError(
                f"{self.device} ({self._board.name}) cannot be partitioned into {' + '.join(wanted.profiles)}",
                got=f"{sum(known[name].compute_slices for name in wanted.profiles)} compute slices",
                expected=f"instances that fit side by side into {most}",
            )
        instances = (GpuInstance(place, (known[place.profile].compute_slices,)) for place in places)
        return MigState(True, True, tuple(sorted(instances)))

    def _used(self, old: MigState) -> dict[GpuInstance, tuple[int, ...]]:
        """The instances that processes run on, and the ids of these processes."""
        if not old.enabled:
            return {}
        pids: dict[int, tuple[int, ...]] = {}
        for device in self._surface.devices():
            pids[device.instance_id] = (*pids.get(device.instance_id, ()), *device.pids)
        return {item: pids[number] for number, item in self._surface.instances() if pids.get(number)}

    def _placed_profiles(self, old: MigState, wanted: MigSetting) -> Sequence[MigProfile]:
        """The profiles with their places: from the driver in MIG mode, otherwise from the catalogue."""
        if old.enabled:
            return self._surface.profiles()
        menu = menu_for(self._board.name)
        listed = {profile.name for profile in menu.profiles} if menu else set()
        offered = set(self._sizes)
        if menu is None or set(wanted.profiles) & (offered - listed):
            raise CapabilityError(
                f"the placements of {wanted} on {self._board.name} can be read only in MIG mode",
                resource=self.device,
                grant=f"sudo nvidia-smi -i {self.device.partition(':')[2]} -mig 1",
            )
        return menu.profiles

    def _guarded_transition(self, old: MigState, new: MigState) -> MigTransition:
        try:
            return self._transition(old, new)
        except self._failures as error:
            raise self._refused(error) or self._board.trouble(error) from error

    def _transition(self, old: MigState, new: MigState) -> MigTransition:
        """The changes by instance, and the processes that they would affect."""
        gone = tuple(item for item in old.instances if item not in new.instances)
        fresh = tuple(item for item in new.instances if item not in old.instances)
        mode_change = old.enabled != new.enabled
        pids = {pid for item, users in self._used(old).items() if item in gone for pid in users}
        if mode_change:
            nvml = self._board.nvml
            pids |= {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(self._board.handle)}
        step_s = sum(self._steps) / len(self._steps) if self._steps else ASSUMED_STEP_S
        return MigTransition(
            kept=tuple(item.place for item in old.instances if item in new.instances),
            destroyed=tuple(item.place for item in gone),
            created=tuple(item.place for item in fresh),
            mode_change=mode_change,
            busy_pids=tuple(sorted(pids)),
            seconds=step_s * (len(gone) + len(fresh)) + ASSUMED_MODE_S * mode_change,
            measured=bool(self._steps) and not mode_change,
        )

    def _seen_without_permission(self) -> DeviceState[MigSetting]:
        devices = self._surface.devices()
        slices = tuple(self._slice(device, 0) for device in devices)
        return DeviceState(MigSetting(tuple(device.profile for device in devices)), slices=slices)

    def _slice(self, device: MigDevice, start: int) -> DeviceSlice:
        """A MIG device as a slice that programs can run on, with its share of the board's compute slices."""
        piece = Slice(SliceKind.MIG, profile=device.profile)
        share = self._sizes.get(device.profile, 1) / max(self._sizes.values(), default=1)
        return DeviceSlice(piece, device.uuid, cuda_environment(device.uuid), start, device.pids, share)

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return (*self._board.failures, Blocked, SmiRefused)

    def _refused(self, error: Exception) -> JouleryError | None:
        if isinstance(error, SmiDenied):
            return CapabilityError(
                f"this process may not partition {self.device} ({self._board.name}): {error}",
                resource=self.device,
                grant=SMI_GRANT,
            )
        return self._board.refused(error)


def _surface(board: NvidiaBoard) -> MigSurface:
    """The interface that partitions a board: ``nvidia-smi`` where this process may only run that as root, else NVML."""
    command = None if may_administer() else smi_command()
    return NvmlMig(board) if command is None else SmiMig(board, command)


def _how(*, may: bool, through: bool) -> str:
    if through:
        return ", cut through sudo nvidia-smi"
    return "" if may else f"; cutting needs CAP_SYS_ADMIN, or permission to run nvidia-smi as root; {HINT}"


def cuda_environment(uuid: str) -> tuple[tuple[str, str], ...]:
    """Environment variables with which a process runs on a GPU or a MIG instance, and sees no other."""
    return (("CUDA_VISIBLE_DEVICES", uuid), (DEVICE, "cuda"))


def _setting(state: MigState) -> MigSetting:
    return MigSetting(tuple(item.place.profile for item in state.instances))


def _state_document(state: MigState) -> dict[str, Any]:
    instances = [[i.place.profile, i.place.start, i.place.size, list(i.compute)] for i in state.instances]
    return {"enabled": state.enabled, "pending": state.pending, "instances": instances}


def _remembered(memento: Mapping[str, Any]) -> MigState:
    try:
        instances = tuple(
            sorted(
                GpuInstance(MigPlace(str(name), int(start), int(size)), tuple(int(part) for part in compute))
                for name, start, size, compute in memento["instances"]
            )
        )
        return MigState(bool(memento["enabled"]), bool(memento["pending"]), instances)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a partition of a GPU: {memento!r}") from error
