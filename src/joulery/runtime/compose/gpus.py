"""This machine's GPUs as the site file names them: what replicas may run on, each change on loan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from joulery.adapters.devices.nvidia_board import open_board
from joulery.adapters.devices.nvidia_mig import NvidiaMig
from joulery.adapters.devices.nvidia_mps import NvidiaMps
from joulery.adapters.devices.nvidia_watch import BoardWatch
from joulery.adapters.devices.places import GpuPlaces
from joulery.config.devices import GpuDeviceConfig
from joulery.domain.device import DeviceSpec, MigSetting, MpsSetting
from joulery.domain.errors import CapabilityError
from joulery.domain.mig import menu_for
from joulery.domain.ports import Places
from joulery.domain.serving import Slice
from joulery.runtime.leasing.leases import LeaseHolder

__all__ = ["BoardWatch", "LocalGpus", "board_watch", "local_gpus", "together"]


@dataclass(slots=True)
class LocalGpus:
    """The GPUs of a site on this machine, opened; nothing is set.

    Attributes:
        places: Where replicas run on them; every cut and daemon is on loan.
        partitions: The ways each may be cut, in the order of the site file.
        names: What they are called as devices (``gpu:0``).
    """

    places: Places
    partitions: tuple[tuple[tuple[Slice, ...], ...], ...]
    names: tuple[str, ...] = ()
    _open: list[Any] = field(default_factory=list)

    def close(self) -> None:
        """Let go of the driver; loans are given back by their holder. Safe to call twice."""
        while self._open:
            self._open.pop().close()


def board_watch(gpu: int | str) -> BoardWatch:
    """A board to be watched while something runs on it.

    Raises:
        CapabilityError: No driver, or it does not answer.
        ConfigError: There is no such GPU.
    """
    return BoardWatch(gpu)


def local_gpus(devices: Sequence[GpuDeviceConfig], holder: LeaseHolder) -> LocalGpus:
    """The GPUs that the site file names.

    Raises:
        CapabilityError: One is not here, cannot be cut, or its cuts are not known.
        ConfigError: There is no such GPU.
    """

    def turn(device: NvidiaMig | NvidiaMps, spec: DeviceSpec, wanted: MigSetting | MpsSetting, reason: str) -> object:
        # One overload a knob: a device and a setting of the same knob, as GpuPlaces pairs them.
        any_device: Any = device
        return holder.set(any_device, spec, wanted, reason)

    partitions: list[tuple[tuple[Slice, ...], ...]] = []
    opened: list[Any] = []
    cut: dict[str, NvidiaMig] = {}
    shared: dict[str, NvidiaMps] = {}
    whole: dict[str, str] = {}
    specs: dict[str, DeviceSpec] = {}
    for config in devices:
        if config.mode == "mig":
            mig = NvidiaMig(config.gpu)
            opened.append(mig)
            cut[mig.device] = mig
            specs[mig.device] = DeviceSpec("nvidia-mig", {"gpu": config.gpu})
            partitions.append(config.as_partitions(_menu(mig, config)))
        elif config.mode == "mps":
            mps = NvidiaMps(config.gpu)
            opened.append(mps)
            shared[mps.device] = mps
            specs[mps.device] = DeviceSpec("nvidia-mps", {"gpu": config.gpu})
            partitions.append(config.as_partitions())
        else:
            board = open_board(config.gpu)
            opened.append(board)
            whole[board.device] = board.uuid
            partitions.append(config.as_partitions())
    places = GpuPlaces(turn, cut, shared, whole, specs)
    return LocalGpus(places, tuple(partitions), tuple(each.device for each in opened), opened)


def _menu(mig: NvidiaMig, config: GpuDeviceConfig) -> tuple[tuple[str, ...], ...]:
    """Every cut of a GPU's type, equal ones once."""
    menu = menu_for(mig.capability().name)
    if menu is None and config.cuts is None:
        raise CapabilityError(
            f"the cuts of {mig.capability().name} are not known here",
            resource=mig.device,
            hint="name those to choose from: cuts: [[3g.40gb, 3g.40gb]]",
        )
    return () if menu is None else menu.multisets


def together(partitions: Sequence[Sequence[tuple[Slice, ...]]]) -> tuple[tuple[Slice, ...], ...]:
    """The ways several devices may be cut at once, equal ones once."""
    found: tuple[tuple[Slice, ...], ...] = ((),)
    for options in partitions:
        found = tuple(dict.fromkeys(tuple(sorted((*so_far, *option))) for so_far in found for option in options))
    return found
