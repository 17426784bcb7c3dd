"""The whole path with real processes: load generator, gateway, engine, workers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from joulery.adapters.engines.embedded.engine import LocalEngine
from joulery.domain.serving.engine import Outcome
from joulery.runtime.load import LoadPlan, read_outcomes, start
from joulery.runtime.load.load_plan import encode
from joulery.runtime.load.sender import Sender
from tests.adapters.engines.support import alive, toy
from tests.gateway.support import serving
from tests.waiting import PATIENCE_S, eventually, wait_until

pytestmark = pytest.mark.e2e

TOYS = "tests.adapters.engines.toys"


@contextmanager
def serve(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """``joulery serve`` on a free port, and what it said when it was ready."""
    line = [sys.executable, "-m", "joulery", "serve", "--listen", "127.0.0.1:0", "--json", *arguments]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = process.stdout.readline()
        try:
            yield process, json.loads(said) if said else {"error": process.stderr.read()}
        finally:
            process.kill()


def workers(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def load(tmp_path: Path, url: str, **changes: Any) -> "subprocess.Popen[bytes]":
    np.savez(tmp_path / "i.npz", x=np.ones((3, 2), np.float32))
    fields = {"service": "toy", "inputs": f"{tmp_path}/i.npz", "out": f"{tmp_path}/o.parquet", "timeout_s": 20.0}
    return start(LoadPlan(url=url, **(fields | changes)))


def gone(pids: list[int]) -> bool:
    wait_until(lambda: not any(alive(pid) for pid in pids), f"the end of processes {pids}")
    return True


def answered(url: str) -> float:
    """Requests that a gateway has answered well so far."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=PATIENCE_S).text
    lines = [line for line in text.splitlines() if line.startswith("joulery_requests_total") and 'outcome="ok"' in line]
    return sum(float(line.split()[-1]) for line in lines)


def test_killing_workers_under_load_fails_no_accepted_request(tmp_path: Path) -> None:
    with serve("--model", f"toy={TOYS}:double", "--replicas", "2") as (process, said):
        loading = load(tmp_path, said["url"], rate_rps=300.0, duration_s=3.0)
        for _ in range(4):
            time.sleep(0.7)
            victim = workers(process.pid)
            os.kill(victim[0], signal.SIGKILL)
        printed, _ = loading.communicate()
        summary = json.loads(printed)
        assert summary["failed"] == 0, summary
        assert len(read_outcomes(tmp_path / "o.parquet")) == summary["requests"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_killing_the_gateway_leaves_no_process(tmp_path: Path) -> None:
    with serve("--model", f"toy={TOYS}:slow", "--replicas", "3") as (process, _):
        pids = workers(process.pid)
        assert len(pids) == 3
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_under_load_answers_what_it_took_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    with serve("--model", f"toy={TOYS}:double") as (process, said):
        pids = workers(process.pid)
        loading = load(tmp_path, said["url"], rate_rps=200.0, duration_s=20.0)
        wait_until(lambda: answered(said["url"]) >= 20, "the 20th answer")
        process.send_signal(number)
        assert process.wait(30) == 0
        assert gone(pids)
        assert process.stderr is not None
        assert process.stderr.read() == ""
        kinds = json.loads(loading.communicate()[0])["by_outcome"]
        assert kinds["200"] >= 20
        assert set(kinds) <= {"200", "refused", "reset"}, "nothing that was taken is turned away"


def test_a_stop_while_models_load_exits_0(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text("import time\ntime.sleep(60)\n")
    line = [sys.executable, "-m", "joulery", "serve", "--listen", "127.0.0.1:0", "--model", "toy=sleepy:model"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(line, env=environment, stderr=subprocess.PIPE) as process:
        pids = wait_until(lambda: workers(process.pid), "a worker")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert gone(pids)
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--model", "toy=nothing.onnx"], 2, "nothing.onnx: the model of toy/toy does not exist"),
        (["--model", f"toy={TOYS}:nothing"], 2, "has no callable 'nothing'"),
        (["--model", "toy"], 2, "not a model to serve"),
        (["--model", "a b=m:f"], 2, "not a model to serve"),
        (["--model", "a/=m:f"], 2, "not a model to serve"),
        (["--model", "toy=model.pickle"], 2, "not a model"),
        (["--model", "toy=model.pt"], 2, "toy/toy does not exist"),
        (["--model", f"toy={TOYS}:double", "--cores", "4096"], 2, "4096 cores does not fit"),
        (["--model", f"toy={TOYS}:double", "--listen", "nowhere"], 2, "not an address"),
        (["--model", f"toy={TOYS}:double", "--listen", "0.0.0.0:0"], 2, "needs a token"),
        (["--model", f"toy={TOYS}:double", "--token-file", "nothing.txt"], 2, "the token cannot be read"),
    ],
)
def test_a_mistake_is_one_clear_error(arguments: list[str], code: int, complaint: str) -> None:
    line = [sys.executable, "-m", "joulery", "serve", "--listen", "127.0.0.1:0", *arguments]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == code
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_port_in_use_is_named_before_any_model_is_loaded() -> None:
    with serve("--model", f"toy={TOYS}:double") as (_, said):
        port = said["url"].rpartition(":")[2]
        arguments = ["--listen", f"127.0.0.1:{port}", "--model", "toy=no.such.module:model"]
        line = [sys.executable, "-m", "joulery", "serve", *arguments]
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}: the port is in use" in done.stderr
        assert "--listen HOST:PORT" in done.stderr


def test_variants_share_a_queue_behind_a_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("open sesame\n")
    models = ("--model", f"toy/small={TOYS}:double", "--model", f"toy/large={TOYS}:double")
    with serve(*models, "--token-file", str(token)) as (_, said):
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
        with httpx.Client(base_url=said["url"], trust_env=False) as client:
            assert client.post("/v2/models/toy/infer", json=body).status_code == 401
            client.headers["authorization"] = "Bearer open sesame"
            answers = [client.post("/v2/models/toy/infer", json=body) for _ in range(4)]
            assert [answer.headers["x-joulery-variant"] for answer in answers] == ["small", "large"] * 2
            assert answers[0].json()["outputs"][0]["data"] == [2.0, 4.0]
            pinned = client.post("/v2/models/toy/versions/large/infer", json=body)
            assert pinned.json()["model_version"] == "large"
            assert client.get("/v2/models/toy").json()["versions"] == ["large", "small"]
            assert 'joulery_requests_total{outcome="ok",workload="toy"} 5.0' in client.get("/metrics").text


async def replaced(engine: LocalEngine, senders: list[Sender]) -> None:
    """Change the variant and the number of replicas three times, each once the one before has answered."""
    for variant in ("1", "2", "3"):
        await engine.apply([toy("double", variant=variant)] * (1 + int(variant) % 2))
        await eventually(
            lambda variant=variant: any(variant in sender.outcomes.texts["variant"] for sender in senders),
            f"an answer of variant {variant}",
        )


async def test_replacing_replicas_under_load_over_http_loses_nothing() -> None:
    engine = LocalEngine()
    await engine.apply([toy("double", variant="0")] * 2)
    async with serving(engine) as gateway:
        bodies = [encode({"x": np.ones((1, 2), np.float32)}, binary=False)]
        senders: list[Sender] = []
        changes = asyncio.ensure_future(replaced(engine, senders))
        while not changes.done():
            senders.append(Sender(gateway.server.url, "/v2/models/toy/infer", bodies, connections=16, timeout_s=60.0))
            await senders[-1].run_closed(1.0)
        await changes
        summaries = [sender.outcomes.summary() for sender in senders]
        assert sum(summary["failed"] for summary in summaries) == 0, summaries
        assert len(gateway.records) == sum(summary["requests"] for summary in summaries)
    await engine.close()


async def test_a_client_that_vanishes_frees_its_place_in_the_queue() -> None:
    engine = LocalEngine()
    await engine.apply([toy("slow")])
    async with serving(engine) as gateway:

        def body(seconds: float) -> bytes:
            return encode({"seconds": np.array([seconds])}, binary=False)[0]

        running = asyncio.ensure_future(gateway.post(body(0.5)))
        await eventually(lambda: any(view.busy for view in engine.replicas()), "the first request at its replica")
        request = body(0.2)
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(b"POST /v2/models/toy/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(request))
        writer.write(request)
        await eventually(lambda: len(engine.backlog()) == 2, "the second request in the queue")
        writer.transport.abort()
        assert (await running).status_code == 200
        assert (await gateway.post(body(0.0))).status_code == 200
        (view,) = engine.replicas()
        assert view.served == 2, "the request of the client that vanished never reached a replica"
        assert sorted(record.outcome for record in gateway.records) == [Outcome.CANCELLED, Outcome.OK, Outcome.OK]
    await engine.close()
