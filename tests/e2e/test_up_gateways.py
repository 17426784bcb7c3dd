"""Three gateways behind one controller, played: gateways, the controller and the engine server are killed."""

import fcntl
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from joulery.app.profiling.service_profile import write_profile
from joulery.app.runs.replay import decide_again
from joulery.app.serving.gateways.engine_process import LOCK
from joulery.runtime.session.requests import ROW
from joulery.store.run.directory import open_run
from tests.app.serving.test_service import profile as toy_profile
from tests.e2e.test_up import Up
from tests.runtime.site_files import toy_site
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("up")]
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


def site_file(folder: Path) -> Path:
    """The toy site with three gateways and no load of its own."""
    write_profile(folder / "profile.json", toy_profile())
    changed = {
        "    slo:": "    rate: 20 /s\n    profile: profile.json\n    slo:",
        "drain: 2 s}": "drain: 2 s, gateways: {count: 3, state: state, outlive: 120 s}}",
        "load: {": "# load: {",
    }
    return toy_site(folder, changed=changed)


class Clients:
    """Sends requests without end, a few on one connection; what became of each is counted."""

    def __init__(self, url: str, service: str = "sums") -> None:
        self.url, self.sent = f"{url}/v2/models/{service}/infer", 0
        self.outcomes: Counter[str] = Counter()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(3)]

    def _run(self) -> None:
        while not self._stop.is_set():
            with httpx.Client(timeout=PATIENCE_S) as http:
                for _ in range(5):  # another connection comes to another gateway
                    outcome = self._one(http)
                    with self._lock:
                        self.sent += 1
                        self.outcomes[outcome] += 1
                    if self._stop.wait(0.02):
                        return

    def _one(self, http: httpx.Client) -> str:
        try:
            return str(http.post(self.url, json=BODY).status_code)
        except httpx.HTTPError:
            return "lost"

    def more(self, count: int = 30, patience_s: float = PATIENCE_S) -> None:
        """Wait until so many more were answered."""
        until = self.outcomes["200"] + count
        wait_until(lambda: self.outcomes["200"] >= until, f"{count} more answers", patience_s)

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def pid_of(state: Path, name: str) -> int:
    """The process of a gateway; 0 for none."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if name in words and "gateway" in words and process.cwd() == str(state):
                return process.pid
    return 0


@contextmanager
def ended(state: Path) -> Iterator[None]:
    """Leaves nothing behind, whatever fails."""
    try:
        yield
    finally:
        for process in list(psutil.process_iter()):
            with suppress(psutil.Error):
                if process.cwd() == str(state):
                    process.kill()


def address(up: Up) -> str:
    """Where a run serves."""
    return up.until("/dashboard").partition("dashboard ")[2].split("/dashboard")[0].strip()


def rows(path: Path) -> int:
    return path.stat().st_size // ROW.itemsize


def health(url: str) -> dict:
    return httpx.get(f"{url}/v2/health/ready", timeout=PATIENCE_S).json()


def test_no_request_is_lost_or_counted_twice(tmp_path: Path) -> None:
    site, state = site_file(tmp_path), tmp_path / "state"
    with ended(state):
        with Up(site, tmp_path, "--stay") as first:
            url = address(first)
            with Clients(url) as clients:
                clients.more()
                killed = pid_of(state, "gateway-2")
                os.kill(killed, signal.SIGKILL)
                wait_until(lambda: pid_of(state, "gateway-2") not in (0, killed), "another gateway-2")
                clients.more()
                lost = clients.outcomes["lost"]
                assert lost <= 3, "no more than the open connections of one gateway"
                assert set(clients.outcomes) <= {"200", "lost"}

                os.kill(first.process.pid, signal.SIGKILL)
                wait_until(lambda: health(url).get("controller") == "lost", "a gateway that says so")
                metrics = httpx.get(f"{url}/metrics").text
                assert 'joulery_gateway_controller_connected{gateway="gateway-' in metrics
                assert 'engine_connected{gateway="gateway-' in metrics and "joulery_requests_total" not in metrics
                clients.more()
                assert clients.outcomes["lost"] == lost, "without a controller all is answered"

                second_folder = tmp_path / "second"
                second_folder.mkdir()
                with Up(site, second_folder, "--stay", "--json-out", str(tmp_path / "report.json")) as second:
                    second.until("/dashboard")
                    wait_until(lambda: health(url)["controller"] == "connected", "a gateway that joined again")
                    clients.more()
                    clients.__exit__()
                    assert set(clients.outcomes) <= {"200", "lost"} and clients.outcomes["lost"] == lost
                    page = httpx.get(f"{url}/dashboard")
                    assert page.status_code == 200 and "joulery" in page.text
                    second.process.send_signal(signal.SIGINT)
                    status, _, errors = second.end()
        assert status == 0, errors
        wait_until(lambda: not [one for one in psutil.process_iter() if _cwd(one) == str(state)], "the end of all")
    report = json.loads((tmp_path / "report.json").read_text())
    apart = report["without_controller"]
    before = rows(tmp_path / "run" / "requests.rows")
    ended_requests = sum(one["ended"] for one in report["gateways"])
    assert sum(one["received"] for one in report["gateways"]) == ended_requests
    assert before + apart["requests"] + report["requests"] == ended_requests, "each is in one place"
    assert ended_requests <= clients.sent <= ended_requests + lost, "only what a dead gateway had not passed on"
    assert apart["outcomes"].keys() <= {"ok", "cancelled"} and apart["requests"] > 0
    assert report["unknown_requests"] == report["engine_server_restarts"] == 0
    assert "while there was no controller" in json.dumps(report)
    assert 0 < report["requests_j"] < report["energy_j"]
    assert decide_again(open_run(second_folder / "run").log()).differences == ()


def test_no_request_is_lost_where_the_controller_and_later_the_engine_server_are_killed(tmp_path: Path) -> None:
    """What neither a run folder nor the dead engine server's ledger has is in the gateways: the next run counts it."""
    site, state = site_file(tmp_path), tmp_path / "state"
    with ended(state):
        with Up(site, tmp_path, "--stay") as first:
            url = address(first)
            with Clients(url) as clients:
                clients.more()
                wait_until(lambda: rows(tmp_path / "run" / "requests.rows") > 0, "requests on disk")
                os.kill(first.process.pid, signal.SIGKILL)
                wait_until(lambda: health(url).get("controller") == "lost", "a gateway that says so")
                clients.more()
                os.kill(int((state / "engine.pid").read_text()), signal.SIGKILL)
                wait_until(lambda: clients.outcomes["503"] > 0, "a refused request")
                folder, out = tmp_path / "second", tmp_path / "report.json"
                folder.mkdir()
                with Up(site, folder, "--stay", "--json-out", str(out)) as second:
                    second.until("/dashboard")
                    clients.more()
                    clients.__exit__()
                    second.process.send_signal(signal.SIGINT)
                    status, _, errors = second.end()
        assert status == 0, errors
    assert set(clients.outcomes) <= {"200", "503"}
    report = json.loads(out.read_text())
    apart = report["without_controller"]
    before = rows(tmp_path / "run" / "requests.rows")
    assert before + apart["requests"] + report["requests"] == clients.sent, "each is in one place"
    assert apart["outcomes"]["ok"] >= 30 and report["failed"] <= clients.outcomes["503"]
    assert 0 < report["requests_j"] < report["energy_j"]


def _cwd(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "once it can"])
def test_a_dead_engine_server_is_started_again_with_its_layout(tmp_path: Path, at_once: bool) -> None:
    site, state = site_file(tmp_path), tmp_path / "state"
    out = tmp_path / "report.json"
    with ended(state), Up(site, tmp_path, "--stay", "--json-out", str(out)) as up:
        url = address(up)
        with Clients(url) as clients:
            clients.more()
            with (state / LOCK).open() as lock:
                os.kill(int((state / "engine.pid").read_text()), signal.SIGKILL)
                if not at_once:  # as if the former process took long to end
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    up.until("cannot be started")
            wait_until(lambda: clients.outcomes["503"] > 0, "a refused request")
            clients.more()
        assert set(clients.outcomes) <= {"200", "503"}, "gateways keep their clients"
        up.process.send_signal(signal.SIGINT)
        status, _, errors = up.end()
    assert status == 0, errors
    report = json.loads(out.read_text())
    assert report["engine_server_restarts"] == 1 and report["unknown_requests"] == 0
    assert report["failed"] <= clients.outcomes["503"] and report["requests"] <= clients.sent
