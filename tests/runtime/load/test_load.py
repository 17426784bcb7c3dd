import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import EnergyShare
from joulery.gateway.protocol import parse
from joulery.runtime.load import LoadPlan, Outcomes, constant_times_s, poisson_times_s, read_outcomes, start
from joulery.runtime.load.load_plan import MAX_REQUESTS, bodies_of, encode, read_bodies
from joulery.runtime.load.outcomes import DELAY_S
from joulery.runtime.load.sender import Sender
from tests.gateway.support import FakeEngine, serving
from tests.waiting import ended, eventually, wait_until

ROW = {"x": np.array([[1.0, 2.0]], np.float32)}


def plan(**changes: Any) -> LoadPlan:
    fields: dict[str, Any] = {"url": "http://127.0.0.1:1", "service": "toy", "inputs": "i.npz", "out": "o.parquet"}
    if not {"times", "closed"} & set(changes):
        fields["rate_rps"] = 10.0
    return LoadPlan(**(fields | changes))


def sender(url: str, *, rows: int = 1, **options: Any) -> Sender:
    bodies = [encode({"x": np.full((1, 2), row, np.float32)}, binary=row % 2 == 0) for row in range(rows)]
    return Sender(url, "/v2/models/toy/infer", bodies, **({"connections": 4, "timeout_s": 10.0} | options))


@given(st.floats(0.5, 300), st.floats(0.01, 20), st.integers(0, 2**63 - 1))
def test_poisson_arrivals_are_the_same_for_the_same_seed_and_stay_inside(rate: float, span: float, seed: int) -> None:
    times_s = poisson_times_s(rate, span, seed)
    assert np.array_equal(times_s, poisson_times_s(rate, span, seed))
    assert (np.diff(times_s) >= 0).all()
    assert ((times_s >= 0) & (times_s < span)).all()
    assert abs(len(times_s) - rate * span) < 7 * math.sqrt(rate * span) + 7


def test_poisson_gaps_are_exponential() -> None:
    gaps_s = np.diff(poisson_times_s(50.0, 400.0, 7))
    assert gaps_s.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps_s.std() == pytest.approx(1 / 50, rel=0.05)
    assert not np.array_equal(poisson_times_s(50, 1, 7)[:3], poisson_times_s(50, 1, 8)[:3])


def test_prompts_are_chat_requests_with_a_limit(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('["Who?", "Why?"]')
    path, bodies = bodies_of(plan(inputs=str(tmp_path / "p.json"), max_tokens=7))
    assert path == "/v1/chat/completions"
    assert [json.loads(body) for body, _ in bodies] == [
        {"model": "toy", "max_tokens": 7, "messages": [{"role": "user", "content": text}]} for text in ("Who?", "Why?")
    ]
    assert {length for _, length in bodies} == {None}, "no binary part"


@pytest.mark.parametrize("wrong", ["[]", "[1]", '{"a": 1}', "[", None])
def test_what_holds_no_prompts_is_refused(tmp_path: Path, wrong: str | None) -> None:
    file = tmp_path / "p.json"
    if wrong is not None:
        file.write_text(wrong)
    with pytest.raises(DataError, match="prompts"):
        bodies_of(plan(inputs=str(file), max_tokens=7))


def test_nothing_is_asked_for_no_token() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(max_tokens=0)
    assert caught.value.pointer == "max_tokens"


def test_constant_arrivals() -> None:
    assert constant_times_s(4.0, 1.0).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert constant_times_s(3.0, 0.9).tolist() == pytest.approx([0.0, 1 / 3, 2 / 3])


def test_recorded_arrivals_are_cut_at_the_end(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([0, 1, 1, 5]))
    assert plan(times=str(tmp_path / "t.npy"), duration_s=5.0).times_s().tolist() == [0.0, 1.0, 1.0]
    assert plan(closed=True).times_s().tolist() == []
    assert len(plan(poisson=False).times_s()) == 100
    assert plan(seed=3).times_s().tolist() == poisson_times_s(10.0, 10.0, 3).tolist()


@pytest.mark.parametrize("wrong", [[1.0, 0.5], [-1.0], [math.nan], [[0.0]], ["a"]])
def test_times_that_do_not_count_up_are_refused(tmp_path: Path, wrong: Any) -> None:
    np.save(tmp_path / "t.npy", np.array(wrong))
    with pytest.raises(DataError):
        plan(times=str(tmp_path / "t.npy")).times_s()


def test_files_that_are_not_there_or_hold_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    np.savez(tmp_path / "uneven.npz", a=np.zeros(2), b=np.zeros(3))
    np.savez(tmp_path / "empty.npz", a=np.zeros((0, 2)))
    np.savez(tmp_path / "complex.npz", a=np.array([1j]))
    for name in ("nothing", "junk"):
        with pytest.raises(DataError):
            plan(times=str(tmp_path / name)).times_s()
        with pytest.raises(DataError):
            read_outcomes(tmp_path / name)
    for name in ("nothing.npz", "junk", "uneven.npz", "empty.npz", "complex.npz"):
        with pytest.raises(DataError):
            read_bodies(str(tmp_path / name), binary=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate_rps": 0.0},
        {"rate_rps": math.nan},
        {"duration_s": -1.0},
        {"connections": 0},
        {"timeout_s": math.inf},
        {"times": "t.npy", "rate_rps": 1.0},
        {"closed": True, "rate_rps": 1.0},
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plan(**wrong)


def test_a_plan_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="too large"):
        plan(rate_rps=MAX_REQUESTS, duration_s=2.0).times_s()


@pytest.mark.parametrize("binary", [True, False])
def test_bodies_are_what_the_gateway_takes(tmp_path: Path, binary: bool) -> None:
    arrays = {"x": np.arange(6, dtype=np.float16).reshape(3, 2), "s": np.array(["a", "bc", "d"])}
    np.savez(tmp_path / "i.npz", **arrays)
    bodies = read_bodies(str(tmp_path / "i.npz"), binary=binary)
    assert len(bodies) == 3
    call = parse(*bodies[1])
    assert call.binary_default == binary
    assert call.request.inputs["x"].dtype == np.float16
    assert call.request.inputs["x"].tolist() == [[2.0, 3.0]]
    assert call.request.inputs["s"].tolist() == [b"bc"]


async def test_every_request_is_sent_in_turn_and_its_outcome_noted() -> None:
    share = EnergyShare(0.5, 0.25, Quality.MODELLED)
    engine = FakeEngine()
    async with serving(engine, attribute=lambda *args: share) as gateway:
        before_s = time.time()
        load = sender(gateway.server.url, rows=3)
        await load.run(np.array([0.0, 0.01, 0.02, 0.03]))
        outcomes = load.outcomes
        assert list(outcomes.input) == [0, 1, 2, 0]
        assert list(outcomes.status) == [200] * 4
        assert outcomes.texts == {"error": ["answered"] * 4, "variant": ["small"] * 4, "quality": ["modelled"] * 4}
        assert outcomes.column("energy_j").tolist() == [0.5] * 4
        assert outcomes.column("carbon_g").tolist() == [0.25] * 4
        assert np.diff(outcomes.column("intended_s")).tolist() == pytest.approx([0.01] * 3, abs=1e-5)
        assert (outcomes.column("intended_s") >= before_s - 0.01).all()
        assert (outcomes.column("sent_s") >= outcomes.column("intended_s")).all()
        assert (outcomes.latency_s > 0).all()
        assert [float(request.inputs["x"][0, 0]) for _, request in engine.asked] == [0.0, 1.0, 2.0, 0.0]


async def test_latency_counts_from_when_a_request_was_due() -> None:
    """A server that stalls once delays all that were due meanwhile, and every one of them shows it."""
    engine = FakeEngine()
    stalled = asyncio.Event()

    async def stall() -> dict[str, Any]:
        if not stalled.is_set():
            stalled.set()
            await asyncio.sleep(0.3)
        return {}

    engine.reply = lambda request: stall()
    async with serving(engine) as gateway:
        load = sender(gateway.server.url, connections=1)
        await load.run(np.array([0.0, 0.05, 0.1]))
        due_s, sent_s = load.outcomes.column("intended_s"), load.outcomes.column("sent_s")
        latency_s = load.outcomes.latency_s
        answered_s = due_s + latency_s
        assert latency_s[0] >= 0.3 and (np.diff(answered_s) >= 0).all()
        assert (sent_s[1:] >= answered_s[:-1] - 1e-3).all(), "one connection: each waits for the answer before it"
        assert (latency_s >= answered_s - sent_s).all(), "the wait for the connection counts"


async def test_requests_wait_for_one_of_so_many_connections() -> None:
    engine = FakeEngine()
    under_way = most = 0

    async def count() -> dict[str, Any]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return {}

    engine.reply = lambda request: count()
    async with serving(engine) as gateway:
        load = sender(gateway.server.url, connections=3)
        await load.run(np.zeros(30))
        assert load.outcomes.summary()["ok"] == 30
        assert most == 3


async def test_failures_of_every_kind_are_noted() -> None:
    engine = FakeEngine()
    hang = asyncio.Event()
    answers: list[Any] = [{}, RuntimeError("bug"), hang]

    async def reply() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        return {}

    engine.reply = lambda request: reply()
    async with serving(engine) as gateway:
        load = sender(gateway.server.url, timeout_s=0.3)
        await load.run(np.array([0.0, 0.1, 0.2]))
        url = gateway.server.url
    assert list(load.outcomes.status) == [200, 500, 0]
    assert load.outcomes.texts["error"] == ["answered", "answered", "timeout"]
    assert np.isnan(load.outcomes.latency_s).tolist() == [False, False, True]
    summary = load.outcomes.summary()
    assert summary["by_outcome"] == {"200": 1, "500": 1, "timeout": 1}
    assert (summary["requests"], summary["ok"], summary["failed"]) == (3, 1, 2)
    refused = sender(url)
    await refused.run(np.array([0.0, 0.01]))
    assert refused.outcomes.texts["error"] == ["refused", "refused"]
    assert refused.outcomes.summary()["p95_s"] is None


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", b"nonsense\r\n\r\n"])
async def test_a_server_that_breaks_off_is_noted(answer: bytes) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    async with await asyncio.start_server(break_off, "127.0.0.1", 0) as server:
        load = sender(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await load.run(np.array([0.0, 0.01]))
        assert load.outcomes.texts["error"] == ["reset", "reset"]


async def test_a_closed_loop_keeps_every_connection_busy() -> None:
    async with serving(FakeEngine()) as gateway:
        load = sender(gateway.server.url, connections=3)
        await load.run_closed(0.2)
        summary = load.outcomes.summary()
        assert summary["ok"] == summary["requests"] >= 3
        assert summary["ok_rps"] > 0
    dead = sender(gateway.server.url, connections=3)
    await dead.run_closed(0.05)
    assert len(dead.outcomes) == 3, "a refused connection is not tried again and again"


async def test_a_stop_ends_it_with_what_it_has() -> None:
    engine = FakeEngine()
    engine.reply = lambda request: {} if len(engine.asked) < 3 else asyncio.sleep(60)
    async with serving(engine) as gateway:
        load = sender(gateway.server.url, connections=1)
        running = asyncio.ensure_future(load.run(np.array([0.0, 0.01, 0.02, 0.03, 1000.0])))
        await eventually(lambda: len(engine.asked) >= 3, "the third request")
        load.stop()
        await running
        assert load.outcomes.texts["error"] == ["answered", "answered", "abandoned", "unsent"]


async def test_a_token_is_sent() -> None:
    async with serving(FakeEngine(), token="secret words", protected=True) as gateway:
        load = sender(gateway.server.url, token="secret words")
        await load.run(np.zeros(1))
        assert list(load.outcomes.status) == [200]
        load = sender(gateway.server.url)
        await load.run(np.zeros(1))
        assert list(load.outcomes.status) == [401]


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:80", "unix://x", "http://", "https://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError):
        sender(url)


def test_outcomes_survive_the_file(tmp_path: Path) -> None:
    outcomes = Outcomes()
    for row in range(3):
        outcomes.add(row, 100.0 + row)
    outcomes.status[1] = 200
    outcomes.texts["variant"][1] = "large"
    outcomes.numbers["energy_j"][1] = 0.125
    outcomes.write(tmp_path / "o.parquet")
    again = read_outcomes(tmp_path / "o.parquet")
    assert list(again.input) == [0, 1, 2]
    assert list(again.status) == [0, 200, 0]
    assert again.texts == outcomes.texts
    for name, values in outcomes.numbers.items():
        assert np.array_equal(again.column(name), np.array(values), equal_nan=True)
    assert [path.name for path in tmp_path.iterdir()] == ["o.parquet"]
    with pytest.raises(DataError, match="cannot be written"):
        outcomes.write(tmp_path / "nowhere" / "o.parquet")


async def test_the_process_sends_writes_and_prints(tmp_path: Path) -> None:
    np.savez(tmp_path / "i.npz", **ROW)
    async with serving(FakeEngine(), token="secret words", protected=True) as gateway:
        changes = {"url": gateway.server.url, "inputs": f"{tmp_path}/i.npz", "out": f"{tmp_path}/o.parquet"}
        process = start(plan(**changes, rate_rps=100.0, duration_s=0.3, seed=5), token="secret words")
        printed = await asyncio.to_thread(process.communicate)
        assert process.returncode == 0
        summary = json.loads(printed[0])
        expected = len(poisson_times_s(100.0, 0.3, 5))
        assert (summary["requests"], summary["ok"]) == (expected, expected)
        assert len(read_outcomes(tmp_path / "o.parquet")) == expected == len(gateway.records)


def test_the_process_takes_its_plan_from_the_command_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "i.npz", **ROW)
    line = [sys.executable, "-m", "joulery.runtime.load", "--url", "http://127.0.0.1:1", "--service", "toy"]
    line += ["--inputs", f"{tmp_path}/i.npz", "--out", f"{tmp_path}/o.parquet", "--duration-s", "0.1"]
    done = subprocess.run([*line, "--rate-rps", "50", "--no-poisson"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["by_outcome"] == {"refused": 5}
    for wrong, code in ([], 2), (["--rate-rps", "0"], 2), (["--rate-rps", "1", "--inputs", "nothing.npz"], 2):
        done = subprocess.run([*line, *wrong], capture_output=True, text=True)
        assert done.returncode == code
        assert "joulery load: " in done.stderr
        assert "Traceback" not in done.stderr
    done = subprocess.run(line[:5], capture_output=True, text=True)
    assert "--service is needed" in done.stderr


def test_a_signal_ends_the_process_with_what_it_has(tmp_path: Path) -> None:
    np.savez(tmp_path / "i.npz", **ROW)
    np.save(tmp_path / "t.npy", np.array([0.0, 500.0]))
    files = {"inputs": f"{tmp_path}/i.npz", "out": f"{tmp_path}/o.parquet", "times": f"{tmp_path}/t.npy"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = start(plan(url=f"http://127.0.0.1:{server.getsockname()[1]}", **files, duration_s=1000.0))
        with server.accept()[0] as connection:
            assert connection.recv(4) == b"POST"
            process.send_signal(signal.SIGTERM)
            printed, _ = process.communicate()
    assert process.returncode == 0
    assert json.loads(printed)["by_outcome"] == {"abandoned": 1}
    assert len(read_outcomes(tmp_path / "o.parquet")) == 1


def test_it_ends_when_its_parent_does(tmp_path: Path) -> None:
    np.savez(tmp_path / "i.npz", **ROW)
    np.save(tmp_path / "t.npy", np.array([500.0]))
    script = f"""
import time
from joulery.runtime.load import LoadPlan, start
p = start(LoadPlan("http://127.0.0.1:1", "toy", "{tmp_path}/i.npz", "{tmp_path}/o.parquet",
                   times="{tmp_path}/t.npy", duration_s=1000.0))
print(p.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    assert wait_until(lambda: ended(pid), "the end of the load generator")


_ENDS = ["answered 200", "answered 429", "answered 500", "timeout", "reset", "abandoned", "refused", "unsent"]


@given(st.lists(st.tuples(st.sampled_from(_ENDS), st.floats(0, 1), st.floats(0, 2)), max_size=60), st.integers(0, 9))
def test_no_request_is_lost_from_sight(ends: list[tuple[str, float, float]], not_due: int) -> None:
    outcomes = Outcomes()
    for end, wait_s, took_s in ends:
        row = outcomes.add(0, 100.0)
        error, _, status = end.partition(" ")
        outcomes.texts["error"][row] = error
        outcomes.status[row] = int(status or 0)
        if error not in ("refused", "unsent"):
            outcomes.numbers["sent_s"][row] = 100.0 + wait_s
            outcomes.numbers["end_s"][row] = 100.0 + wait_s + took_s
    found = outcomes.summary(slo_s=1.0)
    planned = len(outcomes) + not_due
    assert planned - found["sent"] == not_due + sum(end in ("refused", "unsent") for end, _, _ in ends)
    assert (
        found["sent"]
        == found["answered"] + found["failed"] + found["abandoned"]
        == sum(end.split()[0] not in ("refused", "unsent") for end, _, _ in ends)
    )
    assert 0 <= found["refused"] <= found["failed"] and 0 <= found["late"] <= found["answered"] == found["ok"]
    assert found["late"] == sum(end == "answered 200" and wait_s + took_s > 1.0 for end, wait_s, took_s in ends)
    assert 0 <= found["delayed"] <= found["sent"] and found["delay_max_s"] >= 0


class _SlowServer(asyncio.Protocol):
    """Answers nothing until :meth:`release`; counts the requests that wait at once. One a connection."""

    waiting: set["_SlowServer"]
    most = 0
    released = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if b"POST" in data:
            self.waiting.add(self)
            type(self).most = max(self.most, len(self.waiting))
            if self.released:
                self.answer()

    def answer(self) -> None:
        self.waiting.discard(self)
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    @classmethod
    def release(cls) -> None:
        cls.released = True
        for connection in list(cls.waiting):
            connection.answer()


@pytest.mark.parametrize(("connections", "delayed"), [(4096, False), (200, True)])
async def test_a_load_is_open_loop_up_to_its_connections_and_says_where_it_is_not(connections, delayed) -> None:
    slow = type("_Slow", (_SlowServer,), {"waiting": set()})
    server = await asyncio.get_running_loop().create_server(slow, "127.0.0.1", 0, backlog=4096)
    async with server:
        load = sender(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections=connections, timeout_s=60.0)
        running = asyncio.create_task(load.run(np.zeros(4096)))
        await eventually(lambda: slow.most >= connections, "every connection", 60.0)
        # What is sent from now on is delayed, however fast this machine is.
        begun_s = time.monotonic()
        await eventually(lambda: time.monotonic() >= begun_s + DELAY_S, "the delay", 60.0)
        slow.release()
        await running
    found = load.outcomes.summary(slo_s=0.0)
    assert slow.most == connections, "all of them wait at once; none of them waits for another"
    assert (found["sent"], found["answered"], found["late"]) == (4096, 4096, 4096)
    if delayed:
        assert found["delayed"] >= 4096 - connections
