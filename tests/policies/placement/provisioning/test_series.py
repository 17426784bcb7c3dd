"""Plans for rates that change: every period meets its own SLOs, moves stay within what was asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.provisioning import Arrivals, Workload
from joulery.domain.serving.service import Slo
from joulery.perf.catalog.v100 import V100
from joulery.policies.placement.provisioning.difference import difference, running_of
from joulery.policies.placement.provisioning.gpu_shares import GpuType
from joulery.policies.placement.provisioning.options import Rules
from joulery.policies.placement.provisioning.series import Period, periods_of, plan_series

TYPES = [GpuType("V100", V100, 3.06)]
W1 = Workload("W1", "alexnet", Slo(0.015, 0.99), 1200.0)
W2 = Workload("W2", "resnet50", Slo(0.040, 0.99), 500.0)
W3 = Workload("W3", "vgg19", Slo(0.060, 0.99), 400.0)
SERVICES = [W1, W2, W3]
DAY = {
    "W1": [(0.0, 100.0), (8 * 3600.0, 1200.0), (20 * 3600.0, 100.0)],
    "W2": [(0.0, 50.0), (8 * 3600.0, 500.0)],
    "W3": [(0.0, 0.0), (12 * 3600.0, 400.0)],
}


def test_periods_lie_between_any_two_changes():
    periods = periods_of(DAY, 24 * 3600.0)
    assert [(p.from_s / 3600, p.until_s / 3600) for p in periods] == [(0, 8), (8, 12), (12, 20), (20, 24)]
    assert periods[2].rates_rps == {"W1": 1200.0, "W2": 500.0, "W3": 400.0}
    assert periods_of(DAY)[-1].until_s == 28 * 3600.0, "the last step lasts as long as the one before it"
    assert periods_of({"a": [(0.0, 1.0)]}) == (Period(0.0, 3600.0, {"a": 1.0}),)
    with pytest.raises(ConfigError, match="ends before its last step"):
        periods_of(DAY, 20 * 3600.0)


def test_a_night_costs_less_than_the_peak_and_every_period_meets_its_slos():
    series = plan_series("best", SERVICES, periods_of(DAY, 24 * 3600.0), TYPES, Rules(max_replicas=1), max_migrations=2)
    assert not any(each.plan.violations for each in series.periods)
    assert series.usd < series.peak_usd == pytest.approx(24 * series.peak.usd_per_hour)
    assert series.bound_usd <= series.usd + 1e-9
    assert all(each.migrations <= 2 for each in series.periods) and series.periods[0].change is None
    for before, after in zip(series.periods, series.periods[1:], strict=False):
        again = difference(running_of(before.plan.gpus), running_of(after.plan.gpus))
        assert again.migrations == after.migrations
    served = [{each.workload for gpu in p.plan.gpus for each in gpu.instances} for p in series.periods]
    assert "W3" not in served[0] and "W3" in served[2]


def test_without_moves_nothing_that_runs_on_changes_its_gpu():
    series = plan_series("igniter", SERVICES, periods_of(DAY, 24 * 3600.0), TYPES, max_migrations=0)
    assert series.migrations == 0
    with_moves = plan_series("igniter", SERVICES, periods_of(DAY, 24 * 3600.0), TYPES, max_migrations=9)
    assert with_moves.usd <= series.usd + 1e-9


def test_random_arrivals_keep_their_headroom_in_every_period():
    poisson = Workload("W1", "alexnet", Slo(0.015, 0.99), 400.0, Arrivals.poisson())
    periods = periods_of({"W1": [(0.0, 100.0), (3600.0, 400.0)]}, 7200.0)
    rules = Rules(max_replicas=1, max_batch=8)
    random = plan_series("best", [poisson], periods, TYPES, rules)
    even = plan_series("best", [Workload("W1", "alexnet", W1.slo, 400.0)], periods, TYPES, rules)
    for one, other in zip(random.periods, even.periods, strict=True):
        assert not one.plan.violations
        shares = [sum(gpu.share_ratio for gpu in each.plan.gpus) for each in (one, other)]
        assert shares[0] > shares[1], "a queue of random requests needs room"


def test_a_period_without_any_demand_has_no_gpus():
    steps = {"W1": [(0.0, 100.0), (3600.0, 0.0), (7200.0, 100.0)]}
    series = plan_series("igniter", [W1], periods_of(steps), TYPES)
    assert [len(each.plan.gpus) for each in series.periods] == [1, 0, 1]
    assert series.periods[1].change.count("stop") == 1 and series.periods[2].change.count("start") == 1


RATES = st.lists(st.sampled_from([0.0, 60.0, 200.0, 400.0]), min_size=3, max_size=3)


@given(st.lists(RATES, min_size=2, max_size=4), st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_laws_of_any_series(rates, max_migrations):
    steps = {name: [(3600.0 * k, row[i]) for k, row in enumerate(rates)] for i, name in enumerate(("W1", "W2", "W3"))}
    series = plan_series("igniter", SERVICES, periods_of(steps), TYPES, max_migrations=max_migrations)
    for each in series.periods:
        wanted = {name for name, rate in each.period.rates_rps.items() if rate > 0}
        assert {one.workload for gpu in each.plan.gpus for one in gpu.instances} == wanted
        assert all(gpu.share_ratio <= 1 + 1e-9 for gpu in each.plan.gpus)
        for name in wanted:
            parts = [o.rate_rps for g in each.plan.gpus for o in g.instances if o.workload == name]
            assert sum(parts) == pytest.approx(each.period.rates_rps[name])
