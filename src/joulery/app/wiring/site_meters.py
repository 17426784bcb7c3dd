"""Choose the meters of a site file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from joulery.app.wiring.meters import PREFERRED, open_meter, overlap, parse_meter
from joulery.config.meters import MetersConfig
from joulery.domain.energy.channel import Channel, MeterSpec
from joulery.domain.errors import CapabilityError


def meter_specs(
    config: MetersConfig, defaults: Mapping[str, Mapping[str, str]] = MappingProxyType({})
) -> tuple[MeterSpec, ...] | None:
    """Meters to open; None for the preferred ones that this machine has, which is also the default.

    Where the site narrows the choice or gives the watts of the CPU model, each meter is tried once, now: the meters to
    open are those that answer and read a device that no earlier one reads.

    Args:
        config: The section of the site file.
        defaults: Options by kind of meter, where the site file gives none.

    Raises:
        CapabilityError: None of the meters answers.
        ConfigError: The watts given make no sense.
    """
    if tuple(config.use) == PREFERRED and config.cpu_model is None:
        return None
    found: list[MeterSpec] = []
    seen: list[Channel] = []
    refusals: list[CapabilityError] = []
    for kind in config.use:
        spec = parse_meter(kind)
        if kind == "cpu-model" and config.cpu_model is not None:
            values = config.cpu_model
            options = {"idle_w": values.idle_w, "max_w": values.max_w, "band_ratio": values.band_ratio}
            spec = spec._replace(options=options)
        spec = spec._replace(options={**defaults.get(spec.kind, {}), **spec.options})
        try:
            meter = open_meter(spec)
        except CapabilityError as error:
            refusals.append(error)
            continue
        meter.close()
        if not overlap(seen, meter.channels):
            found.append(spec)
            seen += meter.channels
    if not found:
        raise CapabilityError(
            "none of the meters of the site file answers: " + "; ".join(map(str, refusals)),
            hint="joulery doctor lists what can be read here, and how to grant the rest",
        )
    return tuple(found)
