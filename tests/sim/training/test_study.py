import csv
from functools import cache
from itertools import takewhile

import numpy as np
import pytest

from benchmarks._pollux_workload import ARTIFACT_JCT_S, mean_jct_s
from joulery.domain.errors import ConfigError, DataError
from joulery.perf.power.training_power import POWER_LIMITS, RTX3090_CLASSES, limited
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.cluster import TrainingRun
from joulery.sim.training.plant import Jobs
from joulery.sim.training.study import MIXES, SCHEMES, Setting, jobs_from_trace, run_scheme, scheme, synthetic_trace
from tests.data_folder import data_folder

REGIONS = ("GB", "SE", "US-CAL-CISO", "PL", "CA-ON")
AUGUST_H = slice(212 * 24, 243 * 24)


def direct(region: str) -> np.ndarray:
    with (data_folder("carbon") / f"{region}_2023.csv").open() as handle:
        return np.array([float(row["ci_direct"]) for row in csv.DictReader(handle)])


def trace(name: str, until_s: float = np.inf) -> tuple[np.ndarray, np.ndarray]:
    with (data_folder("green") / name).open() as handle:
        read = ((float(row["submit_s"]), float(row["duration_s"])) for row in csv.DictReader(handle))
        rows = np.array(list(takewhile(lambda row: row[0] < until_s, read)))  # in order of submission
    return rows[:, 0], rows[:, 1]


def change(run: TrainingRun, base: TrainingRun) -> dict[str, float]:
    pairs = {
        "jct": (run.jct_s.mean(), base.jct_s.mean()),
        "p99": (np.quantile(run.jct_s, 0.99), np.quantile(base.jct_s, 0.99)),
        "job": (run.job_kg.sum(), base.job_kg.sum()),
        "co2": (run.cluster_kg, base.cluster_kg),
        "kwh": (run.cluster_kwh, base.cluster_kwh),
    }
    return {name: float(mine / theirs - 1) for name, (mine, theirs) in pairs.items()}


def day(region: str, *schemes: str, seeds: int = 2) -> list[dict[str, float]]:
    """Mean change of the first scheme against each other one, on the testbed day."""
    carbon = Intensity(direct(region)[AUGUST_H].reshape(31, 24).mean(0))
    changes: list[list[dict[str, float]]] = []
    for seed in range(seeds):
        jobs = jobs_from_trace(*trace("testbed_day_791.csv"), Streams(seed))
        runs = [run_scheme(scheme, Setting(window_s=172_800.0), jobs, carbon) for scheme in schemes]
        changes.append([change(runs[0], other) for other in runs[1:]])
    return [
        {key: float(np.mean([row[at][key] for row in changes])) for key in changes[0][at]}
        for at in range(len(schemes) - 1)
    ]


@pytest.mark.parametrize("region", ["GB", "SE"])
def test_on_a_burst_green_is_much_faster_than_tiresias_for_about_the_same_carbon(region: str) -> None:
    preset, requested = day(region, "green", "tiresias", "tiresias-requested")
    assert preset["jct"] <= -0.30 and preset["co2"] <= 0.015 and preset["p99"] <= 0.12
    assert requested["kwh"] <= -0.05 and requested["co2"] <= -0.05 and requested["job"] <= -0.09
    assert requested["jct"] <= -0.10


@pytest.mark.parametrize("region", ["GB", "PL"])
def test_green_as_published_beats_gaia_in_time(region: str) -> None:
    gaia = day(region, "green", "gaia")[0]
    assert gaia["jct"] <= -0.18 and gaia["co2"] <= 0.04


@pytest.mark.slow
def test_a_month_of_the_year_trace() -> None:
    jobs = jobs_from_trace(*trace("pai_year_146k.csv", 30 * 86_400.0), Streams(0))
    carbon = Intensity(direct("GB"))
    base = run_scheme("tiresias", Setting(), jobs, carbon)
    green = change(run_scheme("green", Setting(), jobs, carbon), base)
    assert green["jct"] <= 0.02 and green["p99"] <= 0.04 and green["co2"] <= 0.005
    lean = change(run_scheme("green-lean", Setting(), jobs, carbon), base)
    assert lean["co2"] <= -0.14 and lean["jct"] <= 0.05 and lean["p99"] <= 0.08


def test_synthetic_jobs_keep_their_mix_and_never_step_back() -> None:
    submit_s, duration_s = synthetic_trace(20, 400, "day", Streams(1))
    assert len(submit_s) == 8000 and submit_s[0] >= 0 and submit_s[-1] < 20 * 86_400
    assert bool(np.all(np.diff(submit_s) >= 0))
    shares = np.histogram(duration_s, [60, 600, 3600, 36_000, 133_200])[0] / 8000
    assert shares == pytest.approx(MIXES["day"], abs=0.02)
    night = np.mean((submit_s % 86_400 < 6 * 3600) | (submit_s % 86_400 > 18 * 3600))
    assert night < 0.4
    again = synthetic_trace(20, 400, "day", Streams(1))
    assert again[0].tobytes() == submit_s.tobytes()


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_runs_a_small_day(name: str) -> None:
    jobs = jobs_from_trace(*synthetic_trace(1, 60, "year", Streams(2)), Streams(2))
    carbon = Intensity(np.array([300.0, 100.0, 50.0, 200.0] * 6))
    run = run_scheme(name, Setting(nodes=8), jobs, carbon)
    assert bool(np.all(np.isfinite(run.finish_s))) and run.most_gpus <= 16


def test_a_power_limit_slows_and_saves() -> None:
    for limit_ratio in POWER_LIMITS:
        for full, cut in zip(RTX3090_CLASSES, limited(RTX3090_CLASSES, limit_ratio), strict=True):
            assert cut.time_ratio >= 1.0 and cut.gpu_w * cut.time_ratio <= full.gpu_w
    assert limited(RTX3090_CLASSES, 1.0) == RTX3090_CLASSES
    with pytest.raises(ConfigError, match="no measurement"):
        limited(RTX3090_CLASSES, 0.4)


def test_unknown_schemes_and_impossible_jobs_are_refused() -> None:
    jobs = jobs_from_trace(np.zeros(1), np.ones(1), Streams(0), requested=np.array([99]))
    carbon = Intensity(np.ones(24))
    with pytest.raises(ConfigError, match="no such training policy"):
        run_scheme("best", Setting(), jobs, carbon)
    with pytest.raises(DataError, match=r"job 0 .*99 GPUs, .*has 64"):
        run_scheme("green", Setting(), jobs, carbon)


def test_every_knob_can_be_turned_in_the_name_of_a_scheme() -> None:
    jobs = jobs_from_trace(*synthetic_trace(1, 60, "year", Streams(2)), Streams(2))
    carbon = Intensity(np.array([300.0, 100.0, 50.0, 200.0] * 6))
    runs = {
        name: run_scheme(name, Setting(nodes=8), jobs, carbon)
        for name in ("green", "green:mu=2", "green:mu=1", "green-unshifted", "green:sleep=1", "green-sleep",
                     "green:limit=0.75", "green:eta=0.5", "green:cap=none", "green:fixed_gpus=1",
                     "tiresias:threshold_gpu_s=600")
    }  # fmt: skip
    for same in (
        ("green", "green:mu=2"),
        ("green:mu=1", "green-unshifted"),
        ("green:sleep=1", "green-sleep"),
        ("green", "green:cap=none"),
    ):
        assert runs[same[0]].digest == runs[same[1]].digest
    assert runs["green:limit=0.75"].job_j.sum() < runs["green"].job_j.sum()
    assert runs["green:eta=0.5"].job_j.sum() < runs["green"].job_j.sum()
    assert runs["green:fixed_gpus=1"].digest != runs["green"].digest
    for bad, says in (
        ("green:mue=2", "green has no knob mue"),
        ("green:mu=high", "takes a number"),
        ("gren", "no such training policy"),
    ):
        with pytest.raises(ConfigError, match=says):
            run_scheme(bad, Setting(nodes=8), jobs, carbon)


def test_what_schedulers_believe_changes_what_they_do_and_not_what_the_grid_does() -> None:
    jobs = jobs_from_trace(*synthetic_trace(1, 60, "year", Streams(2)), Streams(2))
    carbon = Intensity(np.array([300.0, 100.0, 50.0, 200.0] * 6))
    wrong = Intensity(np.array([50.0, 300.0, 300.0, 50.0] * 6))
    informed = run_scheme("gaia", Setting(nodes=8), jobs, carbon)
    fooled = run_scheme("gaia", Setting(nodes=8, belief=wrong), jobs, carbon)
    assert fooled.digest != informed.digest and fooled.job_kg.sum() > informed.job_kg.sum()
    blind = run_scheme("fifo", Setting(nodes=8, belief=wrong), jobs, carbon)
    assert blind.cluster_kg == run_scheme("fifo", Setting(nodes=8), jobs, carbon).cluster_kg


def test_a_watched_run_keeps_the_course_of_its_power() -> None:
    jobs = jobs_from_trace(*synthetic_trace(1, 60, "year", Streams(2)), Streams(2))
    carbon = Intensity(np.array([300.0, 100.0, 50.0, 200.0] * 6))
    rounds: list[float] = []
    run = run_scheme("green-sleep", Setting(nodes=8), jobs, carbon, lambda t_s, view, step: rounds.append(t_s))
    t_s, power_w = run.power_timeline[:, 0], run.power_timeline[:, 1]
    lasts_s = np.diff(np.append(t_s, run.makespan_s)).clip(0)
    assert float(power_w @ lasts_s) / 3.6e6 == pytest.approx(run.cluster_kwh, rel=1e-9)
    assert power_w.max() == pytest.approx(run.peak_w) and len(rounds) > 5
    assert run_scheme("green-sleep", Setting(nodes=8), jobs, carbon).power_timeline.shape == (0, 2)


@pytest.mark.slow
def test_without_progress_reports_green_differs_and_tiresias_does_not() -> None:
    jobs, carbon = burst_of_a_week(0), Intensity(np.full(24, 200.0))
    reporting, silent = Setting(nodes=8), Setting(nodes=8, silent=True)
    green, deaf = (
        run_scheme("green", silent, jobs, carbon),
        run_scheme("green:progress_after_s=none", silent, jobs, carbon),
    )
    assert green.digest != run_scheme("green", reporting, jobs, carbon).digest
    assert green.jct_s.mean() == pytest.approx(deaf.jct_s.mean(), rel=0.05)
    assert run_scheme("tiresias", silent, jobs, carbon).digest == run_scheme("tiresias", reporting, jobs, carbon).digest


def test_pollux_comes_within_a_tenth_of_its_artifact_on_its_own_workload() -> None:
    assert mean_jct_s(data_folder("green")) == pytest.approx(ARTIFACT_JCT_S, rel=0.10)


def burst_of_a_week(seed: int) -> Jobs:
    """On 16 GPUs, half as much again as they can do in that week, a fifth of the jobs longer than ten hours."""
    rng, edges = np.random.default_rng(seed), np.log([60.0, 600.0, 3600.0, 36_000.0, 133_200.0])
    submit_s = np.sort(rng.uniform(0, 7 * 86_400.0, 853))
    size = rng.choice(4, 853, p=MIXES["day"])
    return jobs_from_trace(submit_s, np.exp(rng.uniform(edges[size], edges[size + 1])), Streams(0))


@cache
def in_bursts(name: str) -> dict[str, float]:
    """Means over two such weeks: in one there are eight jobs beyond the 99th percentile."""
    grid = Intensity(200 + 100 * np.sin(np.arange(24) / 24 * 2 * np.pi))
    runs = [run_scheme(name, Setting(nodes=8), burst_of_a_week(seed), grid) for seed in range(2)]
    return {
        "p99": float(np.mean([np.quantile(run.jct_s, 0.99) for run in runs])),
        "mean": float(np.mean([run.jct_s.mean() for run in runs])),
        "preemptions": float(np.mean([run.preemptions for run in runs])),
        "grams": float(np.mean([run.cluster_kg for run in runs])),
    }


@pytest.mark.slow
def test_in_a_burst_of_a_week_the_slowest_end_sooner_than_under_tiresias() -> None:
    tiresias = in_bursts("tiresias")
    for name in ("green", "green-lean"):
        assert in_bursts(name)["p99"] < 0.8 * tiresias["p99"] and in_bursts(name)["mean"] < 0.65 * tiresias["mean"]
    blind = in_bursts("green:progress_after_s=none")
    assert blind["p99"] < tiresias["p99"] and blind["mean"] < 0.65 * tiresias["mean"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "without", "what", "at_least"),
    [
        ("green", "oldest_share=0", "p99", 1.05),
        ("green", "progress_after_s=none", "mean", 1.4),
        ("green", "ageing_s=none", "p99", 1.10),
        ("green", "ceiling_gpu_s=none", "p99", 1.10),
        ("green", "gamma=0.9", "mean", 1.03),
        ("green", "levels=none", "preemptions", 1.25),
        ("green", "hysteresis=1", "preemptions", 1.25),
        ("green", "mu=1", "grams", 1.01),
        ("green-lean", "lift_after_s=none", "mean", 1.05),
    ],
)
def test_what_each_of_them_is_good_for(scheme: str, without: str, what: str, at_least: float) -> None:
    assert in_bursts(f"{scheme}:{without}")[what] > at_least * in_bursts(scheme)[what]


def test_a_scheme_says_how_it_is_run_or_that_it_is_simulated_only() -> None:
    assert scheme("green").live == "run it with jobs.policy.kind: green"
    assert "SuspendProgram" in scheme("green-sleep").live
    for kind in ("swift", "lean", "frugal"):
        assert f"jobs.policy.kind: {kind}," in scheme(kind).live
        assert scheme(f"green-{kind}").live.endswith(f"{kind} is what can be run")
    assert "theta: 0.5" in scheme("green:theta=0.5").live
    for name in ("green-lean", "green:limit=0.75", "green:eta=0.5", "green:ageing_s=9", "fifo"):
        assert scheme(name).live.startswith("simulated only"), name
