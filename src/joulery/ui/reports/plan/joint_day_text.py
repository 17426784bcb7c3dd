"""A series of joint plans on the terminal: one line per period, then the total beside its alternatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from joulery.ui.reports.plan.joint_text import value_text
from joulery.ui.reports.plan.shares_text import clock_text

if TYPE_CHECKING:
    from joulery.app.planning.plans import DayPlan

_HEADINGS = ("from", "hours", "demand", "GPUs", "clocks", "objective", "moves", "woken", "asleep", "switching")

_SAME_PERCENT = 0.05
"""Totals closer than this are called equal."""


def day_view(day: DayPlan) -> RenderableType:
    """One line per period, then the total."""
    shown = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        shown.add_column(heading, justify="right")
    objective = day.periods[0].period.request.objective
    for each in day.periods:
        moves, gpus = each.moves, each.plan.gpus
        clocks = sorted({round(gpu.clock_set_mhz) for gpu in gpus if gpu.clock_set_mhz is not None})
        rate = sum(one.workload.rate_rps for one in each.period.request.services)
        shown.add_row(
            clock_text(each.period.from_s),
            f"{each.period.hours:.3g}",
            f"{rate:.4g} /s",
            str(len(gpus)),
            f"{clocks[0]} MHz" if len(clocks) == 1 else f"{clocks[0]}-{clocks[-1]} MHz" if clocks else "",
            value_text(each.period.request.objective, each.value),
            *(("", "", "") if moves is None else (str(moves.moves), str(moves.opened), str(moves.closed))),
            "" if moves is None else _total(objective.unit, each.switching),
        )
    unit = objective.unit
    saved = 100 * (1 - day.against_ratio)
    against = "as much as" if abs(saved) < _SAME_PERCENT else f"{saved:.1f} % less than"
    total = (
        f"{_total(unit, day.total)} over the series, of it {_total(unit, day.switching)} for changes (modelled); the "
        f"peak's plan all the time {_total(unit, day.peak_total)}, a plan of its own for each period "
        f"{_total(unit, day.hourly_total)}, of it {_total(unit, day.hourly_switching)} for changes; {against} "
        "the better of the two"
    )
    kept = "Changes keep capacity: GPUs that are opened or changed are ready before the period, others leave after."
    return Group(shown, Text(), Text(total), Text(kept, "dim"))


def _total(unit: str, value: float) -> str:
    """A total: objective times hours."""
    if unit == "W":
        return f"{value / 1000:,.4g} kWh"
    return f"{value:,.4g} {unit.removesuffix('/h')}"
