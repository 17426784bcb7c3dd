"""The engine with replicas on connections of its own: ended, killed and cut off, it asks each model once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from joulery.adapters.engines.ray_serve import engine as engine_module
from joulery.adapters.engines.ray_serve.engine import RayServeEngine
from joulery.adapters.engines.ray_serve.settings import RaySettings
from joulery.domain.serving.engine import InferRequest, InferResponse, Outcome, ReplicaState, RequestError
from tests.adapters.engines.ray_serve.listening_cluster import GATE, ListeningCluster, spec
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(engine_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(engine_module, "_WATCH_S", 0.01)
    monkeypatch.setattr(engine_module, "_RETRY_LOST_S", 0.01)


@asynccontextmanager
async def served(*specs, **settings) -> AsyncIterator[tuple[RayServeEngine, ListeningCluster]]:
    cluster = ListeningCluster()
    engine = RayServeEngine(RaySettings(**settings), cluster)
    try:
        await engine.apply(specs)
        yield engine, cluster
    finally:
        GATE.set()
        await engine.close()
        await asyncio.sleep(0)


def asked(engine: RayServeEngine, number: int) -> asyncio.Future[InferResponse]:
    return asyncio.ensure_future(engine.infer("toy", InferRequest({"number": np.array([number])})))


async def all_busy(cluster: ListeningCluster, count: int) -> None:
    def busy() -> bool:
        return sum(one._turn.locked() for there in cluster.replicas.values() for one in there) == count

    await eventually(busy, "requests in replicas")


async def test_replicas_are_asked_on_their_connections_by_default():
    GATE.set()
    async with served(spec(), spec()) as (engine, cluster):
        answers = await asyncio.gather(*(asked(engine, number) for number in range(20)))
        assert [int(answer.outputs["y"][0]) for answer in answers] == list(range(20))
        assert cluster.through == [] and engine.remarks() == ()
        assert cluster.runs == dict.fromkeys(range(20), 1)


async def test_a_replica_that_ray_ends_under_a_request_answers_it():
    GATE.clear()
    async with served(spec("a"), spec("b")) as (engine, cluster):
        held = [asked(engine, number) for number in range(2)]
        await all_busy(cluster, 2)
        change = asyncio.ensure_future(engine.apply([spec("b")]))
        await eventually(lambda: any(view.state is ReplicaState.DRAINING for view in engine.replicas()), "its end")
        later = asked(engine, 2)
        GATE.set()
        answers = await asyncio.gather(*held, later)
        await change
        assert [answer.attempts for answer in answers] == [1, 1, 1]
        assert cluster.runs == {0: 1, 1: 1, 2: 1} and cluster.through == []
        assert [view.restarts for view in engine.replicas()] == [0]


async def test_a_request_that_takes_longer_than_ray_lists_its_replica_is_not_asked_twice(monkeypatch):
    monkeypatch.setattr(engine_module, "_PATIENCE", 0)
    GATE.clear()
    async with served(spec()) as (engine, cluster):
        held = asked(engine, 1)
        await all_busy(cluster, 1)
        (there,) = cluster.replicas.values()
        replica = there.pop()  # Ray names another instead
        await eventually(lambda: len(engine.replicas()) == 2, "the other")
        for _ in range(3):
            await engine._look()
        GATE.set()
        assert (await held).attempts == 1 and cluster.runs == {1: 1}
        await eventually(lambda: len(engine.replicas()) == 1, "the end of the first")
        await cluster.end(replica)


async def test_a_killed_replica_s_request_is_tried_again_and_old_descriptions_do_not_bring_it_back():
    GATE.clear()
    async with served(spec("a"), spec("b")) as (engine, cluster):
        held = [asked(engine, number) for number in range(2)]
        await all_busy(cluster, 2)
        (there,) = cluster.replicas.values()
        killed, before = there[1], [one.description() for one in there]
        describe, begun, may = cluster.describe, asyncio.Event(), asyncio.Event()

        async def slow(application):
            begun.set()
            await may.wait()
            return before

        cluster.describe = slow
        await begun.wait()
        killed.kill()
        await eventually(lambda: sum(view.restarts for view in engine.replicas()) == 1, "its loss")
        may.set()
        cluster.describe = describe
        GATE.set()
        answers = await asyncio.gather(*held)
        assert sorted(answer.attempts for answer in answers) == [1, 2]
        await eventually(lambda: {view.state for view in engine.replicas()} == {ReplicaState.READY}, "another")
        assert [(view.id[-1], view.restarts) for view in engine.replicas()] == [("0", 0), ("1", 1)]


async def test_replicas_that_die_without_a_request_cost_no_request_an_attempt():
    GATE.set()
    async with served(spec("a"), spec("b")) as (engine, cluster):
        (there,) = cluster.replicas.values()
        for replica in there:
            replica.kill()
        await eventually(lambda: sum(view.restarts for view in engine.replicas()) == 2, "their loss")
        assert (await asked(engine, 1)).attempts == 1


async def test_a_connection_that_breaks_is_no_second_run():
    GATE.clear()
    async with served(spec()) as (engine, cluster):
        held = asked(engine, 1)
        await all_busy(cluster, 1)
        (there,) = cluster.replicas.values()
        there[0].cut()
        await eventually(lambda: cluster.through == ["r1"], "the same request through Ray")
        GATE.set()
        assert (await held).attempts == 1 and cluster.runs == {1: 1}
        assert (await asked(engine, 2)).attempts == 1


async def test_a_request_whose_deadline_comes_while_no_replica_runs_is_unavailable_before_ray_is_looked_at(monkeypatch):
    monkeypatch.setattr(engine_module, "_WATCH_S", 600.0)
    async with served(spec(), spec()) as (engine, cluster):
        (there,) = cluster.replicas.values()
        await eventually(lambda: all(replica._listener._lines for replica in there), "lines that a kill can break")
        for replica in there:
            replica.kill()
        await eventually(lambda: {view.state for view in engine.replicas()} == {ReplicaState.RESTARTING}, "their end")
        assert not cluster.lost
        with pytest.raises(RequestError) as caught:
            await engine.infer("toy", InferRequest({"number": np.array([3])}, timeout_s=0.05))
        assert caught.value.outcome is Outcome.UNAVAILABLE and caught.value.retry_after_s


async def test_replicas_serve_on_while_what_is_connected_to_ray_is_gone():
    GATE.clear()
    async with served(spec(), spec(), deadline_s=20.0) as (engine, cluster):
        held = asked(engine, 1)
        await all_busy(cluster, 1)
        cluster.lost, cluster.away = "Ray is gone", True
        await eventually(lambda: "not back" in cluster.lost, "an attempt to return")
        GATE.set()
        assert (await held).attempts == 1
        assert (await asked(engine, 2)).attempts == 1
        assert {view.state for view in engine.replicas()} == {ReplicaState.READY}
        (there,) = cluster.replicas.values()
        for replica in there:
            replica.kill()
        await eventually(lambda: {view.state for view in engine.replicas()} == {ReplicaState.RESTARTING}, "their end")
        with pytest.raises(RequestError) as caught:
            await engine.infer("toy", InferRequest({"number": np.array([3])}, timeout_s=0.05))
        assert caught.value.outcome is Outcome.UNAVAILABLE
        cluster.away = False
        assert (await asked(engine, 4)).attempts == 1
        assert [view.restarts for view in engine.replicas()] == [1, 1]
        assert cluster.runs == {1: 1, 2: 1, 4: 1}
