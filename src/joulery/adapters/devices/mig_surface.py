"""Interface that reads and changes a GPU's MIG partition, and its implementation with NVML.

A GPU is divided into GPU instances, and these into compute instances; joulery gives each GPU instance one compute
instance of its full size. NVML 11.1 and later; creating, destroying and listing instances needs root.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from joulery.adapters.devices.nvidia_board import NvidiaBoard
from joulery.adapters.nvidia import text
from joulery.domain.gpu.mig import MigPlace, MigProfile

_MB = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class GpuInstance:
    """One GPU instance.

    Attributes:
        place: Its profile and its position on the GPU.
        compute: Slices of its compute instances, ascending.
    """

    place: MigPlace
    compute: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MigState:
    """MIG partition of a GPU.

    Attributes:
        enabled: Whether MIG mode is on.
        pending: Whether MIG mode will be on after a reset.
        instances: Its GPU instances, by place.
    """

    enabled: bool
    pending: bool
    instances: tuple[GpuInstance, ...] = ()

    def __str__(self) -> str:
        if not self.enabled:
            return "not partitioned" + (", MIG mode pending" if self.pending else "")
        return " + ".join(str(item.place) for item in self.instances) or "MIG mode, no instances"


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A MIG device: an instance as CUDA programs address it.

    Attributes:
        uuid: ``MIG-…``, for ``CUDA_VISIBLE_DEVICES``.
        profile: Name of the profile of its GPU instance.
        instance_id: Id of its GPU instance.
        pids: Processes that run there.
    """

    uuid: str
    profile: str
    instance_id: int
    pids: tuple[int, ...]


class Blocked(Exception):  # noqa: N818 - a state of the GPU, raised where a call says success and means later
    """The driver deferred a change of mode: the GPU is in use, or has to be reset first."""


class MigSurface(Protocol):
    """Interface that partitions a GPU: NVML, or ``nvidia-smi mig``."""

    def mode(self) -> tuple[bool, bool]:
        """Whether MIG mode is on, and whether it will be after a reset."""
        ...

    def set_mode(self, on: bool) -> None:
        """Switch MIG mode; raises ``Blocked`` where the driver defers the change."""
        ...

    def profiles(self) -> tuple[MigProfile, ...]:
        """The profiles of the board; ``starts`` are empty while MIG mode is off."""
        ...

    def instances(self) -> tuple[tuple[int, GpuInstance], ...]:
        """Every GPU instance with its id."""
        ...

    def create(self, instance: GpuInstance) -> None:
        """Create a GPU instance, with its compute instances."""
        ...

    def destroy(self, instance_id: int) -> None:
        """Give one back, its compute instances first."""
        ...

    def devices(self) -> tuple[MigDevice, ...]:
        """The instances as programs see them."""
        ...


@dataclass(slots=True)
class NvmlMig:
    """MIG through NVML.

    Attributes:
        board: The board.
    """

    board: NvidiaBoard
    _ids: dict[str, tuple[int, int]] = field(default_factory=dict)

    def mode(self) -> tuple[bool, bool]:
        """Whether MIG mode is on, and whether it will be after a reset."""
        current, pending = self.board.nvml.nvmlDeviceGetMigMode(self.board.handle)
        return bool(current), bool(pending)

    def set_mode(self, on: bool) -> None:
        """Switch MIG mode.

        Raises:
            Blocked: The mode changes only after a reset.
        """
        nvml = self.board.nvml
        status = nvml.nvmlDeviceSetMigMode(self.board.handle, int(on))
        if status != nvml.NVML_SUCCESS:
            raise Blocked(f"MIG mode of {self.board.device} changes after a reset only: {nvml.NVMLError(status)}")

    def profile_ids(self) -> dict[str, int]:
        """The driver's id of each profile, by name."""
        if not self._ids:
            self.profiles(places=False)
        return {name: number for name, (number, _) in self._ids.items()}

    def profiles(self, *, places: bool = True) -> tuple[MigProfile, ...]:
        """The profiles of the board, largest first; with their places in MIG mode, unless ``places`` is False."""
        nvml, handle = self.board.nvml, self.board.handle
        enabled = places and self.mode()[0]
        found = []
        for constant in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            try:
                info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, constant)
            except nvml.NVMLError as error:
                if getattr(error, "value", None) in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                    continue
                raise
            name = text(info.name).removeprefix("MIG ")
            self._ids[name] = (int(info.id), int(info.instanceCount))
            starts, size = self._starts(int(info.id), int(info.instanceCount)) if enabled else ((), 0)
            found.append(MigProfile(name, int(info.sliceCount), size, int(info.memorySizeMB) * _MB, starts))
        return tuple(sorted(found, key=lambda profile: (-profile.compute_slices, -profile.memory_bytes, profile.name)))

    def instances(self) -> tuple[tuple[int, GpuInstance], ...]:
        """Every GPU instance with its id, by place."""
        nvml = self.board.nvml
        found = []
        for name, pointer in self._pointers():
            info = nvml.nvmlGpuInstanceGetInfo(pointer)
            place = MigPlace(name, int(info.placement.start), int(info.placement.size))
            compute = sorted(slices for slices, _ in self._compute(pointer))
            found.append((int(info.id), GpuInstance(place, tuple(compute))))
        return tuple(sorted(found, key=lambda pair: pair[1]))

    def create(self, instance: GpuInstance) -> None:
        """Create a GPU instance at its place, with its compute instances."""
        nvml = self.board.nvml
        placement = nvml.c_nvmlGpuInstancePlacement_t(instance.place.start, instance.place.size)
        profile_id, _ = self._id(instance.place.profile)
        pointer = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(self.board.handle, profile_id, ctypes.byref(placement))
        ids = {slices: compute_id for slices, compute_id, _ in self._compute_profiles(pointer)}
        for slices in instance.compute:
            nvml.nvmlGpuInstanceCreateComputeInstance(pointer, ids[slices])

    def destroy(self, instance_id: int) -> None:
        """Give one back, its compute instances first."""
        nvml = self.board.nvml
        pointer = nvml.nvmlDeviceGetGpuInstanceById(self.board.handle, instance_id)
        for _, compute in self._compute(pointer):
            nvml.nvmlComputeInstanceDestroy(compute)
        nvml.nvmlGpuInstanceDestroy(pointer)

    def devices(self) -> tuple[MigDevice, ...]:
        """The instances as MIG devices, with their UUIDs and processes; needs no permission."""
        nvml, handle = self.board.nvml, self.board.handle
        found = []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            except nvml.NVMLError as error:
                if getattr(error, "value", None) == nvml.NVML_ERROR_NOT_FOUND:
                    continue
                raise
            profile = text(nvml.nvmlDeviceGetName(device)).rpartition("MIG ")[2]
            pids = tuple(sorted(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)))
            number = nvml.nvmlDeviceGetGpuInstanceId(device)
            found.append(MigDevice(text(nvml.nvmlDeviceGetUUID(device)), profile, int(number), pids))
        return tuple(found)

    def _id(self, profile: str) -> tuple[int, int]:
        if profile not in self._ids:
            self.profiles()
        return self._ids[profile]

    def _starts(self, profile_id: int, count: int) -> tuple[tuple[int, ...], int]:
        """Places where instances of a profile may begin, and the number of memory slices they take."""
        nvml = self.board.nvml
        number = ctypes.c_uint(max(count, 8))
        places = (nvml.c_nvmlGpuInstancePlacement_t * number.value)()
        nvml.nvmlDeviceGetGpuInstancePossiblePlacements(self.board.handle, profile_id, places, ctypes.byref(number))
        found = [(int(place.start), int(place.size)) for place in places[: number.value]]
        return tuple(sorted(start for start, _ in found)), max((size for _, size in found), default=0)

    def _pointers(self) -> Iterator[tuple[str, Any]]:
        """Every GPU instance: the name of its profile and the driver's handle."""
        nvml = self.board.nvml
        if not self._ids:
            self.profiles()
        for name, (profile_id, count) in self._ids.items():
            array = (nvml.c_nvmlGpuInstance_t * count)()
            number = ctypes.c_uint(0)
            nvml.nvmlDeviceGetGpuInstances(self.board.handle, profile_id, array, ctypes.byref(number))
            yield from ((name, array[index]) for index in range(number.value))

    def _compute_profiles(self, pointer: Any) -> Iterator[tuple[int, int, int]]:
        """The compute instances that a GPU instance can hold: slices, profile id, number."""
        nvml = self.board.nvml
        for constant in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                    pointer, constant, nvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
                )
            except nvml.NVMLError as error:
                if getattr(error, "value", None) in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                    continue
                raise
            yield int(info.sliceCount), int(info.id), int(info.instanceCount)

    def _compute(self, pointer: Any) -> Iterator[tuple[int, Any]]:
        """Compute instances of a GPU instance: slices and the driver's handle."""
        nvml = self.board.nvml
        for slices, profile_id, count in list(self._compute_profiles(pointer)):
            array = (nvml.c_nvmlComputeInstance_t * count)()
            number = ctypes.c_uint(0)
            nvml.nvmlGpuInstanceGetComputeInstances(pointer, profile_id, array, ctypes.byref(number))
            yield from ((slices, array[index]) for index in range(number.value))
