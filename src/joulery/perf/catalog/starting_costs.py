"""Starting point for the fit of a pull service: round numbers scaled to measurements, with published slowdowns.

Slowdowns on MIG slices cannot be derived from a few points of whole services. They are those of published measurements
of models of similar size (:mod:`joulery.perf.catalog.clover_services`): of the variant itself where the catalog has it,
else of the class that corresponds to its rank in the family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from joulery.domain.errors import DataError
from joulery.perf.catalog.clover_services import CLOVER_SERVICES
from joulery.perf.queues.pull_costs import PullPoint, ServiceCosts, VariantCosts

_FAMILY = CLOVER_SERVICES["efficientnet"].variants
"""A family from light to saturating, for variants that the catalog does not name."""


def starting_costs(
    name: str, accuracy_ratio: Mapping[str, float], points: Sequence[PullPoint], gpus: int, source: str
) -> ServiceCosts:
    """Estimate rough costs of a service.

    The most accurate variant under the lightest load sets the scale: about half of its latency is host time and a fifth
    is device time; two thirds of its joules are idle power.

    Args:
        name: The service.
        accuracy_ratio: Accuracy of each variant alone.
        points: The measured points.
        gpus: GPUs that served it.
        source: Origin of the points.

    Raises:
        DataError: A point contains a variant without an accuracy, or there is no point.
    """
    if not points:
        raise DataError(f"no measured point of {name!r} to start from")
    strange = sorted({variant for point in points for variant, _ in point.instances} - set(accuracy_ratio))
    if strange:
        raise DataError(f"no accuracy is known of {', '.join(strange)}, which a measured point of {name!r} shows")
    names = sorted(accuracy_ratio, key=lambda variant: (accuracy_ratio[variant], variant))
    light = max(points, key=lambda point: (point.interarrival_s, point.accuracy_ratio))
    device_s = np.geomspace(0.05, 0.2, len(names)) * light.p95_s
    joules = np.geomspace(0.01, 0.35, len(names)) * light.energy_j
    variants = tuple(
        VariantCosts(
            variant,
            accuracy_ratio[variant],
            0.5 * light.p95_s,
            float(device_s[rank]),
            float(joules[rank]),
            _slowdown(variant, rank, len(names)),
        )
        for rank, variant in enumerate(names)
    )
    return ServiceCosts(
        name=name,
        variants=variants,
        contention=0.1,
        size_cv=0.2,
        jitter_s=0.03 * light.p95_s,
        idle_w=0.65 * light.energy_j / light.interarrival_s / gpus,
        gpus=gpus,
        loads_s=tuple(sorted({point.interarrival_s for point in points}, reverse=True)),
        source=source,
    )


def _slowdown(variant: str, rank: int, variants: int) -> Mapping[str, float]:
    for service in CLOVER_SERVICES.values():
        for known in service.variants:
            if known.name == variant:
                return known.slowdown
    place = round(rank / max(variants - 1, 1) * (len(_FAMILY) - 1))
    return _FAMILY[place].slowdown
