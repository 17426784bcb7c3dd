"""Upstream models as variants: shares, failover, and the answer when none is left."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.engines.remote.open_inference import OpenInferenceSettings
from joulery.adapters.engines.remote.upstreams import UpstreamEngine
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.serving.engine import InferRequest, ModelRef, Outcome, ReplicaSpec, ReplicaState, RequestError
from joulery.domain.serving.mix import MixStep, VariantMix
from joulery.domain.serving.service import Slice, SliceKind
from joulery.gateway.protocol import parse, render
from tests.waiting import eventually

MODELS = {name: ModelRef.parse(f"http://{name}:8000/net") for name in ("large", "small")}


class Upstreams(httpx.AsyncBaseTransport):
    """Two servers of the protocol, and what each has answered."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self.values: Counter[float] = Counter()
        self.dead: set[str] = set()
        self.status: dict[str, int] = {}
        self.hold: asyncio.Event | None = None
        self.under_way = self.most = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host in self.dead:
            raise httpx.ConnectError("connection refused")
        if request.url.path.endswith("/infer"):
            return await self.infer(host, request)
        if host in self.status:
            return httpx.Response(self.status[host], json={"error": "not ready"})
        spec = {"name": "x", "datatype": "FP32", "shape": [-1]}
        return httpx.Response(200, json={"platform": "fake", "inputs": [spec], "outputs": [{**spec, "name": "y"}]})

    async def infer(self, host: str, request: httpx.Request) -> httpx.Response:
        if host in self.status:
            return httpx.Response(self.status[host], json={"error": "says no"})
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.under_way -= 1
        if host in self.dead:
            raise httpx.ReadError("connection reset")
        call = parse(await request.aread(), int(request.headers["inference-header-content-length"]))
        x = call.request.inputs["x"]
        self.answered[host] += 1
        self.values[float(x.flat[0])] += 1
        answer = render("net", host, call, {"y": x * 2})
        return httpx.Response(
            200, content=answer.body, headers={"inference-header-content-length": str(answer.json_bytes)}
        )


def slots(**counts: int) -> list[ReplicaSpec]:
    return [
        ReplicaSpec(
            "net", name, Slice(SliceKind.WHOLE), MODELS[name], warm=tuple(i for i in MODELS.items() if i[0] != name)
        )
        for name, count in counts.items()
        for _ in range(count)
    ]


@asynccontextmanager
async def engine_of(servers: Upstreams, *specs: ReplicaSpec, **settings: Any) -> AsyncIterator[UpstreamEngine]:
    engine = UpstreamEngine(OpenInferenceSettings(probe_s=0.001, **settings), servers)
    try:
        await engine.apply(specs)
        yield engine
    finally:
        await engine.close()


async def ask(engine: UpstreamEngine, value: float = 1.0, **fields: Any) -> Any:
    answer = await engine.infer("net", InferRequest({"x": np.array([value], np.float32)}, **fields))
    assert answer.outputs["y"].tolist() == [2 * value]
    return answer


async def test_slots_share_requests_as_the_layout_says() -> None:
    servers = Upstreams()
    async with engine_of(servers, *slots(large=3, small=1)) as engine:
        answers = [await ask(engine) for _ in range(40)]
        assert servers.answered == {"large": 30, "small": 10}
        assert all(answer.cpu_s > 0 for answer in answers)
        assert {view.spec.variant for view in engine.replicas()} == {"large", "small"}
        done = await engine.apply(slots(large=1, small=3))
        assert (len(done.started), len(done.stopped), len(done.kept)) == (2, 2, 2)
        servers.answered.clear()
        for _ in range(40):
            await ask(engine)
        assert servers.answered == {"large": 10, "small": 30}


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
async def test_a_mix_steers_requests_without_another_layout(share: float) -> None:
    servers = Upstreams()
    async with engine_of(servers, *slots(large=4)) as engine:
        engine.set_mix("net", VariantMix((MixStep(100.0, 1.0, (("small", share),)),)))
        for _ in range(40):
            await ask(engine)
        assert servers.answered["small"] == round(40 * share)
        assert {view.spec.variant for view in engine.replicas()} == {"large"}


async def test_no_more_requests_are_sent_at_once_than_there_are_slots() -> None:
    servers = Upstreams()
    servers.hold = asyncio.Event()
    async with engine_of(servers, *slots(large=2, small=1), queue=5) as engine:
        asked = [asyncio.ensure_future(ask(engine, value)) for value in range(8)]
        await eventually(lambda: servers.under_way == 3, "three requests under way")
        assert len(engine.backlog()) == 8
        with pytest.raises(RequestError) as caught:
            await ask(engine)
        assert caught.value.outcome is Outcome.OVERLOADED
        servers.hold.set()
        await asyncio.gather(*asked)
        assert servers.most == 3


@pytest.mark.parametrize("how", ["refused", "not ready", "full"])
async def test_another_variant_takes_over_and_the_first_comes_back(how: str) -> None:
    servers = Upstreams()
    async with engine_of(servers, *slots(large=2)) as engine:
        if how == "refused":
            servers.dead.add("large")
        else:
            servers.status["large"] = 503 if how == "not ready" else 429
        for value in range(10):
            assert (await ask(engine, value)).variant == "small"
        assert servers.values == dict.fromkeys(map(float, range(10)), 1)
        if how != "full":
            assert {view.state for view in engine.replicas()} == {ReplicaState.RESTARTING}
        servers.dead.clear()
        servers.status.clear()
        await eventually(lambda: {v.state for v in engine.replicas()} == {ReplicaState.READY}, "the upstream is back")
        assert (await ask(engine)).variant == "large"


async def test_requests_under_way_at_a_server_that_dies_are_answered_once_by_another() -> None:
    servers = Upstreams()
    servers.hold = asyncio.Event()
    async with engine_of(servers, *slots(large=4)) as engine:
        asked = [asyncio.ensure_future(ask(engine, value)) for value in range(12)]
        await eventually(lambda: servers.under_way == 4, "four requests under way")
        servers.dead.add("large")
        servers.hold.set()
        answers = await asyncio.gather(*asked)
        assert {answer.variant for answer in answers} == {"small"}
        assert servers.values == dict.fromkeys(map(float, range(12)), 1)


async def test_with_no_upstream_left_a_request_learns_at_once_when_to_retry() -> None:
    servers = Upstreams()
    async with engine_of(servers, *slots(large=1, small=1)) as engine:
        servers.dead |= set(MODELS)
        for _ in range(3):
            with pytest.raises(RequestError) as caught:
                await ask(engine)
            assert caught.value.outcome is Outcome.UNAVAILABLE
            assert caught.value.retry_after_s
        servers.dead.clear()
        await eventually(lambda: {v.state for v in engine.replicas()} == {ReplicaState.READY}, "both are back")
        await ask(engine)


async def test_a_request_for_one_variant_goes_to_no_other() -> None:
    servers = Upstreams()
    async with engine_of(servers, *slots(large=2)) as engine:
        assert (await ask(engine, variant="small")).variant == "small"
        servers.dead.add("small")
        with pytest.raises(RequestError) as caught:
            await ask(engine, variant="small")
        assert caught.value.outcome is Outcome.UNAVAILABLE
        with pytest.raises(RequestError, match="runs no variant"):
            await ask(engine, variant="other")


async def test_an_error_of_the_model_is_the_answer() -> None:
    servers = Upstreams()
    async with engine_of(servers, *slots(large=1)) as engine:
        servers.status["large"] = 500
        with pytest.raises(RequestError) as caught:
            await ask(engine)
        assert caught.value.outcome is Outcome.FAILED
        assert not servers.answered


async def test_one_upstream_may_be_absent_at_the_start_and_not_all() -> None:
    servers = Upstreams()
    servers.dead.add("large")
    async with engine_of(servers, *slots(large=2)) as engine:
        assert (await ask(engine)).variant == "small"
        servers.dead.clear()
        await eventually(lambda: {v.state for v in engine.replicas()} == {ReplicaState.READY}, "it came")
        assert {view.platform for view in engine.replicas()} == {"fake"}
    servers.dead |= set(MODELS)
    with pytest.raises(CapabilityError, match="no upstream of net"):
        async with engine_of(servers, *slots(large=1)):
            raise AssertionError


async def test_deadlines_and_clients_that_leave_free_their_slot() -> None:
    servers = Upstreams()
    servers.hold = asyncio.Event()
    async with engine_of(servers, *slots(large=1)) as engine:
        with pytest.raises(RequestError) as caught:
            await ask(engine, timeout_s=0.05)
        assert caught.value.outcome is Outcome.DEADLINE
        leaving = asyncio.ensure_future(ask(engine))
        await eventually(lambda: servers.under_way == 1, "one request under way")
        leaving.cancel()
        servers.hold.set()
        assert (await ask(engine, 7.0)).variant == "large"
        assert not engine.backlog()


async def test_a_model_of_this_machine_is_none_of_its_upstreams() -> None:
    with pytest.raises(ConfigError, match="model of this machine"):
        async with engine_of(Upstreams(), ReplicaSpec("net", "v", Slice(SliceKind.WHOLE), ModelRef.parse("m:f"))):
            raise AssertionError


async def test_a_service_that_ends_answers_what_it_took() -> None:
    servers = Upstreams()
    servers.hold = asyncio.Event()
    async with engine_of(servers, *slots(large=1)) as engine:
        asked = [asyncio.ensure_future(ask(engine, value)) for value in range(3)]
        await eventually(lambda: servers.under_way == 1, "one request under way")
        ending = asyncio.ensure_future(engine.apply([]))
        servers.hold.set()
        await asyncio.gather(*asked)
        await ending
        assert not engine.replicas()
        with pytest.raises(RequestError) as caught:
            await ask(engine)
        assert caught.value.outcome is Outcome.UNKNOWN


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 5)),
        st.tuples(st.just("dead"), st.sets(st.sampled_from(["large", "small"]))),
        st.tuples(st.just("slots"), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
    ),
    max_size=12,
)


@given(EVENTS)
def test_whatever_happens_each_request_has_one_answer_or_one_error(events: list[tuple[str, Any]]) -> None:
    asyncio.run(plays(events))


async def plays(events: list[tuple[str, Any]]) -> None:
    servers, asked, value = Upstreams(), [], 0
    servers.hold = asyncio.Event()
    async with engine_of(servers, *slots(large=2, small=1)) as engine:
        for what, arg in events:
            if what == "ask":
                for _ in range(arg):
                    asked.append(asyncio.ensure_future(ask(engine, float(value))))
                    value += 1
            elif what == "dead":
                servers.dead = set(arg)
            elif what == "slots":
                await engine.apply(slots(large=arg, small=3 - arg))
            elif asked:
                asked[arg % len(asked)].cancel()
            await asyncio.sleep(0)
        servers.hold.set()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        answered = [one for one in ended if not isinstance(one, BaseException)]
        errors = [one for one in ended if isinstance(one, RequestError)]
        cancelled = [one for one in ended if isinstance(one, asyncio.CancelledError)]
        assert len(answered) + len(errors) + len(cancelled) == value
        assert {one.outcome for one in errors} <= {Outcome.UNAVAILABLE}
        assert not (errors and not servers.dead and not any(what == "dead" for what, _ in events))
        assert all(count == 1 for count in servers.values.values())
        assert not engine.backlog()
