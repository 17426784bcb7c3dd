"""Read loads over time from a CSV file, and make a joint plan for each period."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from joulery.app.planning.joint import joint_request
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, DataError
from joulery.policies.placement.joint.day import DayPeriod, DayPlan, LoadPeriod, plan_day, with_rates
from joulery.policies.placement.joint.day import SwitchingCosts as SwitchingCosts
from joulery.policies.placement.provisioning.series import periods_of
from joulery.store.plan_documents import document_of
from joulery.tabular import CsvTable, read_csv

Steps = dict[str, list[tuple[float, float]]]
"""``(from_s, rate_rps)`` by service."""
_S_PER_H = 3600.0
_FROM, _LOAD, _INTENSITY = ("from_s", "hour"), "load", "g_per_kwh"


@dataclass(frozen=True, slots=True)
class LoadSeries:
    """Rates and intensities over time.

    Attributes:
        steps: Rates by service.
        g_per_kwh: ``(from_s, intensity)``; empty where the file has none.
    """

    steps: Steps
    g_per_kwh: tuple[tuple[float, float], ...] = ()


def read_loads(file: Path, rates_rps: Mapping[str, float]) -> LoadSeries:
    """Read a CSV file of loads.

    Columns: ``from_s`` (seconds) or ``hour``, ascending from 0; ``load``, a ratio of every service's rate, or a column
    of requests a second for each service; ``g_per_kwh``, if the intensity changes over time.

    Args:
        file: The file.
        rates_rps: Rate of each service at load 1.

    Raises:
        DataError: A column is missing or unknown, a value is not a number of 0 or more, or times do not ascend from 0.
    """
    table = read_csv(file)
    at = next((name for name in _FROM if name in table.header), None)
    if at is None:
        raise DataError(
            "no column from_s or hour", file=str(file), row=1, hint=f"columns: {', '.join(table.header) or 'none'}"
        )
    own = [name for name in table.header if name in rates_rps]
    unknown = [name for name in table.header if name not in (*rates_rps, at, _LOAD, _INTENSITY)]
    if unknown:
        raise DataError(
            f"column {unknown[0]} is neither a service nor known",
            file=str(file),
            row=1,
            hint=f"expected {at}, load, g_per_kwh or services: {', '.join(rates_rps)}",
        )
    if _LOAD not in table.header and len(own) < len(rates_rps):
        missing = next(name for name in rates_rps if name not in own)
        raise DataError(f"no column load, and none for service {missing}", file=str(file), row=1)
    rows = _rows(table, at)
    scale = _S_PER_H if at == "hour" else 1.0
    steps: Steps = {name: [] for name in rates_rps}
    for row in rows:
        for name, rate in rates_rps.items():
            steps[name].append((scale * row[at], row[name] if name in row else rate * row[_LOAD]))
    intensity = tuple((scale * row[at], row[_INTENSITY]) for row in rows) if _INTENSITY in table.header else ()
    return LoadSeries(steps, intensity)


def _rows(table: CsvTable, at: str) -> list[dict[str, float]]:
    """Parse the rows as numbers.

    Raises:
        DataError: A value is not a number of 0 or more, there is no row, or times do not ascend from 0.
    """
    file, found = str(table.file), list[dict[str, float]]()
    for line, cells in table.lines:
        if not any(cell.strip() for cell in cells):
            continue
        row = {}
        for name, cell in zip(table.header, [*cells, *[""] * len(table.header)], strict=False):
            try:
                row[name] = float(cell)
            except ValueError:
                row[name] = math.nan
            if not 0 <= row[name] < math.inf:
                raise DataError(f"{name} is not a number from 0: {cell.strip() or 'empty'}", file=file, row=line)
        if not (row[at] > found[-1][at] if found else row[at] == 0):
            raise DataError(f"{at} ascends from 0, not {row[at]:g}", file=file, row=line)
        found.append(row)
    if not found:
        raise DataError("no loads: no row below the header", file=file, row=1)
    return found


def plan_joint_series(
    site: Site, steps: Mapping[str, Sequence[tuple[float, float]]], g_per_kwh: Sequence[tuple[float, float]] = ()
) -> DayPlan:
    """Make a joint plan for each period, switching costs included.

    Args:
        site: The site.
        steps: ``(from_s, rate_rps)`` by service.
        g_per_kwh: Carbon intensities by the time from which they hold; empty to use the site's.

    Raises:
        ConfigError: A period has no load, or the site lacks a setting that the plan needs.
        InfeasibleError: For some period, no plan is within the SLOs.
    """
    known = dict(steps)
    if g_per_kwh:
        known["\0intensity"] = g_per_kwh  # a further edge of periods, no service can have its name
    periods = []
    for each in periods_of(known, site.plan.lasts_s):
        rates = {name: rate for name, rate in each.rates_rps.items() if name in steps}
        if not any(rates.values()):
            raise ConfigError(
                "a joint plan needs some load in every period",
                pointer="services",
                got=f"none from {each.from_s:g} s",
                expected="a rate above 0 /s",
            )
        request = joint_request(site, None, each.rates_rps.get("\0intensity"))
        served = tuple(one for one in request.services if rates[one.workload.id] > 0)
        periods.append(LoadPeriod(each.from_s, each.until_s, with_rates(replace(request, services=served), rates)))
    return plan_day(periods)


def day_document(day: DayPlan, schema: str) -> dict[str, Any]:
    """The plans of the day as one JSON object; totals are in the objective's unit times hours."""
    objective = day.periods[0].period.request.objective
    return {
        "schema": schema,
        "kind": "joint",
        "objective": objective.name,
        "objective_unit": objective.unit,
        "total": day.total,
        "switching": day.switching,
        "peak_total": day.peak_total,
        "hourly_total": day.hourly_total,
        "hourly_switching": day.hourly_switching,
        "against_ratio": day.against_ratio,
        "violations": [],
        "periods": [_period(each) for each in day.periods],
    }


def _period(each: DayPeriod) -> dict[str, Any]:
    moves = each.moves
    return {
        "from_s": each.period.from_s,
        "until_s": each.period.until_s,
        "rates_rps": {one.workload.id: one.workload.rate_rps for one in each.period.request.services},
        "value": each.value,
        "switching": each.switching,
        "moves": None if moves is None else moves.moves,
        "opened": None if moves is None else moves.opened,
        "closed": None if moves is None else moves.closed,
        "plan": {**document_of(each.plan), "certificate": None},
    }
