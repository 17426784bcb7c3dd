"""``fleet.devices``, ``fleet.clocks``, ``fleet.power_limits``: GPUs for replicas, and devices that are governed."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import Megahertz, Ratio, Seconds
from joulery.config.parsing.section import InputFile, Name, Section
from joulery.domain.serving.service import Slice, SliceKind

GpuId = Annotated[int, Field(ge=0, le=255)] | Annotated[str, StringConstraints(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]+$")]
"""A GPU by its index or its UUID."""
Profile = Annotated[str, StringConstraints(pattern=r"^[0-9]g\.[0-9]+gb(\+[a-z.]+)?$")]
"""A MIG profile such as 3g.20gb."""


Partitions = Annotated[tuple[Annotated[tuple[Profile, ...], Field(min_length=1)], ...], Field(min_length=1)]
"""MIG partitions to choose from."""


class GpuDeviceConfig(Section):
    """One NVIDIA GPU of this machine that replicas may run on."""

    kind: Literal["nvidia"] = "nvidia"
    gpu: GpuId = 0
    """Its index as nvidia-smi shows it, or its UUID."""
    mode: Literal["whole", "mig", "mps"] = "whole"
    """whole: one replica; mig: hardware instances; mps: processes side by side, each with a share of the SMs."""
    ALIASES: ClassVar = {"cuts": "mig_partitions"}
    mig_partitions: Partitions | None = None
    """With mode mig: the partitions to choose from, such as [[7g.40gb], [4g.20gb, 3g.20gb]]; all when left out."""
    shares: Annotated[tuple[Annotated[tuple[Ratio, ...], Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """With mode mps: the ways to share it, such as [[100 %], [60 %, 40 %]]; one process or two halves when left out."""

    @model_validator(mode="after")
    def _check_partition_of_mode(self) -> GpuDeviceConfig:
        if self.mig_partitions is not None and self.mode != "mig":
            raise problem(f"needs mode mig, the mode is {self.mode}", at=("mig_partitions",))
        if self.shares is not None and self.mode != "mps":
            raise problem(f"needs mode mps, the mode is {self.mode}", at=("shares",))
        for index, shares in enumerate(self.shares or ()):
            if min(shares) <= 0 or sum(shares) > 1 + 1e-9:
                raise problem("shares lie above 0 and come to 100 % at most", at=("shares", index))
        return self

    def as_partitions(self, menu: tuple[tuple[str, ...], ...] = ()) -> tuple[tuple[Slice, ...], ...]:
        """The ways it may be partitioned, as nouns.

        Args:
            menu: Cuts of its type, for mode mig where none are named.
        """
        if self.mode == "whole":
            return ((Slice(SliceKind.WHOLE),),)
        if self.mode == "mps":
            return tuple(
                tuple(Slice(SliceKind.MPS, share_ratio=round(share, 6)) for share in shares)
                for shares in self.shares or ((1.0,), (0.5, 0.5))
            )
        return tuple(
            tuple(Slice(SliceKind.MIG, profile=name) for name in partition) for partition in self.mig_partitions or menu
        )


class ClockConfig(Section):
    """A device whose clock is governed while services run. Nothing is set unless the site's mode is act."""

    device: Literal["cpu", "nvidia", "emulated"]
    """cpu: the kernel's cpufreq; nvidia: a GPU's locked clocks; emulated: an emulated V100, to try it."""
    gpu: GpuId = 0
    """With device nvidia: which."""
    governor: Literal["predictive", "busy-idle", "miad", "fixed"] = "predictive"
    """predictive: least energy within the SLO; busy-idle: two clocks; miad: the published rule; fixed: one clock."""
    clock_mhz: Megahertz | None = Field(alias="clock", default=None)
    """With governor fixed: the clock; with busy-idle: the clock while busy, the voltage knee when left out."""
    min_mhz: Megahertz | None = Field(alias="min", default=None)
    """Never below; the device's lowest when left out."""
    max_mhz: Megahertz | None = Field(alias="max", default=None)
    """Never above; the device's highest when left out."""
    plan: InputFile | None = None
    """A plan with clock bounds, as joulery plan --out wrote it: they hold beside min and max."""
    plan_gpu: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Number of the GPU in that plan, counted from 1."""
    profile: InputFile | None = None
    """Latency and power of its model by clock (joulery profile MODEL --clocks --out FILE); assumed if left out."""
    knee_mhz: Megahertz | None = Field(alias="knee", default=None)
    """Clock below which the voltage falls no further: only an idle device goes below it. Known for some GPUs."""
    step_mhz: Megahertz = Field(alias="step", default=100.0)
    """With governor miad: one step down."""
    period_s: Seconds = Field(alias="period", default=1.0)
    """Time between two decisions."""
    lease_s: Seconds = Field(alias="lease", default=10.0)
    """Time that a clock stays set after its last renewal."""
    services: tuple[Name, ...] = ()
    """Services whose SLOs the governor keeps; when left out, every service and language model on the device."""

    @model_validator(mode="after")
    def _check_consistency(self) -> ClockConfig:
        if self.governor == "fixed" and self.clock_mhz is None:
            raise problem("is needed with governor fixed", at=("clock",))
        if self.clock_mhz is not None and self.governor not in ("fixed", "busy-idle"):
            raise problem("goes with governor fixed or busy-idle", at=("clock",))
        if self.min_mhz is not None and self.max_mhz is not None and self.min_mhz > self.max_mhz:
            raise problem("is above max", at=("min",))
        check_lease(self.period_s, self.lease_s)
        return self


def check_lease(period_s: float, lease_s: float) -> None:
    """Check that a setting stays while one renewal of its lease is late.

    Raises:
        PydanticCustomError: The lease is shorter than two periods.
    """
    if lease_s < 2 * period_s:
        raise problem("must be at least twice the period", at=("lease",))


def check_limit_times(period_s: float, trial_s: float, review_s: float, lease_s: float) -> None:
    """Check the times of a search for a power limit.

    Raises:
        PydanticCustomError: The lease is shorter than two periods, or a trial than one, or longer than the review.
    """
    check_lease(period_s, lease_s)
    if not 0 < period_s <= trial_s <= review_s:
        raise problem("must lie between the period and the review", at=("trial",))


class PowerLimitConfig(Section):
    """A device whose power is limited while services run, learned within a bound on their slowdown (mode act)."""

    device: Literal["cpu", "nvidia"]
    """cpu: RAPL; nvidia: a GPU's power management limit."""
    gpu: GpuId = 0
    """With device nvidia: which."""
    max_slowdown: Annotated[float, Field(ge=1, le=3)] = 1.1
    """Most service time that requests may take over that at full power, trials included; queueing is not counted."""
    eta: Ratio = 0.5
    """Weight of energy against service time in the cost of a limit."""
    min_ratio: Annotated[Ratio, Field(gt=0, lt=1)] = Field(alias="min", default=0.5)
    """Lowest limit, as a share of the limit that the device had before."""
    trial_s: Seconds = Field(alias="trial", default=20.0)
    """Length of a window in which requests are measured, at least 20 of them."""
    settle_s: Seconds = Field(alias="settle", default=2.0)
    """Time that the device takes to follow a new limit."""
    period_s: Seconds = Field(alias="period", default=1.0)
    """Time between two decisions."""
    baseline_ratio: Annotated[Ratio, Field(gt=0, le=0.5)] = Field(alias="baseline", default=0.1)
    """Share of the time at full power while a limit is kept, to compare it."""
    review_s: Seconds = Field(alias="review", default=3600.0)
    """Time until the search for the best limit starts again."""
    lease_s: Seconds = Field(alias="lease", default=10.0)
    """Time that a limit stays set after its last renewal."""
    services: tuple[Name, ...] = ()
    """Services that are measured and whose SLOs are kept; when left out, every one on the device."""

    @model_validator(mode="after")
    def _check_consistency(self) -> PowerLimitConfig:
        check_limit_times(self.period_s, self.trial_s, self.review_s, self.lease_s)
        return self
