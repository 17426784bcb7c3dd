"""Requests on connections of their own: answered as through Ray, given the token, and not lost with the replica."""

import asyncio
import socket

import numpy as np
import pytest

from joulery.adapters.engines.embedded.wire import Frame, FrameReader, encode
from joulery.adapters.engines.ray_serve.cluster import RayPlace, ReplicaGoneError
from joulery.adapters.engines.ray_serve.direct import DirectLines
from joulery.adapters.engines.ray_serve.listener import Listener
from joulery.adapters.engines.ray_serve.settings import RaySettings
from joulery.domain.serving.engine import InferRequest

X = {"x": np.arange(6.0).reshape(2, 3), "text": np.array([b"a", b"\xff"], object)}
LARGE = {"x": np.arange(300_000.0)}


def answer(frame: Frame) -> dict:
    if frame.header["v"] == "other":
        return {"variant": "v", "s": 0.0, "c": 0.0, "moved": True}
    if frame.header["v"] == "bad":
        return {"variant": "v", "s": 0.0, "c": 0.0, "e": "no luck", "o": "failed"}
    return {"variant": frame.header["id"], "s": 0.1, "c": 0.2, "y": dict(frame.tensors)}


class Ray:
    """Answers through Ray."""

    async def infer(self, application, replica, request):
        return {"variant": f"{application} {replica} through Ray"}


@pytest.fixture
def listener():
    made = Listener("127.0.0.1", answer)
    yield made
    made.close()


@pytest.fixture
async def lines():
    made = DirectLines(Ray())
    yield made
    made.close()
    await asyncio.sleep(0)  # transports close in the loop's next turn


async def test_a_request_is_answered_with_its_tensors_unchanged(listener, lines):
    info = {"id": "r1", "direct": listener.place}
    for inputs in (X, LARGE, X):
        got = await lines.infer("app", info, InferRequest(inputs))
        assert (got["variant"], got["s"], got["c"]) == ("r1", 0.1, 0.2)
        for name, array in inputs.items():
            assert got["y"][name].dtype == array.dtype and got["y"][name].tolist() == array.tolist()
    assert (await lines.infer("app", info, InferRequest(X, variant="other")))["moved"] is True
    failed = await lines.infer("app", info, InferRequest(X, variant="bad"))
    assert (failed["e"], failed["o"]) == ("no luck", "failed")


def test_the_gateway_s_own_event_loop_has_such_connections_too(listener):
    uvloop = pytest.importorskip("uvloop")

    async def asked() -> dict:
        lines = DirectLines(Ray())
        try:
            return await lines.infer("app", {"id": "r1", "direct": listener.place}, InferRequest(X))
        finally:
            lines.close()
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(asked())["variant"] == "r1"


async def test_a_replica_that_does_not_listen_or_cannot_be_reached_is_asked_through_ray(lines):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for direct in (None, ("127.0.0.1", port, "token")):
        for _ in range(2):
            info = {"id": f"r {direct}", "direct": direct}
            assert (await lines.infer("app", info, InferRequest(X)))["variant"] == f"app {info['id']} through Ray"


async def test_nothing_is_answered_without_the_token(listener, lines):
    host, port, token = listener.place
    with pytest.raises(ReplicaGoneError):
        await lines.infer("app", {"id": "r1", "direct": (host, port, token[::-1])}, InferRequest(X))
    reader, writer = await asyncio.open_connection(host, port)
    for pieces in (encode({"v": "", "id": "r1"}, X), encode({"token": token}, {})):
        writer.writelines(pieces)
    assert await reader.read() == b"", "the first frame must have it"
    writer.close()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(64))
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


async def test_a_replica_that_ends_fails_its_call_and_the_next_one_connects_anew(listener, lines):
    ends = asyncio.Event()

    async def half(reader, writer):
        frames, known = FrameReader(), []
        while len(known) < 2:
            known += frames.feed(await reader.read(65536))
        ends.set()
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    place = ("127.0.0.1", server.sockets[0].getsockname()[1], "t")
    with pytest.raises(ReplicaGoneError, match="connection was closed"):
        await lines.infer("app", {"id": "r1", "direct": place}, InferRequest(X))
    assert ends.is_set()
    server.close()
    again = await lines.infer("app", {"id": "r1", "direct": listener.place}, InferRequest(X))
    assert again["variant"] == "r1"


@pytest.mark.parametrize(
    ("address", "direct", "listens"),
    [
        ("local", False, ""),
        ("local", True, "127.0.0.1"),
        ("auto", False, ""),
        ("auto", True, "node"),
    ],
)
def test_nothing_is_opened_unasked(address, direct, listens):
    assert RaySettings().listens == ""
    assert RaySettings(RayPlace(address), direct=direct).listens == listens
