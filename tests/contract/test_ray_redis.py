"""Ray's head dies and starts anew from its Redis: the replicas on the other node answer all the while."""

import asyncio
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from joulery.adapters.engines.ray_serve.cluster import RayPlace
from joulery.adapters.engines.ray_serve.engine import RayServeEngine
from joulery.adapters.engines.ray_serve.settings import RaySettings
from joulery.domain.serving.engine import ReplicaState
from tests.adapters.engines.support import ask, toy
from tests.contract.test_engine import NO_RAY
from tests.ports import free_port
from tests.two_ray_nodes import TwoNodes, two_ray_nodes
from tests.waiting import eventually

REDIS = shutil.which("redis-server")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=NO_RAY),
    pytest.mark.skipif(REDIS is None, reason="redis-server is not installed"),
]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        line = (str(REDIS), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "")
        with subprocess.Popen(line, stdout=subprocess.DEVNULL) as redis:
            try:
                with two_ray_nodes(head_cpus=0, redis=f"127.0.0.1:{port}") as made:
                    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "PYTHONPATH"):
                        monkeypatch.setenv(name, made.environ[name])
                    yield made
            finally:
                redis.kill()


async def test_replicas_serve_on_while_the_head_starts_anew_and_change_again_after_it(cluster: TwoNodes) -> None:
    place = RayPlace(address=cluster.address, dashboard=cluster.dashboard)
    engine = RayServeEngine(RaySettings(place=place, deadline_s=20.0, direct=True))
    answered, over = 0, False

    async def asking() -> None:
        nonlocal answered
        while not over:
            assert (await ask(engine, seconds=[0.05])).attempts == 1
            answered += 1

    try:
        await engine.apply([toy("slow"), toy("slow")])
        pids = {view.pid for view in engine.replicas()}
        async with asyncio.TaskGroup() as clients:
            clients.create_task(asking())
            await eventually(lambda: answered > 5, "answers before")
            cluster.kill_head()
            await eventually(lambda: engine._cluster.lost, "the end of what is connected to Ray")
            await asyncio.to_thread(cluster.start_head, "again")
            change = await engine.apply([toy("slow"), toy("slow"), toy("slow", variant="other")])
            assert len(change.started) == 1 and len(change.kept) == 2
            before = answered
            await eventually(lambda: answered > before + 5, "answers after")
            over = True
        views = engine.replicas()
        assert {view.state for view in views} == {ReplicaState.READY} and not any(view.restarts for view in views)
        assert pids < {view.pid for view in views}
    finally:
        await engine.close()
