"""An envelope on the terminal and as a page: the best plan by load and price, and the error of look-ups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from joulery.domain.format import number, percent
from joulery.domain.gpu.plan_envelope import Envelope, EnvelopePlan, Regret
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.ui.kit.charts import Axes, Line, legend, lines
from joulery.ui.kit.html import head, static_text, table, tag, whole_page
from joulery.ui.reports.plan.joint_text import watts
from joulery.ui.reports.plan.shares_text import pictures, usd

_SHOWN = 6
"""Maximum number of loads that are shown."""
_OFF_RATIO = 0.005
"""Error of look-ups above which a range of loads is named."""
_NAMED = 3
_COLORS = ("var(--v0)", "var(--v1)", "var(--v2)", "var(--v3)", "var(--v4)", "var(--v5)")
_HEADINGS = ("load", "price", "GPUs", "power", "carbon", "rent", "accuracy", "plan")
_POINTS = 120
"""Number of loads of each line in the picture."""


def envelope_view(envelope: Envelope) -> RenderableType:
    """Best plans at a few loads, by price; then the errors of look-ups."""
    shown = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        shown.add_column(heading, justify="left" if heading == "plan" else "right")
    for row in _rows(envelope):
        shown.add_row(*row)
    return Group(shown, Text(), *(Text(line) for line in sentences(envelope)))


def sentences(envelope: Envelope) -> list[str]:
    """Number of plans, the largest error of look-ups and its place, and what is proven."""
    loads, errors = envelope.loads, envelope.errors()
    found = [
        f"{len(envelope.plans)} plans for {len(loads)} loads from {loads[0]:g} to {loads[-1]:g} of the site's rates, "
        f"prices from {_price(envelope, envelope.prices[0])} to {_price(envelope, envelope.prices[-1])}; all figures "
        "are modelled, none of these plans is simulated"
    ]
    off = [each for each in errors if each.error_ratio > _OFF_RATIO]
    if len(loads) > 1:
        inside = envelope.error_table().part_within(_OFF_RATIO)
        found.append(
            f"look-ups cost at most {percent(_OFF_RATIO)} more than the best plan known in {percent(inside)} of "
            "all loads and prices (evenly in the load and in the logarithm of the price)"
        )
    if off:
        named = ", ".join(
            f"{e.from_load:.4g} to {e.to_load:.4g} (up to {percent(e.error_ratio)} at {_price(envelope, e.price)})"
            for e in off[:_NAMED]
        )
        more = f" and {len(off) - _NAMED} other stretches" if len(off) > _NAMED else ""
        found.append(f"farther off between loads {named}{more}: another GPU is needed there, or the limit came first")
    gaps = envelope.gaps
    if gaps:
        found.append(
            f"proven at {len(gaps)} of the {len(envelope.planned)} loads and prices that plans were made for: no plan "
            f"costs less than half of these by more than {percent(gaps[len(gaps) // 2])}, than the worst of them by "
            f"more than {percent(gaps[-1])}"
        )
    return found


def found_view(
    plan: ProvisionPlan, name: str, regret: Regret, saved_ratio: float | None = None
) -> list[RenderableType]:
    """A plan that was looked up, or made again because the envelope was too uncertain, and the saving of that."""
    certificate = plan.certificate
    assert certificate is not None
    proven = f"; proven at most {percent(regret.proven_ratio)}" if math.isfinite(regret.proven_ratio) else ""
    title = name if not saved_ratio else f"instead of {name}"
    head_text = Text(
        f"{title}: {len(plan.gpus)} GPUs, {watts(certificate.power_w)}, {usd(plan.usd_per_hour)}/h; in all "
        f"{usd(certificate.value)}/h at this price\n"
    )
    if saved_ratio is not None:
        saved = f"{percent(saved_ratio, 2)} less than" if saved_ratio > 0 else "no less than"
        head_text.append(
            f"planned again for this load and price, where the envelope is coarse: {saved} the plan that was kept"
            f"{proven}\n"
        )
    elif math.isfinite(regret.known_ratio):
        head_text.append(
            f"at most {percent(regret.known_ratio, 2)} above any plan, as far as the plans made for the envelope are "
            f"the best for their loads and prices{proven}\n"
        )
    head_text.append(f"modelled, not simulated; {certificate.method}", "dim")
    return [head_text, Text(), *pictures(plan)]


def envelope_page(envelope: Envelope, title: str) -> str:
    """The page, ready to be written to a file: rent against power for some loads, power and rent over the load."""
    top = tag("header", tag("div", tag("h1", title), tag("span", "modelled", class_="pill warn")), class_="top")
    frontier, names = _frontiers(envelope)
    power, rent, prices = _over_load(envelope)
    figures = [
        tag(
            "figure",
            tag("h3", "Power against rent: each point is the best plan at some price"),
            legend([(name, _COLORS[at % len(_COLORS)], None) for at, name in enumerate(names)]),
            lines(frontier, Axes("rent, USD/h", "power, W")),
        ),
        tag(
            "figure",
            tag("h3", "Power of the best plan over the load"),
            legend([(name, _COLORS[at % len(_COLORS)], None) for at, name in enumerate(prices)]),
            lines(power, Axes("load, ratio of the site's rates", "power, W")),
        ),
        tag(
            "figure",
            tag("h3", "Rent of the best plan over the load"),
            lines(rent, Axes("load, ratio of the site's rates", "rent, USD/h")),
        ),
    ]
    body = tag(
        "main",
        [tag("p", line, class_="soft") for line in sentences(envelope)],
        figures,
        tag("h2", "What is best where"),
        tag("div", tag("div", table(_HEADINGS, _rows(envelope), text={7}), class_="scroll"), class_="card"),
    )
    return whole_page(head(f"{title}: an envelope", static_text("joulery.css")), tag("body", top, body))


def _loads_shown(envelope: Envelope) -> list[float]:
    """A few loads, evenly apart, of those that were planned for."""
    wanted = np.linspace(envelope.loads[0], envelope.loads[-1], min(_SHOWN, len(envelope.loads)))
    nearest = [min(envelope.loads, key=lambda load: abs(load - one)) for one in wanted.tolist()]
    return list(dict.fromkeys(nearest))


def _rows(envelope: Envelope) -> list[tuple[str, ...]]:
    objective, found = envelope.axis.objective(1.0), list[tuple[str, ...]]()
    for load in _loads_shown(envelope):
        for at, (plan, low, high) in enumerate(envelope.frontier(load)):
            power_w = plan.power_at_w(load)
            grams = objective.carbon_g_per_hour(power_w, len(plan.gpus))
            first, last = low <= envelope.prices[0], high >= envelope.prices[-1]
            price = "any" if first and last else f"up to {number(high)}" if first else f"from {number(low)}"
            found.append(
                (
                    "" if at else f"{load:.3g}",
                    price,
                    _gpus(plan),
                    watts(power_w),
                    "" if grams is None else f"{grams:,.4g} g/h",
                    f"{usd(plan.usd_per_hour)}/h",
                    "" if math.isnan(plan.accuracy_ratio) else percent(plan.accuracy_ratio),
                    plan.name,
                )
            )
    return found


def _gpus(plan: EnvelopePlan) -> str:
    counts: dict[str, int] = {}
    for gpu in plan.gpus:
        counts[gpu.type] = counts.get(gpu.type, 0) + 1
    return " + ".join(f"{count} × {name}" for name, count in counts.items())


def _price(envelope: Envelope, price: float) -> str:
    return number(price, envelope.axis.unit)


def _frontiers(envelope: Envelope) -> tuple[list[Line], list[str]]:
    """For some loads the plans that are best at some price: rent and power."""
    found, names = [], []
    for at, load in enumerate(_loads_shown(envelope)):
        plans = sorted((plan for plan, _, _ in envelope.frontier(load)), key=lambda plan: plan.usd_per_hour)
        x = np.array([plan.usd_per_hour for plan in plans])
        y = np.array([plan.power_at_w(load) for plan in plans])
        tips = [
            f"{plan.name}: {_gpus(plan)}, {usd(plan.usd_per_hour)}/h, {watts(plan.power_at_w(load))}" for plan in plans
        ]
        names.append(f"load {load:.3g}")
        found.append(Line(names[-1], _COLORS[at % len(_COLORS)], x, y, tips=tips))
    return found, names


def _over_load(envelope: Envelope) -> tuple[list[Line], list[Line], list[str]]:
    """Power and rent over the load, at the lowest price, one in between, and the highest."""
    low, high = envelope.prices[0], envelope.prices[-1]
    prices: Sequence[float] = (low, math.sqrt(low * high), high) if high > low else (low,)
    loads = np.linspace(envelope.loads[0], envelope.loads[-1], _POINTS)
    power, rent, names = [], [], []
    for at, price in enumerate(prices):
        plans = [envelope.lookup(price, load)[0] for load in loads.tolist()]
        watts_of = np.array([plan.power_at_w(load) for plan, load in zip(plans, loads.tolist(), strict=True)])
        names.append(_price(envelope, price))
        color = _COLORS[at % len(_COLORS)]
        power.append(Line(names[-1], color, loads, watts_of))
        rent.append(Line(names[-1], color, loads, np.array([plan.usd_per_hour for plan in plans]), steps=True))
    return power, rent, names
