"""Accuracy thresholds, the columns scheme, what trials really cost, and the page with Clover's figures."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from joulery.app.simulation.variant_study import read_costs
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.mig import A100_40GB
from joulery.policies.serving.search.annealing import AnnealingSearch, LayoutNeighbourhood, TrialMetrics
from joulery.policies.serving.search.configuration_graph import one_gpu, published_odds
from joulery.sim.core.streams import Streams
from joulery.sim.serving.outcome import StudySettings, trial_cost
from joulery.sim.serving.schemes import co2opt_row, run_variants
from joulery.sim.serving.trial_table import bench
from joulery.store.variant_tables import read_tables
from reproduce.clover.claims import claims
from reproduce.clover.figures import LOSSES, figures
from reproduce.clover.page import page
from tests.data_folder import data_folder

GRID = [100.0, 300.0, 104.0, 250.0]


@cache
def made(service, *, costs=True):
    folder = data_folder("clover") / "synth_v1"
    tables = read_tables(folder)
    known = read_costs(folder, tables) if costs else {}
    return bench(tables[service], A100_40GB, costs=known.get(service))


def allowed(scheme, one, loss, grid=GRID):
    return run_variants(scheme, one, "any", grid, StudySettings(lambda_ratio=1.0, max_loss_ratio=loss), Streams(0))


def test_what_the_table_can_keep_within_a_loss():
    """Spec check 8 on two standardised GPUs; an infeasible threshold runs the baseline and is counted."""
    assert allowed("oracle", made("efficientnet"), 0.01).saving_ratio >= 0.77
    assert allowed("oracle", made("albert"), 0.04).saving_ratio >= 0.80
    for service, loss in (("yolo", 0.04), ("efficientnet", 0.008), ("albert", 0.03)):
        found = allowed("oracle", made(service), loss)
        assert (found.fallbacks, found.saving_ratio) == (len(GRID), pytest.approx(0.0, abs=1e-12))
        assert found.infeasible is not None and found.infeasible.nearest["loss_ratio"] > loss
    assert allowed("oracle", made("efficientnet"), 0.01).infeasible is None


@pytest.mark.parametrize(
    ("service", "loss", "nearest", "saving"), [("yolo", 0.04, 0.078, 0.804), ("efficientnet", 0.008, 0.0095, 0.779)]
)
def test_what_cannot_be_had_is_said_with_the_least_bad_there_is(service, loss, nearest, saving):
    """Spec check 8; the least bad is what Eq. 1 alone would choose among what keeps the SLA (spec 3.2, lambda 0.1)."""
    error = allowed("oracle", made(service), loss).infeasible
    assert error.binding == "minimum accuracy"
    assert error.nearest["loss_ratio"] == pytest.approx(nearest, abs=6e-4)
    assert error.nearest["saving_ratio"] == pytest.approx(saving, abs=6e-4)
    one = made(service)
    assert error.nearest["latency_s"] <= one.table.base_latency_s
    better = [each for each in one.metrics if each.accuracy_ratio > error.nearest["accuracy_ratio"] + 1e-9]
    assert better and all(each.latency_s > one.table.base_latency_s for each in better)
    assert f"{error.nearest['configuration']}, loses {100 * nearest:.2g} %" in error.message


def test_a_latency_that_nothing_keeps_is_said_with_the_soonest():
    one = made("yolo")
    late = replace(one, table=replace(one.table, base_latency_s=0.001))
    error = run_variants("oracle", late, "any", GRID, StudySettings(), Streams(0)).infeasible
    assert error.binding == "latency"
    assert error.nearest["latency_s"] == min(each.latency_s for each in one.metrics)


@pytest.mark.parametrize("scheme", ["clover", "learning", "blover"])
def test_searches_settle_within_the_loss_or_on_the_baseline(scheme):
    one = made("efficientnet")
    found = allowed(scheme, one, 0.01)
    assert found.settled_violations == 0
    # Trials may be less accurate for as long as they last; what is settled on may not.
    assert found.loss_ratio <= 0.01 + 0.08 * found.optimise_time_ratio
    nothing = allowed(scheme, one, 0.001, GRID[:1])
    assert nothing.fallbacks == 1
    assert nothing.trials <= 40


@pytest.mark.slow
def test_pools_of_any_number_of_gpus_keep_less_loss():
    """Spec check 8: classification, at most 0.8 % lost, at least 64 % saved; no trial on the service."""
    found = allowed("columns", made("efficientnet"), 0.008)
    assert found.saving_ratio >= 0.64
    assert found.loss_ratio <= 0.008
    assert found.settled_violations == found.fallbacks == found.trials == 0
    assert found.saving_same_gpus_ratio <= 0.356, "idle power of ten GPUs is a floor"


@pytest.mark.slow
def test_detection_within_four_percent_takes_four_gpus():
    """Spec 3.2: 51.7 % on four GPUs, from a list made by hand; infeasible where every GPU is cut alike."""
    found = allowed("columns", made("yolo"), 0.04)
    assert found.saving_ratio >= 0.517
    assert found.loss_ratio <= 0.04
    assert found.settled_violations == found.fallbacks == 0 and found.infeasible is None


def test_the_columns_scheme_weighs_as_equation_3_does():
    one = made("albert")
    settings = StudySettings(lambda_ratio=0.5)
    found = run_variants("columns", one, "any", GRID, settings, Streams(0))
    assert found.objective >= run_variants("oracle", one, "any", GRID, settings, Streams(0)).objective * (1 - 1e-3)
    assert found.settled_violations == 0
    with pytest.raises(ConfigError, match="not only a table of trials"):
        run_variants("columns", made("albert", costs=False), "any", GRID, settings, Streams(0))


def test_trials_cost_what_they_take():
    one = made("yolo")
    finest = co2opt_row(one)
    cost = trial_cost(one, [one.base_row, finest, finest], 1)
    assert cost.reslices == 2, "both GPUs, once"
    assert cost.energy_j == pytest.approx(
        1000 * (one.metrics[one.base_row].energy_j + 2 * one.metrics[finest].energy_j)
    )
    assert 600 + 20 < cost.seconds < 600 + 20 + 3 * 10
    assert trial_cost(one, [], 0).seconds == 0.0
    found = run_variants("clover", one, "any", GRID, StudySettings(), Streams(0))
    assert found.optimise_time_true_ratio > 5 * found.optimise_time_ratio, "the published 30 s is a sixth of it"


def test_what_is_not_accurate_enough_is_never_settled_on():
    space = one_gpu(A100_40GB, ("a", "b"))
    near = LayoutNeighbourhood(space, published_odds(space, A100_40GB))

    def shown(row):
        share = float(space.graphs[row].reshape(2, -1).sum(axis=1)[1]) / float(space.graphs[row].sum())
        return TrialMetrics(0.6 + 0.2 * share, 0.1, 10.0 + 30.0 * share)

    for seed in range(5):
        search = AnnealingSearch(
            near, 0, {}, lambda metrics: -metrics.energy_j, 0.2, np.random.default_rng(seed), least_accuracy_ratio=0.7
        )
        while (row := search.ask()) is not None:
            search.tell(row, shown(row))
        assert search.settled is None or shown(search.settled).accuracy_ratio >= 0.7


@pytest.fixture(scope="module")
def drawn():
    one = made("yolo", costs=False)
    grids = {"north": GRID * 3, "south": [200.0] * 12}
    return figures({"yolo": one}, grids, StudySettings(), 2)


def test_every_figure_is_on_the_page(drawn):
    text = page(drawn, {"yolo": "made for a test"})
    for number in ("9", "10", "11", "12", "13", "14a", "14b", "15", "16"):
        assert f"Fig. {number}" in text
    assert "simulated" in text
    assert "src=" not in text
    assert "@import" not in text
    assert text.count("<svg") == text.count("</svg>") > 20
    assert {claim.verdict for claim in claims(drawn)} <= {"holds", "partly", "does not hold", ""}


def test_the_figures_are_those_of_the_study(drawn):
    one = made("yolo", costs=False)
    outcomes = [run_variants("clover", one, "south", [200.0] * 12, StudySettings(), Streams(seed)) for seed in range(2)]
    mine = drawn.mean("yolo", "clover", "south")
    assert mine.saving_ratio == pytest.approx(np.mean([each.saving_ratio for each in outcomes]))
    assert mine.trials == pytest.approx(np.mean([each.trials for each in outcomes]))
    assert drawn.objective["yolo", "oracle"].shape == (12,)
    assert len(drawn.allowed) == len(LOSSES)
    (fewer,) = drawn.fewer
    assert fewer.gpus == (10, 4, 2)
    assert fewer.base_p95_ratio[1:].min() > 1.0
    assert fewer.mixture_p95_ratio.max() <= 0.71
    first, second, last = drawn.invocations["yolo"]
    assert sum(trial.settled for trial in first) <= 1
    assert len(first) >= len(last) >= 1
    assert len(second) >= 1
    assert drawn.windows["clover"].sum() > 0


def test_folders_without_costs_are_distinguished_from_wrong_ones(tmp_path):
    folder = data_folder("clover") / "synth_v1"
    tables = read_tables(folder)
    assert read_costs(tmp_path, tables) == {}
    costs = read_costs(folder, tables)
    assert set(costs) == {"yolo", "efficientnet", "albert"}
    assert "1g.5gb" not in costs["yolo"].variants[-1].slowdown, "assumed not to fit"
    assert costs["yolo"].variants[-1].slowdown["7g.40gb"] == 1.0
    text = (folder / "profile.csv").read_text()
    (tmp_path / "model.json").write_text(json.dumps(json.loads((folder / "model.json").read_text())))
    for old, new, message in (
        ("0.1946", "-1", "host_s is '-1'"),
        ("host_s", "host", "no column host_s"),
        (",4g,", ",9g,", "no slice"),
    ):
        (tmp_path / "profile.csv").write_text(text.replace(old, new, 1))
        with pytest.raises(DataError, match=message):
            read_costs(tmp_path, tables)


@pytest.mark.parametrize("seed", [1, 2])
def test_other_physics_in_the_same_form_are_studied_too(seed):
    """Perturbed times, joules and accuracies: searches stay within their limits, against the table's own best."""
    rng = np.random.default_rng(seed)
    one = made("yolo", costs=False)
    entries = tuple(
        replace(
            entry,
            latency_s=entry.latency_s * float(rng.uniform(0.9, 1.1)),
            energy_j=entry.energy_j * float(rng.uniform(0.95, 1.05)),
        )
        for entry in one.table.entries
    )
    other = bench(replace(one.table, entries=entries), A100_40GB)
    best = run_variants("oracle", other, "any", GRID, StudySettings(), Streams(0))
    for scheme in ("clover", "blover", "learning"):
        found = run_variants(scheme, other, "any", GRID, StudySettings(), Streams(seed))
        assert found.settled_violations == 0
        assert found.objective <= best.objective + 0.1 * found.optimise_time_ratio
