"""Stated shares of a service's requests: kept by weights, whatever the grid and the queue do."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from joulery.domain.decisions import Decision
from joulery.domain.errors import DataError
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.mix import OWN, MixCounter, VariantMix
from joulery.perf.blend import blended
from joulery.policies.serving.observation import SET_LAYOUT, SET_WEIGHTS
from joulery.policies.serving.search.predictive_search import PredictiveSearch
from joulery.policies.serving.variants.traffic_split import TrafficSplit
from tests.policies.serving.test_predictive_policy import policy, seen

CANARY = (("lite2", 0.9), ("lite0", 0.1))


def split(shares=CANARY) -> TrafficSplit:
    """The test service with a split in place of its choice among variants."""
    whole = policy()
    search = whole.search
    assert isinstance(search, PredictiveSearch)
    main = max(shares, key=lambda one: one[1])[0]
    only = tuple(layout for layout in search.candidates if set(layout.counts) == {main})
    mixed = replace(search, candidates=only, predictor=blended(search.predictor, shares, main))
    return TrafficSplit(replace(whole, search=mixed), shares)


class World:
    """An engine on paper that loads what the split names, unless it shall fail."""

    def __init__(self, one: TrafficSplit) -> None:
        self.policy, self.state = one, one.initial()
        self.running: Layout | None = None
        self.loaded: tuple[str, ...] = ()
        self.mix, self.now_s, self.fails = OWN, 0.0, False

    def second(self, **more) -> tuple[Decision, ...]:
        seen_now = seen(self.now_s, running=self.running, loaded=self.loaded, mix=self.mix, **more)
        step = self.policy.step(self.state, seen_now)
        self.state = step.state
        for decision in step.decisions:
            if decision.kind == SET_WEIGHTS:
                self.mix = VariantMix.of(json.loads(json.dumps(decision.value)))
            elif decision.kind == SET_LAYOUT and not self.fails:
                self.running = Layout.parse(decision.value)
                self.loaded = tuple(sorted({*(name for name, _ in self.policy.shares), *self.running.counts}))
        self.now_s += 1.0
        return step.decisions

    def change(self, one: TrafficSplit) -> None:
        self.policy, self.state = one, one.initial()

    def steady(self) -> None:
        for _ in range(10):
            decisions = self.second()
        assert decisions == ()


def test_the_largest_share_has_the_slices_and_the_others_are_steered_to():
    world = World(split())
    world.steady()
    assert set(world.running.counts) == {"lite2"} and world.loaded == ("lite0", "lite2")
    assert dict(world.mix.steady) == {"lite0": 0.1}
    counter, answered = MixCounter(world.mix), {"lite0": 0, "lite2": 0}
    for k in range(1, 1001):
        answered[counter.choose("lite2", {"lite0"}, k % 50, 0.1 * k)] += 1
        assert abs(answered["lite0"] - 0.1 * k) <= 1, "also in front of a queue"


def test_neither_the_grid_nor_a_threat_to_the_slo_changes_the_shares():
    world = World(split())
    world.steady()
    kept = world.mix
    for k in range(60):
        world.second(g=40.0 + 10 * k, rate_rps=500.0, arrival_rps=500.0, queued=900, oldest_wait_s=3.0, latency_s=3.0)
        assert world.mix == kept and set(world.running.counts) == {"lite2"}


def test_a_canary_that_is_slower_than_the_slo_answers_nothing_for_a_minute():
    """It keeps a replica busy for longer than the SLO of 100 ms: cut at the next look, tried again after a minute."""
    for sign in ({"held_s": {"lite0": 0.3}}, {"occupied_s": {"lite0": 0.2, "lite2": 0.02}, "served": {"lite0": 1}}):
        world = World(split())
        world.steady()
        kept = world.mix
        (decision,) = world.second(**sign)
        assert world.mix == OWN and "lite2 answers all for 60 s" in decision.reason
        tried = [world.mix == kept for _ in range(70) if world.second() is not None]
        assert tried.index(True) == 59 and set(world.running.counts) == {"lite2"}
    world = World(split())
    world.steady()
    world.second(occupied_s={"lite0": 0.2, "lite2": 0.3}, served={"lite0": 1, "lite2": 9})
    assert world.mix != OWN, "the others are no faster"


def test_a_variant_that_joins_is_loaded_beside_the_others_and_one_that_leaves_is_unloaded():
    world = World(split())
    world.steady()
    world.change(split((("lite2", 0.5), ("lite1", 0.5))))
    reasons = [one.reason for _ in range(10) for one in world.second()]
    assert any("lite1 to be loaded and lite0 to be unloaded" in reason for reason in reasons)
    assert world.loaded == ("lite1", "lite2") and dict(world.mix.steady) == {"lite1": 0.5}
    world.change(split((("lite1", 1.0),)))
    world.steady()
    assert set(world.running.counts) == {"lite1"} and world.loaded == ("lite1",) and world.mix == OWN


def test_no_request_is_steered_to_a_variant_that_could_not_be_loaded_and_loading_is_tried_once_a_minute():
    world = World(split((("lite2", 1.0),)))
    world.steady()
    world.fails = True
    world.change(split())
    tries = [world.now_s for _ in range(200) for one in world.second() if one.kind == SET_LAYOUT]
    assert world.mix == OWN and 3 <= len(tries) <= 4
    assert all(later - earlier >= 60 for earlier, later in pairwise(tries))


def test_the_partition_is_chosen_for_the_blend():
    """Half the answers by a variant of half the joules: the plan predicts the joules of the two together."""
    alone, half = split((("lite2", 1.0),)), split((("lite2", 0.5), ("lite0", 0.5)))
    layout = Layout.parse(["lite2 on cpu:1", "lite2 on cpu:1"])
    found = [one.policy.search.predictor.predict(layout, 20.0) for one in (alone, half)]
    small = policy().search.predictor.predict(Layout.parse(["lite0 on cpu:1", "lite0 on cpu:1"]), 20.0)
    assert found[1].energy_j == pytest.approx((found[0].energy_j + small.energy_j) / 2, rel=0.02)
    assert found[1].accuracy_ratio == pytest.approx((0.776 + 0.751) / 2)


def test_a_slow_machine_is_seen_through_the_mixture():
    world = World(split((("lite2", 0.5), ("lite0", 0.5))))
    world.steady()
    busy_s = {"lite2": 2 * 8.7e-3, "lite0": 2 * 4.1e-3}
    world.second(requests=80, served={"lite2": 40, "lite0": 40}, occupied_s=busy_s)
    cores = max(piece.cores for piece in world.running.slices)
    assert world.state.service.slowdown_ratio == pytest.approx(2.0 * (1.6 if cores == 2 else 1.0), rel=0.02)


def test_a_split_decides_the_same_from_its_log():
    one = split()
    again = TrafficSplit.from_dict(json.loads(json.dumps(one.as_dict())))
    a, b = World(one), World(again)
    for k in range(20):
        decided = a.second(g=100.0 + k), b.second(g=100.0 + k)
        assert decided[0] == decided[1]
    with pytest.raises(DataError, match="not a split"):
        TrafficSplit.from_dict({**one.as_dict(), "shares": 3})


@pytest.mark.parametrize(
    "shares", [(), (("lite2", 0.9),), (("lite2", 1.0), ("lite0", 0.0)), (("lite2", math.nan),), (("lite2", 1.5),)]
)
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(DataError, match="sum to 1"):
        TrafficSplit(policy(), shares)
