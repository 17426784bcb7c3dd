"""Energy and carbon charge of a request: CPU seconds of its replica at the watts of a busy core, and grid intensity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import EnergyShare


@dataclass(frozen=True, slots=True)
class ChargeTable:
    """Watts and carbon intensity to charge a site's requests with, the same in its controller and all gateways.

    Attributes:
        active_w: Watts of a busy core by service and variant; under the empty variant for any other.
        quality: Quality of the watts, by service.
        g_per_kwh: Carbon intensity with the facility's overhead; NaN where it is not known.
        own_quality: Quality of the watts by service and variant, where it differs from the service's.
    """

    active_w: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    quality: Mapping[str, Quality] = field(default_factory=dict)
    g_per_kwh: float = math.nan
    own_quality: Mapping[str, Mapping[str, Quality]] = field(default_factory=dict)

    def charge(self, service: str, variant: str, cpu_s: float) -> EnergyShare | None:
        """The charge of one request; None where no watts are known."""
        known = self.active_w.get(service)
        if not known:
            return None
        energy_j = cpu_s * (known[variant] if variant in known else known[""])
        carbon_g = energy_j * self.g_per_kwh / JOULES_PER_KWH
        quality = self.own_quality.get(service, {}).get(variant, self.quality[service])
        return EnergyShare(energy_j, carbon_g if math.isfinite(carbon_g) else None, quality)

    def as_dict(self) -> dict[str, Any]:
        """The table as a JSON-ready object."""
        return {
            "active_w": {service: dict(watts) for service, watts in self.active_w.items()},
            "quality": {service: quality.value for service, quality in self.quality.items()},
            "own_quality": {
                service: {variant: quality.value for variant, quality in known.items()}
                for service, known in self.own_quality.items()
            },
            "g_per_kwh": self.g_per_kwh if math.isfinite(self.g_per_kwh) else None,
        }

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> ChargeTable:
        """The inverse of :meth:`as_dict`.

        Raises:
            DataError: The object is not a table of charges.
        """
        try:
            watts = {
                str(service): {str(variant): float(watts) for variant, watts in known.items()}
                for service, known in found["active_w"].items()
            }
            quality = {str(service): Quality(value) for service, value in found["quality"].items()}
            intensity = found["g_per_kwh"]
            own = {
                str(service): {str(variant): Quality(value) for variant, value in known.items()}
                for service, known in found.get("own_quality", {}).items()
            }
            return cls(watts, quality, math.nan if intensity is None else float(intensity), own)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not a table of charges: {error!r}") from error
