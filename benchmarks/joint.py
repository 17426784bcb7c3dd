"""Preset joint: every check of the specification with its figure."""

from __future__ import annotations

import itertools
import math
import resource
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import NotRun, Result
from benchmarks._joint_envelope import add_envelope_checks
from benchmarks._joint_slices import add_slice_checks
from benchmarks.provision import APP12
from joulery.domain.gpu.optimum import PlanObjective, objective_of
from joulery.domain.gpu.provisioning import Arrivals, ProvisionPlan, Workload
from joulery.domain.serving.service import Slo
from joulery.perf import catalog
from joulery.perf.instances import clocks_mhz
from joulery.policies.placement.joint.compare import KNOBS, comparisons, locked
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointFleet, JointRequest, JointService, Variant, problem_of
from joulery.policies.placement.provisioning.gpu_shares import GpuType
from joulery.policies.placement.provisioning.options import Rules
from joulery.policies.placement.provisioning.planner import provision
from joulery.sim.placement.plan_judge import judge_plan

RULES = Rules(margin_ratio=0.05)
ENERGY = objective_of("energy")
SMALL = 200
"""Number of small instances that are compared with brute force."""
_EQUAL = 1e-5


@dataclass
class Checks:
    """Rows, bars and figures in the order in which they are added."""

    rows: list[list[str]] = field(default_factory=list)
    bars: list[tuple[str, bool | None]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, number: str, what: str, held: bool | None, result: str, **figures: Any) -> None:
        """Add one check: its bar, whether it held, and its figures."""
        self.rows.append([number, what, result])
        self.bars.append((f"{number}: {what}", held))
        self.figures.setdefault(number, {"held": held}).update(figures)
        if held is False:
            self.figures[number]["held"] = False


def services(copies: int = 1, arrivals: Arrivals | None = None) -> tuple[JointService, ...]:
    """The twelve services of iGniter, each in ``copies`` slightly different copies."""
    found = []
    for copy in range(copies):
        for at, (model, slo_ms, rate_rps) in enumerate(APP12):
            rate = rate_rps * (1 - 0.03 * copy)
            name = f"W{at + 1}" + (f".{copy}" if copies > 1 else "")
            random = Arrivals.poisson() if arrivals is None else arrivals
            workload = Workload(name, model, Slo(slo_ms / 1e3, 0.99), rate, random)
            found.append(JointService(workload, (Variant(model),)))
    return tuple(found)


def fleet(levels: int = 4, host_w: float = 0.0, available: int | None = None) -> JointFleet:
    """V100s with the calibrated profile."""
    profile = catalog.profile("v100-calibrated")
    return JointFleet(GpuType("V100", profile, 3.06, available), clocks_mhz(profile, levels), host_w)


def request(objective: PlanObjective = ENERGY, levels: int = 4, host_w: float = 0.0, copies: int = 1) -> JointRequest:
    """Instance I1: the twelve services of iGniter on V100s."""
    return JointRequest(services(copies), (fleet(levels, host_w),), RULES, objective)


def _value(plan: ProvisionPlan) -> float:
    assert plan.certificate is not None
    return plan.certificate.value


def _gap(plan: ProvisionPlan) -> float:
    assert plan.certificate is not None
    return plan.certificate.gap_ratio


def _first(checks: Checks) -> ProvisionPlan:
    """Checks 1 and 3: the twelve services with several host watts, locks, dollars."""
    cases = []
    first: ProvisionPlan | None = None
    for host_w in (0.0, 60.0, 120.0):
        asked = request(host_w=host_w)
        plan = plan_joint(asked)
        others = {each.policy: each for each in comparisons(asked)}
        composed = _value(others["one after the other"])
        checks.rows.append(
            [
                "1",
                f"I1, {host_w:g} W host a GPU",
                "; ".join(
                    [f"joint {_value(plan):.0f} W on {len(plan.gpus)} GPUs, gap {100 * _gap(plan):.2f} %"]
                    + [f"{name} {_value(each):.0f} W on {len(each.gpus)}" for name, each in others.items()]
                ),
            ]
        )
        cases.append({"host_w": host_w, "joint_w": _value(plan), "gpus": len(plan.gpus), "gap_ratio": _gap(plan)})
        cases[-1] |= {name: _value(each) for name, each in others.items()}
        if first is None:
            first = plan
            held = _value(plan) <= 1360 and _gap(plan) <= 0.01 and _value(plan) <= 0.85 * composed
            text = f"{_value(plan):.1f} W, gap {100 * _gap(plan):.2f} %, {_value(plan) / composed:.3f} of it"
            bar = "I1 at most 1,360 W, gap at most 1 %, at most 0.85 of one after the other"
            against = _value(plan) / composed
            checks.add("1", bar, held, text, power_w=_value(plan), gap_ratio=_gap(plan), against=against)
    checks.figures["1"]["host_watts"] = cases
    assert first is not None
    best = {knob: _value(plan_joint(locked(request(), [knob]))) for knob in KNOBS if knob != "variant"}
    held = all(_value(first) <= each * (1 + 1e-9) for each in best.values())
    text = ", ".join(f"{knob} {each:.0f} W" for knob, each in best.items())
    checks.add("3", "joint is never above a plan with a locked knob (I1)", held, text, locked_w=best)
    poisson = _dollars(Arrivals.poisson(), RULES)
    constant = _dollars(Arrivals(), Rules())
    held = poisson == (8, 8) and constant == (5, 5)
    text = f"Poisson {poisson[0]} GPUs, best {poisson[1]}; evenly spaced {constant[0]}, best {constant[1]}"
    checks.add("3", "dollars alone: as preset best, 8 V100 Poisson and 5 evenly spaced", held, text)
    return first


def _dollars(arrivals: Arrivals, rules: Rules) -> tuple[int, int]:
    mine = services(1, arrivals)
    best = provision("best", [each.workload for each in mine], [fleet(1).gpu_type], rules)
    plan = plan_joint(JointRequest(mine, (fleet(1),), rules, objective_of("cost")), others=[best])
    return len(plan.gpus), len(best.gpus)


def _floors(checks: Checks) -> None:
    """Check 4, on the models of I1: a service with two variants."""
    accuracy = {"vgg19": 0.724, "alexnet": 0.565}
    found, missed = [], 0.0
    for loss in (0.0, 0.005, 0.01, 0.02, 0.03):
        workload = Workload("a", "vgg19", Slo(0.04, 0.99), 900.0, Arrivals.poisson())
        floor = 0.724 * (1 - loss)
        mine = JointService(workload, tuple(Variant(*each) for each in accuracy.items()), floor)
        plan = plan_joint(JointRequest((mine,), (fleet(2),), RULES, ENERGY))
        answers = [each for gpu in plan.gpus for each in gpu.instances]
        mean = math.fsum(each.rate_rps * each.accuracy_ratio for each in answers) / 900.0
        missed = max(missed, floor - mean)
        found.append(_value(plan))
    held = missed <= 1e-9 and all(a >= b * (1 - 1e-9) for a, b in itertools.pairwise(found))
    text = "W at 0, 0.5, 1, 2, 3 % lost: " + ", ".join(f"{each:.0f}" for each in found)
    checks.add("4", "floors to 1e-9, watts never rise with the allowed loss (V100 models)", held, text, power_w=found)


def _simulated(checks: Checks, plan: ProvisionPlan) -> None:
    assert plan.certificate is not None
    verdict = judge_plan(plan.gpus, [each.workload for each in services()], {"V100": catalog.profile("v100-refit")})
    off = verdict.power_w / plan.certificate.power_w - 1
    worst = max(verdict.tail_ratio.values())
    text = f"{len(verdict.violated)} violations, worst tail {100 * worst:.1f} % of its SLO, watts {100 * off:+.1f} %"
    bar = "simulated on V100 (refit), 3 seeds, neighbours busy: no violation, watts within 3 %"
    checks.add("5", bar, not verdict.violated and abs(off) <= 0.03, text, tail_ratio=worst, power_error_ratio=off)


def _brute_force(checks: Checks) -> None:
    """Check 7: small instances against brute force."""
    from tests.policies.placement.joint.brute_force import optimum, random_request

    order, equal, widest = 0, 0, 0.0
    for seed in range(SMALL):
        asked = random_request(seed)
        best, plan = optimum(problem_of(asked)), plan_joint(asked)
        assert plan.certificate is not None
        bound, value = plan.certificate.bound, plan.certificate.value
        order += bound <= best * (1 + 1e-9) and best <= value * (1 + 1e-9)
        equal += value <= best * (1 + _EQUAL)
        widest = max(widest, value / best - 1)
    text = f"{order} in order, {equal} equal of {SMALL}; the worst plan {100 * widest:.3f} % above the optimum"
    bar = f"{SMALL} small instances by brute force: bound ≤ optimum ≤ plan always, equal in at least 95 %"
    checks.add("7", bar, order == SMALL and equal >= 0.95 * SMALL, text, in_order=order, equal=equal)


def alike(count: int) -> JointRequest:
    """Instance I1 repeated until it has ``count`` services."""
    base = request()
    copies = [
        replace(each, workload=replace(each.workload, id=f"{each.workload.id}.{copy}"))
        for copy in range(math.ceil(count / 12))
        for each in base.services
    ]
    return replace(base, services=tuple(copies[:count]))


def _speed(checks: Checks) -> None:
    for count, seconds in ((100, 120.0), (1000, 120.0)):
        begin = time.process_time()
        plan = plan_joint(alike(count))
        took = time.process_time() - begin
        text = f"{took:.1f} s, {_value(plan):,.0f} W on {len(plan.gpus)} GPUs, gap {100 * _gap(plan):.2f} %"
        bar = f"{count} services of 12 kinds: at most {seconds:g} s of user CPU, gap at most 2 %"
        figures = {f"cpu_s_{count}_alike": took, f"gap_ratio_{count}_alike": _gap(plan)}
        checks.add("8", bar, took <= seconds and _gap(plan) <= 0.02, text, **figures)
    for copies, seconds, gap in ((1, 5.0, 0.01), (2, 30.0, 0.01), (4, 30.0, 0.01)):
        begin = time.process_time()
        plan = plan_joint(request(copies=copies))
        took = time.process_time() - begin
        text = f"{took:.1f} s, {_value(plan):.0f} W on {len(plan.gpus)} GPUs, gap {100 * _gap(plan):.2f} %"
        bar = f"{12 * copies} services: at most {seconds:g} s of user CPU, gap at most {100 * gap:g} %"
        checks.add("8", bar, took <= seconds and _gap(plan) <= gap, text, **{f"cpu_s_{12 * copies}": took})
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    checks.rows.append(["8", "greatest memory of this run", f"{memory_mb:.0f} MiB"])


def _limits(checks: Checks) -> None:
    from joulery.domain.errors import InfeasibleError

    errors = []
    for asked in (replace(request(levels=2), fleet=(fleet(2, available=5),)), replace(request(), power_cap_w=900.0)):
        try:
            plan_joint(asked)
        except InfeasibleError as error:
            errors.append(f"exit {error.exit_code}, {error.binding}, nearest plan has {error.nearest['gpus']} GPUs")
    bar = "pool or power cap too small: exit 3, the binding row, the nearest plan"
    checks.add("12", bar, len(errors) == 2, "; ".join(errors))


def _mixed(checks: Checks) -> None:
    t4 = catalog.profile("synthetic-t4")
    kinds = (fleet(2), JointFleet(GpuType("T4 (synthetic)", t4, 0.53), clocks_mhz(t4, 2)))
    asked = (services()[5], services()[8], services()[11])
    objective = objective_of({"cost": 1.0, "energy": 0.3})
    found = []
    for some in (kinds, kinds[:1], kinds[1:]):
        try:
            found.append(_value(plan_joint(JointRequest(asked, some, RULES, objective))))
        except Exception as error:  # noqa: BLE001 - a type that cannot serve them says so in the row
            found.append(math.inf)
            print(error, file=sys.stderr)
    text = f"mixed {found[0]:.3f} USD/h, V100 {found[1]:.3f}, synthetic T4 {found[2]:.3f}"
    held = found[0] <= min(found[1:]) * (1 + 1e-6)
    checks.add("13", "a mixed fleet never costs more than any single type", held, text)


def _slices(checks: Checks) -> list[str]:
    """Checks 2, 4, 5, 6 and 7 on GPUs with MIG slices, if the measured table is available."""
    try:
        return add_slice_checks(checks)
    except NotRun as absent:
        checks.add("2", "I2, the measured A100-80GB table", None, str(absent))
        return []


def run() -> Result:
    """Run every check."""
    from benchmarks.joint_over_time import day_of_switching, executed, warm_replans

    checks = Checks()
    plan = _first(checks)
    _floors(checks)
    _simulated(checks, plan)
    limits = "held by tests/perf/test_instances.py and tests/perf/test_slice_table.py"
    checks.add("6", "old models are the predictor's limits", None, limits)
    notes = _slices(checks)
    _brute_force(checks)
    _speed(checks)
    _limits(checks)
    _mixed(checks)
    warm_replans(checks, plan)
    day_of_switching(checks)
    executed(checks)
    add_envelope_checks(checks, request())
    order = sorted(range(len(checks.rows)), key=lambda at: int(checks.rows[at][0]))
    return Result(
        "One plan over all knobs (preset joint)",
        ("check", "what", "figure"),
        [checks.rows[at] for at in order],
        notes=[
            "I1: the twelve services of the iGniter paper, Poisson, p99, V100 with the coefficients calibrated on "
            "measured pairs, margin 5 %, four clocks from 1530 MHz to the voltage's knee. Watts are modelled; the "
            "voltage and idle curves are a measured V100's of another clock range, stretched. Every gap holds within "
            "that predictor and the stated choices.",
            *notes,
        ],
        checks=sorted(checks.bars, key=lambda bar: int(bar[0].split(":")[0])),
        figures=checks.figures,
    )
