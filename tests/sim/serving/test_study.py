"""Clover's study: the oracle to the digit, the search within the published bands, honest accounting."""

import csv
import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import DataError
from joulery.domain.gpu.mig import A100_40GB
from joulery.domain.serving.variant_table import TableEntry, VariantTable
from joulery.perf.queues.pull_costs import ServiceCosts, VariantCosts
from joulery.policies.serving.observation import SET_LAYOUT, TRY_LAYOUT
from joulery.sim.core.streams import Streams
from joulery.sim.serving.outcome import StudySettings, objective_of, outcome
from joulery.sim.serving.policy_run import baseline_of, run_policy
from joulery.sim.serving.schemes import co2opt_row, fixed, oracle, run_variants, timetable_of
from joulery.sim.serving.trial_table import bench, exhaustive_table
from joulery.store.variant_tables import read_tables
from tests.data_folder import data_folder

TRACES = ("CISO_March", "CISO_Sep", "ESO_March")
SERVICES = ("yolo", "efficientnet", "albert")
SETTINGS = StudySettings()


@cache
def tables():
    return read_tables(data_folder("clover") / "synth_v1")


@cache
def traces():
    with (data_folder("clover") / "carbon_traces_48h.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    return {name: [float(row[name]) for row in rows] for name in TRACES}


@cache
def reference():
    return json.loads((data_folder("clover") / "synth_v1" / "reference_results.json").read_text())


@cache
def heaviest(service, load_s=None):
    return bench(tables()[service], A100_40GB, load_s)


@cache
def runs(service, trace, scheme, seeds=20, settings=SETTINGS):
    made = heaviest(service)
    return [run_variants(scheme, made, trace, traces()[trace], settings, Streams(seed)) for seed in range(seeds)]


def best(service, trace, settings=SETTINGS):
    return run_variants("oracle", heaviest(service), trace, traces()[trace], settings, Streams(0))


def mean(outcomes, name):
    return float(np.mean([getattr(each, name) for each in outcomes]))


@pytest.mark.slow
def test_oracle_equals_the_reference_at_all_150_points():
    points = reference()["oracle"]
    assert len(points) == 150
    for point in points:
        made = heaviest(point["service"], point["mean_interarrival_s"])
        settings = replace(SETTINGS, lambda_ratio=point["lambda"])
        timetable = oracle(made, objective_of(made.table, settings), [point["ci"]])
        found = outcome("oracle", made, objective_of(made.table, settings), [point["ci"]], settings, timetable)
        assert 100 * found.objective == pytest.approx(point["f"], abs=1e-3)
        assert 100 * found.saving_ratio == pytest.approx(point["saving_vs_base_pct"], abs=0.006)
        assert 100 * found.loss_ratio == pytest.approx(point["accuracy_loss_rel_pct"], abs=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
def test_more_weight_on_carbon_saves_no_less_and_loses_no_less(service):
    found = [best(service, "CISO_March", replace(SETTINGS, lambda_ratio=weight / 10)) for weight in range(11)]
    savings, losses = [each.saving_ratio for each in found], [each.loss_ratio for each in found]
    assert savings == sorted(savings)
    assert losses == sorted(losses)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("service", SERVICES)
def test_oracle_over_48_hours_equals_the_reference(service, trace):
    for point in reference()["trace48"]:
        if (point["service"], point["trace"]) == (service, trace):
            found = best(service, trace, replace(SETTINGS, lambda_ratio=point["lambda"]))
            assert 100 * found.saving_ratio == pytest.approx(point["oracle"]["saving_pct"], abs=0.0006)
            assert 100 * found.objective == pytest.approx(point["oracle"]["mean_f"], abs=0.0006)


@pytest.mark.parametrize(("trace", "times"), [("CISO_March", 24), ("CISO_Sep", 17), ("ESO_March", 17)])
def test_the_trigger_fires_as_often_as_published(trace, times):
    assert {each.invocations for each in runs("yolo", trace, "clover", 2)} == {times}
    assert len(traces()[trace]) == 49


@pytest.mark.parametrize(("trace", "times"), [("CISO_March", 27), ("CISO_Sep", 21), ("ESO_March", 27)])
def test_the_trigger_may_be_relative_as_the_paper_words_it(trace, times):
    settings = replace(SETTINGS, replan_of_previous=True)
    assert {each.invocations for each in runs("yolo", trace, "learning", 1, settings)} == {times}


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES)
def test_search_meets_the_published_claims(trace):
    """Lambda 0.1, 20 seeds: saving, loss, gap to the oracle, overhead, and nothing settled above the limit."""
    gaps, savings, losses = [], [], []
    for service in SERVICES:
        found, top = runs(service, trace, "clover"), best(service, trace)
        assert mean(found, "saving_ratio") >= 0.75
        assert mean(found, "loss_points") <= 4.5
        assert max(top.saving_ratio - each.saving_ratio for each in found) <= 0.05
        assert all(each.settled_violations == each.fallbacks == 0 for each in found)
        assert mean(found, "optimise_time_ratio") <= 0.015
        # Trials above the limit may score more than anything that keeps it, for as long as they last.
        assert all(each.objective <= top.objective + 0.1 * each.optimise_time_ratio for each in found)
        gaps.append(1 - mean(found, "objective") / top.objective)
        savings.append(mean(found, "saving_ratio"))
        losses.append(mean(found, "loss_points"))
    assert np.mean(gaps) <= (0.06 if trace == "CISO_March" else 0.10)
    assert np.mean(losses) <= 3.3
    assert np.mean(savings) >= 0.80


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
def test_search_behaves_as_the_reference_does(service):
    (point,) = (
        p for p in reference()["trace48"] if (p["service"], p["trace"], p["lambda"]) == (service, TRACES[0], 0.1)
    )
    for scheme, key in (("clover", "clover_sa_20_seeds"), ("blover", "blover_20_seeds")):
        found, expected = runs(service, TRACES[0], scheme), point[key]
        assert mean(found, "trials") == pytest.approx(expected["new_evaluations"], rel=0.12)
        assert 100 * mean(found, "saving_ratio") == pytest.approx(expected["saving_pct"], abs=1.2)
        assert 100 * mean(found, "objective") == pytest.approx(expected["mean_f"], rel=0.08)
        assert 100 * mean(found, "trials_meeting_limit_ratio") == pytest.approx(
            expected["pct_evaluations_meeting_sla"], abs=5
        )
    ratio = mean(runs(service, TRACES[0], "clover"), "trials") / mean(runs(service, TRACES[0], "blover"), "trials")
    assert ratio <= 0.78


@pytest.mark.parametrize("service", SERVICES)
def test_finest_cut_of_the_smallest_saves_what_the_reference_says_in_both_accountings(service):
    made = heaviest(service)
    row = co2opt_row(made)
    assert {variant for variant, _ in made.space.instances(made.space.graphs[row])} == {made.smallest}
    found = run_variants("co2opt", made, "any", [100.0], SETTINGS, Streams(0))
    first, second = (point for point in reference()["co2opt"] if point["service"] == service)
    assert 100 * found.saving_same_gpus_ratio == pytest.approx(first["carbon_saving_pct"], abs=0.006)
    assert 100 * found.saving_ratio == pytest.approx(second["carbon_saving_pct"], abs=0.006)
    assert 0.30 <= found.saving_same_gpus_ratio <= 0.41


@pytest.mark.parametrize("service", SERVICES)
def test_no_configuration_saves_more_than_idle_power_allows(service):
    """75.2 W of two idle GPUs is a floor: 37.7/35.6/43.2 % with all powered, 87.5/87.1/88.6 % consolidated."""
    made = heaviest(service)
    base_j = made.table.base_energy_j
    ceiling = {"yolo": (0.377, 0.875), "efficientnet": (0.356, 0.871), "albert": (0.432, 0.886)}[service]
    assert 1 - min(made.same_gpus_j) / base_j <= ceiling[0]
    assert 1 - min(metrics.energy_j for metrics in made.metrics) / base_j <= ceiling[1]
    for each in runs(service, TRACES[0], "clover", 2):
        assert each.saving_same_gpus_ratio < ceiling[0] < each.saving_ratio < ceiling[1]


def test_the_baseline_saves_and_loses_nothing():
    made = bench(tables()["yolo"], A100_40GB)
    found = run_variants("base", made, "any", [250.0, 100.0], SETTINGS, Streams(0))
    assert found.saving_ratio == found.saving_same_gpus_ratio == pytest.approx(0.0, abs=1e-12)
    assert found.loss_points == found.loss_ratio == 0.0
    assert found.objective == pytest.approx(0.1 * (0.0 + 0.6) / 2)
    assert (found.trials, found.trials_meeting_limit_ratio, found.fallbacks) == (0, 1.0, 0)


def toy_table(*, latency_s=0.1, loads=(1.0, 0.2), skip=0):
    """Two variants on the two partitions {7g} and {3g, 4g}: 2 + 4 configurations."""
    accuracy, joules = {"a": 0.6, "b": 0.8}, {"a": 10.0, "b": 30.0}
    entries = []
    for partition in (("7g.40gb",), ("3g.20gb", "4g.20gb")):
        for models in ["a", "b"] if len(partition) == 1 else ["aa", "ab", "ba", "bb"]:
            for load_s in loads:
                share = [accuracy[model] for model in models]
                energy_j = sum(joules[model] for model in models) / len(models) + 40 * load_s
                edges = tuple(zip(models, partition, strict=True))
                entries.append(TableEntry(load_s, edges, sum(share) / len(share), latency_s, energy_j))
    return VariantTable("toy", 2, tuple(entries[skip:]), 0.8, 0.15, 80.0, "made up")


MENU = replace(A100_40GB, partitions=(("7g.40gb",), ("3g.20gb", "4g.20gb")))


class Listed:
    """Tries given rows, then settles on a given one, each time the grid moves by more than 12.5 g/kWh."""

    def __init__(self, made, script):
        self.layout, self.script, self.grids = made.layouts.layout, list(script), []

    def initial(self):
        return ([], None, None)

    def step(self, state, seen, /):
        rows, settled, planned = state
        if planned is None or abs(seen.g_per_kwh - planned) > 12.5:
            rows, settled = self.script.pop(0)
            planned = seen.g_per_kwh
            self.grids.append(planned)
        elif seen.sample is None:
            return Step(state)
        kind, row, rest = (TRY_LAYOUT, rows[0], rows[1:]) if rows else (SET_LAYOUT, settled, [])
        decision = Decision(kind, "toy", self.layout(row).names(), "listed", "because")
        return Step((rest, settled, planned), (decision,))


def test_trials_are_paid_for_and_hours_weighted_by_the_grid():
    made = bench(toy_table(), MENU)
    settings = replace(SETTINGS, lambda_ratio=0.5, trial_s=900.0)
    objective, grid = objective_of(made.table, settings), [100.0, 102.0, 300.0]
    row = {name: made.space.index(made.space.vector([(name, "7g.40gb")])) for name in "ab"}
    policy = Listed(made, [([row["b"], row["a"]], row["a"]), ([], row["b"])])
    timetable = run_policy(policy, made, baseline_of(made), grid, settings)
    assert timetable.periods == (
        ((0.25, row["b"]), (0.25, row["a"]), (0.5, row["a"])),
        ((1.0, row["a"]),),
        ((1.0, row["b"]),),
    )
    assert timetable.trials == (row["b"], row["a"]) and timetable.trials_at == (2, 0, 0)
    assert timetable.invocations == 2 and policy.grids == [100.0, 300.0]
    found = outcome("listed", made, objective, grid, settings, timetable)
    energy_j = [0.25 * 38 + 0.75 * 18, 18.0, 38.0]
    assert found.saving_ratio == pytest.approx(
        1 - sum(g * e for g, e in zip(grid, energy_j, strict=True)) / (sum(grid) * 80.0)
    )
    assert found.saving_same_gpus_ratio == pytest.approx(
        1 - sum(g * (e + 32) for g, e in zip(grid, energy_j, strict=True)) / (sum(grid) * 80.0)
    )
    assert found.loss_points == pytest.approx(100 * (0.2 * 0.75 + 0.2) / 3)
    assert found.loss_ratio == pytest.approx((0.2 * 0.75 + 0.2) / 3 / 0.8)
    assert found.optimise_time_ratio == pytest.approx(2 * 900 / (3 * 3600))
    assert found.trials_meeting_limit_ratio == 1.0


def test_nothing_feasible_falls_back_to_the_baseline_and_says_so():
    made = bench(toy_table(latency_s=0.2), MENU)
    objective, grid = objective_of(made.table, SETTINGS), [100.0, 300.0]
    timetable = timetable_of("clover", made, "any", grid, SETTINGS, Streams(0))
    found = outcome("clover", made, objective, grid, SETTINGS, timetable)
    assert found.fallbacks == 2
    assert found.settled_violations == 0
    assert found.trials == len(made.space) == 6, "everything is tried once, nothing twice"
    assert found.trials_meeting_limit_ratio == 0.0
    assert oracle(made, objective, grid).periods == (((1.0, None),), ((1.0, None),))


def test_violations_of_what_is_settled_are_counted():
    made = bench(toy_table(latency_s=0.2), MENU)
    objective = objective_of(made.table, SETTINGS)
    assert outcome("x", made, objective, [1.0, 2.0], SETTINGS, fixed(0, [1.0, 2.0])).settled_violations == 2


def test_incomplete_tables_are_refused():
    with pytest.raises(DataError, match=r"no load of 0\.5 s"):
        bench(toy_table(), MENU, 0.5)
    with pytest.raises(DataError, match="lacks"):
        bench(toy_table(skip=1), MENU)
    with pytest.raises(DataError, match="no partition carries"):
        bench(toy_table(), replace(MENU, partitions=(("7g.40gb",),)))


def test_equal_seeds_give_equal_studies():
    assert runs("yolo", "CISO_March", "clover", 2) == runs.__wrapped__("yolo", "CISO_March", "clover", 2)


BARS = {0.1: 0.01, 0.5: 0.0025}
"""Largest gap to the oracle that the learning search may leave on classification and language, by lambda."""


@pytest.mark.slow
@pytest.mark.parametrize("weight", sorted(BARS))
@pytest.mark.parametrize("service", SERVICES)
def test_learning_finds_the_best_with_few_trials(service, weight):
    """At most 60 % of the annealer's trials; on detection no worse than the annealer; never settled above the limit."""
    settings = replace(SETTINGS, lambda_ratio=weight)
    for trace in ("CISO_March", "CISO_Sep") if weight == 0.1 else ("CISO_March",):
        (found,) = runs(service, trace, "learning", 1, settings)
        top = best(service, trace, settings)
        (point,) = (
            point["clover_sa_20_seeds"]
            for point in reference()["trace48"]
            if (point["service"], point["trace"], point["lambda"]) == (service, trace, weight)
        )
        assert 1 - found.objective / top.objective <= BARS[weight]
        assert 100 * found.objective >= point["mean_f"]
        assert found.trials <= 0.6 * point["new_evaluations"]
        assert found.settled_violations == found.fallbacks == 0


def made_up_service(seed):
    """Another physics: other speeds, other joules, other contention, another demand."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 4))
    pace_s = float(rng.choice([0.05, 0.6]))
    accuracy = np.sort(rng.uniform(0.5, 0.95, count))
    variants = []
    for number in range(count):
        size = ((number + 1) / count) ** rng.uniform(0.5, 2.0)
        strain = rng.uniform(0.1, 1.0)
        slowdown = {
            profile.name: 1 + strain * ((7 / profile.compute_slices) ** 0.9 - 1) * rng.uniform(0.9, 1.1)
            for profile in A100_40GB.profiles
        }
        variants.append(
            VariantCosts(
                f"v{number}",
                float(accuracy[number]),
                pace_s * (0.5 + 0.2 * number),
                pace_s * 0.5 * size,
                40.0 * size**1.5,
                {**slowdown, "7g.40gb": 1.0},
            )
        )
    reference_s = 1.5 * (variants[-1].host_s + variants[-1].gpu_s)
    loads_s = (reference_s, reference_s / rng.uniform(3.0, 5.0))
    return ServiceCosts(
        f"s{seed}", tuple(variants), float(rng.uniform(0, 0.2)), float(rng.uniform(0.05, 0.7)), 0.03 * pace_s,
        float(rng.uniform(20, 60)), 2, loads_s, "made up",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learning_beats_the_annealer_on_physics_it_has_not_seen(seed):
    made = bench(exhaustive_table(made_up_service(seed), A100_40GB, Streams(seed)), A100_40GB)
    grid = traces()["CISO_March"][:12]
    top, found, annealed = (
        run_variants(scheme, made, "grid", grid, SETTINGS, Streams(0)) for scheme in ("oracle", "learning", "clover")
    )
    assert found.settled_violations == 0
    assert found.objective >= annealed.objective - 1e-4
    assert top.objective - found.objective <= 0.01
