"""Accuracy, latency and energy of every configuration of one service, tabulated in advance."""

from __future__ import annotations

from dataclasses import dataclass

from joulery.domain.errors import DataError


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One configuration under one load.

    Attributes:
        interarrival_s: Mean time between requests.
        instances: Variant and slice profile of each instance of one GPU; every GPU has the same.
        accuracy_ratio: Mean accuracy over requests.
        latency_s: Latency at the SLO's quantile.
        energy_j: Joules a request, idle of the powered GPUs included.
    """

    interarrival_s: float
    instances: tuple[tuple[str, str], ...]
    accuracy_ratio: float
    latency_s: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class VariantTable:
    """The table of one service.

    Attributes:
        service: Its name.
        gpus: GPUs that serve it under the heaviest load, all with the same instances.
        entries: Every configuration that can run, under every load.
        base_accuracy_ratio: Accuracy of the baseline: the most accurate variant on whole GPUs, at the reference load.
        base_latency_s: Latency of the baseline; it is the SLO.
        base_energy_j: Joules a request of the baseline.
        quality: Origin of the entries, as text.

    Raises:
        DataError: There is no entry or no GPU, or a value of the baseline is not positive.
    """

    service: str
    gpus: int
    entries: tuple[TableEntry, ...]
    base_accuracy_ratio: float
    base_latency_s: float
    base_energy_j: float
    quality: str

    def __post_init__(self) -> None:
        if not self.entries:
            raise DataError(f"the table of {self.service!r} is empty")
        if self.gpus < 1:
            raise DataError(f"{self.service!r} needs at least one GPU, got {self.gpus}")
        if not min(self.base_accuracy_ratio, self.base_latency_s, self.base_energy_j) > 0:
            raise DataError(f"the baseline of {self.service!r} needs a positive accuracy, latency and energy")

    @property
    def loads_s(self) -> tuple[float, ...]:
        """Mean times between requests in the table: the reference load first, then heavier and heavier ones."""
        return tuple(sorted({entry.interarrival_s for entry in self.entries}, reverse=True))
