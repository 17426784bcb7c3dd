"""Open this machine's GPUs as the site file names them; changes of their settings are leased."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from joulery.adapters.devices.nvidia_board import open_board
from joulery.adapters.devices.nvidia_mig import NvidiaMig
from joulery.adapters.devices.nvidia_mps import NvidiaMps
from joulery.adapters.devices.nvidia_watch import NvidiaBoardWatch
from joulery.adapters.devices.places import GpuPlaces
from joulery.config.devices import GpuDeviceConfig
from joulery.config.serving import EmbeddedEngine
from joulery.config.site import Site
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.gpu.device import DeviceSpec, MigSetting, MpsSetting
from joulery.domain.gpu.mig import menu_for
from joulery.domain.serving.service import Slice
from joulery.policies.placement.pools.gpu_groups import divide, parts
from joulery.runtime.leasing.leases import LeaseHolder

__all__ = ["LocalGpus", "NvidiaBoardWatch", "Partitions", "board_watch", "local_gpus"]

Partitions = Sequence[tuple[Slice, ...]]
"""The possible partitions of one GPU."""


@dataclass(slots=True)
class LocalGpus:
    """The GPUs of a site on this machine, opened; nothing is set.

    Attributes:
        places: Hands out slices of the GPUs to replicas; every MIG partition and MPS daemon is leased.
        partitions: Possible partitions of each GPU, by device name (``gpu:0``), in the order of the site file.
    """

    places: GpuPlaces
    partitions: Mapping[str, Partitions]
    _open: list[Any] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """Device names of the GPUs."""
        return tuple(self.partitions)

    def group(self, partitions: Mapping[str, Partitions]) -> LocalGpus:
        """A group of these GPUs with the partitions it may use; :meth:`close` of the whole closes the group too."""
        return LocalGpus(self.places.only(partitions), partitions)

    def close(self) -> None:
        """Close the driver; the lease holder reverts the settings. Safe to call twice."""
        while self._open:
            self._open.pop().close()


def board_watch(gpu: int | str) -> NvidiaBoardWatch:
    """Open a board to watch while processes run on it.

    Raises:
        CapabilityError: No driver, or it does not answer.
        ConfigError: There is no such GPU.
    """
    return NvidiaBoardWatch(gpu)


def local_gpus(devices: Sequence[GpuDeviceConfig], holder: LeaseHolder, *, in_use: bool = False) -> LocalGpus:
    """Open the GPUs that the site file names.

    Args:
        devices: The GPUs.
        holder: Leases them.
        in_use: Whether the site's own replicas, of an engine server, may already run on them.

    Raises:
        CapabilityError: A GPU is not available, cannot be partitioned, or its MIG partitions are not known.
        ConfigError: There is no such GPU.
    """

    def turn(device: NvidiaMig | NvidiaMps, spec: DeviceSpec, wanted: MigSetting | MpsSetting, reason: str) -> object:
        # One overload a knob: a device and a setting of the same knob, as GpuPlaces pairs them.
        any_device: Any = device
        return holder.set(any_device, spec, wanted, reason)

    partitions: dict[str, Partitions] = {}
    opened: list[Any] = []
    mig_devices: dict[str, NvidiaMig] = {}
    shared: dict[str, NvidiaMps] = {}
    whole: dict[str, str] = {}
    specs: dict[str, DeviceSpec] = {}
    alone: set[str] = set()
    uuids: dict[str, str] = {}
    for index, config in enumerate(devices):
        menu: tuple[tuple[str, ...], ...] = ()
        if config.mode == "mig":
            mig = NvidiaMig(config.gpu)
            opened.append(mig)
            name, menu, uuids[mig.device] = mig.device, _menu(mig, config), mig.capability().uuid
            mig_devices[name], specs[name] = mig, DeviceSpec("nvidia-mig", {"gpu": config.gpu})
        elif config.mode == "mps":
            mps = NvidiaMps(config.gpu)
            opened.append(mps)
            name = mps.device
            mps.require_room()
            shared[name], specs[name] = mps, DeviceSpec("nvidia-mps", {"gpu": config.gpu})
        else:
            board = open_board(config.gpu)
            opened.append(board)
            name = board.device
            if board.require_room(shared=in_use):
                alone.add(board.uuid)
            whole[name] = board.uuid
        if name in partitions:
            raise ConfigError(f"{name} is listed twice, under two names", pointer=f"fleet.devices.{index}.gpu")
        partitions[name] = config.as_partitions(menu)

    def within(name: str, instance: str) -> tuple[NvidiaMps, DeviceSpec]:
        mps = NvidiaMps(uuids[name], instance=instance)
        opened.append(mps)
        return mps, DeviceSpec("nvidia-mps", {"gpu": uuids[name], "instance": instance})

    places = GpuPlaces(turn, mig_devices, shared, whole, specs, frozenset(alone), within)
    return LocalGpus(places, partitions, opened)


def _menu(mig: NvidiaMig, config: GpuDeviceConfig) -> tuple[tuple[str, ...], ...]:
    """All MIG partitions of a GPU's type, equal ones once."""
    menu = menu_for(mig.capability().name)
    if menu is None and config.mig_partitions is None:
        raise CapabilityError(
            f"the MIG partitions of {mig.capability().name} are unknown",
            resource=mig.device,
            hint="name those to choose from: mig_partitions: [[3g.40gb, 3g.40gb]]",
        )
    return () if menu is None else menu.multisets


def gpu_groups(site: Site, here: LocalGpus) -> dict[str, LocalGpus]:
    """The GPUs of each service, with the partitions that it may use.

    Services with ``gpus`` get those first; the others get equal parts of the remaining GPUs, the first ones one more.
    With ``plan.colocate`` the remainder is shared instead, as are GPUs that several services name.

    Args:
        site: The site; its ``fleet.devices`` are the opened GPUs, in this order.
        here: All opened GPUs.

    Returns:
        The GPUs by service, in the order of the site file.

    Raises:
        ConfigError: Several services need GPU groups, and the engine is not the embedded one.
        InfeasibleError: A service is left without a GPU, or a shared one has no slice for each.
    """
    if len(site.services) > 1 and not isinstance(site.serving.engine, EmbeddedEngine):
        raise ConfigError(
            f"GPU groups for {len(site.services)} services need the embedded engine",
            pointer="serving.engine",
            got=site.serving.engine.kind,
            expected="embedded",
            hint="give each service a site file of its own",
        )
    listed, names = [device.gpu for device in site.fleet.devices], here.names
    claims = {one.name: [listed.index(gpu) for gpu in one.gpus or ()] for one in site.services}
    divided = divide(claims, len(listed), colocate=site.plan.colocate)
    groups = {service: [names[index] for index in mine] for service, mine in divided.items()}
    return {service: here.group(mine) for service, mine in parts(here.partitions, groups).items()}
