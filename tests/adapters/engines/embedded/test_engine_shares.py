"""Shares of a service's requests over replicas of several variants: kept while all run, and from a change on."""

import asyncio
import os
import signal
from collections import Counter

from joulery.domain.serving.mix import MixStep, VariantMix
from tests.adapters.engines.support import ask, running, toy, until


def variant(name: str):
    return toy("with_options", variant=name, options=f'{{"offset": {ord(name)}}}')


def shares(**parts: float) -> VariantMix:
    return VariantMix((MixStep(1.0, 0.0, tuple(parts.items())),))


async def answered(engine, count: int) -> Counter[str]:
    return Counter([(await ask(engine, x=[0.0])).variant for _ in range(count)])


async def test_each_variant_answers_its_share_whichever_replica_is_free():
    async with running() as engine:
        engine.set_next_mixes({"toy": shares(a=0.2, b=0.8)})
        await engine.apply([variant("a"), variant("a"), variant("a"), variant("b")])
        assert await answered(engine, 50) == {"a": 10, "b": 40}
        named = [(await ask(engine, x=[0.0], variant="a")).variant for _ in range(5)]
        assert named == ["a"] * 5, "a request may name its variant"


async def test_new_shares_hold_from_the_change_of_the_replicas_on_and_no_request_is_lost():
    async with running() as engine:
        engine.set_next_mixes({"toy": shares(a=0.5, b=0.5)})
        await engine.apply([variant("a"), variant("b")])
        waiting = [asyncio.create_task(ask(engine, x=[0.0])) for _ in range(200)]
        await asyncio.sleep(0)
        engine.set_next_mixes({"toy": shares(b=0.25, c=0.75)})
        assert dict(engine.mix("toy").steady) == {"a": 0.5, "b": 0.5}, "the old replicas serve"
        await engine.apply([variant("b"), variant("c")])
        assert all(answer.variant in "abc" for answer in await asyncio.gather(*waiting))
        assert await answered(engine, 40) == {"b": 10, "c": 30}


async def test_a_change_that_fails_changes_no_shares():
    async with running() as engine:
        engine.set_next_mixes({"toy": shares(a=0.5, b=0.5)})
        await engine.apply([variant("a"), variant("b")])
        engine.set_next_mixes({"toy": shares(a=1.0)})
        try:
            await engine.apply([variant("a"), toy("no_such_model", variant="b")])
        except Exception as error:  # noqa: BLE001 - whichever it is, the old replicas answer
            assert "no_such_model" in str(error)
        assert await answered(engine, 20) == {"a": 10, "b": 10}


async def test_while_a_variant_is_gone_the_others_answer_and_then_it_has_its_share_again():
    async with running() as engine:
        engine.set_next_mixes({"toy": shares(a=0.5, b=0.5)})
        await engine.apply([variant("a"), variant("b")])
        lost = next(view for view in engine.replicas() if view.spec.variant == "a")
        os.kill(lost.pid, signal.SIGKILL)
        assert sum((await answered(engine, 10)).values()) == 10
        await until(lambda: all(view.state == "ready" for view in engine.replicas()), "the replica again")
        assert await answered(engine, 20) == {"a": 10, "b": 10}
