"""A plan for language models as one self-contained page: every replica as a bar, the numbers below."""

from __future__ import annotations

from joulery.domain.format import percent, si
from joulery.domain.gpu.language_plan import LanguagePlan, LanguageReplicas
from joulery.ui.kit.charts import Piece, StackedRow, color_legend, stacked
from joulery.ui.kit.html import head, static_text, table, tag, whole_page
from joulery.ui.reports.plan.language_text import bound_text, explanation, headline

_COLORS = ("var(--v0)", "var(--v1)", "var(--v2)", "var(--v3)", "var(--v4)", "var(--v5)")
_COLUMNS = (
    "service",
    "replicas",
    "model",
    "GPUs a replica",
    "requests at most",
    "in flight",
    "W",
    "J a token",
    "basis",
)


def language_page(plan: LanguagePlan, title: str) -> str:
    """The page, ready to be written to a file."""
    top = tag(
        "header",
        tag("div", tag("h1", title), tag("span", "modelled", class_="pill warn"), tag("span", headline(plan))),
        class_="top",
    )
    names = list(dict.fromkeys(each.variant for each in plan.replicas))
    colors = {name: _COLORS[at % len(_COLORS)] for at, name in enumerate(names)}
    rows = [
        StackedRow(
            f"{each.gpus} × {each.gpu}",
            [_piece(each, colors[each.variant])],
            f"{each.rate_rps:.3g} /s, {each.power_w + each.host_w:.0f} W",
        )
        for each in plan.replicas
        for _ in range(each.count)
    ]
    picture = stacked(rows, f"{plan.gpus} GPUs: requests in flight of those each replica may run", name_width=150)
    cells = [
        (
            each.service,
            str(each.count),
            each.variant,
            f"{each.gpus} × {each.gpu}",
            str(each.max_num_seqs),
            f"{each.in_flight:.1f}",
            si(each.power_w + each.host_w, "W"),
            f"{each.energy_per_token_j:.3g} ±{percent(each.error_ratio, 0)}",
            each.basis,
        )
        for each in plan.replicas
    ]
    body = tag(
        "main",
        tag("figure", tag("h3", "Every replica and how full its batch is"), color_legend(colors), picture),
        tag("h2", "What answers"),
        tag("div", tag("div", table(_COLUMNS, cells, text={0, 2, 8}), class_="scroll"), class_="card"),
        tag("h2", "Why"),
        tag("ul", (tag("li", line) for line in explanation(plan))),
        tag("p", bound_text(plan), class_="soft"),
        tag("p", f"from measured runs: {plan.source}", class_="soft"),
    )
    return whole_page(head(title, static_text("joulery.css")), tag("body", top, body))


def _piece(each: LanguageReplicas, color: str) -> Piece:
    """Fill of a replica's batch."""
    share = min(each.in_flight / each.max_num_seqs, 1.0)
    labels = (f"{each.in_flight:.1f} of {each.max_num_seqs}", f"{each.in_flight:.0f}")
    return Piece(labels, share, color, f"{each.variant}: {each.in_flight:.1f} of {each.max_num_seqs} in flight")
