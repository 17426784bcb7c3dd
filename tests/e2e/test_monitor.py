"""The monitor, asked by a program that is no Python: a shell with curl, as the documentation shows it."""

import csv
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from joulery.store.run.directory import open_run
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.e2e


class Running:
    """A monitor in a process of its own, and a way to ask it."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "monitor.sock"
        self.runs = folder / "runs"
        command = [sys.executable, "-m", "joulery", "monitor", "--socket", str(self.socket), "--runs", str(self.runs)]
        self.process = subprocess.Popen(
            [*command, "--meter", "fake:50", "--period", "5 ms", "--json"], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["socket"] == str(self.socket)
        self.client = httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://joulery")

    def ask(self, method: str, path: str, status: int, body: Any = None) -> Any:
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        answer = self.client.request(method, path, content=content, timeout=PATIENCE_S)
        assert answer.status_code == status, answer.text
        return answer.json() if "json" in answer.headers["content-type"] else answer.text

    def stop(self) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    one = Running(tmp_path_factory.mktemp("monitor"))
    yield one
    one.stop()


def test_a_shell_has_itself_measured(running: Running, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    script = tmp_path / "job.sh"
    script.write_text(
        """set -eu
ask() { curl -sS --fail --unix-socket "$SOCKET" "$@"; }
ID=$(ask -d "{\\"pid\\": $$}" http://joulery/sessions | sed 's/.*"id":"\\([0-9]*\\)".*/\\1/')
while :; do
  ask "http://joulery/sessions/$ID/power?of=machine" > power.csv
  [ "$(wc -l < power.csv)" -le 20 ] || break
done
ask -X DELETE "http://joulery/sessions/$ID" > report.json
"""
    )
    environment = {**os.environ, "SOCKET": str(running.socket)}
    subprocess.run(["sh", str(script)], cwd=tmp_path, env=environment, check=True)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "power.csv").read_text())))
    assert len(rows) >= 20 and {row["device"] for row in rows} == {"cpu:0"}
    stamps_ns = [int(row["t_ns"]) for row in rows]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["energy_j"] > 0 and report["duration_s"] * 1e9 >= max(stamps_ns) - min(stamps_ns) > 0
    assert open_run(report["run"]).closed


BUSY = """
import time
end = time.thread_time() + 1.2
while time.thread_time() < end:
    pass
input()
"""


def test_the_power_of_a_session_is_the_process_s_share(running: Running) -> None:
    """Of a machine that others keep busy, a process that sleeps has next to nothing, and one that works its part."""
    both = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for code in (BUSY, "input()")]
    names = [running.ask("POST", "/sessions", 201, {"pid": one.pid})["id"] for one in both]
    wait_until(lambda: cpu_s(both[0].pid) >= 1.2)
    works, sleeps = (energy(running.ask("GET", f"/sessions/{name}/power", 200)) for name in names)
    whole = energy(running.ask("GET", f"/sessions/{names[0]}/power?of=machine", 200))
    for name, one in zip(names, both, strict=True):
        running.ask("DELETE", f"/sessions/{name}", 200)
        one.communicate(b"\n")
    assert 0 <= sleeps < 0.2 * works < 0.2 * whole


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def energy(text: str) -> float:
    """Joules of a table of power, and that every row says how it is known."""
    rows = list(csv.DictReader(io.StringIO(text)))
    assert all(row["quality"] in ("measured", "modelled", "assumed") for row in rows)
    if rows[0]["counter_j"]:
        return float(rows[-1]["counter_j"]) - float(rows[0]["counter_j"])
    t_s = [int(row["t_ns"]) / 1e9 for row in rows]
    return sum(float(row["power_w"]) * (b - a) for row, a, b in zip(rows, t_s, t_s[1:], strict=False))


def test_start_read_stop(running: Running) -> None:
    assert running.ask("GET", "/sessions", 200) == []
    started = running.ask("POST", "/sessions", 201, {"pid": os.getpid(), "period": "4 ms"})
    assert running.ask("GET", "/sessions", 200) == [started]
    path = f"/sessions/{started['id']}/power?of=machine"
    first = list(csv.DictReader(io.StringIO(running.ask("GET", path, 200))))
    since = first[-1]["t_ns"]
    later = running.ask("GET", f"{path}&since_ns={since}", 200)
    assert all(int(row["t_ns"]) > int(since) for row in csv.DictReader(io.StringIO(later)))
    report = running.ask("DELETE", f"/sessions/{started['id']}", 200)
    assert report["quality"] and Path(report["run"]).is_dir()
    assert running.ask("GET", "/sessions", 200) == []
    assert running.ask("DELETE", f"/sessions/{started['id']}", 404)["error"]["message"].startswith(
        "there is no session"
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "no JSON"),
        ([], "not a process"),
        ({"pid": "7"}, "not a process"),
        ({"pid": True}, "not a process"),
        ({"pid": 2**30}, "no such process"),
        ({"pid": 0}, "no such process"),
        ({"pid": 1, "color": "red"}, "no such key"),
        ({"pid": 1, "period": "4 V"}, "no time"),
        ({"pid": 1, "period": "1 h"}, "not a sampling period"),
    ],
)
def test_a_wrong_request_is_one_clear_error(running: Running, body: Any, says: str) -> None:
    assert says in running.ask("POST", "/sessions", 400, body)["error"]["message"]


def test_the_socket_is_for_its_user_alone_and_gone_afterwards(tmp_path: Path) -> None:
    running = Running(tmp_path)
    assert stat.S_IMODE(running.socket.stat().st_mode) == 0o600
    again = subprocess.run(
        [sys.executable, "-m", "joulery", "monitor", "--socket", str(running.socket)], capture_output=True, text=True
    )
    assert again.returncode == 2 and "another process listens there" in again.stderr
    running.ask("POST", "/sessions", 201, {"pid": os.getpid(), "out": str(tmp_path / "mine")})
    assert running.stop() == 0
    assert not running.socket.exists()
    assert open_run(tmp_path / "mine").closed, "a session that was not stopped is closed with the monitor"


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "joulery", "monitor", "--socket", str(tmp_path / "precious")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and (tmp_path / "precious").read_text() == "mine"
