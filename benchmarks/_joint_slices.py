"""Checks 2, 4, 5, 6 and 7 of preset joint on MIG slices, with the measured A100-80GB table. Needs the data set."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks import data_folder
from joulery.app.planning.joint import joint_request
from joulery.config import load
from joulery.domain.gpu.optimum import PlanCertificate
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.policies.placement.joint.compare import comparisons
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointRequest, problem_of
from joulery.sim.placement.plan_judge import judge_plan

SMALL = 60
"""Number of small MIG problems that are compared with brute force."""
_EQUAL = 1e-5
_OTHER_POWERS = ((40.0, 300.0), (90.0, 400.0))
"""Idle and busy watts other than the example's, to show how much of the result depends on that assumption."""


class Added(Protocol):
    """Collects the checks."""

    rows: list[list[str]]
    figures: dict[str, Any]

    def add(self, number: str, what: str, held: bool | None, result: str, **figures: Any) -> None:
        """Add one check: its bar, whether it held, and its figures."""
        ...


def add_slice_checks(checks: Added) -> list[str]:
    """Add every check on GPUs with MIG slices, and return the notes.

    Raises:
        NotRun: The data set is not here.
    """
    asked = example()
    begin = time.process_time()
    plan = plan_joint(asked)
    took_s = time.process_time() - begin
    _watts(checks, asked, plan, took_s)
    _losses(checks, asked)
    _simulated(checks, asked, plan)
    _left_out(checks, asked)
    _brute_force(checks)
    return [
        "I2: examples/joint-mig.yaml, six services of ResNet and DenseNet variants on the ParvaGPU table of an "
        "A100-80GB (batch times by MIG slice and processes, measured). Its power is assumed: idle 60 W, 400 W while "
        "kernels execute on the whole board at full clock, each slice its compute slices' part of the difference, "
        "voltage and idle power following a measured V100's curves stretched over 1026 to 1410 MHz. Services, rates "
        "and power are not those of the prototype behind the specification, so watts compare with its figures in "
        "size alone; the ratios are the result.",
    ]


def example() -> JointRequest:
    """The request of instance I2, from ``examples/joint-mig.yaml``.

    Raises:
        NotRun: The data set is not here.
    """
    os.environ["JOULERY_DATA"] = str(data_folder("clover").parent)
    return joint_request(load(str(Path(__file__).resolve().parents[1] / "examples" / "joint-mig.yaml")))


def _proof(plan: ProvisionPlan) -> PlanCertificate:
    assert plan.certificate is not None
    return plan.certificate


def _hosted(asked: JointRequest, host_w: float) -> JointRequest:
    return replace(asked, fleet=tuple(replace(each, host_w=host_w) for each in asked.fleet))


def _loaded(asked: JointRequest, ratio: float) -> JointRequest:
    services = tuple(
        replace(each, workload=replace(each.workload, rate_rps=ratio * each.workload.rate_rps))
        for each in asked.services
    )
    return replace(asked, services=services)


def _powered(asked: JointRequest, idle_w: float, busy_w: float) -> JointRequest:
    kinds = []
    for each in asked.fleet:
        assert each.sliced is not None
        profile = each.gpu_type.profile
        held = replace(each.gpu_type, profile=replace(profile, gpu=replace(profile.gpu, idle_w=idle_w)))
        kinds.append(replace(each, gpu_type=held, sliced=replace(each.sliced, idle_w=idle_w, busy_w=busy_w)))
    return replace(asked, fleet=tuple(kinds))


def _watts(checks: Added, asked: JointRequest, plan: ProvisionPlan, took_s: float) -> None:
    """Check 2: I2 with and without host watts, at a lower load, and under other assumptions of power."""
    result: dict[str, dict[str, float]] = {}
    cases = {
        "0 W host": asked,
        "60 W host": _hosted(asked, 60.0),
        "load 0.3": _loaded(asked, 0.3),
        **{f"idle {idle:g} W, busy {busy:g} W": _powered(asked, idle, busy) for idle, busy in _OTHER_POWERS},
    }
    for name, case in cases.items():
        made = plan if case is asked else plan_joint(case)
        values = {each.policy: _proof(each).value for each in comparisons(case)}
        value, gap_ratio = _proof(made).value, _proof(made).gap_ratio
        single = min(watts for policy, watts in values.items() if policy.startswith("only "))
        result[name] = {
            "joint_w": value,
            "gpus": len(made.gpus),
            "gap_ratio": gap_ratio,
            "relaxed_w": _proof(made).relaxed,
            "of_single": value / single,
            "of_composed": value / values["one after the other"],
            **values,
        }
        text = f"joint {value:.0f} W on {len(made.gpus)} GPUs, gap {100 * gap_ratio:.2f} %; "
        text += "; ".join(f"{policy} {watts:.0f} W" for policy, watts in values.items())
        text += f"; {result[name]['of_single']:.3f} of the best single knob, {result[name]['of_composed']:.3f} in turn"
        checks.rows.append(["2", f"I2, 1 % accuracy lost, {name}", text])
    first, hosted = result["0 W host"], result["60 W host"]
    text = f"{first['joint_w']:.0f} W, gap {100 * first['gap_ratio']:.2f} %, {first['of_single']:.3f} of the best "
    text += f"single knob, {first['of_composed']:.3f} of one after the other; {took_s:.1f} s of user CPU"
    held = first["joint_w"] <= 1290 and first["gap_ratio"] <= 0.01
    held = held and first["of_single"] <= 0.66 and first["of_composed"] <= 0.87
    bar = "I2 at 1 %: at most 1,290 W, gap at most 1 %, 0.66 of the best single knob, 0.87 of one after the other"
    checks.add("2", bar, held, text, cases=result, cpu_s=took_s)
    text = f"{hosted['of_composed']:.3f}, gap {100 * hosted['gap_ratio']:.2f} %"
    checks.add("2", "with 60 W host: at most 0.93 of one after the other", hosted["of_composed"] <= 0.93, text)


def _losses(checks: Added, asked: JointRequest) -> None:
    """Check 4 on I2: accuracy floors, and watts as the allowed loss of accuracy grows."""
    watts, missed = [], 0.0
    for loss in (0.0, 0.005, 0.01, 0.02, 0.03):
        services = tuple(
            replace(each, floor_ratio=(1 - loss) * max(variant.accuracy_ratio for variant in each.variants))
            for each in asked.services
        )
        plan = plan_joint(replace(asked, services=services))
        watts.append(_proof(plan).value)
        for each in services:
            mine = [one for gpu in plan.gpus for one in gpu.instances if one.workload == each.workload.id]
            mean = math.fsum(one.rate_rps * one.accuracy_ratio for one in mine) / each.workload.rate_rps
            missed = max(missed, each.floor_ratio - mean)
    held = missed <= 1e-9 and all(a >= b * (1 - 1e-9) for a, b in itertools.pairwise(watts))
    text = "W at 0, 0.5, 1, 2, 3 % lost: " + ", ".join(f"{each:.0f}" for each in watts)
    text += f"; a floor missed by at most {max(missed, 0.0):.1e}"
    checks.add("4", "floors to 1e-9, watts never rise with the allowed loss (I2)", held, text, i2_power_w=watts)


def _simulated(checks: Added, asked: JointRequest, plan: ProvisionPlan) -> None:
    sliced = {each.gpu_type.name: each.sliced for each in asked.fleet if each.sliced is not None}
    verdict = judge_plan(plan.gpus, [each.workload for each in asked.services], {}, sliced=sliced)
    off, worst = verdict.power_w / _proof(plan).power_w - 1, max(verdict.tail_ratio.values())
    text = f"{len(verdict.violated)} violations, worst tail {100 * worst:.1f} % of its SLO, watts {100 * off:+.1f} %"
    bar = "I2 simulated on three numbers a curve, 3 seeds, processes busy as they come: no violation, watts within 3 %"
    held = not verdict.violated and abs(off) <= 0.03
    checks.add("5", bar, held, text, i2_tail_ratio=worst, i2_power_error_ratio=off)


def _left_out(checks: Added, asked: JointRequest) -> None:
    """Check 6: each measured batch predicted from the others of its curve."""
    sliced = asked.fleet[0].sliced
    assert sliced is not None
    inner, edge = [], []
    for curve in itertools.chain.from_iterable(sliced.table.curves.values()):
        if len(curve.batches) < 3:
            continue
        for at, (batch, time_s) in enumerate(zip(curve.batches, curve.times_s, strict=True)):
            error = abs(curve.without(batch).time_s(batch) / time_s - 1)
            (inner if 0 < at < len(curve.batches) - 1 else edge).append(error)
    every = [*inner, *edge]
    median, mean = statistics.median(every), statistics.fmean(every)
    tenth = statistics.quantiles(every, n=10)[-1]
    text = (
        f"{len(every)} left out: median {100 * median:.1f} %, mean {100 * mean:.1f} %, 90th percentile "
        f"{100 * tenth:.1f} %; between measured batches {100 * statistics.fmean(inner):.1f} % in the mean, the "
        f"smallest and largest {100 * statistics.fmean(edge):.1f} %"
    )
    bar = "left-out MIG batches: at most 8 % in the median and in the mean"
    checks.add("6", bar, max(median, mean) <= 0.08, text, median=median, mean=mean, p90=tenth)


def _brute_force(checks: Added) -> None:
    from tests.policies.placement.joint.brute_force_mig import most_worth, optimum, random_request

    order, equal, proven = 0, 0, 0
    for seed in range(SMALL):
        asked = random_request(seed)
        best, certificate = optimum(problem_of(asked)), _proof(plan_joint(asked))
        order += certificate.bound <= best * (1 + 1e-9) and best <= certificate.value * (1 + 1e-9)
        equal += certificate.value <= best * (1 + _EQUAL)
        proven += most_worth(certificate) <= 1 + 1e-7
    text = f"{order} in order, {equal} equal, prices proven again in {proven} of {SMALL}"
    bar = f"{SMALL} small cut problems by brute force: bound ≤ optimum ≤ plan always, equal in at least 95 %"
    checks.add("7", bar, min(order, proven) == SMALL and equal >= 0.95 * SMALL, text, mig_in_order=order)
