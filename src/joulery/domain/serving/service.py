"""Services: variants, SLOs, slices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from joulery.domain.errors import ConfigError


class SliceKind(StrEnum):
    """Kind of partition of a device. The first three exclude one another on one GPU."""

    WHOLE = "whole"
    MIG = "mig"
    MPS = "mps"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """A slice of one device that runs one instance.

    Attributes:
        kind: How the device is partitioned.
        profile: MIG profile name (``3g.20gb``); empty otherwise.
        share_ratio: Share of the device: MPS thread share; on CPU the share of its cores' time (a quota); on a MIG
            slice that several processes share under MPS the share of one of them; else 1.
        cores: CPU cores; 0 on a GPU.
    """

    kind: SliceKind
    profile: str = ""
    share_ratio: float = 1.0
    cores: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share_ratio <= 1:
            raise ConfigError("a slice must be a positive share of its device", got=str(self.share_ratio))
        if (self.cores > 0) != (self.kind is SliceKind.CPU):
            raise ConfigError("a CPU slice needs at least one core, any other slice none", got=str(self.cores))

    def __str__(self) -> str:
        if self.kind is SliceKind.CPU:
            return f"cpu:{self.cores}" + (f"@{self.share_ratio:g}" if self.share_ratio < 1 else "")
        if self.kind is SliceKind.MPS:
            return f"mps:{self.share_ratio:g}"
        if self.kind is SliceKind.MIG:
            return self.profile + (f"@{self.share_ratio:g}" if self.share_ratio < 1 else "")
        return "whole"

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Parse the text of a slice: ``cpu:2``, ``mps:0.25`` (six digits), ``3g.20gb``, ``3g.20gb@0.5`` ...

        Raises:
            ConfigError: The text is not a slice.
        """
        kind, colon, size = text.partition(":")
        if not text or (colon and kind not in (SliceKind.CPU, SliceKind.MPS)):
            raise ConfigError("not a slice", got=text, expected="such as cpu:2, mps:0.25, 3g.20gb or whole")
        if text == SliceKind.WHOLE:
            return cls(SliceKind.WHOLE)
        try:
            if not colon:
                profile, _, share = text.partition("@")
                return cls(SliceKind.MIG, profile=profile, share_ratio=float(share or 1))
            return (
                cls(SliceKind.CPU, cores=int(size))
                if kind == SliceKind.CPU
                else cls(SliceKind.MPS, share_ratio=float(size))
            )
        except ValueError as error:
            raise ConfigError("not the size of a slice", got=text, expected="such as cpu:2 or mps:0.25") from error


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """One member of a family: same task, its own quality and cost.

    Attributes:
        name: Unique within its family.
        accuracy_ratio: Accuracy on the family's metric, 0 to 1.
        accuracy_source: Where the accuracy comes from (a citation, or "measured on ...").
        memory_bytes: Resident memory of one replica; 0 when not known.
        autoregressive: True for generative models: their work grows with their output.
    """

    name: str
    accuracy_ratio: float
    accuracy_source: str = ""
    memory_bytes: int = 0
    autoregressive: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.accuracy_ratio <= 1:
            raise ConfigError(
                "accuracy must be a ratio", pointer=self.name, got=str(self.accuracy_ratio), expected="0 to 1"
            )


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Variants that answer the same requests with different quality and cost."""

    name: str
    task: str
    accuracy_metric: str
    variants: tuple[ModelVariant, ...]

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) != len(names):
            raise ConfigError("a family needs variants with distinct names", pointer=self.name, got=str(names))

    def __getitem__(self, name: str) -> ModelVariant:
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise KeyError(name)

    @property
    def largest(self) -> ModelVariant:
        """The most accurate variant, which runs without optimisation (Clover's BASE)."""
        return max(self.variants, key=lambda variant: variant.accuracy_ratio)


DEFAULT_QUANTILE = 0.95
"""The quantile of an SLO that names none, wherever it is stated."""


class SloScope(StrEnum):
    """Latency that an SLO bounds."""

    END_TO_END = "end_to_end"
    """Arrival at the gateway to the last byte of the answer: queueing included."""
    SERVICE = "service"
    """Execution alone."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency SLO: ``quantile`` of the latencies must not exceed ``latency_s``."""

    latency_s: float
    quantile: float = DEFAULT_QUANTILE
    scope: SloScope = SloScope.END_TO_END

    def __post_init__(self) -> None:
        if not self.latency_s > 0:
            raise ConfigError("an SLO needs a positive latency", got=f"{self.latency_s} s")
        if not 0 < self.quantile < 1:
            raise ConfigError("an SLO needs a quantile between 0 and 1", got=str(self.quantile))
