"""Parking and waking instances: the laws, and whole days in the plant of burst studies."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._burst_controllers import PolicyController
from benchmarks._elastic_service import ElasticService, PlantSettings
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.profile import Timings
from joulery.domain.serving.service import Slo
from joulery.perf.layouts import Predictor
from joulery.policies.serving.caution import MOST_CAUTION
from joulery.policies.serving.consolidation import CONSOLIDATION, EQUAL_RATIO, Consolidation, is_part, parts
from joulery.policies.serving.objective import Objective, ReplanTrigger, ServiceObjectives
from joulery.policies.serving.observation import KEEP_LAYOUT, SET_LAYOUT, Observation
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.layout_space import core_partitions, cpu_slices, layouts
from joulery.policies.serving.search.predictive_search import PredictiveSearch, baseline_layout
from joulery.policies.serving.slo_first import ROOM_RATIO
from tests.policies.serving.test_slo_first import predictor

AWAKE_W, START_S, SLO_S = 3.0, 1.5, 0.1
RULE = Consolidation()


def waiting(awake_w: float = AWAKE_W, startup_s: float = START_S) -> Predictor:
    """A profile whose replicas draw power while they wait."""
    known = predictor()
    entries = tuple(replace(one, awake_w=awake_w, startup_s=startup_s) for one in known.profile.entries)
    return replace(known, profile=replace(known.profile, entries=entries), requests=600)


KNOWN = waiting()
SPACE = layouts([cpu_slices(cut) for cut in core_partitions(2)], sorted(KNOWN.accuracy_ratio))
LOADED = tuple(sorted(KNOWN.accuracy_ratio))
GOALS = ServiceObjectives(0.05, Slo(SLO_S))


def policy(rule: Consolidation | None = RULE, *, rate_rps: float = 40.0) -> ServicePolicy:
    _, base = baseline_layout(SPACE, "large", KNOWN, GOALS.slo, rate_rps)
    objective = Objective(0.05, max(KNOWN.accuracy_ratio.values()), base.energy_j, 200.0)
    search = PredictiveSearch(SPACE, KNOWN, objective)
    return ServicePolicy("sums", search, GOALS, rate_rps, ReplanTrigger(200.0), rule)


def play(rate, until_s, rule=RULE, seed=0):
    """A day in the plant: ``rate`` by time, Poisson arrivals by thinning."""
    rng, most = np.random.default_rng(seed), max(rate(t) for t in np.arange(0.0, until_s, 0.5))
    times = np.cumsum(rng.exponential(1.0 / most, int(most * until_s * 1.2) + 50))
    times = times[times < until_s]
    times = times[rng.random(len(times)) * most < np.array([rate(t) for t in times])]
    table = {(e.variant, e.slice): (e.loaded.service_s, e.loaded.cpu_s, e.active_w) for e in KNOWN.profile.entries}
    controller = PolicyController(policy(rule))
    settings_ = PlantSettings(SLO_S, START_S, LOADED, awake_w=AWAKE_W)
    outcome = ElasticService(table, times, settings_, controller, seed).simulate(until_s + 5.0)
    return outcome, controller


def awake_cores(controller):
    """When each layout was decided on, and how many cores it uses."""
    decided = [(t_s, d) for t_s, d in controller.decisions if d.kind in (SET_LAYOUT, KEEP_LAYOUT)]
    return [(t_s, sum(piece.cores for piece in Layout.parse(d.value).slices)) for t_s, d in decided]


def test_the_parts_of_seventy_like_instances_are_sixty_nine():
    instance = next(one for layout in SPACE for one in layout.instances)
    assert [len(part.instances) for part in parts(Layout([instance] * 70))] == list(range(1, 70))


def test_parts_are_all_and_proper():
    whole = Layout.parse(["large on cpu:1", "small on cpu:1", "small on cpu:1"])
    found = list(parts(whole))
    assert len(found) == len(set(found)) == 4 and all(is_part(one, whole) for one in found)
    assert not is_part(whole, whole) and not is_part(whole, found[0])


@settings(max_examples=40, deadline=None)
@given(
    whole=st.sampled_from(SPACE),
    rate_rps=st.floats(0.001, 900.0),
    reserve=st.floats(1.0, 4.0),
    slowdown=st.floats(1.0, 2.0),
)
def test_no_part_is_predicted_to_threaten_the_slo_or_to_cost_more(whole, rate_rps, reserve, slowdown):
    awake = RULE.part(whole, rate_rps, KNOWN, GOALS, reserve=reserve, slowdown_ratio=slowdown)
    if awake == whole:
        return
    metrics = KNOWN.predict_slower(awake, rate_rps * reserve, slowdown)
    assert metrics.latency_s <= SLO_S and metrics.utilisation_ratio <= ROOM_RATIO
    assert metrics.accuracy_ratio >= KNOWN.predict_slower(whole, rate_rps * reserve, slowdown).accuracy_ratio - 1e-12

    def watts(layout):
        return KNOWN.predict(layout, rate_rps).energy_j * rate_rps + KNOWN.awake_w(layout)

    equal_w = EQUAL_RATIO * KNOWN.predict(whole, rate_rps).energy_j * rate_rps
    assert is_part(awake, whole) and watts(awake) <= watts(whole) + equal_w + 1e-6


def alone_at(ratio: float, spread: float) -> Predictor:
    """Replicas draw nothing while they wait; alone, a request takes ``ratio`` of the CPU time it takes in company."""
    known = predictor(spread=spread)
    entries = [
        replace(one, alone=Timings(one.loaded.service_s, one.loaded.cpu_s * ratio)) for one in known.profile.entries
    ]
    return replace(known, profile=replace(known.profile, entries=tuple(entries)))


@pytest.mark.parametrize(
    ("ratio", "spread", "awake"),
    [
        (1.0001, 0.08, 1),  # within the error: an instance less
        (0.9999, 0.08, 1),
        (1.005, 1e-9, 2),  # no error: what is dearer stays dearer
        (10.0, 0.9, 2),  # however large the error, never 1 % more
        (0.9, 1e-9, 1),
    ],
)
def test_joules_that_differ_by_less_than_the_profiles_error_are_equal(ratio, spread, awake):
    whole = Layout.parse(["small on cpu:1"] * 2)
    assert len(RULE.part(whole, 40.0, alone_at(ratio, spread), GOALS, reserve=2.0).instances) == awake


def test_a_profile_of_one_run_claims_no_error():
    known = predictor()
    one = Timings([0.01], [0.01])
    entries = tuple(replace(each, alone=one, loaded=one) for each in known.profile.entries)
    single = replace(known, profile=replace(known.profile, entries=entries))
    assert single.energy_error_ratio(SPACE[0]) == 0.0 < known.energy_error_ratio(SPACE[0]) < 0.05


@given(awake_w=st.floats(0.0, 50.0), whole=st.sampled_from(SPACE))
@settings(max_examples=40, deadline=None)
def test_an_idle_service_never_draws_more_than_without(awake_w, whole):
    known = waiting(awake_w)
    awake = RULE.part(whole, 1e-3, known, GOALS, reserve=2.0)
    assert known.awake_w(awake) <= known.awake_w(whole) + 1e-12


@pytest.mark.slow
def test_low_demand_parks_and_more_demand_wakes_before_the_slo_is_threatened():
    outcome, controller = play(lambda t: 8.0 if t < 120 else min(60.0, 8.0 + 0.6 * (t - 120)), 240.0)
    used = awake_cores(controller)
    parked_s = next(t_s for t_s, cores in used if cores == 1)
    woken_s = next(t_s for t_s, cores in used if t_s > parked_s and cores == 2)
    assert 30.0 <= parked_s <= 60.0 and woken_s > 120.0
    assert not any(d.cause == "threat" for _, d in controller.decisions), "awake before demand needed it"
    assert outcome.refused == 0
    assert outcome.attainment_ratio >= 0.99
    assert np.isfinite(outcome.latency_s).all(), "no request lost over the switches"


@pytest.mark.slow
def test_a_burst_onto_a_parked_service_is_carried_by_lean_variants_while_the_rest_wakes():
    outcome, controller = play(lambda t: 300.0 if 100 <= t < 130 else 8.0, 200.0)
    used = awake_cores(controller)
    assert any(cores == 1 for t_s, cores in used if t_s < 100)
    assert min(t_s for t_s, cores in used if t_s >= 100 and cores == 2) <= 102.0
    assert outcome.attainment_ratio >= 0.99, outcome.late
    without, _ = play(lambda t: 300.0 if 100 <= t < 130 else 8.0, 200.0, rule=None)
    assert outcome.refused <= without.refused + 0.01 * len(outcome.latency_s)


@pytest.mark.slow
@pytest.mark.parametrize(("rate_rps", "saves"), [(5.0, True), (40.0, False), (110.0, False)])
def test_waiting_joules_at_low_medium_and_high_demand(rate_rps, saves):
    on, _ = play(lambda _: rate_rps, 200.0)
    off, _ = play(lambda _: rate_rps, 200.0, rule=None)
    total = [float(one.energy_j.sum()) + one.awake_j for one in (on, off)]
    assert total[0] < 0.75 * total[1] if saves else total[0] == pytest.approx(total[1], rel=0.02)
    assert on.attainment_ratio >= 0.99 and on.refused == 0


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000), low=st.floats(1.0, 20.0), period_s=st.sampled_from([80.0, 120.0]))
def test_demand_that_comes_and_goes_loses_nothing_and_never_costs_more(seed, low, period_s):
    def rate(t):
        return low if t % period_s < period_s / 2 else 60.0

    on, controller = play(rate, 360.0, seed=seed)
    off, _ = play(rate, 360.0, rule=None, seed=seed)
    assert on.refused == 0
    assert np.isfinite(on.latency_s).all()
    assert on.attainment_ratio >= 0.99
    assert float(on.energy_j.sum()) + on.awake_j <= 1.02 * (float(off.energy_j.sum()) + off.awake_j)
    switches = [d for _, d in controller.decisions if d.cause == CONSOLIDATION]
    assert len(switches) <= 2 * (360.0 / period_s + 1), "no flapping"


def test_it_decides_the_same_from_its_written_form():
    made = policy()
    again = ServicePolicy.from_dict(made.as_dict())
    assert again.consolidation == made.consolidation == RULE
    assert "consolidation" not in policy(None).as_dict()


def test_a_service_that_is_asked_nothing_is_parked():
    """No arrival for a while counts as next to no demand."""
    made, running, state = policy(), None, None
    state = made.initial()
    for now_s in range(120):
        blank = Observation(float(now_s), 100.0, 0.0, math.nan, 0, {}, math.nan, running, arrival_rps=0.0)
        step = made.step(state, blank)
        state, running = step.state, step.state.layout
    assert len(running.instances) == 1 and len(state.whole.instances) == 2


def on_gpus(*cuts: int) -> dict:
    """Assignments of GPUs with so many equal slices each, and of the first of them alone."""
    (one,) = cpu_slices((1,))
    names = [(one, f"gpu:{index}") for index, cut in enumerate(cuts) for _ in range(cut)]
    sizes = [sum(cuts[:count]) for count in range(1, len(cuts) + 1)]
    return {(one,) * size: tuple(names[:size]) for size in sizes}


def test_on_gpus_whole_ones_are_left_empty():
    whole = Layout.parse(["small on cpu:1"] * 4)
    free = RULE.part(whole, 1.0, KNOWN, GOALS)
    assert len(free.instances) == 1, "a slice beside an empty one would do"
    rule = Consolidation(gpus=on_gpus(2, 2))
    assert rule.part(whole, 1.0, KNOWN, GOALS) == Layout.parse(["small on cpu:1"] * 2)
    assert rule.part(whole, 1e6, KNOWN, GOALS) == whole
    assert Consolidation(gpus=on_gpus(4)).part(whole, 1.0, KNOWN, GOALS) == whole, "one GPU is never left empty"


def test_the_gpus_that_stay_are_not_cut_anew():
    """Three slices are two on one GPU and one on another, or three on the first: that would take another cut."""
    (one,) = cpu_slices((1,))
    whole = Layout.parse(["small on cpu:1"] * 3)
    places = ((one, "gpu:0"), (one, "gpu:0"), (one, "gpu:1"))
    for first, parked in (((one, "gpu:0"),), whole), (places[:2], Layout.parse(["small on cpu:1"] * 2)):
        rule = Consolidation(gpus={(one,) * 3: places, (one,) * len(first): first})
        assert rule.part(whole, 1.0, KNOWN, GOALS) == parked


def test_the_rule_of_gpus_survives_its_written_form():
    rule = Consolidation(room=3.0, gpus=on_gpus(2, 1))
    assert Consolidation.from_dict(json.loads(json.dumps(rule.as_dict()))) == rule
    made = policy(rule)
    assert ServicePolicy.from_dict(json.loads(json.dumps(made.as_dict()))).consolidation == rule


def parkings(
    late: Callable[[float], bool], rate: Callable[[float], float], until_s: float
) -> tuple[list[float], float]:
    """When instances were parked, where the part that is awake is late at some times; seconds spent late."""
    made, running, found, late_s = policy(), None, [], 0.0
    state = made.initial()
    for now_s in np.arange(0.0, until_s):
        is_late, rate_rps = state.whole is not None and late(now_s) and now_s - found[-1] >= 2.0, rate(now_s)
        late_s += is_late
        seen = Observation(now_s, 100.0, rate_rps, SLO_S / 20, 60, {}, math.nan, running, arrival_rps=rate_rps)
        if is_late:
            seen = replace(seen, latency_s=3 * SLO_S, tail_latency_s=3 * SLO_S, queued=4, oldest_wait_s=2 * SLO_S)
        was_parked, step = state.whole is not None, made.step(state, seen)
        state, running = step.state, step.state.layout
        if state.whole is not None and not was_parked:
            found.append(float(now_s))
    return found, late_s


def test_a_busy_machine_that_is_late_with_the_awake_part_is_left_alone_for_longer_each_time():
    at_s, late_s = parkings(lambda _: True, lambda _: 8.0, 3600.0)
    gaps_s = np.diff(at_s)
    assert len(at_s) >= 5 and (gaps_s[1:] >= 1.5 * np.minimum(gaps_s[:-1], 600.0)).all(), gaps_s
    assert gaps_s[-1] >= MOST_CAUTION * RULE.patience_s
    assert late_s < 0.01 * 3600.0


def test_patience_is_the_same_again_once_instances_were_parked_for_long():
    def rate(now_s):
        return 60.0 if now_s % 3000.0 >= 2900.0 else 8.0

    at_s, _ = parkings(lambda now_s: now_s < 300.0, rate, 3200.0)
    doubted, first, second = at_s[:-2], *at_s[-2:]
    assert len(doubted) >= 3 and first < 600.0, "it was late while others worked, and stays parked now"
    assert 3000.0 < second < 3000.0 + 3 * RULE.patience_s, "demand ended that, and nothing was late"
