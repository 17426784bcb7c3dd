"""The Open Inference Protocol over gRPC: the same arrays, limits, token and records as over HTTP."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import EnergyShare, Outcome, ReplicaState, RequestError, RequestRecord
from joulery.domain.serving.tensors import NUMPY_TYPES, datatype_of, to_bytes
from joulery.gateway.app import Gateway
from joulery.gateway.body import Limits
from joulery.gateway.server import GatewayServer
from tests.adapters.engines.support import until
from tests.gateway.certificates import made
from tests.gateway.support import FakeEngine, view
from tests.waiting import PATIENCE_S

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'joulery[grpc]'")

from joulery.gateway.grpc_api import inference_pb2 as messages  # noqa: E402
from joulery.gateway.grpc_api.server import SERVICE, GrpcServer  # noqa: E402
from joulery.gateway.grpc_api.tensors import FIELDS, parse, render  # noqa: E402


class Client:
    """Calls the methods of the protocol on a channel."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel

    def call(self, method: str, message: Any = None, **options: Any) -> Any:
        asked = getattr(messages, f"{method}Request")
        answered = getattr(messages, f"{method}Response")
        path = f"/{SERVICE}/{method}"
        ask = self.channel.unary_unary(path, asked.SerializeToString, answered.FromString)
        return ask(asked() if message is None else message, **options)


class Running:
    """A gRPC server, a client for it, and the records of its requests."""

    def __init__(self, server: GrpcServer, client: Client, records: list[RequestRecord]) -> None:
        self.server, self.client, self.records = server, client, records
        self.gateway = server.gateway

    async def status(self, method: str, message: Any = None, **options: Any) -> Any:
        """The code with which a call that is to fail ends."""
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await self.client.call(method, message, **options)
        return failed.value


@asynccontextmanager
async def running(engine: FakeEngine, *, token: str | None = None, **options: Any) -> AsyncIterator[Running]:
    records: list[RequestRecord] = []
    gateway = Gateway(engine, telemetry=[records.append], **options)
    server = GrpcServer(gateway, "127.0.0.1", 0, token=token, drain_s=5.0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Running(server, Client(channel), records)
    finally:
        await server.stop()


def asking(*values: float, service: str = "toy", **rest: Any) -> Any:
    message = messages.ModelInferRequest(model_name=service, **rest)
    entry = message.inputs.add(name="x", datatype="FP32", shape=[1, len(values)])
    entry.contents.fp32_contents.extend(values)
    return message


def sent(arrays: dict[str, Any], *, raw: bool) -> Any:
    """A request as a client writes it."""
    message = messages.ModelInferRequest(model_name="toy")
    for name, array in arrays.items():
        entry = message.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        if raw:
            message.raw_input_contents.append(to_bytes(array))
        else:
            getattr(entry.contents, FIELDS[entry.datatype]).extend(array.reshape(-1).tolist())
    return message


def same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and to_bytes(one) == to_bytes(other)


TYPED = [dtype for name, dtype in NUMPY_TYPES.items() if name in FIELDS and name != "BYTES"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@given(st.sampled_from(TYPED).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES)), st.booleans())
def test_arrays_arrive_and_return_as_they_were_sent(array: Any, raw: bool) -> None:
    message = sent({"x": array}, raw=raw)
    got = parse(messages.ModelInferRequest.FromString(message.SerializeToString())).inputs["x"]
    assert same(got, array)
    answer = render(message, "small", {"y": array}, None)
    assert bool(answer.raw_output_contents) is raw
    back = answer.raw_output_contents[0] if raw else to_bytes(parse(_echoed(answer)).inputs["y"])
    assert back == to_bytes(array)


def _echoed(answer: Any) -> Any:
    """An answer's outputs as the inputs of a request."""
    message = messages.ModelInferRequest(model_name="toy")
    for output in answer.outputs:
        entry = message.inputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        entry.contents.CopyFrom(output.contents)
    return message


@given(st.lists(st.binary(max_size=9), max_size=5), st.booleans())
def test_byte_strings_arrive_and_return(elements: list[bytes], raw: bool) -> None:
    array = np.empty(len(elements), object)
    array[:] = elements
    message = sent({"x": array}, raw=raw)
    assert parse(message).inputs["x"].tolist() == elements
    answer = render(message, "small", {"y": array}, None)
    assert raw or list(answer.outputs[0].contents.bytes_contents) == elements


def test_half_precision_makes_the_answer_raw() -> None:
    array = np.array([1.5, -2.0], np.float16)
    answer = render(asking(1.0), "small", {"a": array, "b": np.array([7], np.int64)}, None)
    assert list(answer.raw_output_contents) == [array.tobytes(), np.array([7], "<i8").tobytes()]
    with pytest.raises(RequestError, match="raw_input_contents"):
        parse(sent_as("FP16", "fp32_contents", [1.0]))


def sent_as(datatype: str, field: str, values: list[Any], shape: tuple[int, ...] = (1,)) -> Any:
    message = messages.ModelInferRequest(model_name="toy")
    entry = message.inputs.add(name="x", datatype=datatype, shape=shape)
    getattr(entry.contents, field).extend(values)
    return message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (sent_as("INT8", "int_contents", [300]), "outside INT8"),
        (sent_as("INT8", "int64_contents", [3]), "int_contents"),
        (sent_as("INT7", "int_contents", [3]), "datatype 'INT7'"),
        (sent_as("INT32", "int_contents", [3], (2,)), "input 'x'"),
        (sent_as("INT32", "int_contents", [3], (-1,)), "shape"),
        (sent_as("INT32", "int_contents", [3], (1,) * 33), "at most 32"),
        (sent_as("INT32", "int_contents", [], (0, 2**62, 8)), "input 'x'"),
    ],
)
def test_what_is_no_tensor_is_refused(message: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        parse(message)
    assert refused.value.outcome is Outcome.INVALID


def test_raw_bytes_are_counted() -> None:
    message = sent({"x": np.zeros(2, np.float32)}, raw=True)
    message.raw_input_contents.append(b"")
    with pytest.raises(RequestError, match="2 entries for 1"):
        parse(message)
    message = sent({"x": np.zeros(2, np.float32)}, raw=True)
    message.inputs[0].contents.fp32_contents.append(1.0)
    with pytest.raises(RequestError, match="give one"):
        parse(message)
    message = sent({"x": np.zeros(2, np.float32)}, raw=True)
    message.raw_input_contents[0] = b"123"
    with pytest.raises(RequestError, match="3 bytes"):
        parse(message)
    message = asking(1.0)
    message.inputs.append(message.inputs[0])
    with pytest.raises(RequestError, match="twice"):
        parse(message)


async def test_an_answer_its_costs_and_its_record() -> None:
    def charge(*_: Any) -> EnergyShare:
        return EnergyShare(0.25, 0.125, Quality.MODELLED)

    engine = FakeEngine()
    async with running(engine, attribute=charge) as here:
        message = asking(1.0, 2.0, id="seven", model_version="small")
        message.outputs.add(name="x")
        answer = await here.client.call("ModelInfer", message, timeout=PATIENCE_S)
        assert (answer.model_name, answer.model_version, answer.id) == ("toy", "small", "seven")
        assert list(answer.outputs[0].contents.fp32_contents) == [1.0, 2.0]
        costs = {name: one.WhichOneof("parameter_choice") for name, one in answer.parameters.items()}
        assert costs["x-joulery-energy-j"] == "double_param"
        assert answer.parameters["x-joulery-energy-j"].double_param == 0.25
        assert answer.parameters["x-joulery-carbon-g"].double_param == 0.125
        assert answer.parameters["x-joulery-quality"].string_param == "modelled"
        asked = engine.asked[0][1]
        assert (asked.outputs, asked.variant) == (("x",), "small")
        # gRPC sends whole seconds for long times, rounded up.
        assert asked.timeout_s is not None and 0 < asked.timeout_s <= PATIENCE_S + 1
        assert [(one.service, one.outcome) for one in here.records] == [("toy", Outcome.OK)]
        assert here.gateway.bodies.held_bytes == 0
        label = here.gateway.feedback.label("toy", b'{"labels": [{"id": "seven", "correct": true}]}')
        assert label == {"accepted": 1, "unknown": 0}


async def test_a_request_without_a_deadline_has_the_engines_own() -> None:
    engine = FakeEngine()
    async with running(engine) as here:
        await here.client.call("ModelInfer", asking(1.0))
        assert engine.asked[0][1].timeout_s is None


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome.INVALID, "INVALID_ARGUMENT"),
        (Outcome.UNKNOWN, "NOT_FOUND"),
        (Outcome.OVERLOADED, "RESOURCE_EXHAUSTED"),
        (Outcome.FAILED, "INTERNAL"),
        (Outcome.CRASHED, "INTERNAL"),
        (Outcome.UNAVAILABLE, "UNAVAILABLE"),
        (Outcome.DEADLINE, "DEADLINE_EXCEEDED"),
    ],
)
async def test_every_outcome_has_a_status_and_a_record(outcome: Outcome, code: str) -> None:
    engine = FakeEngine()

    def reply(request: Any) -> Any:
        raise RequestError("not now", outcome, retry_after_s=2.5, variant="small")

    engine.reply = reply
    async with running(engine) as here:
        error = await here.status("ModelInfer", asking(1.0))
        assert (error.code().name, error.details()) == (code, "not now")
        trailing = dict(list(error.trailing_metadata()))  # grpcio 1.62 has pairs and no mapping
        assert (trailing["retry-after"], trailing["x-joulery-variant"]) == ("3", "small")
        assert [one.outcome for one in here.records] == [outcome]
        assert here.gateway.bodies.held_bytes == 0


async def test_an_output_that_cannot_be_sent_is_a_failure() -> None:
    engine = FakeEngine()
    engine.reply = lambda request: {"y": np.array([1j])}
    async with running(engine) as here:
        error = await here.status("ModelInfer", asking(1.0))
        assert (error.code().name, [one.outcome for one in here.records]) == ("INTERNAL", [Outcome.FAILED])


async def test_a_client_that_gives_up_cancels_its_request() -> None:
    engine = FakeEngine()
    begun = asyncio.Event()

    async def wait() -> Any:
        begun.set()
        await asyncio.Event().wait()

    engine.reply = lambda request: wait()
    async with running(engine) as here:
        call = here.client.call("ModelInfer", asking(1.0))
        waiting = asyncio.ensure_future(_ended(call))
        await begun.wait()
        call.cancel()
        await waiting
        await until(lambda: here.records)
        assert [one.outcome for one in here.records] == [Outcome.CANCELLED]
        assert (engine.cancelled, here.gateway.bodies.held_bytes) == (1, 0)


async def _ended(call: Any) -> None:
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_the_token_guards_all_but_whether_it_lives() -> None:
    async with running(FakeEngine(), token="secret-token") as here:
        assert (await here.client.call("ServerLive")).live
        for method in ("ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer"):
            assert (await here.status(method)).code().name == "UNAUTHENTICATED"
            wrong = (("authorization", "Bearer secret-tokem"),)
            assert (await here.status(method, metadata=wrong)).code().name == "UNAUTHENTICATED"
        right = (("authorization", "Bearer secret-token"),)
        assert (await here.client.call("ServerReady", metadata=right)).ready
        assert not here.records


async def test_what_is_served_is_described() -> None:
    async with running(FakeEngine(view("small"), view("large", ReplicaState.STARTING))) as here:
        assert (await here.client.call("ServerMetadata")).name == "joulery"
        about = await here.client.call("ModelMetadata", messages.ModelMetadataRequest(name="toy"))
        assert (about.name, list(about.versions), about.platform) == ("toy", ["large", "small"], "python")
        assert [(one.name, one.datatype, list(one.shape)) for one in about.inputs] == [("x", "FP32", [-1, 2])]
        ready = messages.ModelReadyRequest
        assert (await here.client.call("ModelReady", ready(name="toy"))).ready
        assert not (await here.client.call("ModelReady", ready(name="toy", version="large"))).ready
        for missing in (ready(name="toys"), ready(name="toy", version="tiny")):
            assert (await here.status("ModelReady", missing)).code().name == "NOT_FOUND"


async def test_what_is_too_large_or_too_much_is_refused() -> None:
    async with running(FakeEngine(), limits=Limits(1000, 1500)) as here:
        large = await here.status("ModelInfer", asking(*[1.0] * 400))
        assert large.code().name == "RESOURCE_EXHAUSTED"
        with here.gateway.bodies.holding(1400):
            crowded = await here.status("ModelInfer", asking(*[1.0] * 100))
        assert crowded.code().name == "RESOURCE_EXHAUSTED"
        assert here.gateway.bodies.held_bytes == 0
        await here.client.call("ModelInfer", asking(*[1.0] * 100))


async def test_a_stop_lets_running_requests_finish() -> None:
    engine = FakeEngine()
    begun, go = asyncio.Event(), asyncio.Event()

    async def wait() -> Any:
        begun.set()
        await go.wait()
        return {"y": np.array([1.0], np.float32)}

    engine.reply = lambda request: wait()
    async with running(engine) as here:
        call = here.client.call("ModelInfer", asking(1.0))
        answered = asyncio.ensure_future(_answer(call))
        await begun.wait()
        stopping = asyncio.create_task(here.server.stop())
        await asyncio.sleep(0)
        go.set()
        assert (await answered).outputs[0].name == "y"
        await stopping
        await here.server.stop()


async def test_a_stop_that_has_waited_long_enough_ends_requests() -> None:
    engine = FakeEngine()
    begun = asyncio.Event()

    async def wait() -> Any:
        begun.set()
        await asyncio.Event().wait()

    engine.reply = lambda request: wait()
    async with running(engine) as here:
        here.server.drain_s = 0.0
        failing = asyncio.ensure_future(here.status("ModelInfer", asking(1.0)))
        await begun.wait()
        await here.server.stop()
        assert (await failing).code().name in ("UNAVAILABLE", "CANCELLED")
        await until(lambda: here.records)
        assert [one.outcome for one in here.records] == [Outcome.UNAVAILABLE]


async def _answer(call: Any) -> Any:
    return await call


async def test_both_servers_share_a_life_and_a_certificate(tmp_path: Path) -> None:
    files = made(tmp_path)
    gateway = Gateway(FakeEngine())
    beside = GrpcServer(gateway, "127.0.0.1", 0, tls=files)
    server = GatewayServer(gateway, "127.0.0.1", 0, tls=files, beside=beside)
    await server.start()
    trusted = grpc.ssl_channel_credentials(files.certificate.read_bytes())
    async with grpc.aio.secure_channel(server.beside_address, trusted) as channel:
        assert (await Client(channel).call("ServerLive")).live
    await server.stop()
    with socket.create_server(("127.0.0.1", beside.port)):
        pass


async def test_a_port_in_use_is_one_error_and_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = Gateway(FakeEngine())
        beside = GrpcServer(gateway, "127.0.0.1", taken.getsockname()[1])
        server = GatewayServer(gateway, "127.0.0.1", 0, beside=beside)
        with pytest.raises(CapabilityError, match="for gRPC"):
            await server.start()
    with socket.create_server(("127.0.0.1", server.port)):
        pass


def test_listening_beyond_this_machine_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        GrpcServer(Gateway(FakeEngine()), "0.0.0.0", 0)
    GrpcServer(Gateway(FakeEngine()), "0.0.0.0", 0, token="secret-token")


async def test_a_joined_gateway_takes_the_limits_it_is_sent_and_shares_its_port() -> None:
    """It listens before it knows the site's limits: a message beyond them is refused by then, not by grpcio."""
    records: list[RequestRecord] = []
    gateway = Gateway(FakeEngine(), telemetry=[records.append])
    first = GrpcServer(gateway, "127.0.0.1", 0, joined=True, shared_port=True)
    await first.start()
    second = GrpcServer(gateway, "127.0.0.1", first.port, joined=True, shared_port=True)
    await second.start()
    try:
        async with grpc.aio.insecure_channel(first.address) as channel:
            here = Running(first, Client(channel), records)
            await here.client.call("ModelInfer", asking(*([1.0] * 100)))
            gateway.bodies.limits = Limits.of(100)
            failed = await here.status("ModelInfer", asking(*([1.0] * 100)))
            assert failed.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [record.outcome for record in records] == [Outcome.OK, Outcome.OVERLOADED]
    finally:
        await first.stop()
        await second.stop()
