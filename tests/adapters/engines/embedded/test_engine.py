import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from joulery.adapters.cgroups import CpuGroups
from joulery.adapters.engines.embedded.engine import LocalEngine
from joulery.domain.errors import CapabilityError
from joulery.domain.serving.dispatch import QueueLimit
from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.service import Slice, SliceKind
from joulery.domain.serving.tensors import TensorSpec
from tests.adapters.engines.support import alive, ask, running, toy, until


@pytest.fixture
async def double_engine() -> AsyncIterator[LocalEngine]:
    async with running(toy("double")) as engine:
        yield engine


async def test_a_request_is_answered_and_its_cost_is_known() -> None:
    async with running(toy("busy")) as engine:
        answer = await ask(engine, seconds=[0.02])
        assert answer.variant == "v"
        assert answer.attempts == 1
        assert answer.cpu_s >= 0.02
        assert answer.service_s >= answer.cpu_s - 0.005
        assert answer.arrival_s <= answer.start_s <= answer.end_s


async def test_tensors_of_every_kind_pass_through_unchanged() -> None:
    arrays = {
        "photo": np.arange(300_000, dtype=np.uint8).reshape(1, 100, 1000, 3),
        "half": np.array([[1.5, -2.0]], np.float16),
        "flags": np.array([True, False]),
        "words": np.array([b"a", b"", b"\xff\x00"], object),
        "empty": np.zeros((0, 3), np.int64),
        "scalar": np.array(7, np.uint16),
    }
    async with running(toy("echo")) as engine:
        answer = await ask(engine, **arrays)
    assert set(answer.outputs) == set(arrays)
    for name, array in arrays.items():
        assert answer.outputs[name].dtype == array.dtype
        assert answer.outputs[name].shape == array.shape
        assert answer.outputs[name].tolist() == array.tolist()


async def test_closing_leaves_no_process() -> None:
    async with running(toy("who"), toy("who")) as engine:
        pids = {int((await ask(engine)).outputs["pid"][0]) for _ in range(2)}
        assert pids == {view.pid for view in engine.replicas()}
        assert len(pids) == 2
    assert engine.replicas() == ()
    assert not any(alive(pid) for pid in pids)
    await engine.close()


async def test_the_longest_idle_replica_is_next() -> None:
    async with running(toy("who"), toy("who")) as engine:
        order = [(await ask(engine)).replica for _ in range(6)]
        assert order == ["r0", "r1"] * 3


async def test_many_at_once_are_all_answered() -> None:
    async with running(toy("double"), toy("double")) as engine:
        answers = await asyncio.gather(*(ask(engine, x=np.full((1, 2), n, np.float32)) for n in range(300)))
        assert [float(a.outputs["y"][0, 1]) for a in answers] == [2.0 * n for n in range(300)]
        assert sum(view.served for view in engine.replicas()) == 300


async def test_a_replica_is_bound_to_its_cores_and_threads() -> None:
    one, two = sorted(os.sched_getaffinity(0))[:2]
    both = Slice(SliceKind.CPU, cores=2)
    async with running(
        toy("who", service="a"),
        toy("who", service="b", slice_=both),
        toy("environment", service="c", slice_=both),
        cores=(one, two),
    ) as engine:
        assert len((await ask(engine, service="a")).outputs["cores"]) == 1
        assert (await ask(engine, service="b")).outputs["cores"].tolist() == [one, two]
        assert (await ask(engine, service="c")).outputs["threads"].tolist() == [2]
        assert [view.cores for view in engine.replicas()][1:] == [(one, two), (one, two)]


async def test_a_quota_slows_a_replica_down() -> None:
    quarter = Slice(SliceKind.CPU, cores=1, share_ratio=0.25)
    try:
        engine = LocalEngine(groups=CpuGroups.find())
        await engine.apply([toy("busy", slice_=quarter)])
    except CapabilityError as error:
        await engine.close()
        pytest.skip(str(error))
    answer = await ask(engine, seconds=[0.06])
    assert answer.service_s > 2.5 * answer.cpu_s
    group = next(CpuGroups.find().base.glob(f"joulery-{os.getpid()}-r0.*"))
    await engine.close()
    assert not group.exists()


async def test_a_model_of_one_s_own_with_state_and_options() -> None:
    async with running(
        toy("Scaled", options='{"factor": 3}'), toy("with_options", service="o", options='{"offset":1}')
    ) as e:
        (view, _) = e.replicas()
        assert view.inputs == (TensorSpec("x", "FP64", (-1,)),)
        assert view.outputs == (TensorSpec("y", "FP64", (-1,)), TensorSpec("calls", "INT64", (1,)))
        assert view.platform == "python"
        assert (await ask(e, x=[2.0])).outputs["y"].tolist() == [6.0]
        calls = (await ask(e, x=[2.0], outputs=("calls",))).outputs
        assert set(calls) == {"calls"}
        assert calls["calls"].tolist() == [3], "the warm-up was the first call"
        assert (await ask(e, service="o", x=[2.0])).outputs["y"].tolist() == [3.0]


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ({}, "input 'x' is missing"),
        ({"x": np.zeros((1, 2))}, "input 'x' is FP64, the model takes FP32"),
        ({"x": np.zeros(2, np.float32)}, r"input 'x' has shape \[2\], the model takes \[-1, 2\]"),
        ({"x": np.zeros((1, 3), np.float32)}, r"input 'x' has shape \[1, 3\], the model takes \[-1, 2\]"),
        ({"x": np.zeros((1, 2), np.float32), "w": [1]}, "the model has no input 'w'"),
        ({"x": np.zeros((1, 2), np.float32), "outputs": ("z",)}, "there is no output 'z'"),
    ],
)
async def test_what_does_not_fit_the_declared_tensors_is_refused_before_any_replica_sees_it(
    double_engine: LocalEngine, inputs: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        await ask(double_engine, **inputs)
    assert caught.value.outcome is Outcome.INVALID
    assert [view.served for view in double_engine.replicas()] == [0]


async def test_a_request_has_to_fit_every_replica_that_declares_something() -> None:
    async with running(toy("double", variant="a"), toy("echo", variant="b")) as engine:
        for _ in range(2):
            with pytest.raises(RequestError, match="the model takes"):
                await ask(engine, x=np.zeros((1, 3), np.float32))
        await ask(engine, x=np.zeros((1, 2), np.float32), variant="b", outputs=("x",))
    async with running(toy("double", variant="a"), toy("Scaled", variant="b")) as engine:
        assert (await ask(engine, x=np.zeros(3), variant="b")).outputs["y"].shape == (3,), "they disagree"


@pytest.mark.parametrize(
    ("name", "outcome", "complaint"),
    [
        ("fails", Outcome.FAILED, "the model failed: RuntimeError: no luck today"),
        ("picky", Outcome.INVALID, "the model refuses the inputs: ValueError: too small"),
        ("slow", Outcome.INVALID, "input 'seconds' is missing"),
        ("bad_return", Outcome.FAILED, "returned list, not a dict of arrays by name"),
        ("complex_return", Outcome.FAILED, "complex128 cannot be sent"),
    ],
)
async def test_what_a_model_raises_is_its_request_s_answer(name: str, outcome: Outcome, complaint: str) -> None:
    async with running(toy(name)) as engine:
        for _ in range(2):
            with pytest.raises(RequestError, match=complaint) as caught:
                await ask(engine, x=[1])
            assert caught.value.outcome is outcome
            assert caught.value.variant == "v"
            assert caught.value.cpu_s > 0
        assert [(view.served, view.restarts) for view in engine.replicas()] == [(2, 0)]


async def test_an_output_a_callable_does_not_make_is_the_request_s_fault() -> None:
    async with running(toy("echo")) as engine:
        with pytest.raises(RequestError, match="no output 'y'") as caught:
            await ask(engine, x=[1], outputs=("y",))
        assert caught.value.outcome is Outcome.INVALID


async def test_unknown_services_and_variants() -> None:
    async with running(toy("echo", variant="small"), toy("who", variant="large")) as engine:
        for what in ({"service": "none"}, {"variant": "medium"}):
            with pytest.raises(RequestError) as caught:
                await ask(engine, x=[1], **what)
            assert caught.value.outcome is Outcome.UNKNOWN
        assert {(await ask(engine, x=[1], variant="large")).variant for _ in range(3)} == {"large"}


async def test_a_wall_clock_that_is_set_back_changes_no_latency(
    double_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await ask(double_engine, x=np.ones((1, 2), np.float32))
    monkeypatch.setattr(time, "time", lambda: before.arrival_s - 3600.0)
    after = await ask(double_engine, x=np.ones((1, 2), np.float32))
    assert before.end_s <= after.arrival_s <= after.start_s <= after.end_s < before.end_s + 1800.0


async def test_what_a_model_prints_never_reaches_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    async with running(toy("noisy")) as engine:
        await ask(engine)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "an error" in captured.err


async def test_a_limited_queue_refuses_at_once_and_answers_what_it_took() -> None:
    """Past what the service can answer within its SLO, clients are refused early instead of all being late."""
    async with running(toy("slow"), queue=1000) as engine:
        await ask(engine, seconds=[0.01])
        engine.limit_queue("toy", QueueLimit(4))
        asked = [asyncio.ensure_future(ask(engine, seconds=[0.02])) for _ in range(50)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in found if isinstance(one, RequestError)]
        assert {one.outcome for one in refused} == {Outcome.OVERLOADED}
        assert all(one.retry_after_s is not None and one.retry_after_s > 0 for one in refused)
        assert len(refused) == 50 - 1 - 4, "one runs, four wait, and all five are answered"
        engine.limit_queue("toy", None)
        asked = [asyncio.ensure_future(ask(engine, seconds=[0.01])) for _ in range(8)]
        await asyncio.sleep(0)
        assert len(engine.backlog()) == 8
        engine.limit_queue("toy", QueueLimit(1000, 0.0))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(one, RequestError) for one in found) == 7, "one runs, the others waited for longer than 0"
        engine.limit_queue("toy", None)
        asked = [asyncio.ensure_future(ask(engine, seconds=[0.0])) for _ in range(50)]
        assert not [one for one in await asyncio.gather(*asked, return_exceptions=True) if isinstance(one, Exception)]


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async with running(toy("slow"), queue=2) as engine:
        await ask(engine, seconds=[0.05])
        running_ = [asyncio.ensure_future(ask(engine, seconds=[0.1])) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="2 requests waiting") as caught:
            await ask(engine, seconds=[0.0])
        assert caught.value.outcome is Outcome.OVERLOADED
        assert caught.value.retry_after_s == pytest.approx(2 * 0.05, rel=0.5)
        await asyncio.gather(*running_)
        await ask(engine, seconds=[0.0])


async def test_deadlines_are_kept_in_the_queue_and_in_a_replica() -> None:
    async with running(toy("slow"), deadline_s=20.0) as engine:
        first = asyncio.ensure_future(ask(engine, seconds=[0.4], timeout_s=0.1))
        queued = asyncio.ensure_future(ask(engine, seconds=[0.0], timeout_s=0.05))
        patient = asyncio.ensure_future(ask(engine, seconds=[0.0]))
        with pytest.raises(RequestError, match="in the queue") as caught:
            await queued
        assert (caught.value.outcome, caught.value.variant) == (Outcome.DEADLINE, "")
        with pytest.raises(RequestError, match="in a replica") as caught:
            await first
        assert (caught.value.outcome, caught.value.variant) == (Outcome.DEADLINE, "v")
        assert (await patient).attempts == 1
        (view,) = engine.replicas()
        assert (view.served, view.restarts) == (2, 0), "the late one was finished, the queued one never started"


async def test_the_engine_s_own_deadline_is_the_longest() -> None:
    async with running(toy("slow"), deadline_s=0.05) as engine:
        with pytest.raises(RequestError, match="deadline"):
            await ask(engine, seconds=[0.3], timeout_s=60)


async def test_a_cancelled_request_leaves_the_queue() -> None:
    async with running(toy("slow"), queue=1) as engine:
        first = asyncio.ensure_future(ask(engine, seconds=[0.2]))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(ask(engine, seconds=[0.0]))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        third = asyncio.ensure_future(ask(engine, seconds=[0.0]))
        await asyncio.gather(first, third)
        (view,) = engine.replicas()
        assert view.served == 2


async def test_a_cancelled_request_in_a_replica_frees_it_when_it_is_done() -> None:
    async with running(toy("slow")) as engine:
        task = asyncio.ensure_future(ask(engine, seconds=[0.1]))
        await until(lambda: any(view.busy for view in engine.replicas()), "the request at its replica")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await ask(engine, seconds=[0.0])
        (view,) = engine.replicas()
        assert view.served == 2
