"""Several runs as one table, and the table as JSON and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from joulery.accounting.rollup import PART_KEYS, by_name, by_part, by_time, total
from joulery.app.runs.recorded import RunView
from joulery.domain.energy.footprint import Footprint, Row
from joulery.domain.errors import DataError
from joulery.domain.json_numbers import known_number
from joulery.domain.quality import weakest
from joulery.store.run.footprints import footprint_to_dict
from joulery.ui.reports.messages import notes_together

BY = ("component", "device", "meter", "quality", "owner", "workload", "run", "hour", "month", "owner-month")


@dataclass(frozen=True, slots=True)
class Rollup:
    """Runs added up.

    Attributes:
        views: The runs.
        footprint: Their sum.
        by: Grouping of the rows, one of :data:`BY`.
        rows: One row per group; they add up to ``footprint``.
    """

    views: tuple[RunView, ...]
    footprint: Footprint
    by: str
    rows: tuple[Row, ...]


def roll_up(views: Sequence[RunView], by: str) -> Rollup:
    """Add up runs, grouped by one of :data:`BY`.

    Raises:
        DataError: Their grams have different signals or scopes, or ``by`` is ``hour`` and a run has no time series.
    """
    footprint = total((view.name, view.footprint) for view in views)
    if by in PART_KEYS:
        rows = by_part(footprint, by)
    elif by == "hour":
        rows = _by_hour(views)
    else:
        rows = by_name(pair for view in views for pair in _named(view, by))
    return Rollup(tuple(views), footprint, by, rows)


def _named(view: RunView, by: str) -> list[tuple[str, Footprint]]:
    if by == "run":
        return [(view.name, view.footprint)]
    if by == "month":
        return [(_month(view), view.footprint)]
    key = {"owner": "{1}", "workload": "{0}", "owner-month": "{2} {1}"}[by]
    return [(key.format(workload, owner, _month(view)), one) for workload, owner, one in view.charges]


def _month(view: RunView) -> str:
    """The month in which a run began; ``unknown`` where that is not known."""
    start_s = view.footprint.start_s
    return "unknown" if math.isnan(start_s) else f"{datetime.fromtimestamp(start_s, UTC):%Y-%m}"


def _by_hour(views: Sequence[RunView]) -> tuple[Row, ...]:
    for view in views:
        if not view.ticks:
            raise DataError(f"{view.name} has no time series", file=str(view.path), hint="choose another --by")
    rows = [row for view in views for row in by_time(view.ticks, _hour)]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    return tuple(_merged(key, group) for key, group in sorted(groups.items()))


def _merged(key: str, rows: list[Row]) -> Row:
    energy_j = math.fsum(row.energy_j for row in rows)
    carbon_g = math.fsum(row.carbon_g for row in rows)
    return Row(key, energy_j, carbon_g, weakest(row.quality for row in rows))


def _hour(t_s: float) -> str:
    return f"{datetime.fromtimestamp(t_s, UTC):%Y-%m-%dT%H:00Z}"


def as_json(rollup: Rollup, *, with_rows: bool) -> dict[str, Any]:
    """One object: the keys of a footprint, ``runs``, the report's own keys of a single run, and ``rows`` if asked."""
    single = dict(rollup.views[0].report) if len(rollup.views) == 1 else {}
    answer = {**single, **footprint_to_dict(rollup.footprint)}
    answer["runs"] = [
        {
            "id": view.name,
            "kind": view.kind,
            "path": str(view.path),
            "owner": view.manifest.get("owner"),
            "state": view.manifest.get("state"),
            "interrupted": view.interrupted,
        }
        for view in rollup.views
    ]
    if len(rollup.views) > 1:
        answer["notes"] = list(notes_together(rollup.views))
    if with_rows:
        answer["by"] = rollup.by
        answer["rows"] = [
            {
                rollup.by: row.key,
                "energy_j": known_number(row.energy_j),
                "band_j": row.band_j,
                "carbon_g": known_number(row.carbon_g),
                "quality": row.quality.value,
            }
            for row in rollup.rows
        ]
    return answer


def as_csv(rollup: Rollup) -> str:
    """The rows as CSV, with SI units in the header; unknown numbers are empty. The rows add up to the total."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((rollup.by, "energy_j", "band_j", "carbon_g", "quality"))
    for row in rollup.rows:
        numbers = (known_number(row.energy_j), row.band_j, known_number(row.carbon_g))
        writer.writerow((row.key, *("" if n is None else repr(float(n)) for n in numbers), row.quality.value))
    return text.getvalue()
