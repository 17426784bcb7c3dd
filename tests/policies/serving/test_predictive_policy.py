import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import DataError, InfeasibleError
from joulery.domain.gpu.layout import Layout
from joulery.domain.quality import Quality
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.domain.serving.service import Slice, SliceKind, Slo
from joulery.perf.layouts import Predictor
from joulery.policies.serving.messages import predicted, short
from joulery.policies.serving.objective import NO_BASE_G_PER_KWH, Objective, ReplanTrigger, ServiceObjectives
from joulery.policies.serving.observation import KEEP_LAYOUT, SET_LAYOUT, Observation
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.layout_space import core_partitions, cpu_slices, layouts
from joulery.policies.serving.search.predictive_search import PredictiveSearch, baseline_layout

ONE, TWO = (Slice(SliceKind.CPU, cores=n) for n in (1, 2))
ACCURACY = {"lite0": 0.751, "lite1": 0.767, "lite2": 0.776}
MS = {"lite0": 4.1, "lite1": 6.4, "lite2": 8.7}


def entry(variant: str, piece: Slice, slow: float = 1.0) -> SliceProfile:
    spread = np.linspace(0.97, 1.03, 7)
    wall = MS[variant] / 1e3 * slow / (1.6 if piece is TWO else 1.0)
    cpu = MS[variant] / 1e3 * slow * (1.2 if piece is TWO else 1.0)
    timings = Timings(spread * wall, spread * cpu)
    return SliceProfile(variant, piece, timings, timings, 10.0)


def policy(
    slow: float = 1.0,
    requests: int = 1500,
    *,
    slo_s: float = 0.1,
    rate_rps: float = 60.0,
    minimum_accuracy_ratio: float = 0.0,
    gain: float = 0.0,
) -> ServicePolicy:
    profile = Profile(
        {},
        tuple(entry(name, piece, slow) for name in ACCURACY for piece in (ONE, TWO)),
        idle_w=20.0,
        quality=Quality.MODELLED,
        meter="cpu-model",
    )
    predictor = Predictor(profile, ACCURACY, requests=requests)
    space = layouts([cpu_slices(p) for p in core_partitions(2)], sorted(ACCURACY))
    slo = Slo(slo_s)
    _, base = baseline_layout(space, "lite2", predictor, Slo(0.1), 60.0)
    search = PredictiveSearch(space, predictor, Objective(0.055, 0.776, base.energy_j, 200.0), gain=gain)
    goals = ServiceObjectives(0.055, slo, minimum_accuracy_ratio)
    return ServicePolicy("photos", search, goals, rate_rps, ReplanTrigger(200.0))


def seen(now_s: float = 0.0, g: float = 150.0, **changes) -> Observation:
    blank = Observation(now_s, g, math.nan, math.nan, 0, {}, math.nan, None)
    return replace(blank, **changes)


def chosen(step) -> dict[str, int]:
    return Layout.parse(step.decisions[0].value).counts


def decide(p: ServicePolicy, g: float) -> dict[str, int]:
    return chosen(p.step(p.initial(), seen(g=g)))


def test_clean_grid_runs_the_accurate_variant_dirty_grid_the_lean_one():
    p = policy()
    assert decide(p, 20.0) == {"lite2": 2}
    assert decide(p, 190.0) == {"lite1": 2}
    assert decide(p, 400.0) == {"lite0": 2}


def test_every_choice_is_the_best_by_brute_force():
    p = policy()
    for g in (1.0, 60.0, 120.0, 180.0, 260.0, 500.0):
        metrics = {layout: p.search.predictor.predict(layout, 60.0) for layout in p.candidates}
        scores = {
            layout: p.search.objective.score(m.accuracy_ratio, m.energy_j, g)
            for layout, m in metrics.items()
            if m.latency_s <= p.objectives.slo.latency_s
        }
        assert decide(p, g) == max(scores, key=scores.get).counts


def test_nothing_moves_nothing_is_decided():
    p = policy()
    first = p.step(p.initial(), seen())
    assert first.decisions[0].kind == SET_LAYOUT and first.decisions[0].cause == "start"
    assert first.decisions[0].target == "photos" and first.decisions[0].policy == "variants"
    again = p.step(first.state, seen(1.0, g=159.9, running=first.state.layout))
    assert again.decisions == () and again.state.layout == first.state.layout


def test_a_move_of_more_than_five_percent_of_the_base_plans_again():
    p = policy()
    state = p.step(p.initial(), seen(g=190.0)).state
    assert p.step(state, seen(1.0, g=200.0)).decisions == (), "exactly 5 % of 200 is not more"
    runs = state.layout
    up, down = p.step(state, seen(1.0, g=201.0, running=runs)), p.step(state, seen(1.0, g=179.0, running=runs))
    assert up.decisions[0].kind == KEEP_LAYOUT and up.decisions[0].cause == "intensity"
    assert up.decisions[0].reason.startswith("grid up from 190 to 201 g/kWh: ")
    assert down.decisions[0].reason.startswith("grid down from 190 to 179 g/kWh: ")
    assert up.state.g_per_kwh == 201.0, "the next move is measured from here"


def test_equal_scores_go_to_the_layout_with_fewer_joules():
    assert decide(policy(), 0.0) == {"lite2": 2}, "at zero intensity only accuracy counts; two slices take less CPU"


def test_the_reason_is_a_sentence_with_the_numbers():
    p = policy()
    state = p.step(p.initial(), seen(g=20.0)).state
    (decision,) = p.step(state, seen(5.0, g=400.0)).decisions
    assert decision.reason.startswith("grid up from 20 to 400 g/kWh: lite0+lite0 scores best of 9: carbon ")
    assert "accuracy -3.2 %" in decision.reason and "ms of 100 ms" in decision.reason
    clean = p.step(p.initial(), seen(g=20.0)).decisions[0].reason
    assert "carbon -90 %" in clean, "a tenth of the base intensity with the baseline itself"
    assert "against the baseline at 200 g/kWh" in clean


def test_a_policy_without_a_base_intensity_states_joules():
    """It said "carbon +24900 %" at 250 g/kWh, with a base of 1 g/kWh."""
    p = policy()
    choice = p.search.choose(ServiceObjectives(1.0, Slo(0.1)), 60.0, 250.0, None, 1.0)
    said = predicted(choice, replace(p.search.objective, base_g_per_kwh=NO_BASE_G_PER_KWH), Slo(0.1), 250.0)
    assert "carbon" not in said and "joules -" in said


def test_infeasible_variants_are_left_out_however_clean_the_grid():
    p = policy(slow=1.0, rate_rps=220.0)
    metrics = p.search.predictor.predict(
        baseline_layout(p.candidates, "lite2", p.search.predictor, p.objectives.slo, 10.0)[0], 220.0
    )
    assert metrics.latency_s > p.objectives.slo.latency_s, "else this tests nothing"
    counts = decide(p, 5.0)
    assert "lite2" not in counts or counts["lite2"] == 1
    assert p.search.predictor.predict(p.step(p.initial(), seen(g=5.0)).state.layout, 220.0).latency_s <= 0.1


def test_when_nothing_keeps_the_slo_the_nearest_runs_and_it_is_said():
    p = policy(rate_rps=2000.0)
    step = p.step(p.initial(), seen(g=5.0))
    assert chosen(step) == {"lite0": 2}, "the highest capacity"
    assert "none of 9 layouts" in step.decisions[0].reason
    assert "unbounded of 100 ms" in step.decisions[0].reason


def test_accuracy_floor():
    assert decide(policy(minimum_accuracy_ratio=0.767), 900.0) == {"lite1": 2}
    mixed = decide(policy(minimum_accuracy_ratio=0.760), 900.0)
    assert mixed == {"lite0": 1, "lite2": 1} or mixed == {"lite1": 2}
    with pytest.raises(InfeasibleError, match=r"as accurate as 78\.00%") as caught:
        policy(minimum_accuracy_ratio=0.78)
    assert caught.value.nearest == 0.776


def test_unknown_intensity_weighs_accuracy_alone_and_known_again_plans():
    p = policy()
    first = p.step(p.initial(), seen(g=math.nan))
    assert chosen(first) == {"lite2": 2} and "intensity unknown" in first.decisions[0].reason
    assert p.step(first.state, seen(1.0, g=math.nan)).decisions == ()
    known = p.step(first.state, seen(2.0, g=400.0))
    assert known.decisions[0].reason.startswith("intensity known again, 400 g/kWh: ")
    assert p.step(known.state, seen(3.0, g=math.nan)).decisions == (), "a gap does not undo a plan"


def test_an_intensity_long_unknown_leaves_accuracy_to_decide():
    p = policy()
    known = p.step(p.initial(), seen(0.0, g=400.0))
    assert chosen(known) == {"lite0": 2}
    running = known.state.layout
    state, decided = known.state, []
    for now_s in range(1, 400):
        step = p.step(state, seen(float(now_s), g=math.nan, running=running))
        state, running = step.state, step.state.layout
        decided += [(now_s, decision) for decision in step.decisions]
    ((at_s, decision),) = decided
    assert at_s == 300 and decision.cause == "intensity" and Layout.parse(decision.value).counts == {"lite2": 2}
    assert "intensity not known any more" in decision.reason and "accuracy alone decides" in decision.reason
    again = p.step(state, seen(500.0, g=400.0, running=running))
    assert chosen(again) == {"lite0": 2}


@pytest.mark.parametrize(("weight", "variant"), [(0.0, "lite2"), (1.0, "lite0")])
@pytest.mark.parametrize("g", [0.0, 200.0, math.nan])
def test_the_ends_of_the_weight(weight, variant, g):
    """At 0 accuracy alone counts; at 1 the fewest joules, which no intensity changes: not zero, not an unknown one."""
    p = policy()
    p = replace(p, objectives=replace(p.objectives, lambda_ratio=weight))
    p = replace(p, search=replace(p.search, objective=replace(p.search.objective, lambda_ratio=weight)))
    step = p.step(p.initial(), seen(g=g))
    assert chosen(step) == {variant: 2} or (variant == "lite0" and chosen(step) == {"lite0": 1})


def test_demand_is_planned_for_and_smoothed():
    p = policy()
    first = p.step(p.initial(), seen(g=5.0))
    layout = first.state.layout
    state = first.state
    decisions = []
    for second in range(1, 30):
        step = p.step(state, seen(float(second), g=5.0, rate_rps=240.0, requests=240, latency_s=0.03, running=layout))
        state, decisions = step.state, [*decisions, *step.decisions]
        layout = state.layout
    assert decisions and decisions[0].cause == "demand"
    assert decisions[0].reason.startswith("demand up from 60 to ")
    assert "lite2" not in state.layout.counts or state.layout.counts["lite2"] == 1
    idle = p.step(state, seen(60.0, g=5.0, rate_rps=0.0, requests=0, running=layout))
    assert idle.state.rate_rps == state.rate_rps, "no requests says nothing about the demand"


def test_requests_slower_than_predicted_correct_the_prediction():
    p = policy()
    state = p.step(p.initial(), seen(g=5.0)).state
    slow = {"g": 5.0, "requests": 60, "rate_rps": 60.0, "running": state.layout}
    for second in range(1, 40):
        step = p.step(state, seen(float(second), latency_s=5 * state.predicted_s, **slow))
        state = step.state
    assert state.delay_ratio == pytest.approx(5.0, rel=0.02)
    fast = state
    for second in range(40, 80):
        fast = p.step(fast, seen(float(second), latency_s=0.1 * state.predicted_s, **slow)).state
    assert fast.delay_ratio == pytest.approx(1.0, rel=0.02), "never below 1: a lucky hour proves nothing"


def test_a_broken_slo_plans_again_once_a_settling_time():
    p = policy()
    state = p.step(p.initial(), seen(g=5.0)).state
    bad = {"g": 5.0, "requests": 60, "rate_rps": 60.0, "latency_s": 0.35, "running": state.layout}
    early = p.step(state, seen(2.0, **bad))
    assert early.decisions == () and early.state.delay_ratio == 1.0, "still settling"
    late = p.step(early.state, seen(6.0, **bad))
    assert late.decisions[0].cause == "latency"
    assert late.decisions[0].reason.startswith("p95 350 ms above the SLO: ")
    assert late.state.delay_ratio > 1.0
    assert p.step(late.state, seen(7.0, **{**bad, "running": late.state.layout})).decisions == ()


@pytest.mark.parametrize("weak", [{"requests": 10}, {"latency_s": math.nan}, {"now_s": 3.0}])
def test_weak_evidence_is_no_evidence(weak):
    p = policy()
    state = p.step(p.initial(), seen(g=5.0)).state
    strong = {"now_s": 9.0, "g": 5.0, "requests": 60, "rate_rps": 60.0, "latency_s": 0.35, "running": state.layout}
    assert p.step(state, seen(**strong)).decisions, "else this tests nothing"
    step = p.step(state, seen(**{**strong, **weak}))
    assert step.decisions == () and step.state.delay_ratio == 1.0


def test_a_change_must_be_worth_it():
    p = policy(gain=1.0)
    state = p.step(p.initial(), seen(g=20.0)).state
    (decision,) = p.step(state, seen(1.0, g=400.0, running=state.layout)).decisions
    assert decision.kind == KEEP_LAYOUT and Layout.parse(decision.value) == state.layout


def test_a_decision_that_was_not_carried_out_is_taken_again():
    p = policy()
    old = p.step(p.initial(), seen(g=20.0)).state
    state = p.step(old, seen(1.0, g=400.0, running=old.layout)).state
    assert p.step(state, seen(3.0, g=400.0, running=old.layout)).decisions == (), "a change takes its time"
    (decision,) = p.step(state, seen(6.5, g=400.0, running=old.layout)).decisions
    assert (decision.kind, decision.cause) == (SET_LAYOUT, "unfinished")
    assert Layout.parse(decision.value) == state.layout


numbers = st.one_of(st.floats(0.0, 800.0), st.just(math.nan))
observations = st.builds(
    lambda dt, g, rate, latency, requests: (dt, g, rate, latency, requests),
    st.floats(0.1, 20.0),
    numbers,
    numbers,
    st.one_of(st.floats(0.001, 3.0), st.just(math.nan)),
    st.integers(0, 200),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(observations, min_size=1, max_size=12))
def test_pure_total_and_replayable_from_json(rows):
    p = policy(requests=150)
    state, now_s, log = p.initial(), 0.0, []
    for dt, g, rate, latency, requests in rows:
        now_s += dt
        observation = seen(
            now_s, g, rate_rps=rate, latency_s=latency, requests=requests, running=state.layout, served={"lite0": 3}
        )
        step = p.step(state, observation)
        assert p.step(state, observation).decisions == step.decisions, "the same question, the same answer"
        log.append((json.dumps(observation.as_dict()), step.decisions))
        state = step.state
        assert state.layout in p.candidates and 1.0 <= state.delay_ratio < math.inf
        assert all(decision.reason and decision.cause for decision in step.decisions)
    state, p = p.initial(), ServicePolicy.from_dict(json.loads(json.dumps(p.as_dict())))
    for line, decisions in log:
        step = p.step(state, Observation.from_dict(json.loads(line)))
        assert step.decisions == decisions
        state = step.state


@pytest.mark.parametrize("key", ["service", "search", "objectives", "trigger", "rate_rps"])
def test_a_damaged_policy_is_one_clear_error(key):
    data = policy(requests=10).as_dict()
    with pytest.raises(DataError):
        ServicePolicy.from_dict({name: value for name, value in data.items() if name != key})
    with pytest.raises(DataError):
        ServicePolicy.from_dict({**data, key: "moon" if key != "service" else None, "search": {"kind": "moon"}})


def test_the_baseline_is_the_leanest_partition_that_keeps_the_slo():
    p = policy()
    layout, metrics = baseline_layout(p.candidates, "lite2", p.search.predictor, p.objectives.slo, 60.0)
    assert layout.counts == {"lite2": 2}, "two slices of one core cost less CPU than one of two"
    tight = Slo(0.0075)
    fast, _ = baseline_layout(p.candidates, "lite2", p.search.predictor, tight, 1.0)
    assert fast.counts == {"lite2": 1}, "only the wide slice is fast enough"
    worst, overloaded = baseline_layout(p.candidates, "lite2", p.search.predictor, p.objectives.slo, 5000.0)
    assert overloaded.latency_s == math.inf and worst.counts == {"lite2": 2}
    assert metrics.energy_j == pytest.approx(0.087, rel=0.02)
    with pytest.raises(InfeasibleError, match="no layout runs other alone"):
        baseline_layout(p.candidates, "other", p.search.predictor, p.objectives.slo, 60.0)


def test_short_names():
    assert short(layouts([(ONE, ONE)], ["lite2"])[0]) == "lite2+lite2"
    assert short(layouts([(TWO,)], ["lite2"])[0]) == "lite2 (2 cores)"
    assert short(layouts([(TWO, ONE)], ["lite2"])[0]) == "lite2@2+lite2@1"
