"""The client of the Open Inference Protocol, against joulery's own gateway and against servers that misbehave."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace

import httpx
import numpy as np
import pytest

from joulery.adapters.engines.remote.open_inference import OpenInferenceEngine, OpenInferenceSettings, place_of
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError
from joulery.domain.serving.engine import InferRequest, ModelRef, Outcome, ReplicaSpec, ReplicaState, RequestError
from joulery.domain.serving.service import Slice, SliceKind
from tests.adapters.engines.support import until
from tests.gateway.support import FakeEngine, serving
from tests.waiting import eventually


def spec(url: str, variant: str = "toy") -> ReplicaSpec:
    return ReplicaSpec("toy", variant, Slice(SliceKind.WHOLE), ModelRef.parse(url))


async def engine_of(*specs: ReplicaSpec, transport: httpx.AsyncBaseTransport | None = None, **settings: float):
    engine = OpenInferenceEngine(OpenInferenceSettings(**settings), transport)
    try:
        await engine.apply(specs)
    except BaseException:
        await engine.close()
        raise
    return engine


TENSORS = {
    "f": np.array([[1.5, -2.0]], np.float32),
    "i": np.arange(3, dtype=np.int64),
    "b": np.array([b"a", b"\x00\xff"], object),
    "t": np.array([True, False]),
}


async def test_tensors_of_every_kind_pass_through_joulerys_own_gateway() -> None:
    fake = FakeEngine()
    async with serving(fake) as gateway:
        engine = await engine_of(spec(f"{gateway.server.url}/toy"))
        try:
            answer = await engine.infer("toy", InferRequest(TENSORS, timeout_s=7.0))
            (view,) = engine.replicas()
        finally:
            await engine.close()
    for name, array in TENSORS.items():
        assert answer.outputs[name].tolist() == array.tolist() and answer.outputs[name].dtype == array.dtype
    assert math.isnan(answer.cpu_s), "what it cost there is not known, and not zero"
    assert answer.arrival_s <= answer.start_s <= answer.end_s and (answer.replica, answer.variant) == ("o0", "toy")
    assert view.inputs[0].name == "x" and view.platform == "python" and view.served == 1


class Server:
    """A server of the protocol as a transport: what it was asked, and what it says."""

    def __init__(self, say: Callable[[httpx.Request], httpx.Response] | None = None, *, ready: bool = True) -> None:
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        self.ready, self.say = ready, say
        self.loads = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(f"{request.url.host} {path}")
        if path.endswith("/ready"):
            return httpx.Response(200 if self.ready else 400)
        if path.endswith("/load"):
            self.ready = self.loads == 200
            return httpx.Response(self.loads, json={"error": "no such model"} if self.loads != 200 else {})
        if path.endswith("/unload"):
            return httpx.Response(200)
        if path.endswith("/infer"):
            self.bodies.append(request.content)
            if self.say is not None:
                return self.say(request)
            return httpx.Response(
                200, json={"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [3.0]}]}
            )
        return httpx.Response(200, json={"name": "toy", "platform": "p", "inputs": [], "outputs": []})

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self)


X = InferRequest({"x": np.array([1.0], np.float32)})


async def test_a_request_says_what_triton_wants_to_know() -> None:
    server = Server()
    engine = await engine_of(spec("http://a/toy/3"), transport=server.transport)
    await engine.infer("toy", InferRequest(X.inputs, ("y",), 0.25))
    await engine.close()
    assert "a /v2/models/toy/versions/3/infer" in server.asked
    content = json.loads(server.bodies[0][:-4])
    assert content["parameters"] == {"binary_data_output": True, "timeout": 250000}
    assert content["outputs"] == [{"name": "y", "parameters": {"binary_data": True}}]
    assert content["inputs"][0]["parameters"] == {"binary_data_size": 4}


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, Outcome.INVALID),
        (404, Outcome.UNKNOWN),
        (429, Outcome.OVERLOADED),
        (500, Outcome.FAILED),
        (503, Outcome.UNAVAILABLE),
        (504, Outcome.DEADLINE),
    ],
)
async def test_what_a_server_refuses(status: int, outcome: Outcome) -> None:
    server = Server(lambda request: httpx.Response(status, json={"error": "because"}))
    engine = await engine_of(spec("http://a/toy"), transport=server.transport)
    with pytest.raises(RequestError, match="because") as caught:
        await engine.infer("toy", X)
    assert caught.value.outcome is outcome
    await engine.close()


@pytest.mark.parametrize("body", [b"nonsense", b"{}", b'{"outputs": [{"name": "y", "datatype": "FP9", "shape": [1]}]}'])
async def test_an_answer_that_is_none(body: bytes) -> None:
    engine = await engine_of(
        spec("http://a/toy"), transport=Server(lambda request: httpx.Response(200, content=body)).transport
    )
    with pytest.raises(RequestError, match="sent an invalid answer") as caught:
        await engine.infer("toy", X)
    assert caught.value.outcome is Outcome.FAILED
    await engine.close()


async def test_a_server_that_is_gone_is_left_aside_and_found_again() -> None:
    down = True

    def say(request: httpx.Request) -> httpx.Response:
        if request.url.host == "a" and down:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"outputs": []})

    server = Server(say)
    engine = await engine_of(spec("http://a/toy"), spec("http://b/toy"), transport=server.transport)
    answer = await engine.infer("toy", X)
    assert (answer.replica, answer.attempts) == ("o1", 2)
    assert [view.state for view in engine.replicas()] == [ReplicaState.RESTARTING, ReplicaState.READY]
    assert "refused" in engine.replicas()[0].last_error
    down = False
    await engine.apply([spec("http://a/toy")])
    assert (await engine.infer("toy", X)).replica == "o0"
    assert engine.replicas()[0].state is ReplicaState.READY
    await engine.close()


async def test_a_server_that_restarted_gets_requests_again_while_the_other_is_ready() -> None:
    """Seen: 0 of 828 requests reached a replica after its restart, because another was READY."""
    down = True

    def say(request: httpx.Request) -> httpx.Response:
        if request.url.host == "a" and down:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"outputs": []})

    server = Server(say)
    settings = OpenInferenceSettings(probe_s=0.001, probe_max_s=0.004)
    probed: list[int] = []

    def route(request: httpx.Request) -> httpx.Response:
        if down and request.url.host == "a" and request.url.path.endswith("/ready") and probed:
            probed.append(1)
            raise httpx.ConnectError("refused")
        return server(request)

    engine = OpenInferenceEngine(settings, httpx.MockTransport(route))
    await engine.apply([spec("http://a/toy"), spec("http://b/toy")])
    probed.append(0)
    assert (await engine.infer("toy", X)).replica == "o1"
    await eventually(lambda: len(probed) > 4, "probes while it is down")
    assert engine.replicas()[0].state is ReplicaState.RESTARTING
    down = False
    await eventually(lambda: engine.replicas()[0].state is ReplicaState.READY, "the restarted server")
    assert {(await engine.infer("toy", X)).replica for _ in range(2)} == {"o0"}
    await engine.close()


async def test_when_no_server_is_reached() -> None:
    def say(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    engine = await engine_of(spec("http://a/toy"), transport=Server(say).transport)
    with pytest.raises(RequestError, match=r"no replica of toy .*: refused") as caught:
        await engine.infer("toy", X)
    assert caught.value.outcome is Outcome.UNAVAILABLE
    await engine.close()
    with pytest.raises(RequestError, match="closing"):
        await engine.infer("toy", X)


async def test_the_least_busy_replica_is_asked_and_the_bound_holds() -> None:
    gate = asyncio.Event()

    class Slow(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/infer"):
                await gate.wait()
                return httpx.Response(200, json={"outputs": []})
            return Server()(request)

    engine = await engine_of(spec("http://a/toy"), spec("http://b/toy"), transport=Slow(), queue=2)
    waiting = [asyncio.create_task(engine.infer("toy", X)) for _ in range(2)]
    await until(lambda: sum(view.busy for view in engine.replicas()) == 2)
    with pytest.raises(RequestError, match="2 running requests") as caught:
        await engine.infer("toy", X)
    assert caught.value.outcome is Outcome.OVERLOADED
    closing = asyncio.create_task(engine.close())
    gate.set()
    assert {answer.replica for answer in await asyncio.gather(*waiting)} == {"o0", "o1"}, "closing waits for them"
    await closing


async def test_a_deadline_is_kept() -> None:
    class Never(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/infer"):
                await asyncio.Event().wait()
            return Server()(request)

    engine = await engine_of(spec("http://a/toy"), transport=Never())
    with pytest.raises(RequestError, match="did not answer within") as caught:
        await engine.infer("toy", X._replace(timeout_s=0.05))
    assert caught.value.outcome is Outcome.DEADLINE
    await engine.close()


async def test_a_model_that_is_not_loaded_is_loaded_and_unloaded_again() -> None:
    server = Server(ready=False)
    engine = await engine_of(spec("http://a/toy"), transport=server.transport)
    await engine.close()
    assert [path for path in server.asked if "repository" in path] == [
        "a /v2/repository/models/toy/load",
        "a /v2/repository/models/toy/unload",
    ]
    served = Server()
    await (await engine_of(spec("http://a/toy"), transport=served.transport)).close()
    assert not any("repository" in path for path in served.asked), "what was there before is left there"


async def test_what_cannot_be_had_leaves_the_old_set() -> None:
    server = Server()
    engine = await engine_of(spec("http://a/toy"), transport=server.transport)
    server.ready, server.loads = False, 404
    with pytest.raises(ActuationError, match="not load it: no such model"):
        await engine.apply([spec("http://a/toy"), spec("http://a/other")])
    assert [str(view.spec.model) for view in engine.replicas()] == ["http://a/toy"]
    await engine.close()

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(CapabilityError, match="http://a is not reached: refused"):
        await engine_of(spec("http://a/toy"), transport=httpx.MockTransport(refuse))


async def test_variants_and_services_that_there_are_not() -> None:
    waiting = replace(spec("http://a/b"), standby=True)
    engine = await engine_of(spec("http://a/toy"), waiting, transport=Server().transport)
    with pytest.raises(RequestError, match="no variant 'large'"):
        await engine.infer("toy", X._replace(variant="large"))
    with pytest.raises(RequestError, match="no service 'other'"):
        await engine.infer("other", X)
    answers = [await engine.infer("toy", X) for _ in range(3)]
    assert {answer.replica for answer in answers} == {"o0"}, "the other one stands by"
    assert answers[0].outputs["y"].tolist() == [3.0]
    await engine.close()


ADDRESSES = ["ftp://a/toy", "http://a", "http://a/", "http://a/b/c/d", "http://a/toy?x=1", "a/toy"]


@pytest.mark.parametrize("wrong", ADDRESSES)
def test_what_is_no_address(wrong: str) -> None:
    with pytest.raises(ConfigError, match="not a served model"):
        place_of(wrong)
