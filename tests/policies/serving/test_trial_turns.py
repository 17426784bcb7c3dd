"""A search that waits because another service is on trial."""

import json
import math

from joulery.domain.gpu.layout import Layout
from joulery.policies.serving.observation import KEEP_LAYOUT, SET_LAYOUT, TRY_LAYOUT, Observation
from joulery.policies.serving.policy import TURN, ServicePolicy
from tests.policies.serving.test_trial_policy import tried
from tests.policies.serving.trial_world import BASE, World, truth, trying


def test_it_serves_the_baseline_until_its_turn_and_names_the_service_it_waits_for():
    world = World(trying(), g_per_kwh=400.0, waits_for="other")
    (first,) = world.second()
    assert (first.kind, Layout.parse(first.value)) == (SET_LAYOUT, BASE)
    assert "after 0 trials" in first.reason and "wait for those of other" in first.reason
    for _ in range(60):
        assert world.second() == (), "nothing is tried, and nothing measured, while another is on trial"
    assert world.state.baseline is None and tried(world) == []
    world.waits_for = ""
    (begun,) = world.second()
    assert (begun.kind, begun.cause) == (TRY_LAYOUT, TURN)
    assert begun.reason.startswith("start, after waiting: trial 1")
    assert world.state.deferred == "" and world.state.baseline is None, "what came before is no measurement"
    world.until_settled()
    assert len(tried(world)) > 1


def test_a_grid_that_moves_meanwhile_is_answered_with_what_is_known():
    world = World(trying(), g_per_kwh=400.0)
    world.until_settled()
    before = tried(world)
    world.waits_for, world.g_per_kwh = "other", 20.0
    while not world.second():
        pass
    last = world.decisions[-1]
    assert last.kind in (SET_LAYOUT, KEEP_LAYOUT) and tried(world) == before
    assert "wait for those of other" in last.reason
    known = {item.layout for item in world.state.known}
    assert Layout.parse(last.value) in known and truth(world.running).latency_s <= 0.1
    for _ in range(20):
        assert world.second() == (), "said once"
    world.g_per_kwh = 200.0
    while not world.second():
        pass
    assert world.decisions[-1].reason.startswith("grid up from 20 to 200 g/kWh: "), "the newest reason to search"
    world.waits_for = ""
    world.second()
    assert world.decisions[-1].reason.startswith("grid up from 20 to 200 g/kWh, after waiting: ")
    assert world.decisions[-1].cause == TURN


def test_a_search_that_needs_no_trial_does_not_wait():
    world = World(trying(), g_per_kwh=400.0)
    world.until_settled()
    world.waits_for, world.g_per_kwh = "other", math.nan
    for _ in range(20):
        world.second()
    assert world.state.deferred == ""


def test_what_waits_replays_from_the_log():
    world = World(trying(), g_per_kwh=400.0, waits_for="other")
    for _ in range(5):
        world.second()
    world.waits_for = ""
    world.until_settled()
    again, decisions = ServicePolicy.from_dict(json.loads(json.dumps(world.policy.as_dict()))), []
    state = again.initial()
    for seen in world.seen:
        step = again.step(state, Observation.from_dict(json.loads(json.dumps(seen.as_dict()))))
        state = step.state
        decisions += step.decisions
    assert decisions == world.decisions and decisions[0].kind == SET_LAYOUT


def test_an_slo_tightened_while_it_waits_is_judged_at_once():
    world = World(trying(), g_per_kwh=400.0, waits_for="other")
    world.second()
    assert not world.state.feasible
    terms = world.policy.objectives
    world.policy = trying(lambda_ratio=0.2)
    (decision,) = world.second()
    assert terms != world.policy.objectives and decision.cause == "terms" and tried(world) == []
    world.waits_for = ""
    (begun,) = world.second()
    assert begun.reason.startswith("lambda changed from 0.055 to 0.2, after waiting: trial 1")
