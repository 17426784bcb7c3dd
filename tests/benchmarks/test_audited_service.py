from dataclasses import replace

import numpy as np
import pytest

from benchmarks._audit_world import SLO, audited_run, policy, truth
from benchmarks._audited_service import run_audited

RUNS = 12
HOUR_S = 1200.0


@pytest.fixture(scope="module")
def runs():
    return [audited_run(seed, share_ratio=0.06, duration_s=HOUR_S) for seed in range(RUNS)]


@pytest.mark.slow
def test_the_interval_contains_the_true_saving(runs):
    """Of 12 intervals of 95 %, 9 or fewer contain the truth with a probability of 0.2 %."""
    for estimate, true in (("saving", "true_saving_ratio"), ("machine_saving", "true_machine_ratio")):
        found = [(getattr(run, estimate)(), getattr(run, true)) for run in runs]
        assert sum(low <= at <= high for (_, low, high), at in found) >= 10
        assert all(low < middle < high for (middle, low, high), _ in found)


def test_it_is_unbiased_though_the_profile_is_wrong(runs):
    errors = [run.saving()[0] - run.true_saving_ratio for run in runs]
    assert abs(np.mean(errors)) < 3 * np.std(errors, ddof=1) / np.sqrt(RUNS)
    modelled = 1 - 5.0 / 14.0
    assert all(abs(run.true_saving_ratio - modelled) > 0.1 for run in runs), "the profile says something else"


def test_the_budget_and_the_slo_are_kept(runs):
    for run in runs:
        assert run.tally.share_ratio < 0.08
        assert np.mean(run.latency_s <= SLO.latency_s) > 0.99
        assert len(run.periods) == run.tally.periods >= 6


def test_every_request_is_served_once_under_either(runs):
    for run in runs[:3]:
        assert np.all(np.isfinite(run.cpu_s)) and np.all(run.latency_s >= run.cpu_s - 1e-9)
        assert np.all(run.base_latency_s >= run.base_cpu_s - 1e-9)


def test_overload_cuts_or_withholds_the_baseline():
    """Demand at which the baseline's queue would grow: it is not measured, and the tally says why."""
    plenty = truth(5, 1600.0)  # the first block, which has no period, takes 100 s here
    crowded = replace(
        plenty,
        arrival_s=plenty.arrival_s / 4.0,
        cpu_s={name: 1.1 * values for name, values in plenty.cpu_s.items()},
    )
    run = run_audited(policy(0.06, 5), crowded, 400.0)
    assert not run.periods or run.tally.cut
    assert sum(run.tally.withheld.values()) + run.tally.periods >= 1


def test_equal_seeds_give_equal_runs():
    one, again = (audited_run(3, share_ratio=0.06, duration_s=300.0) for _ in range(2))
    assert np.array_equal(one.cpu_s, again.cpu_s) and one.periods == again.periods and one.tally == again.tally
