"""GREEN's acceptance checks 4 to 13; ``JOULERY_DATA`` names the folder with its traces and grids.

``python -m benchmarks green`` takes some ten minutes of a core; ``green_speed`` is separate. Development used the year
2023 of five regions, the PAI traces, generated bursts and every other virtual cluster of Gavel's trace. Check 13 uses
Philly in Germany 2022, the other half of Gavel's trace in France 2023, Alibaba's GPU trace of 2023 in California 2024
and the workloads of Pollux's artifact in Germany 2024: each was unused until the check ran, and has been seen since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import Result, data_folder
from benchmarks._green_checks import Change, Checks, by_size, change, compare, mean, percent, span
from benchmarks._green_traces import (
    DAY_S,
    alibaba,
    august,
    direct,
    first,
    folded,
    gavel,
    philly,
    pollux,
    spread,
    trace,
    trace_jobs,
)
from benchmarks._pollux_workload import ARTIFACT_JCT_S, mean_jct_s
from joulery.domain.arrays import FloatArray
from joulery.domain.decisions import Step
from joulery.perf.power.training_power import JobClass, NodePower, power_table
from joulery.policies.training.allocation import ClusterView
from joulery.policies.training.green import Green, GreenState
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.cluster import TrainingRun, run_training_cluster
from joulery.sim.training.plant import Cluster, Jobs
from joulery.sim.training.study import Setting, jobs_from_trace, run_scheme, scheme
from reproduce.green.bound import least_grams

REGIONS = ("GB", "US-CAL-CISO", "SE", "PL", "CA-ON")


def run() -> Result:
    """Run all checks."""
    checks = Checks([], [])
    burst = [jobs_from_trace(*trace("testbed_day_791.csv"), Streams(seed)) for seed in range(3)]
    days = {region: august(direct(region, 2023)) for region in REGIONS}
    _backlog(checks, "4", {region: days[region] for region in ("GB", "CA-ON", "SE")}, 0.0)
    _burst(checks, burst, {region: days[region] for region in REGIONS[:4]})
    _month(checks, "8", trace_jobs("pai_year_146k.csv", 30 * DAY_S), {r: direct(r, 2023) for r in REGIONS}, 0.0)
    jct_s = mean_jct_s(data_folder("green"))
    away = jct_s / ARTIFACT_JCT_S - 1.0
    checks.add("10", "Pollux on its artifact's workload 6, mean JCT", "2,446 s within 10 %",
               f"{jct_s:.0f} s ({percent(away)})", abs(away) <= 0.10)  # fmt: skip
    _year(checks)
    for place in (
        Elsewhere("DE 2022", direct("DE", 2022), "Philly", philly()),
        Elsewhere("FR 2023", direct("FR", 2023), "Gavel", gavel()),
        Elsewhere("CISO 2024", direct("US-CAL-CISO", 2024), "Alibaba 2023", alibaba()),
        Elsewhere("DE 2024", direct("DE", 2024), "Pollux", pollux()),
    ):
        _elsewhere(checks, place)
        _loads(checks, place)
    return Result(
        "GREEN: acceptance checks",
        ("check", "what", "bar", "ours", "met"),
        checks.rows,
        notes=("Simulated. Means over regions, and over three seeds of the day; the range is over regions.",),
        checks=tuple(checks.held),
    )


def _backlog(checks: Checks, number: str, grids: dict[str, Intensity], slack: float) -> None:
    """Check the saving of shifting with two power classes, one GPU a job, and more work than the cluster can run: alone
    (every gram counts, no job keeps a place), and with the bounds on waiting of ``green``."""
    bars = {"GB": -0.030, "CA-ON": -0.040, "SE": -0.025}
    node = NodePower()
    flat = np.ones(8)
    table = power_table((JobClass("low", 98.0, flat), JobClass("high", 315.0, flat)), node)
    alone: dict[str, Any] = {
        "hysteresis": 1.0,
        "ceiling_gpu_s": None,
        "oldest_share": 0.0,
        "progress_after_s": None,
        "order": "service",
    }
    for region, carbon in grids.items():
        cluster = Cluster(32, node, table, carbon, 172_800.0)
        found: dict[str, list[Change]] = {"alone": [], "as green is": []}
        for seed in range(3):
            rng = np.random.default_rng(seed)
            submit_s = np.sort(rng.uniform(0, DAY_S, 400))
            kind = rng.integers(0, 2, 400)
            one = np.ones(400, np.int64)
            jobs = Jobs(submit_s, rng.uniform(4, 12, 400) * 3600, kind, one, one)
            for how, knobs in (("alone", alone), ("as green is", {})):
                shifted, plain = (run_training_cluster(cluster, jobs, Green(mu=mu, **knobs)) for mu in (2.0, 1.0))
                found[how].append(change(shifted, plain))
        bar = bars.get(region, -0.020) + slack
        for how, changes in found.items():
            job, jct = mean(changes, "job"), mean(changes, "jct")
            held = job <= bar and jct <= 0.05 + slack if how == "alone" else None
            checks.add(number, f"backlog, shifting {how}, job CO2e, {region}",
                       "reported" if held is None else f"<= {percent(bar)}, JCT <= +5 %",
                       f"{percent(job)}, JCT {percent(jct)}", held)  # fmt: skip


def _burst(checks: Checks, burst: Sequence[Jobs], grids: dict[str, Intensity]) -> None:
    """Checks 5 to 11 on the testbed day."""
    setting = Setting(window_s=172_800.0)

    def against(mine: str, other: str) -> list[Change]:
        return compare(burst, grids, setting, mine, other)

    eco = against("green", "ecovisor")
    worst, average = min(c["co2"] for c in eco), mean(eco, "co2")
    held = -0.37 <= average <= -0.27
    checks.add("5", "day, CO2e against EcoVisor, mean", "-37 to -27 %", percent(average), held)
    checks.add("5", "the best region of it", "<= -33 %", percent(worst), worst <= -0.33)
    gaia = against("green", "gaia")
    checks.add("6", "day, mean JCT against GAIA", "each <= -18 %, mean <= -25 %", span(gaia, "jct"),
               max(c["jct"] for c in gaia) <= -0.18 and mean(gaia, "jct") <= -0.25)  # fmt: skip
    checks.add("6", "its CO2e", "<= +4 %", span(gaia, "co2"), max(c["co2"] for c in gaia) <= 0.04)
    checks.add(
        "6", "GREEN as published against GAIA, mean JCT", "reported", span(against("green-paper", "gaia"), "jct")
    )
    paper = against("green-paper", "tiresias")
    for key, bar in (("jct", 0.07), ("p99", 0.07), ("co2", 0.05)):
        held = mean(paper, key) <= bar
        checks.add(
            "7", f"day, GREEN as published against Tiresias, {key}", f"<= {percent(bar)}", span(paper, key), held
        )
    ours = against("green", "tiresias")
    for key, bar in (("jct", -0.30), ("co2", 0.015), ("p99", 0.12)):
        held = mean(ours, key) <= bar
        checks.add(
            "8", f"day, cache and hysteresis against Tiresias, {key}", f"<= {percent(bar)}", span(ours, key), held
        )
    _progress(checks, "8", "testbed", burst, grids)
    asked = against("green", "tiresias-requested")
    for key, bar in (("kwh", -0.05), ("co2", -0.05), ("job", -0.09), ("jct", -0.10)):
        held = mean(asked, key) <= bar
        checks.add("9", f"day, against GPUs as requested, {key}", f"<= {percent(bar)}", span(asked, key), held)
    checks.add("9", "its peak power", "reported", span(asked, "peak"))
    for other in ("pollux", "pollux-like"):
        for mine in ("green:theta=0.5", "green-paper:theta=0.5", "green-lean", "green-lean:theta=0.5"):
            found = against(mine, other)
            held = mean(found, "job") <= -0.05 and mean(found, "jct") <= 0.25
            result = f"{percent(mean(found, 'job'))}, JCT {percent(mean(found, 'jct'))}"
            checks.add("10", f"day, {mine} against {other}, job CO2e", "<= -5 %, JCT <= +25 %", result, held)
    _ablations(checks, burst, {"GB": grids["GB"]}, setting)


def _ablations(checks: Checks, burst: Sequence[Jobs], grid: dict[str, Intensity], setting: Setting) -> None:
    for what, knob in (
        ("one GPU", "fixed_gpus=1"),
        ("two GPUs", "fixed_gpus=2"),
        ("GPU hours", "las=1"),
        ("no shift", "mu=1"),
    ):
        found = compare(burst, grid, setting, f"green:{knob}", "green")
        held = mean(found, "co2") >= -0.0005 if what == "no shift" else None
        bar = ">= 0 CO2e" if what == "no shift" else "sign printed"
        result = f"CO2e {percent(mean(found, 'co2'))}, JCT {percent(mean(found, 'jct'))}"
        checks.add("11", f"ablation: {what}", bar, result, held)
    slow = Setting(window_s=172_800.0, quantum_s=3600.0)
    found = [
        change(run_scheme("green-paper", slow, jobs, grid["GB"]), run_scheme("green-paper", setting, jobs, grid["GB"]))
        for jobs in burst
    ]
    result = f"JCT {percent(mean(found, 'jct'))}, CO2e {percent(mean(found, 'co2'))}"
    held = abs(mean(found, "jct")) < 0.10 and abs(mean(found, "co2")) < 0.02
    checks.add("11", "rounds every 60 min against 30", "JCT < 10 %, CO2e < 2 %", result, held)


def _month(checks: Checks, number: str, jobs: Jobs, grids: dict[str, Intensity], slack: float) -> None:
    found = compare([jobs], grids, Setting(), "green", "tiresias")
    for key, bar in (("jct", 0.02), ("p99", 0.04), ("co2", 0.005)):
        held = mean(found, key) <= bar + slack
        checks.add(number, f"30 days, against Tiresias, {key}", f"<= {percent(bar + slack)}", span(found, key), held)


def year(region: str) -> tuple[Jobs, Intensity]:
    """The year's jobs, and the hourly carbon intensity of 2023 in a region."""
    return trace_jobs("pai_year_146k.csv"), direct(region, 2023)


def _year(checks: Checks) -> None:
    """Check 12: the year in five regions."""
    jobs = trace_jobs("pai_year_146k.csv")
    found: dict[str, list[Change]] = {"preset": [], "requested": [], "lean": [], "sleep": []}
    sizes: list[list[float]] = []
    for region in REGIONS:
        carbon, setting = direct(region, 2023), Setting()
        base = run_scheme("tiresias", setting, jobs, carbon)
        asked = run_scheme("tiresias-requested", setting, jobs, carbon)
        green = run_scheme("green", setting, jobs, carbon)
        lean = run_scheme("green-lean", setting, jobs, carbon)
        found["preset"].append(change(green, base))
        found["requested"].append(change(green, asked))
        found["lean"].append(change(lean, base))
        sizes.append(by_size(jobs, green, base))
        if region == "GB":
            _bound(checks, jobs, carbon, lean, base)
    _year_lines(checks, "12", found, sizes, 0.0)


def _year_lines(
    checks: Checks, number: str, found: dict[str, list[Change]], sizes: Sequence[Sequence[float]], slack: float
) -> None:
    for key, bar in (("jct", 0.05), ("p99", 0.075)):
        held = mean(found["preset"], key) <= bar + slack
        what = f"year, against Tiresias, {key}"
        checks.add(number, what, f"<= {percent(bar + slack)}", span(found["preset"], key), held)
    checks.add(number, "year, against Tiresias, co2", "reported", span(found["preset"], "co2"))
    worst = np.nanmax(np.mean(sizes, axis=0))
    checks.add(
        number,
        "the worst size of job, mean JCT",
        f"<= {percent(0.08 + slack)}",
        percent(worst),
        worst <= 0.08 + slack,
    )
    for key, bar in (("co2", -0.04), ("jct", -0.20)):
        held = mean(found["requested"], key) <= bar + slack
        what = f"year, against GPUs as requested, {key}"
        checks.add(number, what, f"<= {percent(bar + slack)}", span(found["requested"], key), held)
    lean = found["lean"]
    for key, bar in (("co2", -0.15), ("jct", 0.05), ("p99", 0.08)):
        held = mean(lean, key) <= bar + slack
        checks.add("aim" if number == "12" else number, f"year, green-lean against Tiresias, {key}",
                   f"<= {percent(bar + slack)}", span(lean, key), held)  # fmt: skip


def _bound(checks: Checks, jobs: Jobs, carbon: Intensity, lean: TrainingRun, base: TrainingRun) -> None:
    from joulery.perf.power.training_power import RTX3090_CLASSES

    for wait_h, words in ((0, "no wait"), (12, "starts within 12 h")):
        prices = (0.0, 0.005, 0.01, 0.02, 0.04, 0.1)
        curve = least_grams(jobs, RTX3090_CLASSES, (32, NodePower()), carbon, prices, wait_h)
        pairs = sorted((point.mean_jct_s, point.cluster_kg) for point in curve)
        least = float(np.interp(lean.jct_s.mean(), [x for x, _ in pairs], [y for _, y in pairs]))
        share = (base.cluster_kg - lean.cluster_kg) / (base.cluster_kg - least)
        result = f"{percent(lean.cluster_kg / least - 1)} above, {share:.0%} of the possible saving"
        checks.add("bound", f"green-lean, GB, against the bound, {words}", "reported", result)


@dataclass(frozen=True)
class HalfSilent:
    """GREEN where every other job reports its progress."""

    green: Green
    name: str = "green"

    def initial(self) -> GreenState:
        """The initial state of the policy."""
        return self.green.initial()

    def step(self, state: GreenState, view: ClusterView, /) -> Step[GreenState]:
        """Run one round with the reports of half of the jobs."""
        stated_s = np.where(view.job % 2 == 0, view.remaining_s, np.nan)
        return self.green.step(state, replace(view, remaining_s=stated_s))


def _progress(checks: Checks, number: str, on: str, burst: Sequence[Jobs], grids: dict[str, Intensity]) -> None:
    """Repeat the day with progress reports from half of the jobs, or from none."""
    setting = Setting(window_s=172_800.0)
    found: dict[str, list[Change]] = {"every other job reports": [], "no job reports": []}
    for carbon in grids.values():
        cluster = setting.cluster(carbon, scheme("green"), max(int(jobs.max_gpus.max()) for jobs in burst))
        for jobs in burst:
            base = run_scheme("tiresias", setting, jobs, carbon)
            half = run_training_cluster(cluster, jobs, HalfSilent(Green()))
            none = run_scheme("green:progress_after_s=none", setting, jobs, carbon)
            found["every other job reports"].append(change(half, base))
            found["no job reports"].append(change(none, base))
    for who, changes in found.items():
        words = ", ".join(f"{key} {percent(mean(changes, key))}" for key in ("jct", "p99", "co2"))
        checks.add(number, f"{on}: day, against Tiresias, {who} its progress", "reported", words)


@dataclass(frozen=True)
class Elsewhere:
    """A region-year and a trace that nothing was tuned on.

    Attributes:
        grid: Name of the region and year.
        carbon: Hourly carbon intensity.
        trace: Name of the trace.
        submissions: Submissions and durations.
    """

    grid: str
    carbon: Intensity
    trace: str
    submissions: tuple[FloatArray, FloatArray]


def _elsewhere(checks: Checks, place: Elsewhere) -> None:
    """Check 13: checks 4, 5, 8 and 12 on another grid and trace, with two points of slack."""
    slack, number, on = 0.02, "13", f"{place.trace}, {place.grid}"
    mean_day = {place.grid: august(place.carbon)}
    _backlog(checks, number, mean_day, slack - 0.005)
    burst = [folded(*place.submissions, seed) for seed in range(3)]
    setting = Setting(window_s=172_800.0)
    eco = compare(burst, mean_day, setting, "green", "ecovisor")
    checks.add(number, f"{on}: day, CO2e against EcoVisor", "-39 to -25 %", span(eco, "co2"),
               -0.39 <= mean(eco, "co2") <= -0.25)  # fmt: skip
    ours = compare(burst, mean_day, setting, "green", "tiresias")
    for key, bar in (("jct", -0.30), ("co2", 0.015), ("p99", 0.12)):
        bar += slack
        held = mean(ours, key) <= bar
        checks.add(number, f"{on}: day, against Tiresias, {key}", f"<= {percent(bar)}", span(ours, key), held)
    _progress(checks, number, on, burst, mean_day)
    jobs = spread(*place.submissions, 120.0)
    month = first(jobs, 30 * DAY_S)
    _month(checks, number, month, {place.grid: place.carbon}, slack)
    schemes = ("tiresias", "green", "green-lean")
    _to_end(checks, f"{on}, 30 days", {name: run_scheme(name, Setting(), month, place.carbon) for name in schemes})
    base, asked, green, lean = (
        run_scheme(name, Setting(), jobs, place.carbon)
        for name in ("tiresias", "tiresias-requested", "green", "green-lean")
    )
    found = {"preset": [change(green, base)], "requested": [change(green, asked)], "lean": [change(lean, base)]}
    _year_lines(checks, number, found, [by_size(jobs, green, base)], slack)
    _to_end(checks, f"{on}, all", dict(zip(schemes, (base, green, lean), strict=True)))


def _loads(checks: Checks, place: Elsewhere) -> None:
    """Report the same jobs at several loads, to show how much the 99th percentile depends on where it falls."""
    for load in (0.4, 0.52, 0.62, 0.7, 0.8):
        jobs = spread(*place.submissions, 120.0, load)
        base = run_scheme("tiresias", Setting(), jobs, place.carbon)
        for name in ("green", "green-lean"):
            run = run_scheme(name, Setting(), jobs, place.carbon)
            found, sizes = change(run, base), by_size(jobs, run, base)
            words = ", ".join(f"{key} {percent(found[key])}" for key in ("jct", "p99", "co2"))
            result = f"{words}, worst size {percent(float(np.nanmax(sizes)))}"
            checks.add("13", f"{place.trace}, {place.grid}, load {load:g}, {name}", "reported", result)


def _to_end(checks: Checks, span: str, runs: Mapping[str, TrainingRun]) -> None:
    """Report completion times around the quantile of check 13, near which they rise steeply in bursts."""
    points = (0.5, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
    for name, one in runs.items():
        hours = ", ".join(f"{float(np.quantile(one.jct_s, point)) / 3600:.0f}" for point in points)
        checks.add("13", f"{span}, {name}: hours to end of 50, 90, 95, 98, 99, 99.5, 100 %", "reported", hours)
