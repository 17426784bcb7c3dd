import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import DataError, InfeasibleError
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.service import Slo
from joulery.policies.serving.objective import ServiceObjectives
from joulery.policies.serving.observation import KEEP_LAYOUT, SET_LAYOUT, TRY_LAYOUT, Observation
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.layout_space import core_partitions, cpu_slices, slice_menu
from joulery.policies.serving.search.trial_search import TrialSearch
from joulery.policies.serving.search.trials import TrialBudget
from tests.policies.serving.trial_world import BASE, RATE, World, truth, trying

SEARCHES = pytest.mark.parametrize("search", ["clover", "learning"])


def tried(world: World) -> list[Layout]:
    return [Layout.parse(decision.value) for decision in world.decisions if decision.kind == TRY_LAYOUT]


def least_bad(world: World) -> Layout:
    return min(world.state.known, key=lambda item: item.metrics.latency_s).layout


def brute(world: World, g: float) -> Layout:
    policy, base = world.policy, truth(BASE)
    objective = replace(
        policy.search.objective(policy.objectives.lambda_ratio, world.state.baseline), base_energy_j=base.energy_j
    )
    met = {layout: truth(layout) for layout in policy.candidates}
    scores = {
        layout: objective.score(m.accuracy_ratio, m.energy_j, g)
        for layout, m in met.items()
        if m.latency_s <= policy.objectives.slo.latency_s
    }
    return max(scores, key=scores.get)


@SEARCHES
def test_the_first_trial_is_the_baseline_and_the_last_decision_what_is_best(search):
    world = World(trying(search), g_per_kwh=400.0)
    last = world.until_settled()
    assert tried(world)[0] == BASE and world.decisions[0].kind == TRY_LAYOUT
    assert world.decisions[0].reason.startswith("start: trial 1 of at most 10")
    assert len(set(tried(world))) == len(tried(world)) <= 10, "nothing is tried twice"
    assert Layout.parse(last.value) == brute(world, 400.0), "a dirty grid: the leanest"
    assert f"after {len(tried(world))} trials" in last.reason and "carbon -" in last.reason
    assert world.state.trying is None and world.state.feasible


def test_our_search_needs_fewer_trials():
    few, many = World(trying("learning"), g_per_kwh=400.0), World(trying("clover"), g_per_kwh=400.0)
    few.until_settled(), many.until_settled()
    assert len(tried(few)) < len(tried(many))


@SEARCHES
def test_what_was_measured_is_not_tried_again_when_the_grid_moves(search):
    world = World(trying(search), g_per_kwh=400.0)
    world.until_settled()
    before = len(tried(world))
    for _ in range(10):
        assert world.second() == (), "nothing moved"
    world.g_per_kwh = 405.0
    for _ in range(5):
        assert world.second() == (), "5 g are less than 5 % of 200"
    world.g_per_kwh = 20.0
    world.until_settled()
    after = tried(world)[before:]
    assert not set(after) & set(tried(world)[:before])
    assert world.decisions[-1].reason.startswith("grid down from 400 to 20 g/kWh: ")
    assert world.decisions[-1].cause == "intensity"
    assert Layout.parse(world.decisions[-1].value) == brute(world, 20.0)


@SEARCHES
def test_a_log_of_observations_decides_the_same_again(search):
    world = World(trying(search), g_per_kwh=400.0)
    world.until_settled()
    world.g_per_kwh = 100.0
    world.until_settled()
    again = ServicePolicy.from_dict(json.loads(json.dumps(world.policy.as_dict())))
    state, decisions = again.initial(), []
    for seen in world.seen:
        step = again.step(state, Observation.from_dict(json.loads(json.dumps(seen.as_dict()))))
        state = step.state
        decisions += step.decisions
    assert decisions == world.decisions


@pytest.mark.slow
@SEARCHES
def test_no_layout_keeps_the_slo_the_search_ends_and_the_least_bad_serves(search):
    world = World(trying(search, slo_s=1e-4), g_per_kwh=400.0)
    last = world.until_settled()
    assert Layout.parse(last.value) == least_bad(world) and not world.state.feasible
    assert "none of" in last.reason
    assert len(tried(world)) <= 10
    count = len(world.decisions)
    for _ in range(300):
        world.second()
    assert len(world.decisions) == count, "an infeasible SLO is not searched for all the time"
    for _ in range(320):
        world.second()
    assert len(world.decisions) > count, "but once in a while"


@SEARCHES
def test_a_search_is_bounded_in_trials_and_in_time(search):
    short = World(trying(search, budget=TrialBudget(min_requests=100, count=2, longest_s=10.0)), g_per_kwh=400.0)
    short.until_settled()
    assert len(tried(short)) == 2
    quick = World(trying(search, budget=TrialBudget(min_requests=100, clock_s=4.0, longest_s=10.0)), g_per_kwh=400.0)
    quick.until_settled()
    assert quick.now_s - 1001.0 <= 4.0 + 10.0 and 1 <= len(tried(quick)) <= 3


def test_an_unknown_intensity_costs_no_trials_and_comes_back():
    world = World(trying(), g_per_kwh=math.nan)
    last = world.until_settled()
    assert tried(world) == [BASE] and Layout.parse(last.value) == BASE
    assert "intensity unknown, so accuracy alone decides" in last.reason
    world.g_per_kwh = 400.0
    world.until_settled()
    assert world.decisions[-1].reason.startswith("intensity known again, 400 g/kWh: ")
    count = len(world.decisions)
    world.g_per_kwh = math.nan
    for _ in range(20):
        world.second()
    assert len(world.decisions) == count, "what is unknown moves nothing"


def test_an_intensity_below_zero_is_none_at_all():
    world = World(trying(), g_per_kwh=-50.0)
    assert Layout.parse(world.until_settled().value) == brute(world, 0.0)
    world.g_per_kwh = 5.0
    for _ in range(20):
        assert world.second() == ()


def test_a_grid_that_jumps_all_the_time_cannot_keep_the_search_going():
    world = World(trying(), g_per_kwh=400.0)
    for second in range(60):
        world.g_per_kwh = 400.0 if second % 2 else 20.0
        world.second()
    assert len(tried(world)) == len(set(tried(world))) <= len(world.policy.candidates)
    assert world.state.searches > 5, "every jump was looked at, with what was known"


def test_the_slo_tightened_under_a_trial_ends_it_and_judges_what_is_known_anew():
    world = World(trying(), g_per_kwh=400.0)
    while len(tried(world)) < 2:
        world.second()
    assert world.state.trying is not None
    world.policy = replace(world.policy, objectives=replace(world.policy.objectives, slo=Slo(0.0005)))
    (decision,) = world.second()
    assert decision.reason.startswith("SLO tightened from p95 100 ms to p95 0 ms: ")
    assert decision.cause == "terms"
    while world.state.trying is not None:
        world.second()
    assert not world.state.feasible and Layout.parse(world.decisions[-1].value) == least_bad(world)


def test_a_change_of_lambda_or_of_the_accuracy_searches_again():
    world = World(trying(lambda_ratio=0.0), g_per_kwh=400.0)
    assert Layout.parse(world.until_settled().value) == BASE
    world.policy = replace(world.policy, objectives=replace(world.policy.objectives, lambda_ratio=0.9))
    assert "lambda changed from 0 to 0.9" in world.until_settled().reason
    assert set(world.running.counts) == {"lite0"}
    world.policy = replace(world.policy, objectives=replace(world.policy.objectives, minimum_accuracy_ratio=0.765))
    last = world.until_settled()
    assert "from 0.00% to 76.50%" in last.reason
    assert truth(world.running).accuracy_ratio >= 0.765 and world.running != BASE


def test_an_accuracy_threshold_is_never_fallen_below_and_its_violation_is_noticed():
    world = World(trying(lambda_ratio=1.0, minimum_accuracy_ratio=0.765), g_per_kwh=400.0)
    world.until_settled()
    assert truth(world.running).accuracy_ratio >= 0.765
    assert Layout.parse(world.decisions[-1].value) == world.running
    mixed = next(layout for layout in world.policy.candidates if layout.counts == {"lite0": 1, "lite1": 1})
    world.state = replace(world.state, layout=mixed)
    world.running, world.since_s, world.now_s = mixed, world.now_s, world.now_s + 20
    decisions = world.second()
    assert decisions[0].cause == "accuracy" and "76.50%" in decisions[0].reason


def test_a_service_that_got_slower_than_its_slo_is_searched_again():
    world = World(trying(slo_s=0.03), g_per_kwh=20.0)
    world.until_settled()
    first = world.running
    world.latency_ratio = 0.031 / truth(first).latency_s
    for _ in range(10):
        if world.second():
            break
    assert world.decisions[-1].cause == "latency" and "above the SLO of 30 ms" in world.decisions[-1].reason


def test_a_layout_that_cannot_be_run_is_left_out_and_the_log_says_so():
    refused = Layout.parse(["lite0 on cpu:1", "lite0 on cpu:1"])
    world = World(trying(), g_per_kwh=400.0, refuse={refused})
    world.until_settled()
    assert refused in tried(world) and world.running != refused
    after = world.decisions[[d.value for d in world.decisions].index(refused.names()) + 1]
    assert "lite0+lite0 failed" in after.reason
    for g_per_kwh in (200.0, 400.0) * 4:
        world.g_per_kwh = g_per_kwh
        world.until_settled()
    assert tried(world).count(refused) == 2, "twice is enough"


def test_when_even_the_baseline_does_not_run_the_next_most_accurate_takes_its_place():
    world = World(trying(), g_per_kwh=400.0, refuse={BASE})
    world.until_settled()
    assert world.state.baseline.layout == Layout.parse(["lite2 on cpu:2"])


def test_a_replica_that_dies_twice_under_a_trial_ends_it():
    frail = Layout.parse(["lite0 on cpu:1", "lite0 on cpu:1"])
    once = World(trying(), g_per_kwh=400.0, deaths={frail: 1})
    once.until_settled()
    assert once.running == frail, "an accident"
    twice = World(trying(), g_per_kwh=400.0, deaths={frail: 2})
    last = twice.until_settled()
    assert twice.running != frail
    assert any("lite0+lite0 lost 2 replicas" in decision.reason for decision in twice.decisions), last


@SEARCHES
def test_what_a_burst_spoiled_is_tried_again_when_nothing_keeps_the_slo(search):
    world = World(trying(search, slo_s=0.05), g_per_kwh=400.0)
    world.latency_ratio = 0.1 / truth(BASE).latency_s
    world.spread = 0.9  # too noisy to decide
    world.until_settled()
    assert not world.state.feasible and world.running == least_bad(world)
    world.latency_ratio, world.spread = 1.0, 0.02
    world.g_per_kwh = 380.0
    world.until_settled()
    assert world.state.feasible and world.running != BASE


def test_what_surely_broke_the_slo_is_not_tried_again_soon():
    world = World(trying(slo_s=1e-4), g_per_kwh=400.0)
    world.until_settled()
    count = len(tried(world))
    world.g_per_kwh = 300.0
    world.until_settled()
    assert len(tried(world)) == len(set(tried(world))) >= count


def test_too_few_requests_try_nothing_else_and_the_search_begins_when_enough_have_come():
    world = World(trying(), g_per_kwh=400.0, requests_a_s=2)
    last = world.until_settled()
    assert tried(world) == [BASE] and world.running == BASE
    assert "lite2+lite2 serves" in last.reason and "too few" in last.reason
    for _ in range(60):
        world.second()
    assert tried(world)[1] != BASE, "its hundred requests had come by then"
    assert ": trial 1" in world.decisions[2].reason


def test_a_layout_with_too_few_requests_is_not_settled_on():
    world = World(trying(), g_per_kwh=400.0)
    while len(tried(world)) < 2:
        world.second()
    world.requests_a_s = 1
    last = world.until_settled()
    assert world.running == BASE and "too few" in last.reason


def test_one_variant_alone_still_has_its_cuts_to_choose_from():
    problem = TrialSearch({"lite2": 0.776}, slice_menu([cpu_slices(cut) for cut in core_partitions(2)]), 1, BASE, 200.0)
    world = World(replace(trying(), search=problem), g_per_kwh=400.0)
    world.until_settled()
    assert set(tried(world)) <= set(problem.space.layouts) and len(problem.space.layouts) == 2
    only = TrialSearch({"lite2": 0.776}, slice_menu([cpu_slices((1, 1))]), 1, BASE, 200.0)
    alone = World(replace(trying(), search=only), g_per_kwh=400.0)
    last = alone.until_settled()
    assert tried(alone) == [BASE] and last.kind == KEEP_LAYOUT


def test_a_settled_layout_that_does_not_run_is_set_again_then_given_up():
    world = World(trying(), g_per_kwh=400.0)
    world.until_settled()
    first, world.running = world.running, BASE
    world.since_s, world.refuse = world.now_s, {first}
    kinds = []
    for _ in range(30):
        kinds += [(d.kind, Layout.parse(d.value)) for d in world.second()]
    assert kinds[0] == (SET_LAYOUT, first)
    assert kinds[1][1] != first and world.running == kinds[1][1], "the next best of what was measured"
    assert len(kinds) == 2


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.sampled_from([math.nan, -10.0, 0.0, 90.0, 400.0, 1e6]), min_size=5, max_size=40),
    st.floats(0.004, 0.2),
    st.sampled_from(["clover", "learning"]),
)
def test_no_settled_layout_is_above_the_slo(grid, slo_s, search):
    world = World(trying(search, slo_s=slo_s))
    for g in grid:
        world.g_per_kwh = g
        for _ in range(6):
            for decision in world.second():
                if decision.kind != TRY_LAYOUT and world.state.feasible:
                    assert truth(world.running).latency_s <= slo_s
                elif decision.kind != TRY_LAYOUT:
                    assert world.running == least_bad(world)


def test_an_accuracy_that_no_variant_has_is_refused_at_once():
    with pytest.raises(InfeasibleError, match=r"as accurate as 90\.00%"):
        replace(trying(), objectives=ServiceObjectives(0.5, Slo(0.1), 0.9))


def test_damage_is_one_clear_error():
    with pytest.raises(DataError, match="objectives"):
        ServicePolicy.from_dict({"service": "photos"})


def test_demand_that_moved_makes_what_was_measured_stale():
    world = World(trying(), g_per_kwh=400.0)
    world.until_settled()
    count = len(world.state.known)
    assert count >= 2
    world.rate_rps = 2 * RATE
    for _ in range(60):
        if any(decision.cause == "demand" for decision in world.second()):
            break
    assert "demand up from 60 to" in world.decisions[-1].reason
    assert len(world.state.known) <= 1
