"""What clients can do to the server: vanish, dawdle, flood, speak nonsense."""

import asyncio
import gc
import json
import socket
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.serving.engine import InferRequest, Outcome
from joulery.gateway.app import Gateway
from joulery.gateway.body import Limits
from joulery.gateway.server import GatewayServer, ServerLimits
from tests.adapters.engines.support import until
from tests.gateway.support import INFER, FakeEngine, body, serving

REQUEST = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (INFER.encode(), len(body()), body())


async def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = GatewayServer(Gateway(FakeEngine()), "127.0.0.1", port)
        with pytest.raises(CapabilityError, match=f"127.0.0.1:{port}: the port is in use") as caught:
            await server.start()
        assert "--listen" in caught.value.hint
        await server.stop()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
async def test_an_address_this_machine_does_not_have(host: str) -> None:
    server = GatewayServer(Gateway(FakeEngine()), host, 0, protected=True)
    with pytest.raises(ConfigError, match="no such address"):
        await server.start()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_beyond_this_machine_a_token_is_a_must(host: str) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        GatewayServer(Gateway(FakeEngine()), host, 0)
    GatewayServer(Gateway(FakeEngine(), token="t"), host, 0, protected=True)


@pytest.mark.parametrize(("host", "url"), [("localhost", "http://localhost:"), ("::1", "http://[::1]:")])
async def test_it_listens_at_its_address(host: str, url: str) -> None:
    server = GatewayServer(Gateway(FakeEngine()), host, 0)
    try:
        await server.start()
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    assert server.url == f"{url}{server.port}"
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{server.url}/v2/health/live")).status_code == 200
    await server.stop()
    await server.stop()


async def test_a_connection_serves_request_after_request_also_pipelined() -> None:
    async with serving(FakeEngine()) as gateway:
        last = REQUEST.replace(b"host: x", b"host: x\r\nconnection: close")
        answer = await gateway.raw(REQUEST * 3 + last, finish=True)
        assert answer.count(b"HTTP/1.1 200 OK") == 4
        assert answer.count(b"connection: close") == 1
        assert len(gateway.records) == 4


async def test_an_answered_request_leaves_nothing_to_the_garbage_collector() -> None:
    """Its objects are freed at once: circles of references cost a gateway a tenth of its CPU time."""
    async with serving(FakeEngine()) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)

        async def requests(count: int) -> None:
            for _ in range(count):
                writer.write(REQUEST)
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
            await asyncio.sleep(0)

        await requests(5)
        gc.collect()
        gc.disable()
        try:
            await requests(50)
            assert gc.collect() < 50
        finally:
            gc.enable()
        writer.close()


async def test_the_answer_to_head_has_no_body() -> None:
    async with serving(FakeEngine()) as gateway:
        head = b"HEAD /v2 HTTP/1.1\r\nhost: x\r\n\r\n"
        answer = await gateway.raw(head + head.replace(b"host: x", b"connection: close"), finish=True)
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert b"content-length: 72" in answer
        assert b"{" not in answer


async def test_http_1_0_is_answered_and_closed() -> None:
    async with serving(FakeEngine()) as gateway:
        answer = await gateway.raw(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"), finish=True)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer


async def test_expect_100_continue_is_honoured() -> None:
    async with serving(FakeEngine()) as gateway:
        head, content = REQUEST.replace(b"host: x", b"host: x\r\nexpect: 100-continue").split(b"\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(head + b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(content)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_vanishes_cancels_its_request() -> None:
    engine = FakeEngine()
    engine.reply = lambda request: asyncio.sleep(60)
    async with serving(engine) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(REQUEST)
        await until(lambda: bool(engine.asked))
        writer.transport.abort()
        await until(lambda: bool(engine.cancelled))
        await asyncio.sleep(0)
        (record,) = gateway.records
        assert record.outcome is Outcome.CANCELLED


async def test_a_client_that_vanishes_in_its_body_leaves_nothing() -> None:
    engine = FakeEngine()
    async with serving(engine) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(REQUEST[:-10])
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        await until(lambda: bool(gateway.records))
        assert gateway.records[0].outcome is Outcome.CANCELLED
        assert engine.asked == []
        app: Any = gateway.server._app
        assert app.bodies.held_bytes == 0


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"POST /v2/models/toy/infer HTTP/1.1\r\nhost: x\r\nx-slow: ",
        REQUEST[:-10],
        REQUEST + REQUEST[:-10],
    ],
    ids=["nothing", "head", "body", "second body"],
)
async def test_a_client_that_dawdles_is_dropped(start: bytes) -> None:
    async with serving(FakeEngine(), server_limits=ServerLimits(receive_s=0.2)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(start)
        with pytest.raises(ConnectionResetError):
            await reader.read()
            raise ConnectionResetError
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        assert (await gateway.post()).status_code == 200


async def test_a_slow_answer_is_not_a_slow_client() -> None:
    engine = FakeEngine()

    async def late() -> dict[str, Any]:
        await asyncio.sleep(0.6)
        return {}

    engine.reply = lambda request: late()
    async with serving(engine, server_limits=ServerLimits(receive_s=0.2)) as gateway:
        assert (await gateway.post()).status_code == 200


async def test_a_client_that_does_not_take_its_answer_is_dropped() -> None:
    engine = FakeEngine()
    large = {"y": [0.5] * 4_000_000}
    engine.reply = lambda request: large
    async with serving(engine, server_limits=ServerLimits(receive_s=0.3)) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port, limit=1024)
        writer.write(REQUEST + REQUEST)
        server = gateway.server._server
        assert server is not None
        await until(lambda: bool(engine.asked))
        await until(lambda: not server.server_state.connections)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_the_head_of_a_request_is_bounded() -> None:
    async with serving(FakeEngine(), server_limits=ServerLimits(head_bytes=2000)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(b"GET /v2 HTTP/1.1\r\n")
        for _ in range(30):
            writer.write(b"x-filler: " + b"y" * 100 + b"\r\n")
            await asyncio.sleep(0.001)
        writer.write_eof()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431")
        assert b'"error"' in answer
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        assert (await gateway.post(b"x" * 5000)).status_code == 400, "a body is no head"


async def test_the_number_of_connections_is_bounded() -> None:
    """While every connection has a request, one more is refused."""
    async with serving(FakeEngine(), server_limits=ServerLimits(connections=2)) as gateway:
        held = [await asyncio.open_connection("127.0.0.1", gateway.server.port) for _ in range(2)]
        for _, writer in held:
            writer.write(b"GET /v2 HT")
        await until(lambda: not idle(gateway.server))
        answer = await gateway.raw(REQUEST, finish=True)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"error": "there are too many connections"}
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        while (answer := await gateway.post()).status_code == 503:
            assert answer.headers["retry-after"] == "1"
        assert answer.status_code == 200


async def test_the_longest_idle_connection_makes_room_for_a_new_one() -> None:
    """However many clients connect and ask nothing: each that asks is answered."""
    async with serving(FakeEngine(), server_limits=ServerLimits(connections=8)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        held = []
        for _ in range(10):
            held += [await asyncio.open_connection("127.0.0.1", gateway.server.port) for _ in range(5)]
            writer.write(REQUEST)
            assert b"HTTP/1.1 200" in await reader.readuntil(b"\r\n\r\n"), "it is not the longest idle one"
            assert (await gateway.raw(REQUEST)).startswith(b"HTTP/1.1 200")
        assert await held[0][0].read() == b"", "closed without a word"
        for _, each in [*held, (reader, writer)]:
            each.close()
        await asyncio.gather(*(each.wait_closed() for _, each in held), return_exceptions=True)


def idle(server: GatewayServer) -> list[Any]:
    """Its connections without a request."""
    assert server._server is not None
    return [one for one in server._server.server_state.connections if one in one.idle]


async def test_what_is_not_http_is_400_in_json() -> None:
    async with serving(FakeEngine()) as gateway:
        answer = await gateway.raw(b"\x16\x03\x01 this is TLS\r\n\r\n", finish=True)
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert list(json.loads(content)) == ["error"]


async def accepts(port: int) -> bool:
    """Whether something still listens on a port of this machine."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:  # the socket closed in the middle of the handshake: ask again
        return True
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return True


async def test_a_stop_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    engine, answering = FakeEngine(), asyncio.Event()

    async def late() -> dict[str, Any]:
        await answering.wait()
        return {}

    engine.reply = lambda request: late()
    async with serving(engine) as gateway:
        running = asyncio.ensure_future(gateway.post())
        await until(lambda: bool(engine.asked))
        stopping = asyncio.ensure_future(gateway.server.stop())
        while await accepts(gateway.server.port):
            pass
        answering.set()
        answer = await running
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        await stopping


async def test_a_stop_does_not_wait_for_ever() -> None:
    engine = FakeEngine()
    engine.reply = lambda request: asyncio.sleep(60)
    async with serving(engine, server_limits=ServerLimits(drain_s=0.2)) as gateway:
        running = asyncio.ensure_future(gateway.post())
        await until(lambda: bool(engine.asked))
        await gateway.server.stop()
        answer = await running
        assert answer.status_code == 503
        assert answer.json() == {"error": "the gateway is closing"}


def test_a_bug_is_a_500_and_the_server_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()

    def bug(request: InferRequest) -> Any:
        raise ZeroDivisionError("a bug")

    async def scenario() -> None:
        engine.reply = bug
        async with serving(engine) as gateway:
            assert (await gateway.post()).status_code == 500
            engine.reply = lambda request: {}
            assert (await gateway.post()).status_code == 200

    asyncio.run(scenario())
    assert "a bug" in caplog.text


chunks = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [
                REQUEST,
                b"GET /v2 HTTP/1.1\r\n",
                b"POST /v2/models/toy/infer HTTP/1.1\r\n",
                b"OPTIONS * HTTP/1.1\r\n",
                b"CONNECT a:1 HTTP/1.1\r\n",
                b"GET http://x/v2 HTTP/1.1\r\n",
                b"GET /%zz%ff\xff?\x00 HTTP/9.9\r\n",
                b"host: x\r\n",
                b"content-length: 5\r\n",
                b"content-length: -5\r\n",
                b"content-length: 99999999999999999999\r\n",
                b"transfer-encoding: chunked\r\n",
                b"connection: upgrade\r\nupgrade: websocket\r\n",
                b"expect: 100-continue\r\n",
                b"content-encoding: br\r\n",
                b"inference-header-content-length: 3\r\n",
                b"5\r\nabcde\r\n",
                b"0\r\n\r\n",
                b"\r\n",
                b"{}",
            ]
        ),
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chunks)
def test_garbage_never_makes_a_5xx_nor_ends_the_server(fuzz: "_Fuzz", pieces: list[bytes]) -> None:
    for answer in fuzz.send(pieces):
        assert not answer.startswith(b"5"), answer
    assert fuzz.alive()


class _Fuzz:
    """One server for all examples, on an event loop of its own."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        app = Gateway(FakeEngine(), limits=Limits(body_bytes=10_000))
        self.server = GatewayServer(app, "127.0.0.1", 0)
        self.runner.run(self.server.start())

    def send(self, pieces: list[bytes]) -> list[bytes]:
        """The status of every answer."""
        return self.runner.run(self._send(pieces))

    def alive(self) -> bool:
        return self.runner.run(self._send([REQUEST])) == [b"200"]

    async def _send(self, pieces: list[bytes]) -> list[bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        answer = b""
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            with suppress(OSError):
                writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 10)
        except OSError:
            pass
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        return [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]

    def close(self) -> None:
        self.runner.run(self.server.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def fuzz() -> Any:
    server = _Fuzz()
    yield server
    server.close()
