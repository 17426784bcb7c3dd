"""``meters``: what reads the energy, and what to assume where nothing can."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from joulery.config.parsing.problem import nearest, problem
from joulery.config.parsing.quantity import Ratio, Seconds, Watts
from joulery.config.parsing.section import Section

PLAIN = ("rapl", "nvml", "amd", "jetson", "ipmi", "slurm", "cpu-model")
"""Meters that need nothing but their name."""
_WITH_OPTIONS = re.compile(r"dcgm(:.+)?|redfish:.+|jetson:.+|slurm:.+")


def _known(name: str) -> str:
    if name in PLAIN or _WITH_OPTIONS.fullmatch(name):
        return name
    near = nearest(name.partition(":")[0], (*PLAIN, "dcgm", "redfish"))
    raise problem(
        "is not a meter",
        expected=", ".join((*PLAIN, "dcgm:URL", "redfish:URL", "jetson:RAIL+RAIL", "slurm:NODE")),
        hint=f"did you mean {near}?" if near and near != name else "",
    )


MeterName = Annotated[str, AfterValidator(_known)]


class CpuModelConfig(Section):
    """The labelled model for machines without an energy counter: idle + (max - idle) x utilisation."""

    idle_w: Watts = Field(alias="idle")
    """Power of the idle machine, such as 40 W."""
    max_w: Watts = Field(alias="max")
    """Power with every core busy, such as 120 W."""
    band_ratio: Ratio = Field(alias="band", default=0.5)
    """Half-width of the uncertainty to report, such as 30 %; 50 % when left out."""

    @model_validator(mode="after")
    def _max_exceeds_idle(self) -> CpuModelConfig:
        if self.max_w <= self.idle_w:
            raise problem("must be above idle", expected=f"more than {self.idle_w:g} W", at=("max",))
        return self


class MetersConfig(Section):
    """Meters in order of preference, and their sampling period."""

    use: Annotated[tuple[MeterName, ...], Field(min_length=1)] = (
        "rapl",
        "nvml",
        "amd",
        "jetson",
        "cpu-model",
    )
    """The meters to try, named as on the command line; each device is read by the first that can."""
    period_s: Seconds = Field(alias="period", default=0.1)
    """Sampling period, such as 100 ms."""
    cpu_model: CpuModelConfig | None = None
    """Values for the CPU model; a small table by processor when left out."""
