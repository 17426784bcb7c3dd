"""Changing the set of replicas under load."""

import asyncio
import itertools
import os
import signal

import numpy as np
import pytest

from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.domain.errors import ActuationError, CapabilityError
from joulery.domain.serving.engine import InferResponse, Outcome, ReplicaState, RequestError
from joulery.domain.serving.service import Slice, SliceKind
from joulery.steady_time import unix_s
from tests.adapters.engines.support import alive, ask, children, running, toy, until


async def test_a_transition_says_what_changed_and_what_it_cost() -> None:
    async with running() as engine:
        before_s = unix_s()
        first = await engine.apply([toy("who", variant="a"), toy("who", variant="b")])
        assert [spec.variant for spec in first.started] == ["a", "b"]
        assert (first.stopped, first.kept) == ((), ())
        assert before_s <= first.start_s <= unix_s()
        assert 0 < first.ready_s <= first.duration_s
        assert first.startup_cpu_s > 0.01
        pid = {view.spec.variant: view.pid for view in engine.replicas()}
        second = await engine.apply([toy("who", variant="b"), toy("who", variant="c")])
        assert [spec.variant for spec in second.started] == ["c"]
        assert [spec.variant for spec in second.stopped] == ["a"]
        assert [spec.variant for spec in second.kept] == ["b"]
        assert {view.spec.variant for view in engine.replicas()} == {"b", "c"}
        assert next(view.pid for view in engine.replicas() if view.spec.variant == "b") == pid["b"]
        assert not alive(pid["a"])
        third = await engine.apply([toy("who", variant="c"), toy("who", variant="b")])
        assert (third.started, third.stopped, len(third.kept), third.startup_cpu_s) == ((), (), 2, 0.0)


async def test_replacing_every_replica_again_and_again_loses_nothing() -> None:
    answered: list[InferResponse] = []
    async with running(toy("who", variant="0"), toy("who", variant="0")) as engine:
        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                answered.append(await ask(engine))

        clients = [asyncio.ensure_future(client()) for _ in range(16)]
        for n in range(1, 5):
            transition = await engine.apply([toy("who", variant=str(n))] * (1 + n % 2))
            assert transition.kept == ()
            await until(lambda n=n: sum(answer.variant == str(n) for answer in answered) >= 50, f"answers of {n}")
        stop.set()
        await asyncio.gather(*clients)
        assert len(answered) > 200
        assert all(answer.attempts == 1 for answer in answered)
        seen = [variant for variant, _ in itertools.groupby(answer.variant for answer in answered)]
        assert sorted(set(seen)) == ["0", "1", "2", "3", "4"]
        assert len(engine.replicas()) == 1


async def test_an_old_replica_finishes_what_it_holds_while_the_new_one_serves() -> None:
    async with running(toy("slow", variant="old")) as engine:
        long = asyncio.ensure_future(ask(engine, seconds=[1.0]))
        await until(lambda: any(view.busy for view in engine.replicas()), "the request at its replica")
        change = asyncio.ensure_future(engine.apply([toy("slow", variant="new")]))
        await until(lambda: any(view.spec.variant == "new" for view in engine.replicas()))
        assert (await ask(engine, seconds=[0.0])).variant == "new"
        assert ReplicaState.DRAINING in {view.state for view in engine.replicas()}
        assert (await long).variant == "old"
        transition = await change
        assert transition.duration_s > transition.ready_s
        assert [view.spec.variant for view in engine.replicas()] == ["new"]


async def test_a_service_that_leaves_answers_what_it_accepted() -> None:
    async with running(toy("slow"), toy("who", service="stays")) as engine:
        work = [asyncio.ensure_future(ask(engine, seconds=[0.05])) for _ in range(5)]
        await asyncio.sleep(0)
        change = asyncio.ensure_future(engine.apply([toy("who", service="stays")]))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError) as caught:
            await ask(engine, seconds=[0.0])
        assert caught.value.outcome is Outcome.UNKNOWN
        assert len(await asyncio.gather(*work)) == 5
        await change
        assert [view.spec.service for view in engine.replicas()] == ["stays"]
        await engine.apply([toy("who", service="stays"), toy("slow")])
        await ask(engine, seconds=[0.0])


async def test_a_request_for_a_variant_that_leaves_is_refused() -> None:
    async with running(toy("slow", variant="old")) as engine:
        busy = asyncio.ensure_future(ask(engine, seconds=[2.5]))
        await until(lambda: any(view.busy for view in engine.replicas()), "the request at its replica")
        pinned = asyncio.ensure_future(ask(engine, seconds=[0.0], variant="old"))
        await asyncio.sleep(0)
        await engine.apply([toy("slow", variant="new")])
        with pytest.raises(RequestError, match="not run the requested variant") as caught:
            await pinned
        assert caught.value.outcome is Outcome.UNAVAILABLE
        assert (await busy).variant == "old"


async def test_a_target_that_does_not_fit_changes_nothing() -> None:
    async with running(toy("who")) as engine:
        with pytest.raises(CapabilityError, match="4096 cores does not fit"):
            await engine.apply([toy("who", slice_=Slice(SliceKind.CPU, cores=4096))])
        with pytest.raises(CapabilityError, match="no whole slice"):
            await engine.apply([toy("who", slice_=Slice(SliceKind.WHOLE))])
        await ask(engine)


async def test_replicas_that_run_well_are_kept_before_those_that_do_not() -> None:
    async with running(toy("dies"), toy("dies")) as engine:
        asyncio.ensure_future(ask(engine)).add_done_callback(lambda task: task.exception())
        await until(lambda: ReplicaState.RESTARTING in {view.state for view in engine.replicas()})
        well = {view.id for view in engine.replicas() if view.state is ReplicaState.READY}
        if well:
            await engine.apply([toy("dies")])
            assert {view.id for view in engine.replicas()} <= {"r0", "r1"}
        assert len(engine.replicas()) == (1 if well else 2)


async def test_changes_wait_for_one_another() -> None:
    async with running() as engine:
        await asyncio.gather(*(engine.apply([toy("who", variant=str(n))]) for n in range(3)))
        assert [view.spec.variant for view in engine.replicas()] == ["2"]


async def test_a_change_that_is_cancelled_leaves_the_old_set() -> None:
    async with running(toy("who")) as engine:
        change = asyncio.ensure_future(engine.apply([toy("echo", variant="w")] * 2))
        await asyncio.sleep(0.05)
        change.cancel()
        with pytest.raises(asyncio.CancelledError):
            await change
        assert [view.spec.variant for view in engine.replicas()] == ["v"]
        await ask(engine)


async def test_a_change_that_is_cancelled_at_any_moment_leaves_no_process() -> None:
    before, engine = children(), LocalEngine()
    for patience_s in np.linspace(0, 0.3, 25):
        change = asyncio.ensure_future(engine.apply([toy("who")] * 2))
        await asyncio.sleep(patience_s)
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)
        await engine.apply([])
        assert children() - before == set()
    await engine.close()


async def test_closing_at_any_moment_of_a_restart_leaves_no_process() -> None:
    before = children()
    for patience_s in np.linspace(0, 0.3, 12):
        engine = LocalEngine(LocalSettings(drain_s=0.0))
        await engine.apply([toy("who")])
        os.kill(engine.replicas()[0].pid, signal.SIGKILL)
        await asyncio.sleep(patience_s)
        await engine.close()
        assert children() - before == set()
        assert engine.replicas() == ()


async def test_closing_during_a_change_ends_both() -> None:
    engine = LocalEngine()
    await engine.apply([toy("who")])
    change = asyncio.ensure_future(engine.apply([toy("who", variant="w")] * 2))
    await asyncio.sleep(0.05)
    await engine.close()
    with pytest.raises(ActuationError, match="closed before"):
        await change
    assert engine.replicas() == ()


async def test_closing_gives_up_what_waits_and_finishes_what_runs() -> None:
    engine = LocalEngine()
    await engine.apply([toy("slow")])
    first, second = (asyncio.ensure_future(ask(engine, seconds=[0.2])) for _ in range(2))
    await until(lambda: any(view.busy for view in engine.replicas()), "the request at its replica")
    await engine.close()
    assert (await first).variant == "v"
    with pytest.raises(RequestError, match="closing") as caught:
        await second
    assert caught.value.outcome is Outcome.UNAVAILABLE


async def test_closing_does_not_wait_for_ever() -> None:
    async with running(toy("slow"), drain_s=0.1) as engine:
        stuck = asyncio.ensure_future(ask(engine, seconds=[60]))
        await until(lambda: any(view.busy for view in engine.replicas()), "the request at its replica")
        (view,) = engine.replicas()
        await engine.close()
        assert not alive(view.pid)
        with pytest.raises(RequestError) as caught:
            await stuck
        assert caught.value.outcome is Outcome.UNAVAILABLE
