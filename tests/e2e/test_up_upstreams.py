"""Models on other servers as variants, played: two servers of the protocol, the real gateway, a grid that changes."""

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_up import Up
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("up")]
SITE = """\
joulery: 1
name: upstreams
mode: act
carbon: {{kind: file, path: day.csv, column: g, replay: {{day: "2026-06-10", duration: 40 s}}}}
meters: {{period: 50 ms, use: [cpu-model], cpu_model: {{idle: 20 W, max: 60 W}}}}
services:
  - name: net
    slo: {{latency: 2 s}}
    rate: 20 /s
    concurrency: 2
    policy: {{kind: clover, lambda: 15 %, base_intensity: 250 g/kWh}}
    audit: {{share: 0 %}}
    family:
      accuracy_metric: share of right answers
      variants:
        - {{name: large, accuracy: 90 %, accuracy_source: made up,
            model: {{kind: open_inference, url: "http://127.0.0.1:{large}/net", power: 40 W}}}}
        - {{name: small, accuracy: 85 %, accuracy_source: made up,
            model: {{kind: open_inference, url: "http://127.0.0.1:{small}/net", power: 20 W}}}}
serving: {{listen: "127.0.0.1:0", drain: 2 s}}
"""
SECONDS = {"large": 0.02, "small": 0.005}


class Upstream:
    """A fake server, killed and started again on its port."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.log, self.port = name, folder / f"{name}.log", 0
        self.log.touch()
        self.start()

    def start(self) -> None:
        line = [str(self.port), "net", str(SECONDS[self.name]), str(self.log)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.open_inference_server", *line], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def answered(self) -> Counter[int]:
        return Counter(int(line) for line in self.log.read_text().split())


class Client:
    """Sends requests without end from some threads, each with a value of its own."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/v2/models/net/infer"
        self.answers: dict[int, httpx.Response] = {}
        self.lost: list[Exception] = []
        self._next, self._lock, self._stop = 1_000_000, threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(3)]

    def _send(self) -> None:
        with httpx.Client(timeout=PATIENCE_S) as http:
            while not self._stop.wait(0.02):
                with self._lock:
                    self._next += 1
                    value = self._next
                content = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [value, 0]}]}
                try:
                    answer = http.post(self.url, json=content)
                except httpx.HTTPError as error:
                    self.lost.append(error)
                    continue
                self.answers[value] = answer

    def latest(self, count: int = 20) -> list[httpx.Response]:
        return [self.answers[value] for value in sorted(self.answers)[-count:]]

    def until(self, variant: str, share: float = 0.9) -> None:
        """Wait until that share of the latest answers is of a variant."""

        def arrived() -> bool:
            seen = Counter(answer.headers.get("x-joulery-variant") for answer in self.latest())
            return seen[variant] >= share * 20

        wait_until(arrived, f"{variant} answers")

    def __enter__(self) -> "Client":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def upstreams(folder: Path) -> Iterator[dict[str, Upstream]]:
    found = {name: Upstream(name, folder) for name in SECONDS}
    try:
        yield found
    finally:
        for one in found.values():
            if one.process.poll() is None:
                one.kill()


def test_the_policy_steers_among_upstreams_and_outlives_them(tmp_path: Path) -> None:
    rows = (f"2026-06-10T{hour:02}:00Z,{50 if hour < 12 else 800}" for hour in range(24))
    (tmp_path / "day.csv").write_text("\n".join(("timestamp_utc,g", *rows, "")))
    with upstreams(tmp_path) as servers:
        ports = {name: server.port for name, server in servers.items()}
        (tmp_path / "site.yaml").write_text(SITE.format(**ports))
        with Up(tmp_path / "site.yaml", tmp_path, "--json", verb="serve") as gateway:
            url = json.loads(gateway.until("\n").splitlines()[0])["url"]
            with Client(url) as client:
                # A clean grid is for the accurate model, a dirty one for the lean one.
                client.until("large")
                client.until("small")
                played_out(client, servers)
                check_answers(client, servers)
            gateway.process.send_signal(signal.SIGTERM)
            code, _, complaint = gateway.end()
            assert code == 0, complaint
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    (service,) = report["services"]
    assert service["variants"].keys() == SECONDS.keys()
    assert service["answered"] > 0
    assert "stated, not metered" in (tmp_path / "run" / "log.jsonl").read_text()


def played_out(client: Client, servers: dict[str, Upstream]) -> None:
    """One server dies, then both are gone, then one comes back."""
    servers["small"].kill()
    client.until("large", 1.0)
    assert all(answer.status_code == 200 for answer in list(client.answers.values()))
    servers["large"].kill()
    wait_until(lambda: client.latest(1)[0].status_code == 503, "503 while no upstream is left")
    servers["large"].start()
    client.until("large", 1.0)


def check_answers(client: Client, servers: dict[str, Upstream]) -> None:
    """Each request has one answer; each that was answered was answered by a server, once but for those that died."""
    assert client.lost == []
    assert {answer.status_code for answer in list(client.answers.values())} == {200, 503}
    done = servers["large"].answered + servers["small"].answered
    for value, answer in list(client.answers.items()):
        if answer.status_code == 200:
            assert answer.json()["outputs"][0]["data"][0] == 2 * value
            assert answer.headers["x-joulery-energy-j"]
            assert done[value] >= 1
        else:
            assert int(answer.headers["retry-after"]) >= 1
    twice = [value for value in list(client.answers) if done[value] > 1]  # others are questions of the gateway's own
    assert len(twice) <= 2 * len(SECONDS), "only what a dying server had, in each of its slots"
