"""A device whose power may be limited: its leased setting, and its energy and work so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from joulery.domain.gpu.device import DeviceSpec, PowerSetting, lease_name
from joulery.domain.ports import Device


class Activity(Protocol):
    """Energy and work of a device so far."""

    def read(self, now_s: float) -> tuple[float, float]:
        """Energy, J, and busy cycles, in millions; NaN while it does not answer."""
        ...


@dataclass(frozen=True, slots=True)
class LimitedDevice:
    """A GPU, or the CPUs of the machine, whose power may be limited.

    Attributes:
        number: The board's own number, as placements name it; 0 for the CPUs.
        label: ``gpu:0`` …, ``cpu``.
        device: Its power limit.
        spec: How the watchdog opens it.
        activity: Its energy and busy cycles.
        model: The vendor's name of the device.
        uuid: Its identity, for the name of its lease.
        full_w: The limit it had before, W.
        low_w: The lowest limit it takes, W.
        parts: Number of parts that each have this limit: packages of the CPUs.
    """

    number: int
    label: str
    device: Device[PowerSetting]
    spec: DeviceSpec
    activity: Activity
    model: str
    uuid: str
    full_w: float
    low_w: float
    parts: int = 1

    def limit_w(self, ratio: float) -> float:
        """The limit that is set for a share of full power, W."""
        return max(self.low_w, ratio * self.full_w)

    @property
    def lease(self) -> str:
        """The name of its lease."""
        return lease_name(self.uuid or self.label, self.spec.knob)
