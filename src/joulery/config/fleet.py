"""``fleet``: the devices joulery may use and how they are partitioned."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from joulery.config.devices import ClockConfig, GpuDeviceConfig, PowerLimitConfig
from joulery.config.parsing.problem import problem
from joulery.config.parsing.section import InputFile, Section
from joulery.config.plan import GpuConfig
from joulery.domain.serving.service import Slice, SliceKind


class CpuConfig(Section):
    """The CPU of this machine, divided into slices of whole cores."""

    slices: Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1)] | None = None
    """Cores of each slice: [1, 1] is two slices of one core. When left out, the policy chooses among all partitions."""
    cores: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Cores that may be used in all; every core of the machine when left out."""

    @model_validator(mode="after")
    def _slices_fit(self) -> CpuConfig:
        if self.cores is not None and self.slices is not None and sum(self.slices) > self.cores:
            raise problem(f"slices take {sum(self.slices)} cores of {self.cores}", at=("slices",))
        return self

    def as_slices(self) -> tuple[Slice, ...] | None:
        """The nouns; None where the partition is left to the policy."""
        if self.slices is None:
            return None
        return tuple(Slice(SliceKind.CPU, cores=cores) for cores in self.slices)


class FleetConfig(Section):
    """Devices to run on."""

    cpu: CpuConfig | None = None
    """The CPU of this machine."""
    gpus: tuple[GpuConfig, ...] = ()
    """The kinds of GPU one may rent, for joulery plan."""
    prices: InputFile | None = None
    """Your prices, a CSV file with the columns gpu (a name of gpus), market (on-demand or spot) and usd_per_hour; for
    joulery plan. Services with spot: true may be on spot GPUs."""
    devices: tuple[GpuDeviceConfig, ...] = ()
    """This machine's GPUs that replicas may run on; without any they run on its CPU."""
    clocks: tuple[ClockConfig, ...] = ()
    """Devices of this machine whose clock is governed while services run."""
    power_limits: tuple[PowerLimitConfig, ...] = ()
    """Devices of this machine whose power is limited while services run; none whose clock is governed."""

    @model_validator(mode="after")
    def _gpu_names_are_unique(self) -> FleetConfig:
        names = [gpu.name for gpu in self.gpus]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise problem("is listed twice; names must differ", at=("gpus", index, "name"))
        for index, gpu in enumerate(self.gpus):
            if gpu.usd_per_hour is None and self.prices is None:
                raise problem("missing key 'price'", expected="such as price: 3.06 USD/h", at=("gpus", index))
        for key, devices in (
            ("devices", [str(device.gpu) for device in self.devices]),
            ("clocks", [f"{clock.device} {clock.gpu}" for clock in self.clocks]),
            ("power_limits", [f"{limit.device} {limit.gpu}" for limit in self.power_limits]),
        ):
            for index, device in enumerate(devices):
                if device in devices[:index]:
                    raise problem("is listed twice; each device once", at=(key, index))
        governed = {(clock.device, clock.gpu) for clock in self.clocks}
        for index, limit in enumerate(self.power_limits):
            if (limit.device, limit.gpu) in governed:
                raise problem(
                    "a governor sets the clock of this device already (fleet.clocks)",
                    expected="one owner for each device",
                    hint="keep it below clocks or below power_limits",
                    at=("power_limits", index),
                )
        return self
