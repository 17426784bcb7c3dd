"""A clock profile on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from joulery.domain.format import number, percent, si
from joulery.domain.gpu.clock_profile import ClockProfile, ScoredOperator
from joulery.domain.quality import Quality

SHOWN = 12
"""Number of operators listed: those that take longest."""


def clock_view(profile: ClockProfile, notes: Sequence[str]) -> list[RenderableType]:
    """Score of the model and its phases, the curve, the operators that take longest."""
    parts: list[RenderableType] = [_headline(profile), _curve(profile), Text(""), _operators(profile)]
    footer = [f"{profile.quality.value}: {profile.source}", *notes]
    return [*parts, *(Text(line, style="yellow" if line in notes else "dim") for line in footer)]


def headline(profile: ClockProfile) -> str:
    """The headline: ``GPT2-large on V100: score 0.53 (modelled), prefill 1.61, decode 0.31``."""
    phases = [f"{phase} {profile.phase_score(phase):.2f}" for phase in profile.phases if len(profile.phases) > 1]
    return ", ".join(
        [f"{profile.model} on {profile.device}: score {profile.score:.2f} ({profile.quality.value})", *phases]
    )


def longest(profile: ClockProfile, most: int) -> list[tuple[str, str, str, float, float, float, float, float]]:
    """Kinds of operators by time: name, type, phase, calls, flops, bytes, score, share of the pass."""
    total = sum(each.time_s for each in profile.operators)
    groups: dict[tuple[str, str, str], list[ScoredOperator]] = {}
    for each in profile.operators:
        groups.setdefault((_plain(each.cost.name), each.cost.type, each.cost.phase), []).append(each)
    rows = []
    for (name, type_, phase), members in groups.items():
        time_s = sum(each.time_s for each in members)
        rows.append(
            (
                name if len(members) > 1 else members[0].cost.name,
                type_,
                phase,
                sum(each.cost.count for each in members),
                sum(each.cost.count * each.cost.flops for each in members),
                sum(each.cost.count * each.cost.traffic_bytes for each in members),
                sum(each.score * each.time_s for each in members) / time_s,
                time_s / total,
            )
        )
    return sorted(rows, key=lambda row: -row[-1])[:most]


def _plain(name: str) -> str:
    """A name without its numbers, so that the same operator of each layer is one row."""
    head, _, tail = name.partition(".")
    return tail if tail and head.rstrip("0123456789") == "layer" else name


def _headline(profile: ClockProfile) -> Text:
    flops = sum(each.cost.count * each.cost.flops for each in profile.operators)
    moved = sum(each.cost.count * each.cost.traffic_bytes for each in profile.operators)
    work = (
        f"{len(profile.operators)} operators, {si(flops, 'flop')}, {si(moved, 'B')} moved, "
        f"{si(profile.parameter_bytes, 'B')} of weights"
    )
    return Text.assemble((headline(profile), "bold"), f"\n{work}\n")


def _curve(profile: ClockProfile) -> Table:
    table = _table("clock", "latency", "slower", "power while busy", "energy a pass", "saved")
    top_s, joules = float(profile.latency_s[-1]), profile.latency_s * profile.power_w
    known = profile.power_w == profile.power_w
    best = int(joules[known].argmin()) if known.any() else -1
    for at in range(len(profile.clocks_mhz) - 1, -1, -1):
        latency_s, power_w = float(profile.latency_s[at]), float(profile.power_w[at])
        table.add_row(
            f"{profile.clocks_mhz[at]:.0f} MHz",
            si(latency_s, "s"),
            f"{latency_s / top_s:.2f} x",
            number(power_w, "W"),
            si(latency_s * power_w, "J"),
            percent(1 - float(joules[at] / joules[-1])),
            style="bold" if at == best else None,
        )
    return table


def _operators(profile: ClockProfile) -> Table:
    table = _table("operator", "type", "phase", "calls", "flop", "bytes", "score", "time")
    for name, type_, phase, calls, flops, moved, score, share in longest(profile, SHOWN):
        table.add_row(name, type_, phase, f"{calls:g}", si(flops, ""), si(moved, "B"), f"{score:.2f}", percent(share))
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in ("operator", "type", "phase") else "right")
    return table


def quality_note(profile: ClockProfile) -> str:
    """One sentence on the basis of the numbers."""
    return {
        Quality.MEASURED: "Latency was measured at each clock; scores of single operators are modelled.",
        Quality.MODELLED: "Modelled on an emulated GPU whose curves are fitted to measurements; nothing ran.",
        Quality.ASSUMED: "Assumed: the data sheet of the GPU with curves carried over from another; nothing ran.",
    }[profile.quality]
