"""Variants join and leave while a Clover policy serves: what is known stays, and the log replays."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.app.runs.replay import decide_again
from joulery.domain.gpu.layout import Layout
from joulery.policies.serving.observation import SET_LAYOUT, TRY_LAYOUT, Observation, Sample
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.layout_space import layouts
from joulery.policies.serving.state import ServiceState
from joulery.policies.serving.switchback import AuditedPolicy, Switchback
from joulery.policies.serving.variants.changes import FAMILY, change_text, family_of, followed, seen_by
from joulery.runtime.session.history import POLICY, STEP, policy_entry, step_entry
from tests.policies.serving.test_predictive_policy import ACCURACY
from tests.policies.serving.test_predictive_policy import policy as predicting
from tests.policies.serving.trial_world import BASE, SPACE, World, trying

ALL = tuple(sorted(ACCURACY))
BOTH = pytest.mark.parametrize("search", ["predict", "learning", "clover"])


def over(policy: ServicePolicy, names: tuple[str, ...], assumed: tuple[str, ...] = ()) -> ServicePolicy:
    """The policy with other variants, as a changed site file makes it."""
    search, predictor = policy.search, policy.search.predictor
    if hasattr(search, "over"):
        made = search.over({name: ACCURACY[name] for name in names}, (), predictor)
    else:
        made = replace(search, candidates=layouts(SPACE, names))
    return replace(policy, search=made, family=family_of(names, assumed))


def start(search: str, names: tuple[str, ...]) -> ServicePolicy:
    made = predicting(requests=300) if search == "predict" else trying(search, predictor=predicting().search.predictor)
    return over(made, names)


class Logged(World):
    """A world that keeps the log of its run."""

    def __init__(self, policy, **changes):
        super().__init__(policy, **changes)
        self.log = [{"kind": POLICY, **policy_entry(policy)}]
        self.share = {}

    def sample(self):
        made = super().sample()
        return made if made is None else replace(made, served={**made.served, **self.share})

    def change(self, names, assumed=()):
        self.policy = over(self.policy, names, assumed)
        self.log.append({"kind": POLICY, **policy_entry(self.policy)})

    def second(self):
        before = self.state
        decisions = super().second()
        step = self.policy.step(before, self.seen[-1])
        assert step.decisions == decisions, "a policy has no memory of its own"
        self.log.append({"kind": STEP, **step_entry("photos", self.seen[-1], step)})
        return decisions

    def seconds(self, count):
        for _ in range(count):
            self.second()

    def named(self, since=0):
        return {name for decision in self.decisions[since:] for name in Layout.parse(decision.value).counts}


@pytest.mark.slow
@BOTH
def test_a_variant_that_joins_is_considered_and_what_was_measured_is_not_tried_again(search):
    world = Logged(start(search, ("lite0", "lite2")), g_per_kwh=190.0)
    world.seconds(120)
    tried = [one.value for one in world.decisions if one.kind == TRY_LAYOUT]
    known, count = len(world.state.known), len(world.decisions)
    assert world.named() <= {"lite0", "lite2"} and world.state.trying is None
    world.change(ALL)
    world.second()
    assert world.decisions[count].cause == FAMILY and world.decisions[count].reason.startswith("lite1 joined: ")
    world.seconds(120)
    assert "lite1" in world.named(count), "at 190 g/kWh it is the best"
    if search != "predict":
        again = [one.value for one in world.decisions[count:] if one.kind == TRY_LAYOUT]
        assert not [value for value in again if value in tried], "what the variants that stay showed is known"
        assert len(world.state.known) > known and world.state.baseline.layout == BASE
    assert decide_again(world.log).differences == ()


@pytest.mark.slow
@BOTH
def test_a_variant_that_leaves_is_never_named_again(search):
    world = Logged(start(search, ALL), g_per_kwh=190.0)
    while world.running is None or "lite1" not in world.running.counts:
        world.second()
    trial, count = world.state.trying, len(world.decisions)
    assert (trial is None) == (search == "predict"), "it leaves during its trial"
    world.change(("lite0", "lite2"))
    world.second()
    assert world.decisions[count].reason.startswith("lite1 left: ")
    assert trial is None or world.state.trying != trial
    world.seconds(120)
    assert world.named(count) <= {"lite0", "lite2"}
    assert not any("lite1" in item.layout.counts for item in world.state.known)
    assert decide_again(world.log).differences == ()


@pytest.mark.parametrize("search", ["predict", "learning"])
def test_times_that_become_known_are_a_reason_to_search_again(search):
    world = Logged(start(search, ("lite0", "lite2")), g_per_kwh=190.0)
    world.seconds(120)
    world.change(ALL, assumed=("lite1",))
    world.seconds(120)
    count = len(world.decisions)
    world.change(ALL)
    world.seconds(5)
    reasons = [one.reason for one in world.decisions[count:]]
    assert [text.startswith("the times of lite1 are known: ") for text in reasons] == [True]
    assert decide_again(world.log).differences == ()


def threatened(running: Layout, now_s: float, **changes) -> Observation:
    return Observation(
        now_s,
        190.0,
        60.0,
        math.nan,
        0,
        {},
        math.nan,
        running,
        arrival_rps=5000.0,
        queued=900,
        oldest_wait_s=2.0,
        **changes,
    )


@pytest.mark.parametrize("search", ["predict", "learning"])
def test_while_the_slo_is_threatened_one_that_joins_waits_and_one_that_left_is_replaced(search):
    """The layout's own variants serve on with leaner ones loaded; those of a layout that left are not steered to."""
    own, pair = Layout.parse(["lite2 on cpu:1"] * 2), ("lite0", "lite2")
    policy = start(search, pair)
    state = replace(
        policy.step(policy.initial(), replace(threatened(own, 0.0), queued=0, arrival_rps=1.0)).state, layout=own
    )
    state = replace(state, trying=None)
    joined = over(policy, ALL).step(state, threatened(own, 1.0, loaded=pair))
    assert [one.kind for one in joined.decisions] == ["set_weights"] and joined.state.changes == "lite1 joined"
    left = over(over(policy, ALL), ("lite1", "lite2"))
    mixed = Layout.parse(["lite0 on cpu:1", "lite2 on cpu:1"])
    state = replace(followed(state, family_of(ALL)), changes="", layout=mixed)
    step = left.step(state, threatened(mixed, 1.0, loaded=ALL))
    chosen = next(one for one in step.decisions if one.kind == SET_LAYOUT)
    assert set(Layout.parse(chosen.value).counts) == {"lite1"} and "SLO threatened" in chosen.reason
    again = left.step(step.state, threatened(Layout.parse(chosen.value), 2.0, loaded=("lite0", "lite1", "lite2")))
    assert not [one for one in again.decisions if one.kind == "set_weights" and "lite0" in str(one.value)]


def test_a_change_ends_a_period_of_the_baseline_and_its_layout_is_not_gone_back_to():
    policy = over(predicting(requests=300), ALL)
    audited = AuditedPolicy(policy, Switchback(BASE, 0.5, trim_s=1.0, period_s=30.0))
    state, running, now_s = audited.initial(), None, 0.0

    def second(made):
        nonlocal state, running, now_s
        seen = Observation(now_s, 190.0, 60.0, math.nan, 0, {}, math.nan, running, arrival_rps=60.0)
        step = made.step(state, seen)
        state, now_s = step.state, now_s + 1.0
        for decision in step.decisions:
            running = Layout.parse(decision.value)
        return step.decisions

    while math.isnan(state.serving_s) or now_s - state.serving_s < 5.0:
        second(audited)
    assert running == BASE and "lite1" in state.service.layout.counts
    (decision,) = second(replace(audited, policy=over(policy, ("lite0", "lite2"))))
    assert decision.cause == FAMILY and running is not None and "lite1" not in running.counts
    assert math.isnan(state.asked_s) and state.tally.periods >= 1, "what was measured of the baseline stays"


def test_answers_of_a_variant_that_left_measure_no_layout():
    mine = Sample(BASE, 0.0, 100, 0, 0.1, 0.1, 0.1, 1.0, 0.0, {"lite1": 1, "lite2": 99})
    seen = replace(threatened(BASE, 0.0, loaded=ALL), sample=mine)
    family = family_of(("lite0", "lite2"))
    assert seen_by(family, seen).sample is None and seen_by(family, seen).loaded == ("lite0", "lite2")
    assert seen_by((), seen) is seen and seen_by(family_of(ALL), seen).sample is mine


@pytest.mark.parametrize("search", ["learning", "clover"])
def test_the_first_share_of_a_variant_that_joined_is_no_accuracy_of_a_layout(search):
    """Trials do not choose it yet, but it answers a few requests: they go on from what their own variants showed."""
    world = Logged(start(search, ("lite0", "lite2")), g_per_kwh=190.0)
    world.seconds(120)
    world.policy = replace(world.policy, family=family_of(ALL, ("lite1",)))
    world.log.append({"kind": POLICY, **policy_entry(world.policy)})
    own, world.share = world.state.layout, {"lite1": 1}
    world.seconds(60)
    world.g_per_kwh = 40.0
    world.seconds(60)
    assert world.decisions[-1].cause not in (FAMILY, "start"), "another search began from that sample"
    known = next(item for item in world.state.known if item.layout == own)
    assert min(ACCURACY[name] for name in own.counts) <= known.metrics.accuracy_ratio
    assert known.metrics.accuracy_ratio <= max(ACCURACY[name] for name in own.counts)
    assert decide_again(world.log).differences == ()


def test_changes_in_words():
    one, three = family_of(("b", "a")), family_of(("a", "b", "c"), ["c"])
    assert change_text(one, three) == "c joined" and change_text(three, one) == "c left"
    assert change_text(one, family_of(("c", "d"))) == "c, d joined and a, b left"
    assert change_text(three, family_of(("a", "b", "c"))) == "the times of c are known" and change_text(one, one) == ""
    assert followed(ServiceState(), ()) == ServiceState(), "a family that never changes is not followed"


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["predict", "learning", "clover"]),
    st.lists(
        st.tuples(
            st.sets(st.sampled_from(["lite0", "lite1"])), st.integers(1, 25), st.floats(1.0, 500.0), st.booleans()
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_whatever_joins_and_leaves_only_present_variants_are_chosen_and_the_log_replays(search, changes):
    world = Logged(start(search, ALL), g_per_kwh=150.0)
    world.seconds(3)
    for names, seconds, g_per_kwh, tight in changes:
        names, count = (*sorted(names), "lite2"), len(world.decisions)
        world.g_per_kwh, world.latency_ratio = g_per_kwh, 50.0 if tight else 1.0
        world.change(names)
        world.seconds(seconds)
        assert world.named(count) <= set(names)
        assert world.running is not None and set(world.running.counts) <= set(names)
    if search != "predict" and world.state.baseline is not None:
        assert world.state.baseline.layout == BASE
    assert decide_again(world.log).differences == ()
