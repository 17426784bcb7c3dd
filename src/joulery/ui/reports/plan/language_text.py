"""A plan for language models on the terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from joulery.domain.format import percent, si
from joulery.domain.gpu.language_plan import LanguageAlternative, LanguagePlan, LanguageReplicas, SloPart

_OBJECTIVES = {"carbon": "grams an hour", "energy": "watts", "cost": "dollars an hour"}
_NAMES = {"ttft": "TTFT", "itl": "ITL", "answer": "answer"}


def language_view(plan: LanguagePlan, explain: bool) -> list[RenderableType]:
    """The plan for a terminal."""
    parts: list[RenderableType] = [Text(headline(plan), "bold"), Text(bound_text(plan)), Text(), _table(plan)]
    if len(plan.alternatives) > 1:
        parts += [Text(), Text("each variant on one GPU type alone", "bold"), _alternatives(plan.alternatives)]
    parts += [Text(), Text("each replica with vLLM", "bold"), *(Text(line) for line in commands(plan))]
    parts += [
        Text(),
        *(Text(line) for line in judgement(plan)),
        Text(f"modelled, from measured runs: {plan.source}", "dim"),
    ]
    if explain:
        parts += [Text(), Text("why", "bold"), *(Text(f"- {line}") for line in explanation(plan))]
    return parts


def headline(plan: LanguagePlan) -> str:
    """GPUs, dollars, watts and grams in one line."""
    kinds: dict[str, int] = {}
    for each in plan.replicas:
        kinds[each.gpu] = kinds.get(each.gpu, 0) + each.count * each.gpus
    gpus = " + ".join(f"{count} × {gpu}" for gpu, count in kinds.items())
    grams = plan.carbon_g_per_hour
    text = f"least {_OBJECTIVES[plan.objective]}: {gpus}, ${plan.usd_per_hour:.2f}/h, {si(plan.power_w, 'W')}"
    kept = "every SLO kept, by prediction" if not plan.violations else "an SLO is missed in the simulation"
    return text + ("" if grams is None else f", {grams:.0f} g/h") + f"; {kept}"


def bound_text(plan: LanguagePlan) -> str:
    """Largest improvement that any plan could bring."""
    if plan.bound.gap_ratio <= 1e-6:
        return f"optimal among {plan.candidates} candidate replicas, within the predictor"
    return (
        f"no mixture of the {plan.candidates} candidate replicas has less than {percent(1 - plan.bound.gap_ratio)} "
        f"of these {_OBJECTIVES[plan.objective]}, within the predictor"
    )


def commands(plan: LanguagePlan) -> list[str]:
    """Commands that start the replicas, one line a kind."""
    return [f"{each.count} × on {each.gpus} × {each.gpu}: {each.command}" for each in plan.replicas]


def judgement(plan: LanguagePlan) -> list[str]:
    """Results of the simulation of each kind of replica, as text."""
    lines = []
    for each in plan.replicas:
        limits = {part.name: part for part in each.parts}
        latencies = ", ".join(f"{_NAMES[name]}{_quantile(limits[name])} {si(s, 's')}" for name, s in each.simulated_s)
        if latencies:
            verdict = "within its SLOs" if each.kept else "misses an SLO"
            lines.append(f"simulated with noise: {each.variant} on {each.gpus} × {each.gpu}: {latencies}; {verdict}")
    return lines


def _quantile(part: SloPart) -> str:
    return "" if part.quantile_ratio is None else f" p{100 * part.quantile_ratio:g}"


def _table(plan: LanguagePlan) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    left = ("service", "model", "GPUs a replica", "basis")
    for name in (
        *("service", "replicas", "model", "GPUs a replica", "at most", "in flight", "rate", "TTFT", "ITL"),
        *("W", "J a token", "basis"),
    ):
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for each in plan.replicas:
        by_name = {part.name: part for part in each.parts}
        table.add_row(
            each.service,
            str(each.count),
            each.variant.rpartition("/")[2],
            f"{each.gpus} × {each.gpu}",
            str(each.max_num_seqs),
            f"{each.in_flight:.1f}",
            f"{each.rate_rps:.3g} /s",
            _latency(by_name.get("ttft")),
            _latency(by_name.get("itl")),
            f"{each.power_w + each.host_w:.0f}",
            f"{each.energy_per_token_j:.3g} ±{percent(each.error_ratio, 0)}",
            each.basis,
        )
    return table


def _latency(part: SloPart | None) -> str:
    return "–" if part is None else f"{si(part.predicted_s, 's')} of {si(part.limit_s, 's')}"


def _alternatives(found: tuple[LanguageAlternative, ...]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("service", "model", "GPUs", "dollars an hour", "W", "J a token", ""):
        table.add_column(name, justify="left" if name in ("service", "model", "") else "right", overflow="fold")
    for each in sorted(found, key=lambda one: (one.service, one.gpus == 0, one.usd_per_hour)):
        figures = (
            (f"{each.gpus} × {each.gpu}", f"{each.usd_per_hour:.2f}", f"{each.power_w:.0f}")
            if each.gpus
            else (each.gpu, "–", "–")
        )
        joules = f"{each.energy_per_token_j:.3g}" if each.gpus else "–"
        table.add_row(
            each.service,
            f"{each.model.rpartition('/')[2]} {each.precision}",
            *figures,
            joules,
            Text(each.reason, "dim"),
        )
    return table


def explanation(plan: LanguagePlan) -> list[str]:
    """Binding constraints and assumptions; one sentence each."""
    lines = [_binding(each) for each in plan.replicas if each.parts]
    for each in plan.replicas:
        share = each.host_w / (each.power_w + each.host_w)
        if share > 0:
            lines.append(f"{each.variant}: {percent(share)} of its watts are the host's")
    best = min((each for each in plan.alternatives if each.gpus), key=lambda one: one.usd_per_hour, default=None)
    if best is not None:
        lines.append(f"one kind of replica alone costs ${best.usd_per_hour:.2f}/h or more")
    return [*lines, *worth(plan), *plan.notes]


def worth(plan: LanguagePlan) -> list[str]:
    """Value of further requests, GPUs, looser limits and other models; one sentence each."""
    proof = plan.certificate
    if proof is None:
        return []
    unit = plan.objective

    def cost_text(value: float) -> str:
        return {"cost": f"${value:,.3g}/h", "energy": si(value, "W"), "carbon": f"{value:,.3g} g/h"}[unit]

    lines = [
        f"a tenth more requests of {name} would cost about {cost_text(price * proof.rates_rps[name] / 10)}"
        for name, price in proof.demand_price.items()
    ]
    lines += [
        f"one {name} more would save about {cost_text(price)}" for name, price in proof.pool_price.items() if price > 0
    ]
    for each in proof.looser:
        if each.what == "quality":
            lower = f"a quality of {percent(each.then)} instead of {percent(each.now)}"
            lines.append(f"{each.service}: {lower} would save about {cost_text(each.saves)}, with {each.model}")
        else:
            longer = f"{_NAMES[each.what]} within {si(each.then, 's')} instead of {si(each.now, 's')}"
            lines.append(f"{each.service}: {longer} would save about {cost_text(each.saves)}")
    return [
        *lines,
        f"these prices prove that no plan has less than {cost_text(proof.relaxed)}; they hold for small changes, in "
        "fractions of replicas",
    ]


def _binding(each: LanguageReplicas) -> str:
    tight = min(each.parts, key=lambda part: part.slack_ratio)
    return (
        f"{each.service}: {_NAMES[tight.name]}{_quantile(tight)} binds {each.variant} on {each.gpus} × {each.gpu}: "
        f"{si(tight.predicted_s, 's')} of {si(tight.limit_s, 's')}, a margin of {percent(tight.margin_ratio)} included"
    )
