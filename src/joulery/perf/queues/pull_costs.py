"""Costs of requests on a service of many variants and slices: the parameters of a FIFO-pull service.

A request takes a host part (decoding, pre- and post-processing), stretched by busy neighbours, and a device part that
depends on variant and slice. These are few numbers: some measured points of the whole service (accuracy, a latency
quantile, joules a request) suffice to fit them, as :mod:`joulery.sim.queues.pull_fit` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from joulery.domain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VariantCosts:
    """Costs of one variant.

    Attributes:
        name: Unique within the service.
        accuracy_ratio: Accuracy of its answers.
        host_s: Host part of a request.
        gpu_s: Device part of a request of mean size on the whole GPU.
        dynamic_j: Joules of a request above idle, on any slice.
        slowdown: Device time on each slice profile, relative to the whole GPU's; a profile left out does not fit.
    """

    name: str
    accuracy_ratio: float
    host_s: float
    gpu_s: float
    dynamic_j: float
    slowdown: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ServiceCosts:
    """Costs of one service.

    Attributes:
        name: The service.
        variants: Its variants, least accurate first.
        contention: Stretch of the host part per busy neighbour on the same host.
        size_cv: Coefficient of variation of a request's device part.
        jitter_s: Standard deviation of all other variation.
        idle_w: Idle power of one GPU.
        gpus: GPUs it was profiled on, those of one host, all with the same instances.
        loads_s: Mean times between requests: the reference load first.
        source: Where the numbers come from.
    """

    name: str
    variants: tuple[VariantCosts, ...]
    contention: float
    size_cv: float
    jitter_s: float
    idle_w: float
    gpus: int
    loads_s: tuple[float, ...]
    source: str

    def __getitem__(self, name: str) -> VariantCosts:
        """The variant called ``name``.

        Raises:
            ConfigError: There is no variant of that name.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise ConfigError(
            f"{self.name} has no variant {name!r}", got=name, expected=", ".join(v.name for v in self.variants)
        )


@dataclass(frozen=True, slots=True)
class PullPoint:
    """One measured run of a service.

    Attributes:
        interarrival_s: Mean time between its Poisson requests.
        requests: Number of measured requests.
        instances: Variant and slice profile of each instance of one GPU.
        accuracy_ratio: Mean accuracy over requests.
        p95_s: 95th percentile of the latency.
        energy_j: Joules a request.
    """

    interarrival_s: float
    requests: int
    instances: tuple[tuple[str, str], ...]
    accuracy_ratio: float
    p95_s: float
    energy_j: float
