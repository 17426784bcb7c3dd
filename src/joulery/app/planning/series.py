"""``joulery plan --series``: rates that change over time, a plan a period."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from joulery.app.planning.request import Request
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.format import percent
from joulery.policies.placement.provisioning.series import PlannedPeriod, SeriesPlan, periods_of, plan_series
from joulery.ui.reports.plan.document import difference_document, document_of
from joulery.ui.reports.plan.text import usd

SCHEMA = "joulery.plan-series/1"


def planned_series(site: Site, request: Request, preset: str, moves_max: int) -> SeriesPlan:
    """The plans of a site whose services say ``rates``.

    Raises:
        ConfigError: No service does.
        InfeasibleError: A promise cannot be kept in some period.
    """
    steps = {
        service.name: [(step.from_s, step.rate_rps) for step in service.rates] or [(0.0, service.rate_rps or 0.0)]
        for service in site.services
    }
    if all(len(mine) == 1 for mine in steps.values()):
        raise ConfigError(
            "no service says how its rate changes",
            pointer="services",
            expected="rates: [{from: 0 s, rate: 40 /s}, {from: 8 h, rate: 90 /s}]",
        )
    lasts_s = site.plan.lasts_s
    return plan_series(
        preset, request.workloads, periods_of(steps, lasts_s), request.types, request.rules, moves_max=moves_max
    )


def series_document(series: SeriesPlan) -> dict[str, Any]:
    """The plans as one JSON object."""
    return {
        "schema": SCHEMA,
        "periods": [_period(each) for each in series.periods],
        "cost_usd": round(series.usd, 6),
        "peak_cost_usd": round(series.peak_usd, 6),
        "bound_usd": round(series.bound_usd, 6),
        "moves": series.moves,
        "violations": [
            {"from_s": each.period.from_s, "workload": broken.workload}
            for each in series.periods
            for broken in each.plan.violations
        ],
        "peak": document_of(series.peak),
    }


def _period(each: PlannedPeriod) -> dict[str, Any]:
    return {
        "from_s": each.period.from_s,
        "until_s": each.period.until_s,
        "rates_rps": dict(each.period.rates_rps),
        "plan": document_of(each.plan),
        "difference": None if each.change is None else difference_document(each.change),
    }


def series_view(series: SeriesPlan) -> RenderableType:
    """A line a period, and what it comes to."""
    table = Table(box=None, pad_edge=False)
    for heading in ("from", "hours", "demand", "GPUs", "cost", "moved", "started", "stopped", "resized"):
        table.add_column(heading, justify="right")
    for each in series.periods:
        change = each.change
        counts = [str(change.count(what)) if change else "" for what in ("start", "stop", "resize")]
        table.add_row(
            _clock(each.period.from_s),
            f"{each.period.hours:.3g}",
            f"{sum(each.period.rates_rps.values()):.4g} /s",
            str(len(each.plan.gpus)),
            f"{usd(each.plan.usd_per_hour)}/h",
            str(each.moves) if change else "",
            *counts,
        )
    saved = 1 - series.usd / series.peak_usd if series.peak_usd > 0 else 0.0
    words = (
        f"{usd(series.usd)} over the series, {percent(saved)} less than {len(series.peak.gpus)} GPUs all the time "
        f"({usd(series.peak_usd)}); {series.moves} moves; no plan costs less than {usd(series.bound_usd)}"
    )
    return Group(table, Text(), Text(words))


def _clock(seconds: float) -> str:
    """Hours and minutes since the start."""
    minutes = round(seconds / 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}"
