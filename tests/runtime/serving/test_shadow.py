import asyncio
import math

import numpy as np
import pytest

from joulery.domain.quality import Quality
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    ModelRef,
    Outcome,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestError,
)
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.domain.serving.service import Slice, SliceKind
from joulery.perf.counterfactual import compare
from joulery.runtime.serving.shadow import ShadowReplays
from tests.perf.test_counterfactual import live, pair

ONE = Slice(SliceKind.CPU, cores=1)
REQUEST = InferRequest({"x": np.ones((1, 2), np.float32)})


class Engine:
    """Answers with a variant that costs 12 ms, or fails."""

    def __init__(self, warm=("small", "large")) -> None:
        spec = ReplicaSpec("sums", "small", ONE, ModelRef.parse("m:f"))
        self.views = (ReplicaView("r0", spec, ReplicaState.READY, warm=frozenset(warm)),)
        self.asked: list[InferRequest] = []
        self.fails = False

    def replicas(self):
        return self.views

    async def infer(self, service, request):
        self.asked.append(request)
        await asyncio.sleep(0)
        if self.fails:
            raise RequestError("full", Outcome.OVERLOADED)
        return InferResponse({}, request.variant, "r0", 0.0, 0.0, 0.0, 0.012, 0.012)


def shadow(engine, share=0.5, trial=False) -> ShadowReplays:
    timings = Timings([0.01], [0.01])
    profile = Profile({}, (SliceProfile("large", ONE, timings, timings, 10.0),), 1.0, Quality.MODELLED, "fake")
    return ShadowReplays("sums", "large", share, profile, engine, lambda: trial)


async def all_ended() -> None:
    """Every replay that was begun has ended."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


async def test_an_idle_service_replays_within_its_share_and_drops_the_answers() -> None:
    made = shadow(engine := Engine())
    for _ in range(10):
        made.saw(REQUEST)
        made.replay(0)
        await all_ended()
    assert len(engine.asked) == 5, "half of ten"
    assert made.ratios == pytest.approx([1.2] * 5)
    assert {request.variant for request in engine.asked} == {"large"} and REQUEST.variant == ""


async def test_nothing_is_replayed_while_requests_wait_layouts_are_tried_or_the_variant_is_not_loaded() -> None:
    for made, queued in (
        (shadow(Engine()), 1),
        (shadow(Engine(), trial=True), 0),
        (shadow(Engine(warm=("small",))), 0),
    ):
        made.saw(REQUEST)
        made.saw(REQUEST)
        assert not made.replay(queued)
    assert not shadow(Engine()).replay(0), "there is no request to replay"


async def test_a_failed_replay_counts_for_nothing_and_a_stop_ends_the_one_that_runs() -> None:
    made = shadow(engine := Engine())
    engine.fails = True
    made.saw(REQUEST)
    made.saw(REQUEST)
    assert made.replay(0)
    await all_ended()
    assert made.ratios == []
    made.saw(REQUEST)
    made.saw(REQUEST)
    assert made.replay(0)
    await made.stop()
    await made.stop()
    assert made.ratios == []


def test_replays_correct_a_baseline_that_never_ran_and_only_that() -> None:
    ran = [(-math.inf, pair("small", "small"))]
    ratios = {"large": np.full(40, 1.4), "middle": np.full(40, 9.0)}
    found = compare(live(ran), ran, pair("large", "large"), shadow=ratios)
    assert not found.seen_live and found.shadowed == 40
    assert found.saving_ratio == pytest.approx(1 - 4 / (9 * 1.4), abs=0.02)
    assert found.low_ratio == pytest.approx(1 - 4 * 1.2 / (9 * 1.4), abs=0.03), (
        "they say nothing of the cost under load"
    )
    assert found.high_ratio == pytest.approx(1 - 4 / (9 * 1.4 * 1.2), abs=0.03)
    few = compare(live(ran), ran, pair("large", "large"), shadow={"large": np.full(5, 1.4)})
    assert few.shadowed == 0 and few.saving_ratio == pytest.approx(1 - 4 / 9, abs=0.03)
    both = [(-math.inf, pair("small", "large"))]
    assert compare(live(both), both, pair("large", "large"), shadow=ratios).shadowed == 0, "it was seen live"
