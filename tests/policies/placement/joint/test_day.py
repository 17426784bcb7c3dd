"""Joint plans over time: totals add up, capacity is kept through every change, never worse than simpler ways."""

import math
from dataclasses import replace

import pytest

from joulery.policies.placement.joint.day import LoadPeriod, SwitchingCosts, plan_day, switching_cost, with_rates
from joulery.policies.placement.joint.planner import plan_joint
from tests.policies.placement.joint.brute_force import fleet, random_request

LOADS = (1.0, 0.4, 0.4, 0.9)


def periods(request, loads=LOADS, hours=1.0):
    rates = {each.workload.id: each.workload.rate_rps for each in request.services}
    return [
        LoadPeriod(
            3600 * hours * at,
            3600 * hours * (at + 1),
            with_rates(request, {name: load * rate for name, rate in rates.items()}),
        )
        for at, load in enumerate(loads)
    ]


@pytest.fixture(scope="module", params=[0, 9])
def request_and_day(request):
    asked = random_request(request.param)
    return asked, plan_day(periods(asked))


def provided(plan):
    found = {}
    for each in (one for gpu in plan.gpus for one in gpu.instances):
        found[each.workload] = found.get(each.workload, 0.0) + each.provided_rps
    return found


def test_it_is_no_worse_than_the_peaks_plan_or_a_plan_for_each_period(request_and_day):
    _, day = request_and_day
    assert day.total <= min(day.peak_total, day.hourly_total) * (1 + 1e-9)
    assert day.total == pytest.approx(math.fsum(p.value * p.period.hours + p.switching for p in day.periods))


def test_every_period_is_served_within_its_slos(request_and_day):
    _, day = request_and_day
    for each in day.periods:
        served = {}
        for one in (instance for gpu in each.plan.gpus for instance in gpu.instances):
            assert one.latency_s <= one.limit_s * (1 + 1e-9)
            assert one.rate_rps <= one.provided_rps * (1 + 1e-9)
            served[one.workload] = served.get(one.workload, 0.0) + one.rate_rps
        assert served == pytest.approx({one.workload.id: one.workload.rate_rps for one in each.period.request.services})


def test_what_a_change_costs_counts_the_gpus_that_come_and_go(request_and_day):
    request, day = request_and_day
    costs = SwitchingCosts()
    for before, after in zip(day.periods, day.periods[1:], strict=False):
        same = before.plan.gpus == after.plan.gpus
        cost = switching_cost(request, before.plan.gpus, after.plan.gpus, costs)
        assert cost == pytest.approx(after.switching)
        assert cost >= 0 and (cost == 0 or not same)
    one = day.periods[0].plan.gpus[:1]
    watts = one[0].idle_w + one[0].host_w + math.fsum(each.overhead_w for each in one[0].instances)
    assert switching_cost(request, (), one, costs) == pytest.approx(80 * watts / 3600)
    assert switching_cost(request, one, (), costs) == pytest.approx(60 * watts / 3600)
    slower = (replace(one[0], clock_set_mhz=900.0),)
    assert switching_cost(request, one, slower, costs) == 0.0, "a clock is set at no cost"


def test_changes_that_cost_more_than_they_save_are_not_made():
    request = random_request(9)
    hours = 1 / 60
    day = plan_day(periods(request, (1.0, 0.8, 1.0, 0.8, 1.0), hours), SwitchingCosts(600.0, 600.0, 600.0))
    assert day.switching == 0.0
    assert all(each.moves is None or each.moves.moves == 0 for each in day.periods)


def test_a_pool_without_room_for_old_and_new_beside_each_other_keeps_what_runs():
    asked = random_request(9)
    gpus = len(plan_joint(asked).gpus)
    pooled = replace(asked, fleet=(replace(fleet(len(asked.fleet[0].clocks_mhz), asked.fleet[0].host_w, gpus)),))
    day = plan_day(periods(pooled, (1.0, 0.5, 1.0)))
    for before, after in zip(day.periods, day.periods[1:], strict=False):
        assert math.isfinite(after.switching)
        kept = sum(source is not None for source in after.moves.same_gpu)
        changed = after.moves.started + after.moves.changed > 0
        side_by_side = len(before.plan.gpus) + len(after.plan.gpus) - kept
        assert side_by_side <= gpus
        assert not changed or len(before.plan.gpus) < gpus, "what changes takes a further GPU meanwhile"
