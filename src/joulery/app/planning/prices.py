"""Prices of a site's GPUs from the user's file: on demand and, where services may use them, spot."""

from __future__ import annotations

from joulery.config.plan import GpuConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, DataError
from joulery.store.columns import read_rows

COLUMNS = ("gpu", "market", "usd_per_hour")
ON_DEMAND, SPOT = "on-demand", "spot"
SPOT_SUFFIX = "-spot"
"""Suffix of a GPU type's name in a plan where its GPUs are spot GPUs."""


def priced(site: Site) -> Site:
    """The site with the on-demand prices of its file; unchanged without a file.

    Raises:
        ConfigError: A GPU type has no price.
        DataError: The file cannot be read, or a row of it cannot be used.
    """
    if site.fleet.prices is None:
        return site
    known = _prices(site)
    gpus = tuple(_at(index, gpu, known.get((gpu.name, ON_DEMAND))) for index, gpu in enumerate(site.fleet.gpus))
    return _with(site, gpus)


def priced_with_spot(site: Site) -> tuple[Site, frozenset[str]]:
    """The site with the prices of its file, and the names of the GPU types that are spot GPUs.

    A type with a spot price is listed twice, once as ``NAME-spot``; without an on-demand price, only as that.

    Raises:
        ConfigError, DataError: As :func:`priced`.
    """
    if site.fleet.prices is None:
        return site, frozenset()
    known = _prices(site)
    gpus: list[GpuConfig] = []
    spot: set[str] = set()
    for index, gpu in enumerate(site.fleet.gpus):
        cheap = known.get((gpu.name, SPOT))
        if cheap is None or gpu.usd_per_hour is not None or (gpu.name, ON_DEMAND) in known:
            gpus.append(_at(index, gpu, known.get((gpu.name, ON_DEMAND))))
        if cheap is not None:
            name = gpu.name + SPOT_SUFFIX
            known_by_name = gpu.profile_file is None and gpu.measurements is None
            profile = gpu.profile or gpu.name.lower() if known_by_name else gpu.profile
            gpus.append(gpu.model_copy(update={"name": name, "usd_per_hour": cheap, "profile": profile}))
            spot.add(name)
    return _with(site, tuple(gpus)), frozenset(spot)


def _prices(site: Site) -> dict[tuple[str, str], float]:
    """Dollars an hour by GPU type and market."""
    assert site.fleet.prices is not None
    names = [gpu.name for gpu in site.fleet.gpus]
    found: dict[tuple[str, str], float] = {}
    for row in read_rows(site.fleet.prices, COLUMNS):
        if row["gpu"] not in names:
            continue  # price lists hold more types than a site uses
        if row["market"] not in (ON_DEMAND, SPOT):
            raise row.wrong(f"the market is {row['market']!r}", hint=f"expected {ON_DEMAND} or {SPOT}")
        key = (row["gpu"], row["market"])
        if key in found:
            raise row.wrong(f"a second price of {key[0]} {key[1]}", hint="one row for each type and market")
        found[key] = row.positive("usd_per_hour")
    if not found:
        raise DataError(
            "the file has no price of any GPU type of the fleet",
            file=str(site.fleet.prices),
            hint=f"expected rows for {', '.join(names) or 'fleet.gpus'}",
        )
    return found


def _at(index: int, gpu: GpuConfig, usd_per_hour: float | None) -> GpuConfig:
    """The GPU type with a price; with its own when None."""
    if usd_per_hour is None and gpu.usd_per_hour is None:
        raise ConfigError(
            f"no price of {gpu.name}",
            pointer=f"fleet.gpus.{index}.price",
            expected="a price here, or a row of market on-demand in fleet.prices",
        )
    return gpu if usd_per_hour is None else gpu.model_copy(update={"usd_per_hour": usd_per_hour})


def _with(site: Site, gpus: tuple[GpuConfig, ...]) -> Site:
    fleet = site.fleet.model_copy(update={"gpus": gpus, "prices": None})
    return site.model_copy(update={"fleet": fleet})
