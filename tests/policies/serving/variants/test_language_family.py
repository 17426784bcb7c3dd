"""Which language model of a family answers: SLO and accuracy floor first, then Clover's objective."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import InfeasibleError
from joulery.domain.serving.service import Slo
from joulery.policies.serving.objective import ServiceObjectives
from joulery.policies.serving.variants.language_family import FamilySeen, FamilyState, LanguageFamilyPolicy, ModelSeen

ACCURACY = {"large": 0.82, "medium": 0.76, "small": 0.70}
JOULES = {"large": 500.0, "medium": 120.0, "small": 60.0}


def policy(lambda_ratio=0.5, floor=0.0, accuracy=ACCURACY) -> LanguageFamilyPolicy:
    return LanguageFamilyPolicy("chat", accuracy, ServiceObjectives(lambda_ratio, Slo(8.0), floor), 250.0)


def seen(now_s=0.0, g=250.0, joules=JOULES, **changes) -> FamilySeen:
    models = [ModelSeen(name, energy_j=joules.get(name, math.nan)) for name in ACCURACY]
    return FamilySeen(now_s, g, tuple(replace(one, **changes.get(one.name, {})) for one in models))


def decided(one: LanguageFamilyPolicy, *looks: FamilySeen) -> dict[str, float]:
    state = one.initial()
    for look in looks:
        state = one.step(state, look).state
    return dict(state.shares)


def test_a_clean_grid_has_the_accurate_model_answer_and_a_dirty_one_the_lean_one():
    rule = policy(lambda_ratio=0.1)
    assert decided(rule, seen(g=10.0)) == {"large": 1.0}
    assert decided(rule, seen(g=500.0)) == {"medium": 1.0}
    assert decided(policy(lambda_ratio=1.0), seen()) == {"small": 1.0}
    assert decided(policy(lambda_ratio=0.0), seen(g=900.0)) == {"large": 1.0}


@given(
    st.floats(0, 1),
    st.floats(0, 0.82),
    st.lists(st.floats(1, 1000), min_size=3, max_size=3),
    st.floats(0, 900),
    st.sets(st.sampled_from(sorted(ACCURACY))),
)
def test_shares_sum_to_one_and_keep_the_floor_whichever_is_slow(lambda_ratio, floor, joules, g, slow):
    changes = {name: {"wait_s": 9.0} for name in slow}
    shares = decided(policy(lambda_ratio, floor), seen(0.0, g, dict(zip(ACCURACY, joules, strict=True)), **changes))
    assert math.fsum(shares.values()) == pytest.approx(1.0)
    assert math.fsum(share * ACCURACY[name] for name, share in shares.items()) >= floor - 1e-9


@given(st.floats(0, 1), st.floats(0.6, 0.82), st.lists(st.floats(1, 1000), min_size=3, max_size=3), st.floats(1, 900))
def test_no_mixture_on_a_grid_of_shares_scores_better(lambda_ratio, floor, joules, g):
    rule, energy = policy(lambda_ratio, floor), dict(zip(ACCURACY, joules, strict=True))

    def score(shares):
        accuracy = sum(share * ACCURACY[name] for name, share in shares.items())
        spent = sum(share * energy[name] for name, share in shares.items()) * g
        base = energy["large"] * 250.0
        return lambda_ratio * (base - spent) / base + (1 - lambda_ratio) * (accuracy - 0.82) / 0.82, accuracy

    best, _ = score(decided(rule, seen(0.0, g, energy)))
    for a in range(11):
        for b in range(11 - a):
            other, accuracy = score({"large": a / 10, "medium": b / 10, "small": (10 - a - b) / 10})
            assert accuracy < floor - 1e-9 or other <= best + 1e-9


def test_a_floor_between_two_models_is_met_by_a_mixture():
    shares = decided(policy(1.0, floor=0.79), seen())
    assert shares == pytest.approx({"large": 0.5, "medium": 0.5}) or shares == pytest.approx(
        {"large": 0.75, "small": 0.25}
    )
    assert sum(share * ACCURACY[name] for name, share in shares.items()) == pytest.approx(0.79)


def test_unknown_joules_are_found_out_with_a_tenth_of_the_requests():
    shares = decided(policy(), seen(joules={}))
    assert max(shares, key=shares.get) == "large" and min(shares.values()) >= 0.09 and len(shares) == 3
    assert decided(policy(floor=0.82), seen(joules={})) == {"large": 1.0}, "not below the floor"
    assert decided(policy(1.0), seen(joules={}), seen(20.0)) == {"small": 1.0}


def test_a_model_too_slow_for_the_slo_gets_nothing_at_once_and_returns_when_calm():
    rule, state = policy(1.0), FamilyState()
    state = rule.step(state, seen()).state
    step = rule.step(state, seen(1.0, small={"wait_s": 5.0}))
    assert dict(step.state.shares) == {"medium": 1.0} and "small too slow for the SLO" in step.decisions[0].reason
    early = rule.step(step.state, seen(20.0))
    assert dict(early.state.shares) == {"medium": 1.0}
    assert dict(rule.step(early.state, seen(32.0)).state.shares) == {"small": 1.0}


def test_a_model_that_is_slow_whenever_it_answers_is_chosen_ever_more_rarely():
    rule = policy(lambda_ratio=0.1)
    state, since_s, chosen_s, late_s = rule.initial(), 0.0, [], 0
    for now_s in range(7200):
        answers = "large" in dict(state.shares)
        late = answers and now_s - since_s >= 2 and not 5000 <= now_s < 6000
        late_s += late
        before, state = state, rule.step(state, seen(float(now_s), 10.0, large={"wait_s": 9.0 * late})).state
        if "large" in dict(state.shares) and "large" not in dict(before.shares):
            since_s = now_s
            chosen_s.append(now_s)
    first = [at_s for at_s in chosen_s if at_s < 5000]
    gaps_s = [b - a for a, b in itertools.pairwise(first)]
    assert len(first) >= 5 and all(b >= min(1.5 * a, 900.0) for a, b in itertools.pairwise(gaps_s)), chosen_s
    assert late_s <= 20 and any(at_s < 6000 for at_s in chosen_s if at_s >= 5000), "it returned once it was fast"


def test_when_all_are_slow_the_shortest_wait_serves_and_when_one_is_down_the_others_do():
    waits = {"large": {"wait_s": 9.0}, "medium": {"wait_s": 6.0}, "small": {"wait_s": 7.0}}
    assert decided(policy(), seen(**waits)) == {"medium": 1.0}
    rule = policy(1.0)
    state = rule.step(rule.initial(), seen()).state
    step = rule.step(state, seen(1.0, small={"ready": False}))
    assert dict(step.state.shares) == {"medium": 1.0} and "small down" in step.decisions[0].reason
    no_model = {name: {"ready": False} for name in ACCURACY}
    assert sum(decided(policy(), seen(**no_model)).values()) == pytest.approx(1.0)


def test_shares_stay_while_nothing_moves_and_small_changes_of_the_grid_change_nothing():
    rule = policy(lambda_ratio=0.1)
    state = rule.step(rule.initial(), seen(g=100.0)).state
    for k in range(1, 60):
        step = rule.step(state, seen(float(k), g=100.0 + 0.05 * (k % 5)))
        assert step.decisions == ()
        state = step.state


def test_an_unknown_intensity_counts_as_the_baselines_and_prices_below_zero_as_zero():
    rule = policy(lambda_ratio=0.3)
    assert decided(rule, seen(g=math.nan)) == decided(rule, seen(g=250.0))
    assert decided(rule, seen(g=-40.0)) == decided(rule, seen(g=0.0)) == {"large": 1.0}


def test_it_decides_the_same_from_its_log():
    rule = policy(0.3, 0.72)
    again = LanguageFamilyPolicy.from_dict(json.loads(json.dumps(rule.as_dict())))
    one, other = rule.initial(), again.initial()
    for k in range(40):
        look = seen(float(k), g=20.0 * k, joules=JOULES if k > 5 else {}, large={"wait_s": float(k % 9)})
        read = FamilySeen.from_dict(json.loads(json.dumps(look.as_dict())))
        a, b = rule.step(one, look), again.step(other, read)
        assert a.decisions == b.decisions
        one, other = a.state, b.state


def test_a_floor_that_no_model_reaches_is_one_error():
    with pytest.raises(InfeasibleError, match="no model is as accurate"):
        policy(floor=0.9)


def with_ttft(latency_s=0.5) -> LanguageFamilyPolicy:
    return replace(policy(lambda_ratio=0.0), ttft=Slo(latency_s, 0.95))


@pytest.mark.parametrize("late", [{"ttft_s": 0.6}, {"expected_ttft_s": 0.6}])
def test_a_model_that_begins_late_answers_nothing_until_it_was_calm(late):
    rule = with_ttft()
    state = rule.step(rule.initial(), seen()).state
    assert dict(state.shares) == {"large": 1.0}
    step = rule.step(state, seen(1.0, large=late))
    assert dict(step.state.shares) == {"medium": 1.0}
    assert step.decisions[0].cause == "threat" and "large too slow for the SLO" in step.decisions[0].reason
    state = rule.step(step.state, seen(20.0)).state
    assert dict(state.shares) == {"medium": 1.0}, "calm for 19 s"
    assert dict(rule.step(state, seen(40.0)).state.shares) == {"large": 1.0}


@given(st.one_of(st.just(math.nan), st.floats(0, 10)), st.one_of(st.just(math.nan), st.floats(0, 10)))
def test_without_an_slo_of_the_first_token_it_decides_nothing(ttft_s, expected_s):
    late = {"large": {"ttft_s": ttft_s, "expected_ttft_s": expected_s}}
    assert decided(policy(), seen(**late)) == decided(policy(), seen())


def test_a_policy_with_an_slo_of_the_first_token_is_read_back():
    rule = with_ttft()
    assert LanguageFamilyPolicy.from_dict(json.loads(json.dumps(rule.as_dict()))) == rule
    assert "ttft" not in policy().as_dict()
    look = seen(large={"ttft_s": 0.25, "expected_ttft_s": 0.5})
    assert FamilySeen.from_dict(json.loads(json.dumps(look.as_dict()))).models[0].ttft_s == 0.25
    older = look.as_dict()
    for one in older["models"]:
        del one["ttft_s"], one["expected_ttft_s"]
    assert math.isnan(FamilySeen.from_dict(older).models[0].ttft_s), "logs of before are read"
