"""The connection to Ray in a process of its own: calls pass, errors keep their kind, its end is not the gateway's."""

import asyncio
import os
import signal

import numpy as np
import psutil
import pytest

from joulery.adapters.engines.ray_serve.bridge import RayBridge
from joulery.adapters.engines.ray_serve.cluster import RayPlace, ReplicaGoneError
from joulery.adapters.engines.ray_serve.engine import RayServeEngine
from joulery.adapters.engines.ray_serve.settings import RaySettings
from joulery.domain.errors import ActuationError, CapabilityError
from joulery.domain.serving.engine import (
    InferRequest,
    ModelKind,
    ModelRef,
    Outcome,
    ReplicaSpec,
    ReplicaState,
    RequestError,
)
from joulery.domain.serving.service import Slice, SliceKind
from tests.waiting import eventually

FAKE = "tests.adapters.engines.ray_serve.fake_cluster:FakeCluster"
X = {"x": np.arange(6.0).reshape(2, 3), "text": np.array([b"a", b"bc"], object)}
SPEC = ReplicaSpec("toy", "v", Slice(SliceKind.CPU, cores=1), ModelRef(ModelKind.PYTHON, "a:b"))


@pytest.fixture
async def bridge():
    made = RayBridge(RayPlace(address="fake"), FAKE)
    await made.open()
    yield made
    await made.close()
    await made.close()


async def pid_of(bridge: RayBridge) -> int:
    return int((await bridge.infer("app", "r0", InferRequest(X)))["y"]["pid"])


async def test_calls_pass_beside_one_another_and_tensors_unchanged(bridge):
    await bridge.open()
    stuck = {"stuck": np.array([await pid_of(bridge)])}
    slow = asyncio.ensure_future(bridge.infer("app", "r0", InferRequest(stuck)))
    answer = await bridge.infer("app", "r0", InferRequest(X))
    assert answer["y"]["x"].tolist() == X["x"].tolist() and answer["y"]["text"].tolist() == [b"a", b"bc"]
    assert not slow.done()
    slow.cancel()
    await bridge.declare([{"name": "joulery.x"}])
    assert await bridge.applications() == {"joulery.x": {"status": "RUNNING"}}
    assert await bridge.nodes("m:M", [1]) == {"10.0.0.1": {"meter": "m:M", "options": [1]}}


async def test_errors_keep_their_kind(bridge):
    with pytest.raises(ReplicaGoneError, match="RayActorError"):
        await bridge.infer("app", "gone", InferRequest(X))
    with pytest.raises(ActuationError, match="dashboard"):
        await bridge.scale("refused", "d", 1)
    with pytest.raises(ReplicaGoneError, match="ZeroDivisionError"):
        await bridge.infer("app", "defect", InferRequest(X))


@pytest.mark.parametrize("replica", ["cannot be sent", "cannot be read", "infeasible"])
async def test_an_answer_that_cannot_pass_fails_its_call_alone(bridge, replica):
    async with asyncio.timeout(60.0):  # it would wait forever
        with pytest.raises(ReplicaGoneError, match=r"cannot be|no room"):
            await bridge.infer("app", replica, InferRequest(X))
    assert await pid_of(bridge) > 0 and bridge.lost == "", "the calls after it pass"


async def test_a_cluster_that_cannot_be_joined_is_its_own_error():
    made = RayBridge(RayPlace(address="nowhere"), FAKE)
    with pytest.raises(CapabilityError, match="nowhere"):
        await made.open()
    assert made.lost == ""
    await made.close()


@pytest.mark.parametrize(("address", "attempts"), [("local", 3), ("10.0.0.9:6379", 1)])
async def test_a_cluster_that_does_not_start_in_time_is_started_again_in_another_process(tmp_path, address, attempts):
    """Ray gives its node half a minute: too little on a busy machine. One elsewhere is not started here."""
    made = RayBridge(RayPlace(address=address, environ={"tries": str(tmp_path / "tries")}), FAKE)
    if attempts == 1:
        with pytest.raises(CapabilityError, match="timed out"):
            await made.open()
    else:
        await made.open()
        assert await made.applications() == {}
    tried = (tmp_path / "tries").read_text().split()
    assert len(tried) == len(set(tried)) == attempts
    assert all(not psutil.pid_exists(int(pid)) for pid in tried[:2]), "what a failed attempt has started ends with it"
    await made.close()


async def test_a_package_that_is_missing_is_not_waited_for():
    made = RayBridge(RayPlace(), "tests.adapters.engines.ray_serve.fake_cluster:NoCluster")
    with pytest.raises(CapabilityError, match="not reachable"):
        await made.open()
    await made.close()


async def test_calls_under_way_fail_when_the_process_ends_and_another_is_started(bridge):
    first = await pid_of(bridge)
    stuck = {"stuck": np.array([first])}
    waiting = asyncio.ensure_future(bridge.infer("app", "r0", InferRequest(stuck)))
    await bridge.applications()
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ReplicaGoneError, match="SIGKILL"):
        await waiting
    await eventually(lambda: bool(bridge.lost), "the end of the child")
    assert await bridge.describe("app") is None
    with pytest.raises(ActuationError, match="Ray is gone"):
        await bridge.applications()
    await bridge.open()
    assert bridge.lost == "" and await pid_of(bridge) != first


async def test_a_service_outlives_rays_head_requests_wait_and_none_is_answered_twice():
    """What is connected to Ray is killed under two requests; both and those that come meanwhile are answered once."""
    engine = RayServeEngine(RaySettings(), RayBridge(RayPlace(address="fake"), FAKE))
    try:
        await engine.apply([SPEC, SPEC])
        first = int((await engine.infer("toy", InferRequest(X))).outputs["pid"])
        stuck = {"stuck": np.array([first])}
        held = [asyncio.ensure_future(engine.infer("toy", InferRequest(stuck))) for _ in range(3)]
        await eventually(lambda: sum(view.busy for view in engine.replicas()) == 2, "both replicas at work")
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: all(view.state is ReplicaState.RESTARTING for view in engine.replicas()), "its end")
        later = asyncio.ensure_future(engine.infer("toy", InferRequest(X)))
        answers = await asyncio.gather(*held, later)
        assert [answer.attempts for answer in answers] == [2, 2, 1, 1]
        assert first not in {int(answer.outputs["pid"]) for answer in answers}
        views = engine.replicas()
        assert [(view.state, view.restarts) for view in views] == [(ReplicaState.READY, 1)] * 2
        assert sum(view.served for view in views) == 5, "none twice"
    finally:
        await engine.close()


async def test_while_ray_does_not_come_back_requests_fail_as_unavailable():
    engine = RayServeEngine(RaySettings(deadline_s=0.2), bridge := RayBridge(RayPlace(address="fake"), FAKE))
    try:
        await engine.apply([SPEC])
        first = int((await engine.infer("toy", InferRequest(X))).outputs["pid"])
        bridge._cluster = "tests.adapters.engines.ray_serve.fake_cluster:NoCluster"
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: bool(bridge.lost), "its end")
        with pytest.raises(RequestError) as caught:
            await engine.infer("toy", InferRequest(X))
        assert caught.value.outcome is Outcome.UNAVAILABLE and caught.value.retry_after_s > 0
    finally:
        await engine.close()
