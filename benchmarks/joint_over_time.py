"""Checks 10, 11 and 14 of preset joint: warm re-planning, a day with switching costs, plans executed on fakes."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.joint import Checks, request
from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.policies.placement.joint.day import LoadPeriod, plan_day, with_rates
from joulery.policies.placement.joint.following.warm import replan
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointRequest

MOVES = 28
"""Moves of check 10: about all instances of both plans may change."""
FEWER = (16, 8, 0)
DAY = (
    *(0.42, 0.36, 0.32, 0.30, 0.30, 0.33, 0.42, 0.56, 0.72, 0.85, 0.93, 0.97),
    *(1.0, 0.98, 0.95, 0.93, 0.92, 0.94, 0.97, 0.95, 0.86, 0.74, 0.62, 0.50),
)
"""Load of each hour, assumed: a night at 0.3, a plateau from 10 to 20 o'clock."""
PLAYS = ("tests/e2e/test_up_joint.py", "tests/e2e/test_up_slices.py")


def at_load(asked: JointRequest, load: float) -> JointRequest:
    """The request with all rates multiplied by ``load``."""
    return with_rates(asked, {each.workload.id: load * each.workload.rate_rps for each in asked.services})


def warm_replans(checks: Checks, before: ProvisionPlan) -> None:
    """Check 10: warm re-plans for 20 % less and 20 % more demand of every service."""
    shares, dearer, moves = list[float](), list[float](), list[int]()
    modules = len(sys.modules)
    begin = time.process_time()
    replan(at_load(request(), 0.9), before, MOVES)
    text = f"{time.process_time() - begin:.1f} s, {len(sys.modules) - modules} modules loaded"
    checks.rows.append(["10", "the first re-plan of this process (load 0.9)", text])
    for load in (0.8, 1.2):
        asked = at_load(request(), load)
        begin = time.process_time()
        cold = plan_joint(asked)
        cold_s = time.process_time() - begin
        assert cold.certificate is not None
        for allowed in (MOVES, *FEWER):
            begin = time.process_time()
            try:
                found = replan(asked, before, allowed)
            except InfeasibleError as error:
                checks.rows.append(["10", f"load {load:g}, at most {allowed} moves", str(error)])
                continue
            took = (time.process_time() - begin) / cold_s
            assert found.plan.certificate is not None
            against = found.plan.certificate.value / cold.certificate.value
            text = f"{found.moves.moves} moves, {against:.4f} of the cold plan, {100 * took:.0f} % of its CPU"
            checks.rows.append(["10", f"load {load:g}, at most {allowed} moves", text])
            if allowed == MOVES:
                shares.append(took)
                dearer.append(against)
                moves.append(found.moves.moves)
    text = f"CPU {100 * max(shares):.0f} % at most, objective {100 * (max(dearer) - 1):.2f} % above, moves {moves}"
    held = max(shares) <= 0.25 and max(dearer) <= 1.01 and max(moves) <= MOVES
    bar = f"demand ±20 %: warm at most 25 % of the cold CPU, within 1 %, at most {MOVES} moves"
    checks.add("10", bar, held, text, cpu_ratio=shares, value_ratio=dearer, moves=moves)


def day_of_switching(checks: Checks) -> None:
    """Check 11: a day of plans with switching costs."""
    periods = [LoadPeriod(3600.0 * at, 3600.0 * (at + 1), at_load(request(), load)) for at, load in enumerate(DAY)]
    day = plan_day(periods)
    free = (day.hourly_total - day.hourly_switching) / min(day.peak_total, day.hourly_total)
    bounds = {load: _bound(plan_joint(at_load(request(), load))) for load in dict.fromkeys(DAY)}
    least = math.fsum(bounds[load] for load in DAY) / min(day.peak_total, day.hourly_total)
    text = (
        f"{day.against_ratio:.4f} ({day.total / 1e3:.2f} kWh, of it {day.switching / 1e3:.2f} for changes; peak's plan "
        f"{day.peak_total / 1e3:.2f}, hourly {day.hourly_total / 1e3:.2f}, of it {day.hourly_switching / 1e3:.2f}); "
        f"with free changes it would be {free:.4f}; the hours' bounds alone come to {least:.4f}: no plan reaches less"
    )
    bar = "24 h with switching costs: at most 0.97 of the better of the peak's plan and hourly re-planning"
    checks.add("11", bar, day.against_ratio <= 0.97, text, against=day.against_ratio, free_changes=free, bound=least)


def _bound(plan: ProvisionPlan) -> float:
    assert plan.certificate is not None
    return plan.certificate.bound


def executed(checks: Checks) -> None:
    """Check 14: end-to-end tests of the real command with stand-ins for the driver and MPS."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLAYS],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    last = re.findall(r"\d+ (?:passed|failed|skipped|error)[^\n]*", done.stdout)
    text = f"{last[-1].split(' in ')[0] if last else 'no result'}; stand-ins for NVML and MPS, not yet run on hardware"
    what = "cuts, shares, processes of slices, clocks within bounds, leased, given back, also after kill -9"
    bar = f"a joint plan executed: {what} ({', '.join(PLAYS)})"
    ran = bool(last) and "passed" in last[-1] and "skipped" not in last[-1]  # pytest is content with skipped tests
    checks.add("14", bar, None if done.returncode == 0 and not ran else done.returncode == 0, text)
