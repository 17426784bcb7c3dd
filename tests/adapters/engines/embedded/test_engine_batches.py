"""Requests answered together, and replicas that stand by."""

import asyncio
from dataclasses import replace

import pytest

from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.serving.engine import InferResponse, Outcome, ReplicaSpec, RequestError
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
    assert len({answer.cpu_s for answer in answers[1:5]}) == 1, "CPU time in equal parts"


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


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"max_delay_s": float("inf")}, {"max_delay_s": -1.0}])
def test_a_batch_that_cannot_be(wrong) -> None:
    with pytest.raises(ConfigError, match="batches one request or more"):
        replace(toy("who"), **wrong)


def test_a_slice_is_bound_to_as_many_cores_as_it_has() -> None:
    assert CORE.cores == 1
    with pytest.raises(ConfigError, match=r"slice of 1 cores .*to 2"):
        replace(toy("who"), cores=(0, 1))
