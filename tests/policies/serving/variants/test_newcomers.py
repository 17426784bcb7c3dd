"""A variant that joins with assumed times: a small share until they are known, none after a sign that it is slow."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.app.runs.replay import decide_again
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.mix import OWN, MixStep, VariantMix
from joulery.domain.serving.service import Slo
from joulery.policies.serving.objective import ServiceObjectives
from joulery.policies.serving.observation import SET_LAYOUT, SET_WEIGHTS, Observation
from joulery.policies.serving.switchback import AuditedPolicy, Switchback
from joulery.policies.serving.variants.changes import family_of
from joulery.policies.serving.variants.newcomers import JOINED, first_share, shared, unshared
from joulery.runtime.session.history import POLICY, STEP, policy_entry, step_entry
from tests.policies.joining_world import joined
from tests.policies.serving.test_predictive_policy import seen
from tests.policies.serving.test_slo_first import SLO, VARIANTS, policy

RPS = 40.0


def late(outcome):
    return outcome.latency_s > outcome.slo_s


def by(outcome, name="third"):
    return np.array(outcome.variant) == name


@pytest.mark.parametrize("assumed_ms", [15.0, 1.0])
@pytest.mark.parametrize("true_ms", [300.0, 3000.0])
@pytest.mark.parametrize("seed", range(2))
def test_one_that_is_far_slower_than_assumed_delays_few_requests_but_its_own(assumed_ms, true_ms, seed):
    """Assumed to be like the largest, or the leanest of all, and up to 3000 times as slow: two requests find out."""
    outcome, controller = joined(assumed_ms, true_ms, RPS, 90.0, seed)
    assert outcome.refused == 0 and not (late(outcome) & ~by(outcome)).any(), "no other request waits for it"
    assert 1 <= by(outcome).sum() <= 2
    slow_s = [t_s for t_s, one in controller.decisions if one.cause == JOINED and "answer no requests" in one.reason]
    first_s = float(outcome.arrival_s[by(outcome)][0])
    assert slow_s[0] - first_s <= 2.0, "it is cut within two seconds"
    assert not any("third" in str(one.value) for _, one in controller.decisions if one.kind == SET_LAYOUT)


def test_planned_with_what_is_assumed_the_same_variant_breaks_the_slo_for_a_minute():
    """What joining did before: it was the leanest on paper, so that protecting the SLO chose it, too."""
    outcome, _ = joined(1.0, 3000.0, RPS, 90.0, first_share=False)
    assert late(outcome).sum() > 500


@pytest.mark.parametrize("seed", range(2))
def test_one_that_is_as_fast_as_assumed_answers_a_small_share_until_that_is_known(seed):
    outcome, controller = joined(15.0, 15.0, RPS, 110.0, seed)
    assert not late(outcome).any() and 30.0 + 30.0 <= controller.known_s <= 30.0 + 60.0, "30 answers at 0.8 a second"
    before = (outcome.arrival_s > 30.0) & (outcome.arrival_s < controller.known_s)
    assert by(outcome)[before].mean() <= 0.02 + 1 / before.sum()
    after = outcome.arrival_s > controller.known_s + 2.0
    assert by(outcome)[after].mean() > 0.95, "it is the most accurate, and now it may be chosen"


def test_a_threat_ends_the_share_for_a_minute():
    made, state = joining()
    (share,) = weights(made.step(state, at(3.0)))
    assert share.steady == (("third", pytest.approx(0.02)),)
    busy = made.step(state, at(3.0, arrival_rps=400.0, queued=90, oldest_wait_s=0.3, mix=share))
    assert all("third" not in dict(step.weights) for step in weights(busy)[0].steps), "nor does it protect the SLO"
    calm = replace(busy.state, protecting=False, weights=())
    for now_s, answers in ((30.0, False), (62.0, False), (64.0, True)):
        found = weights(made.step(calm, at(now_s)))
        assert bool(found and "third" in dict(found[0].steady)) == answers


def test_a_request_that_stays_with_it_or_one_that_took_long_ends_the_share():
    made, state = joining()
    (share,) = weights(made.step(state, at(3.0)))
    for sign in ({"held_s": {"third": 0.2}}, {"occupied_s": {"third": 0.11}, "served": {"third": 1}}):
        step = made.step(state, at(3.0, mix=share, **sign))
        (mix,) = weights(step)
        assert "third" not in str(mix.as_list()) and step.state.doubted_s == 3.0
    well = made.step(state, at(3.0, mix=share, occupied_s={"third": 0.05}, served={"third": 1}))
    assert weights(well) == [] and well.state.doubted_s == -math.inf
    assert well.state.slowdown_ratio == 1.0, "what it takes says nothing about the machine"


def test_where_no_requests_are_steered_a_doubted_variant_is_in_no_layout():
    """Its one replica threatens the SLO: the leanest layout of known times runs, and for ten minutes none with it."""
    made, state = joining(held=False)
    mixed = Layout.parse(["large on cpu:1", "third on cpu:1"])
    step = made.step(replace(state, layout=mixed), at(3.0, running=mixed, loaded=(), queued=30, oldest_wait_s=0.3))
    (chosen,) = [Layout.parse(one.value) for one in step.decisions if one.kind == SET_LAYOUT]
    assert set(chosen.counts) == {"small"} and step.state.doubted_s == 3.0
    for now_s, returns in ((300.0, False), (700.0, True)):
        again = made.step(replace(step.state, protecting=False), at(now_s, running=chosen, loaded=(), g_per_kwh=20.0))
        (then,) = [Layout.parse(one.value) for one in again.decisions if one.kind == SET_LAYOUT]
        assert ("third" in then.counts) == returns


def test_joining_replays_from_the_log():
    made, state = joining()
    log = [{"kind": POLICY, **policy_entry(made)}]
    state, mix = made.initial(), OWN
    for k in range(90):
        held = {"third": 0.4} if k == 20 else {}
        now = at(float(k), mix=mix, held_s=held, running=None if k == 0 else TWO)
        step = made.step(state, now)
        log.append({"kind": STEP, **step_entry("photos", now, step)})
        state, mix = step.state, (weights(step) or [mix])[0]
    assert sum(entry["kind"] == STEP and "joined" in str(entry) for entry in log) >= 3
    assert decide_again(log).differences == ()


@pytest.mark.parametrize("unknown", [True, False])
def test_no_period_of_the_baseline_is_measured_with_its_share(unknown):
    """The baseline runs anyway: it is measured once the variant that joined is known."""
    made, _ = joining()
    made = replace(made, family=family_of((*VARIANTS, "third"), ["third"] if unknown else []), objectives=LOSSLESS)
    audited = AuditedPolicy(made, Switchback(TWO, 0.5, trim_s=1.0, period_s=5.0))
    now, mix = audited.initial(), OWN
    for k in range(300):
        step = audited.step(now, at(float(k), running=None if k == 0 else TWO, mix=mix))
        now, mix = step.state, (weights(step) or [mix])[0]
    assert now.service.layout == TWO and (now.tally.periods > 3) == (not unknown)
    assert ("a variant that joined answered a share" in now.tally.withheld) == unknown


names = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3, unique=True)
steps = st.lists(
    st.builds(
        MixStep,
        st.floats(0.5, 1e4),
        st.floats(0, 10),
        st.sampled_from([(), (("x", 1.0),), (("x", 0.5), ("y", 0.25))]),
    ),
    max_size=3,
)


@given(steps, names, st.floats(1e-6, 0.3))
def test_the_share_is_taken_away_as_it_was_given(found, joining_names, share):
    mix = VariantMix(tuple(found))
    given_share = shared(mix, joining_names, share)
    assert unshared(given_share) == mix and unshared(mix) == mix
    steady = dict(given_share.steady)
    assert all(steady[name] == share for name in joining_names) and sum(steady.values()) <= 1 + 1e-9
    assert given_share.weights(1, 0.0) == mix.weights(1, 0.0), "in front of a queue nothing changes"


@given(st.floats(0.5, 0.9999), st.floats(0, 1e5), st.integers(1, 5))
def test_the_share_breaks_no_slo_even_if_all_of_it_is_late(quantile, rate_rps, variants):
    share = first_share(Slo(0.1, quantile), rate_rps, variants) * variants
    assert 0 < share <= 0.02 and share <= (1 - quantile) / 2 and share * rate_rps <= 1 + 1e-9


LOSSLESS = ServiceObjectives(0.0, SLO)
TWO = Layout.parse(["large on cpu:1"] * 2)


def at(now_s, **changes) -> Observation:
    base = {"running": TWO, "arrival_rps": RPS, "loaded": (*VARIANTS, "third")}
    calm = {"rate_rps": RPS, "latency_s": 0.03, "requests": 60, "served": {"large": 60}}
    return replace(seen(now_s), **{**calm, **base, **changes})


def weights(step):
    return [VariantMix.of(one.value) for one in step.decisions if one.kind == SET_WEIGHTS]


def joining(*, held=True):
    """A policy that a variant with assumed times has joined, and its state a step after; two large ones run."""
    _, controller = joined(15.0, 15.0, RPS, 29.0, first_share=held)
    made = controller.policy
    assert (
        made.family == family_of((*VARIANTS, "third"), ["third"])
        and made.objectives.slo == SLO == policy().objectives.slo
    )
    state = made.step(made.initial(), at(0.0, running=None, loaded=())).state
    return made, replace(state, layout=TWO, planned_rps=RPS, decided_s=0.0)
