"""``joulery plan --preset columns|clover``: the plan as JSON (schema ``joulery.pool-plan/1``) and on the terminal."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from joulery.app.planning.pool_request import PoolBaseline, PoolRequest
from joulery.domain.errors import ConfigError
from joulery.policies.placement.pools.pool import Pool, Used, cost_w, idle_shares_w
from joulery.policies.placement.pools.problem import PoolProblem, edges_of
from joulery.policies.placement.pools.search import Effort, Judge, PoolPlan, infeasible, plan_pool
from joulery.policies.serving.annealing import TrialMetrics, annealing_search
from joulery.policies.serving.layout_space import LayoutSpace
from joulery.sim.core.streams import Streams
from joulery.sim.placement.pool_trial import judge
from joulery.ui.kit.format import percent, si

SCHEMA = "joulery.pool-plan/1"
PRESETS = ("columns", "clover")


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """A plan and what it was asked.

    Attributes:
        preset: Who made it.
        request: What was asked.
        plan: The pool, its bound where one was proved (else 0).
    """

    preset: str
    request: PoolRequest
    plan: PoolPlan


def planned(preset: str, request: PoolRequest) -> PlannedPool:
    """Plan with one of :data:`PRESETS`.

    Raises:
        InfeasibleError: No pool keeps the limits.
        ConfigError: The preset clover has not been told how many GPUs there are.
    """
    problem = request.problem
    trial = judge(problem.services, problem.machines, Streams(0))
    if preset == "columns":
        return PlannedPool(preset, request, plan_pool(problem, trial))
    return PlannedPool(preset, request, _annealed(problem, trial))


def _annealed(problem: PoolProblem, trial: Judge) -> PoolPlan:
    """The paper's search: one GPU's configuration, the same on every GPU of the service's share."""
    machine = problem.machines[0]
    if machine.available is None:
        raise ConfigError(
            "preset clover fills every GPU there is", pointer="fleet.gpus.0.available", expected="how many there are"
        )
    gpus = max(1, machine.available // len(problem.services))
    cuts: dict[tuple[int, int, int], int] = {}
    used: list[Used] = []
    trials = 0
    for number, service in enumerate(problem.services):
        edges = edges_of(service, (machine,))
        names = tuple(
            sorted((v.name for v in service.costs.variants), key=lambda name: service.costs[name].accuracy_ratio)
        )
        fits = set(zip(edges.variant, edges.profile, strict=True))
        disabled = {(name, profile.name) for name in names for profile in machine.menu.profiles} - fits
        layouts = LayoutSpace.of(machine.menu, names, disabled, gpus)
        space = layouts.graph

        def score(metrics: TrialMetrics, at: int = number) -> float:
            one = problem.services[at]
            lost = max(one.base_accuracy_ratio - metrics.accuracy_ratio, 0.0)
            return -(problem.energy_weight * metrics.energy_j + one.accuracy_price_j * lost)

        start = space.index(space.vector([(names[-1], machine.menu.profiles[0].name)]))
        search = annealing_search(
            layouts,
            start,
            {},
            score,
            service.limit_s,
            Streams(0)("search", service.name),
            least_accuracy_ratio=service.minimum_accuracy_ratio,
        )
        while (row := search.ask()) is not None:
            instances = [(0, profile, variant) for variant, profile in space.instances(space.graphs[row])]
            search.tell(row, trial(number, tuple(instances * gpus), gpus * machine.idle_w))
        trials += len(search.trials)
        if search.settled is None:
            raise infeasible(problem, Effort())
        chosen = space.graphs[search.settled]
        used.append(tuple((0, profile, variant) for variant, profile in space.instances(chosen)) * gpus)
        slices = tuple(np.reshape(chosen, (len(names), -1)).sum(axis=0).tolist())
        cut = next(at for at, multiset in enumerate(machine.menu.multisets) if machine.menu.counts(multiset) == slices)
        cuts[number, 0, cut] = gpus
    idle = idle_shares_w(problem, cuts, used)
    metrics = tuple(trial(at, mine, idle[at]) for at, mine in enumerate(used))
    pool = Pool(cuts, tuple(used), metrics, cost_w(problem, metrics), judged=True)
    return PoolPlan(pool, 0.0, 0.0, {pool.gpus: pool}, 0, trials)


def layouts_of(made: PlannedPool) -> list[dict[str, Any]]:
    """The GPUs that are on, alike ones counted: machine, cut, and what runs on each slice."""
    problem, pool = made.request.problem, made.plan.pool
    waiting: dict[tuple[int, int, str], list[tuple[str, str]]] = {}
    for number, service in enumerate(problem.services):
        group = 0 if problem.colocate else number
        for machine, profile, variant in pool.used[number]:
            waiting.setdefault((group, machine, profile), []).append((service.name, variant))
    found: Counter[tuple[int, tuple[tuple[str, str, str], ...]]] = Counter()
    for (group, machine, cut), count in sorted(pool.cuts.items()):
        for _ in range(count):
            slices = problem.machines[machine].menu.multisets[cut]
            placed = tuple((profile, *waiting[group, machine, profile].pop(0)) for profile in slices)
            found[machine, placed] += 1
    return [
        {
            "gpu": problem.machines[machine].gpu,
            "clock_mhz": problem.machines[machine].clock_mhz,
            "count": count,
            "instances": [
                {"slice": piece, "service": service, "variant": variant} for piece, service, variant in placed
            ],
        }
        for (machine, placed), count in found.items()
    ]


def document_of(made: PlannedPool) -> dict[str, Any]:
    """The plan, whole."""
    plan, request = made.plan, made.request
    bounded = plan.bound_w > 0
    return {
        "schema": SCHEMA,
        "preset": made.preset,
        "quality": "simulated",
        "intensity_g_per_kwh": request.g_per_kwh if math.isfinite(request.g_per_kwh) else None,
        "gpus_on": plan.pool.gpus,
        "gpus_off": _off(made),
        "layouts": layouts_of(made),
        "services": [_service(made, number) for number in range(len(request.problem.services))],
        "cost_w": plan.pool.cost_w,
        "bound_w": plan.bound_w if bounded else None,
        "gap_ratio": plan.gap_ratio if bounded else None,
        "corrected_bound_w": plan.corrected_bound_w if bounded else None,
        "corrected_gap_ratio": plan.corrected_gap_ratio if bounded else None,
        "boxes": plan.boxes,
        "trials": plan.trials,
        "by_gpus": [
            {
                "gpus": gpus,
                "cost_w": pool.cost_w,
                "accuracy_ratio": [metrics.accuracy_ratio for metrics in pool.metrics],
                "latency_s": [metrics.latency_s for metrics in pool.metrics],
            }
            for gpus, pool in plan.by_gpus.items()
        ],
    }


def _off(made: PlannedPool) -> int:
    return max(0, sum(base.gpus for base in made.request.baselines) - made.plan.pool.gpus)


def _service(made: PlannedPool, number: int) -> dict[str, Any]:
    problem, pool = made.request.problem, made.plan.pool
    service, base, shown = problem.services[number], made.request.baselines[number], pool.metrics[number]
    same_j = _same_gpus_j(made, number, base)
    lost = service.base_accuracy_ratio - shown.accuracy_ratio
    objective = made.request.objectives.get(service.name)
    return {
        "service": service.name,
        "rate_rps": service.rate_rps,
        "accuracy_ratio": shown.accuracy_ratio,
        "minimum_accuracy_ratio": service.minimum_accuracy_ratio,
        "loss_points": 100.0 * lost,
        "loss_ratio": lost / service.base_accuracy_ratio,
        "latency_s": shown.latency_s,
        "limit_s": service.limit_s,
        "energy_j": shown.energy_j,
        "saving_ratio": 1.0 - shown.energy_j / base.energy_j,
        "saving_same_gpus_ratio": 1.0 - same_j / base.energy_j,
        "objective": None
        if objective is None
        else objective.score(shown.accuracy_ratio, shown.energy_j, made.request.g_per_kwh),
        "baseline": {
            "variant": base.variant,
            "gpus": base.gpus,
            "energy_j": base.energy_j,
            "latency_s": base.latency_s,
        },
    }


def _same_gpus_j(made: PlannedPool, number: int, base: PoolBaseline) -> float:
    """Joules a request were every GPU of the yardstick still powered."""
    problem, pool = made.request.problem, made.plan.pool
    own = idle_shares_w(problem, pool.cuts, pool.used)[number]
    service = problem.services[number]
    return pool.metrics[number].energy_j + max(base.idle_w - own, 0.0) / service.rate_rps


def view(made: PlannedPool, explain: bool) -> list[RenderableType]:
    """The plan for a terminal."""
    document = document_of(made)
    off = document["gpus_off"]
    head = f"{document['gpus_on']} GPUs on" + (f", {off} of the yardstick's switched off" if off else "")
    parts: list[RenderableType] = [Text(f"{made.preset}: {head}", style="bold"), _layout_table(document), Text()]
    parts += [_service_table(document), Text()]
    if document["bound_w"] is not None:
        parts.append(Text(bound_text(made)))
    parts.append(Text("simulated request by request; savings against the most accurate variant on whole GPUs", "dim"))
    if explain:
        parts += [Text(), Text("why", style="bold"), *(Text(f"- {line}") for line in explanation(made, document))]
    return parts


def _layout_table(document: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("GPUs", justify="right")
    table.add_column("type")
    table.add_column("on its slices")
    for each in document["layouts"]:
        clock = "" if each["clock_mhz"] is None else f" at {each['clock_mhz']:.0f} MHz"
        many = len(document["services"]) > 1
        placed = [
            f"{one['slice'].partition('.')[0]} {one['service'] + ' ' if many else ''}{one['variant']}"
            for one in each["instances"]
        ]
        table.add_row(str(each["count"]), each["gpu"] + clock, ", ".join(placed))
    return table


def _service_table(document: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    names = ("service", "rate", "accuracy", "lost", "p95", "limit", "J a request", "saved", "same GPUs", "yardstick")
    for name in names:
        table.add_column(name, justify="left" if name == "service" else "right", no_wrap=True)
    for each in document["services"]:
        table.add_row(
            each["service"],
            f"{each['rate_rps']:g} /s",
            percent(each["accuracy_ratio"], 2),
            f"{each['loss_points']:.2f} pts",
            si(each["latency_s"], "s"),
            si(each["limit_s"], "s"),
            f"{each['energy_j']:.1f}",
            percent(each["saving_ratio"]),
            percent(each["saving_same_gpus_ratio"]),
            f"{each['baseline']['gpus']} × {each['baseline']['variant']}",
        )
    return table


def bound_text(made: PlannedPool) -> str:
    """How much better any pool could be."""
    plan = made.plan
    return (
        f"no pool costs less than {percent(1 - plan.gap_ratio)} of this one (closed form); "
        f"{percent(1 - plan.corrected_gap_ratio)} with its latencies corrected by the trials; "
        f"{plan.boxes} relaxations, {plan.trials} trials"
    )


def explanation(made: PlannedPool, document: dict[str, Any]) -> list[str]:
    """What binds and what it would cost otherwise, a sentence each."""
    problem, pool = made.request.problem, made.plan.pool
    idle = math.fsum(idle_shares_w(problem, pool.cuts, pool.used))
    power = math.fsum(m.energy_j * s.rate_rps for m, s in zip(pool.metrics, problem.services, strict=True))
    lines = [f"{percent(idle / power)} of {si(power, 'W')} is idle power of GPUs that are on: why so few are"]
    for each in document["services"]:
        slack = 1 - each["latency_s"] / each["limit_s"]
        said = f"{each['service']}: {percent(slack)} of the latency limit is left"
        if each["minimum_accuracy_ratio"] > 0:
            spare = 100 * (each["accuracy_ratio"] - each["minimum_accuracy_ratio"])
            said += f", {spare:.2f} points above the accuracy asked for"
        lines.append(said)
    for each in document["by_gpus"]:
        if each["gpus"] != document["gpus_on"]:
            more = each["cost_w"] / document["cost_w"] - 1
            lines.append(f"with {each['gpus']} GPUs the best found costs {percent(more)} more")
    if math.isfinite(made.request.g_per_kwh):
        lines.append(f"accuracy is weighed against carbon at {made.request.g_per_kwh:g} g/kWh")
    return lines
