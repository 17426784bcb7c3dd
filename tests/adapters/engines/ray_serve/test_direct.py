"""Requests on connections of joulery's own: answered as through Ray, given the token, once, and not lost."""

import asyncio
import re

import numpy as np
import pytest

from joulery.adapters.engines.embedded.wire import Frame, FrameReader, encode
from joulery.adapters.engines.ray_serve.cluster import RayPlace, ReplicaGoneError
from joulery.adapters.engines.ray_serve.direct import RETRY_S, DirectLines
from joulery.adapters.engines.ray_serve.listener import Listener, this_machine
from joulery.adapters.engines.ray_serve.settings import RaySettings
from joulery.domain.serving.engine import InferRequest
from tests.adapters.engines.ray_serve.listening_cluster import GATE, ListeningCluster, spec
from tests.ports import free_port
from tests.waiting import eventually

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

    def __init__(self) -> None:
        self.answer, self.asked = {}, []

    async def infer(self, application, replica, request, call):
        self.asked.append(call)
        return {"variant": f"{application} {replica} through Ray", **self.answer}


class Seen:
    """What connections say of replicas."""

    def __init__(self) -> None:
        self.ray, self.now_s = Ray(), 0.0
        self.leaving, self.lost = [], []
        self.lines = DirectLines(self.ray, self.leaving.append, self.lost.append, lambda: self.now_s)


@pytest.fixture
def listener():
    made = Listener("127.0.0.1", answer)
    yield made
    made.close()


@pytest.fixture
async def seen():
    made = Seen()
    yield made
    made.lines.close()
    await asyncio.sleep(0)  # transports close in the loop's next turn


async def test_a_request_is_answered_with_its_tensors_unchanged(listener, seen):
    info, lines = {"id": "r1", "direct": listener.place}, seen.lines
    for inputs in (X, LARGE, X):
        got = await lines.infer("app", info, InferRequest(inputs))
        assert (got["variant"], got["s"], got["c"]) == ("r1", 0.1, 0.2)
        for name, array in inputs.items():
            assert got["y"][name].dtype == array.dtype and got["y"][name].tolist() == array.tolist()
    assert (await lines.infer("app", info, InferRequest(X, variant="other")))["moved"] is True
    failed = await lines.infer("app", info, InferRequest(X, variant="bad"))
    assert (failed["e"], failed["o"]) == ("no luck", "failed")
    assert (lines.direct, lines.through_ray, seen.ray.asked) == (5, 0, [])


async def test_what_cannot_be_sent_is_the_client_s_error_either_way(listener, seen):
    refused = await seen.lines.infer(
        "app", {"id": "r1", "direct": listener.place}, InferRequest({"z": np.ones(2) * 1j})
    )
    assert refused["o"] == "invalid" and "complex" in refused["e"]

    def unsendable(frame):
        return {"variant": "v", "s": 0.1, "c": 0.2, "y": {"z": np.ones(2) * 1j}}

    other = Listener("127.0.0.1", unsendable)
    failed = await seen.lines.infer("app", {"id": "r2", "direct": other.place}, InferRequest(X))
    assert failed["o"] == "failed" and "complex" in failed["e"] and failed["s"] == 0.1
    other.close()


def test_the_gateway_s_own_event_loop_has_such_connections_too(listener):
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed: pip install 'joulery[serve]'")

    async def asked() -> dict:
        lines = DirectLines(Ray())
        try:
            return await lines.infer("app", {"id": "r1", "direct": listener.place}, InferRequest(X))
        finally:
            lines.close()
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(asked())["variant"] == "r1"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"direct": ("127.0.0.1", 0, "token", "here")}, "do not answer (Connection refused)"),
        ({"direct": ("127.0.0.1", 0, "token", "elsewhere")}, "on another machine"),
        ({"direct": None, "direct_refused": "10.0.0.2: Cannot assign"}, "cannot listen there: 10.0.0.2: Cannot assign"),
        ({"direct": None, "direct_refused": ""}, ""),
    ],
)
async def test_a_replica_that_cannot_be_reached_is_asked_through_ray_which_is_said_once(seen, change, why):
    place = change["direct"]
    if place is not None:
        machine = this_machine() if place[3] == "here" else place[3]
        change = {"direct": (place[0], free_port(), place[2], machine)}
    for replica in ("r1", "r2"):
        info = {"id": replica, "node": "10.0.0.2", **change}
        for _ in range(2):
            assert (await seen.lines.infer("app", info, InferRequest(X)))["variant"] == f"app {replica} through Ray"
    assert len(set(seen.ray.asked)) == seen.lines.through_ray == 4, "each request has a number of its own"
    remarks = seen.lines.remarks()
    assert len(remarks) == bool(why)
    assert all(why in text and "at 10.0.0.2 are asked through Ray's handle" in text for text in remarks)
    await seen.lines.reach([])
    assert seen.lines.remarks() == (), "replicas that are gone are not spoken of"


async def test_a_replica_that_was_not_reached_is_tried_again_later_and_then_reached(listener, seen):
    host, _, token, machine = listener.place
    closed, open_ = ({"id": "r1", "direct": (host, port, token, machine)} for port in (free_port(), listener.place[1]))
    await seen.lines.reach([closed])
    assert len(seen.lines.remarks()) == 1
    seen.now_s = RETRY_S - 0.1
    await seen.lines.reach([open_])
    assert not seen.lines.up("r1"), "not at every look"
    assert (await seen.lines.infer("app", open_, InferRequest(X)))["variant"] == "app r1 through Ray"
    seen.now_s = RETRY_S
    await seen.lines.reach([open_])
    assert seen.lines.up("r1") and seen.lines.remarks() == ()
    assert (await seen.lines.infer("app", open_, InferRequest(X)))["variant"] == "r1"


async def answered(reader: asyncio.StreamReader) -> bytes:
    """What is answered until the connection ends: closed, or reset where it ended before all that was sent was read."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return bytes(reader._buffer)


async def test_nothing_is_answered_without_the_token(listener, seen):
    host, port, token, machine = listener.place
    info = {"id": "r1", "direct": (host, port, token[::-1], machine)}
    assert (await seen.lines.infer("app", info, InferRequest(X)))["variant"] == "app r1 through Ray"
    reader, writer = await asyncio.open_connection(host, port)
    for pieces in (encode({"v": "", "id": "r1"}, X), encode({"token": token}, {})):
        writer.writelines(pieces)
    assert await answered(reader) == b"", "the first frame must have it"
    writer.close()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(64))
    writer.write_eof()
    assert await answered(reader) == b""
    writer.close()


async def hanging_up() -> tuple[asyncio.Server, tuple[str, int, str, str]]:
    """A replica that takes one request and closes the connection."""

    async def half(reader, writer):
        frames, known = FrameReader(), []
        while len(known) < 2:
            known += frames.feed(await reader.read(65536))
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    return server, ("127.0.0.1", server.sockets[0].getsockname()[1], "t", this_machine())


@pytest.mark.parametrize(
    ("answered", "outcome"),
    [
        ({}, "app r1 through Ray"),
        ({"moved": True, "id": "r1"}, "app r1 through Ray"),
        ({"moved": True, "id": "r2"}, ReplicaGoneError),
        (ReplicaGoneError("ActorDiedError"), ReplicaGoneError),
    ],
)
async def test_when_a_connection_breaks_under_a_request_ray_says_whether_its_replica_lives(seen, answered, outcome):
    async def dead(application, replica, request, call):
        raise answered

    if isinstance(answered, Exception):
        seen.ray.infer = dead
    else:
        seen.ray.answer = answered
    server, place = await hanging_up()
    asked = seen.lines.infer("app", {"id": "r1", "direct": place}, InferRequest(X))
    if isinstance(outcome, str):
        assert (await asked)["variant"] == outcome
        assert len(seen.ray.asked) == 1 and re.fullmatch(r"[0-9a-f]{16}/1", seen.ray.asked[0])
    else:
        with pytest.raises(outcome, match="connection was closed"):
            await asked
    assert seen.lost == [], "the request finds out"
    server.close()


async def test_a_replica_that_ray_does_not_answer_for_is_given_up(seen, monkeypatch):
    monkeypatch.setattr("joulery.adapters.engines.ray_serve.direct._VERDICT_S", 0.01)

    async def silent(application, replica, request, call):
        await asyncio.Event().wait()

    seen.ray.infer = silent
    server, place = await hanging_up()
    with pytest.raises(ReplicaGoneError):
        await seen.lines.infer("app", {"id": "r1", "direct": place}, InferRequest(X))
    server.close()


async def test_answers_reach_their_requests_in_whatever_order_they_come(seen):
    async def backwards(reader, writer):
        frames, known = FrameReader(), []
        while len(known) < 4:
            known += frames.feed(await reader.read(65536))
        for frame in known[:0:-1]:
            writer.writelines(encode({"variant": "v", "s": 0.0, "c": 0.0, "n": frame.header["n"]}, frame.tensors))
        writer.writelines(encode({"variant": "v", "s": 0.0, "c": 0.0, "n": "of no one"}, {}))
        await reader.read()
        writer.close()
        left.set()

    left = asyncio.Event()
    server = await asyncio.start_server(backwards, "127.0.0.1", 0)
    info = {"id": "r1", "direct": ("127.0.0.1", server.sockets[0].getsockname()[1], "t", this_machine())}
    await seen.lines.reach([info])
    asked = [seen.lines.infer("app", info, InferRequest({"x": np.array([number])})) for number in range(3)]
    assert [got["y"]["x"].tolist() for got in await asyncio.gather(*asked)] == [[0], [1], [2]]
    seen.lines.close()
    await left.wait()
    server.close()


async def test_a_replica_that_leaves_answers_what_it_holds_and_is_asked_no_more(seen):
    GATE.clear()
    cluster = ListeningCluster()
    await cluster.declare([app_of("127.0.0.1")])
    (replica,) = cluster.replicas["app"]
    info = replica.description()
    held = asyncio.ensure_future(seen.lines.infer("app", info, number(1)))
    await eventually(lambda: replica._turn.locked(), "the request in the replica")
    ended = asyncio.ensure_future(cluster.end(replica))
    await eventually(lambda: seen.leaving == ["r1"], "the replica's word")
    assert not ended.done(), "it waits for its answer to be sent"
    assert (await seen.lines.infer("app", info, number(2)))["moved"] is True
    GATE.set()
    assert (await held)["y"]["y"].tolist() == [1]
    await ended
    assert (cluster.runs, seen.lost, seen.ray.asked) == ({1: 1}, [], [])
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*info["direct"][:2])


async def test_a_replica_without_requests_leaves_at_once(listener, seen):
    info = {"id": "r1", "direct": listener.place}
    await seen.lines.reach([info])
    await eventually(lambda: listener._lines, "the connection")
    await asyncio.to_thread(listener.leave)
    assert (seen.leaving, seen.lost) == (["r1"], [])
    await eventually(lambda: not seen.lines.up("r1"), "the end of the connection")


async def test_a_connection_that_shows_no_token_is_closed_and_keeps_no_replica_from_leaving(listener, monkeypatch):
    monkeypatch.setattr("joulery.adapters.engines.ray_serve.listener._TOKEN_S", 0.01)
    reader, writer = await asyncio.open_connection(*listener.place[:2])
    assert await reader.read() == b""
    await asyncio.to_thread(listener.leave)
    writer.close()


async def test_a_connection_that_breaks_without_a_request_is_reported_and_made_again(seen):
    cluster = ListeningCluster()
    await cluster.declare([app_of("127.0.0.1")])
    (replica,) = cluster.replicas["app"]
    await seen.lines.reach([replica.description()])
    await eventually(lambda: replica._listener._lines, "the connection")
    replica.cut()
    await eventually(lambda: seen.lost == ["r1"], "its end")
    assert not seen.lines.up("r1")
    await seen.lines.reach([replica.description()])
    assert seen.lines.up("r1"), "at the next look, for it was reached before"
    seen.lines.close()
    await cluster.close()


async def test_no_model_runs_twice_for_a_request_whose_connection_breaks(seen):
    GATE.clear()
    cluster = ListeningCluster()
    lines = DirectLines(cluster)
    await cluster.declare([app_of("127.0.0.1")])
    (replica,) = cluster.replicas["app"]
    held = asyncio.ensure_future(lines.infer("app", replica.description(), number(1)))
    await eventually(lambda: replica._turn.locked(), "the request in the replica")
    replica.cut()
    await eventually(lambda: cluster.through == ["r1"], "the same request through Ray")
    GATE.set()
    assert (await held)["y"]["y"].tolist() == [1]
    assert cluster.runs == {1: 1}, "the replica answers with what it had begun"
    later = await lines.infer("app", replica.description(), number(2))
    assert later["y"]["y"].tolist() == [2] and cluster.runs == {1: 1, 2: 1}
    lines.close()
    await cluster.close()


async def test_a_replica_keeps_the_newest_answer_of_eight_callers():
    GATE.set()
    cluster = ListeningCluster()
    await cluster.declare([app_of("127.0.0.1")])
    (replica,) = cluster.replicas["app"]
    for caller in range(9):
        await cluster.infer("app", "r1", number(caller), f"c{caller}/1")
    for caller in (8, 1, 0):
        await cluster.infer("app", "r1", number(caller), f"c{caller}/1")
    assert cluster.runs == {**dict.fromkeys(range(1, 9), 1), 0: 2} and len(replica._answered) == 8
    await cluster.infer("app", "r1", number(8), "c8/2")
    assert cluster.runs[8] == 2, "another number is another request"
    await cluster.close()


async def test_a_replica_that_cannot_listen_serves_through_ray(monkeypatch):
    monkeypatch.setattr("joulery.adapters.engines.ray_serve.replica._own_address", lambda: "192.0.2.1")
    cluster = ListeningCluster()
    await cluster.declare([app_of("node")])
    (replica,) = cluster.replicas["app"]
    assert replica.description()["direct"] is None and "192.0.2.1" in replica.description()["direct_refused"]
    await cluster.close()


def number(count: int) -> InferRequest:
    return InferRequest({"number": np.array([count])})


def app_of(direct: str) -> dict:
    made = {"variant": "v", "kind": "python", "location": spec().model.location, "options": "", "threads": 1}
    return {"name": "app", "deployments": [{"user_config": {"plan": [made], "direct": direct}}]}


@pytest.mark.parametrize(
    ("address", "direct", "listens"),
    [
        ("local", None, "127.0.0.1"),
        ("local", True, "127.0.0.1"),
        ("local", False, ""),
        ("auto", None, "127.0.0.1"),
        ("auto", True, "node"),
        ("auto", False, ""),
    ],
)
def test_nothing_is_opened_beyond_loopback_unasked(address, direct, listens):
    assert RaySettings(RayPlace(address)).listens == "127.0.0.1"
    assert RaySettings(RayPlace(address), direct=direct).listens == listens
