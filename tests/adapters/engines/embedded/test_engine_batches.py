"""Requests answered together, and replicas that stand by."""

import asyncio
import math
from collections import Counter
from dataclasses import replace

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from joulery.adapters.engines.embedded.batches import divided
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.serving.engine import InferResponse, Outcome, ReplicaSpec, RequestError
from joulery.domain.serving.mix import MixStep, VariantMix
from tests.adapters.engines.support import CORE, ask, running, toy, until


def batched(name: str = "rows", batch: int = 4, max_delay_s: float = 0.0, **changes: object) -> ReplicaSpec:
    return replace(toy(name), batch=batch, max_delay_s=max_delay_s, **changes)


async def asked(engine, values) -> list[InferResponse]:
    return await asyncio.gather(*(ask(engine, x=[float(value)]) for value in values))


async def test_what_has_gathered_is_answered_together_each_with_its_own_rows() -> None:
    async with running(batched(batch=4)) as engine:
        answers = await asked(engine, range(9))
    assert [answer.outputs["y"].tolist() for answer in answers] == [[2.0 * value] for value in range(9)]
    assert [answer.batch for answer in answers] == [1, 4, 4, 4, 4, 4, 4, 4, 4], "the first found it idle"
    assert all(answer.outputs["together"].tolist() == [answer.batch] for answer in answers)
    shares = [answer.cpu_s for answer in answers[1:5]]
    assert shares == pytest.approx([shares[0]] * 4, rel=1e-12), "CPU time in equal parts"


async def test_a_batch_waits_for_its_delay_and_no_longer() -> None:
    async with running(batched(batch=3, max_delay_s=0.2)) as engine:
        alone = await ask(engine, x=[1.0])
        assert alone.batch == 1 and alone.start_s - alone.arrival_s >= 0.19
        full = await asked(engine, range(3))
        assert [answer.batch for answer in full] == [3, 3, 3]


async def test_requests_of_several_rows_share_a_batch() -> None:
    async with running(batched(batch=2, max_delay_s=5.0)) as engine:
        one, two = await asyncio.gather(ask(engine, x=[1.0, 2.0, 3.0]), ask(engine, x=[4.0]))
    assert one.outputs["y"].tolist() == [2.0, 4.0, 6.0] and two.outputs["y"].tolist() == [8.0]
    assert one.outputs["together"].tolist() == [4, 4, 4]


async def test_requests_that_do_not_fit_together_go_apart() -> None:
    async with running(batched(batch=4)) as engine:
        flat, deep, odd = await asyncio.gather(ask(engine, x=[1.0]), ask(engine, x=[[1.0, 2.0]]), ask(engine, x=[3]))
    assert [answer.batch for answer in (flat, deep, odd)] == [1, 1, 1]
    assert deep.outputs["y"].tolist() == [[2.0, 4.0]] and odd.outputs["y"].tolist() == [6]


async def test_a_bad_request_spoils_no_other_answer() -> None:
    async with running(batched(batch=4, max_delay_s=5.0)) as engine:
        good = [ask(engine, x=[float(value)]) for value in range(3)]
        *answers, bad = await asyncio.gather(*good, ask(engine, x=[-1.0]), return_exceptions=True)
        assert isinstance(bad, RequestError) and bad.outcome is Outcome.INVALID and "negative" in str(bad)
        assert [answer.outputs["y"].tolist() for answer in answers] == [[0.0], [2.0], [4.0]]


async def test_a_model_that_answers_no_batches_is_asked_one_by_one() -> None:
    async with running(batched("totals", batch=3, max_delay_s=5.0)) as engine:
        answers = await asked(engine, range(3))
    assert [answer.outputs["sum"].tolist() for answer in answers] == [[0.0], [1.0], [2.0]]


async def test_a_replica_on_standby_is_ready_and_answers_only_when_promoted() -> None:
    standby = replace(toy("who"), standby=True, threads=2)
    async with running(toy("who"), standby) as engine:
        first = {int((await ask(engine, seconds=[0.0])).outputs["pid"][0]) for _ in range(6)}
        views = {view.spec.standby: view for view in engine.replicas()}
        assert first == {views[False].pid} and str(views[True].spec).endswith("(standby)")
        standing = views[True].pid
        change = await engine.apply([replace(standby, standby=False)])
        assert change.started == () and len(change.kept) == 1, "nothing had to be started"
        await until(lambda: len(engine.replicas()) == 1)
        assert int((await ask(engine, seconds=[0.0])).outputs["pid"][0]) == standing
        assert not engine.replicas()[0].spec.standby


async def test_only_a_replica_on_standby_answers_nothing() -> None:
    async with running(replace(toy("who"), standby=True)) as engine:
        with pytest.raises(RequestError) as caught:
            await ask(engine, seconds=[0.0], timeout_s=0.05)
        assert caught.value.outcome is Outcome.DEADLINE


async def test_a_replica_is_bound_to_the_cores_it_names() -> None:
    async with running(replace(toy("who"), cores=(1,)), cores=(0, 1)) as engine:
        assert (await ask(engine, seconds=[0.0])).outputs["cores"].tolist() == [1]
        with pytest.raises(CapabilityError, match="bound to core 7"):
            await engine.apply([replace(toy("who"), cores=(7,))])


@given(
    st.floats(0.0, 1e6, allow_subnormal=False),
    st.lists(st.integers(0, 1000), min_size=1, max_size=256),
)
@example(56495.199056510675, [1, 2])
@example(0.0, [0, 0])
@settings(max_examples=300)
def test_the_cpu_seconds_of_a_batch_are_divided_over_its_requests_without_rest(total, rows):
    parts = divided(total, rows)
    assert math.fsum(parts) == sum(parts) == total, "to the last bit, in any order"
    for part, weight in zip(parts, rows, strict=True):
        share = weight / sum(rows) if sum(rows) else 1 / len(rows)
        assert part == pytest.approx(total * share, rel=1e-9, abs=1e-9 * total)


async def test_the_joules_of_a_batch_are_those_of_its_requests() -> None:
    """Seen from the gateway's side: what the replica burned, its answers are charged."""
    async with running(batched(batch=4, max_delay_s=5.0)) as engine:
        await asked(engine, range(4))
        (pid,) = (view.pid for view in engine.replicas())
        before_s = sum(psutil.Process(pid).cpu_times()[:2])
        answers = [one for _ in range(25) for one in await asked(engine, range(4))]
        burned_s = sum(psutil.Process(pid).cpu_times()[:2]) - before_s
    assert {answer.batch for answer in answers} == {4}
    assert math.fsum(answer.cpu_s for answer in answers) <= burned_s + 0.02, "the kernel counts in hundredths"


async def test_replicas_with_warm_variants_answer_batches_each_of_one_variant() -> None:
    models = {
        name: toy("with_options", options=f'{{"offset": {offset}}}').model for name, offset in (("a", 1), ("b", 2))
    }
    spec = batched("with_options", batch=4, variant="a", model=models["a"], warm=(("b", models["b"]),))
    async with running(spec) as engine:
        engine.set_mix("toy", VariantMix((MixStep(1.0, 1e6, (("b", 0.5),)),)))
        free = [ask(engine, x=[float(value)]) for value in range(41)]
        named = [ask(engine, x=[100.0], variant=name) for name in ("a", "b", "a", "b")]
        answers = await asyncio.gather(*free, *named)
    assert [answer.variant for answer in answers[41:]] == ["a", "b", "a", "b"], "who names one is answered by it"
    for answer, value in zip(answers, [*range(41), *[100.0] * 4], strict=True):
        assert answer.outputs["y"].tolist() == [value + {"a": 1.0, "b": 2.0}[answer.variant]]
    counts = Counter(answer.variant for answer in answers[:41])
    assert abs(counts["b"] - 20.5) <= 4 and max(answer.batch for answer in answers) == 4, "shares hold to one batch"


async def test_another_own_variant_with_another_batch_needs_no_new_process() -> None:
    models = {
        name: toy("with_options", options=f'{{"offset": {offset}}}').model for name, offset in (("a", 1), ("b", 2))
    }
    one = batched("with_options", batch=4, variant="a", model=models["a"], warm=(("b", models["b"]),))
    other = batched("with_options", batch=2, variant="b", model=models["b"], warm=(("a", models["a"]),))
    async with running(one) as engine:
        change = await engine.apply([other])
        assert change.started == () and [spec.batch for spec in change.kept] == [2]
        answers = await asked(engine, range(5))
    assert [answer.batch for answer in answers] == [1, 2, 2, 2, 2]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"max_delay_s": float("inf")}, {"max_delay_s": -1.0}])
def test_a_batch_that_cannot_be(wrong) -> None:
    with pytest.raises(ConfigError, match="batches one request or more"):
        replace(toy("who"), **wrong)


def test_a_slice_is_bound_to_as_many_cores_as_it_has() -> None:
    assert CORE.cores == 1
    with pytest.raises(ConfigError, match=r"slice of 1 cores .*to 2"):
        replace(toy("who"), cores=(0, 1))


async def test_a_leaner_variant_takes_batches_of_its_own_size() -> None:
    """The own variant's answers take too long in batches of more than two; requests steered to the other need not."""
    models = {name: toy("rows").model for name in ("a", "b")}
    spec = batched(batch=2, variant="a", model=models["a"], warm=(("b", models["b"]),), warm_batches=(("b", 6),))
    async with running(spec) as engine:
        assert [answer.batch for answer in await asked(engine, range(5))] == [1, 2, 2, 2, 2]
        engine.set_mix("toy", VariantMix((MixStep(1.0, 1e6, (("b", 1.0),)),)))
        answers = await asked(engine, range(7))
        assert [(answer.variant, answer.batch) for answer in answers] == [("b", 1), *[("b", 6)] * 6]
        named = await asyncio.gather(*(ask(engine, x=[float(value)], variant="a") for value in range(5)))
        assert max(answer.batch for answer in named) == 2, "a request that names a variant is batched as that one"
        await engine.apply([replace(spec, variant="b", batch=6, warm=(("a", models["a"]),), warm_batches=(("a", 2),))])
        engine.set_mix("toy", VariantMix())
        assert [answer.batch for answer in await asked(engine, range(7))] == [1, *[6] * 6]
