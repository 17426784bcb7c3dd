"""Replicas that keep several variants loaded: requests steered by a mix, changes without a new process."""

import asyncio
import os
import signal
from collections import Counter
from dataclasses import replace

from joulery.domain.serving.engine import ReplicaSpec
from joulery.domain.serving.mix import OWN, MixStep, VariantMix
from joulery.policies.serving.variants.newcomers import shared, unshared
from tests.adapters.engines.support import ask, running, toy, until

MODELS = {name: toy("with_options", options=f'{{"offset": {offset}}}').model for name, offset in (("a", 1), ("b", 2))}


def warm(own: str = "a", **changes) -> ReplicaSpec:
    others = tuple((name, model) for name, model in MODELS.items() if name != own)
    return replace(toy("with_options", variant=own), model=MODELS[own], warm=others, **changes)


def always(variant: str, share: float = 1.0) -> VariantMix:
    return VariantMix((MixStep(1.0, 1e6, ((variant, share),)),))


async def answers(engine, count: int, **kwargs):
    return [await ask(engine, x=[0.0], **kwargs) for _ in range(count)]


async def test_a_mix_steers_requests_to_the_variants_that_are_loaded() -> None:
    async with running(warm()) as engine:
        (view,) = engine.replicas()
        assert view.warm == ("b",) and engine.mix("toy") == OWN
        assert {answer.variant for answer in await answers(engine, 4)} == {"a"}
        engine.set_mix("toy", always("b", 0.25))
        found = await answers(engine, 40)
        assert Counter(answer.variant for answer in found) == {"a": 30, "b": 10}
        assert all(float(answer.outputs["y"][0]) == {"a": 1.0, "b": 2.0}[answer.variant] for answer in found)
        assert engine.replicas()[0].pid == view.pid
        named = await answers(engine, 2, variant="b")
        assert [answer.variant for answer in named] == ["b", "b"], "a request may name any loaded variant"


async def test_a_variant_that_joined_answers_its_first_share_and_none_in_front_of_a_queue() -> None:
    async with running(warm()) as engine:
        engine.set_mix("toy", shared(OWN, ["b"], 0.02))
        found = await answers(engine, 150)
        assert Counter(answer.variant for answer in found) == {"a": 147, "b": 3}
        found = await asyncio.gather(*(ask(engine, x=[0.0]) for _ in range(120)))
        assert Counter(answer.variant for answer in found)["b"] <= 1, "only the first and the last have none behind"
        assert engine.mix("toy").steady == (("b", 0.02),) and unshared(engine.mix("toy")) == OWN


async def test_a_longer_queue_is_answered_by_the_leaner_variant() -> None:
    async with running(warm()) as engine:
        engine.set_mix("toy", VariantMix((MixStep(1e-3, 2900.0), MixStep(1e-3, 9e3, (("b", 1.0),)))))
        found = await asyncio.gather(*(ask(engine, x=[0.0]) for _ in range(6)))
        assert [answer.variant for answer in found] == ["a", "b", "b", "a", "a", "a"], (
            "behind the first, nothing waited yet"
        )


async def test_another_own_variant_needs_no_new_process() -> None:
    async with running(warm("a")) as engine:
        pid = engine.replicas()[0].pid
        change = await engine.apply([warm("b")])
        assert (change.started, change.stopped) == ((), ()) and [spec.variant for spec in change.kept] == ["b"]
        assert engine.replicas()[0].pid == pid and engine.replicas()[0].warm == ("a",)
        assert (await answers(engine, 1))[0].variant == "b"


async def test_a_worker_that_dies_comes_back_with_its_warm_variants() -> None:
    async with running(warm("a")) as engine:
        engine.set_mix("toy", always("b"))
        await engine.apply([warm("b")])
        os.kill(engine.replicas()[0].pid, signal.SIGKILL)
        await until(
            lambda: engine.replicas()[0].restarts == 1 and engine.replicas()[0].warm == ("a",), "the new worker"
        )
        engine.set_mix("toy", always("a"))
        assert {answer.variant for answer in await answers(engine, 3)} == {"a"}


async def test_memory_bounds_what_is_kept_warm() -> None:
    async with running(warm(memory_bytes=1_000_000)) as engine:
        (view,) = engine.replicas()
        assert view.warm == () and "b is not kept warm" in view.last_error
        engine.set_mix("toy", always("b"))
        assert {answer.variant for answer in await answers(engine, 3)} == {"a"}


async def test_a_warm_variant_that_cannot_be_loaded_or_declares_other_inputs_is_left_out() -> None:
    broken = ("broken", toy("no_such_function").model)
    async with running(replace(toy("with_options", variant="a"), model=MODELS["a"], warm=(broken,))) as engine:
        assert engine.replicas()[0].warm == () and "broken is not kept warm" in engine.replicas()[0].last_error
        assert (await answers(engine, 1))[0].variant == "a"
    async with running(replace(warm(), warm=(("other", toy("double").model),))) as engine:
        assert engine.replicas()[0].warm == () and "other inputs" in engine.replicas()[0].last_error
