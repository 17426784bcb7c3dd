"""``joulery up`` on two Ray nodes of which one sleeps while demand is low: by its commands, leased, always woken."""

import importlib.util
import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import httpx
import pytest

from joulery.app.profiling.service_profile import write_profile
from joulery.app.runs.replay import decide_again
from joulery.store.run.directory import open_run
from tests.app.serving.test_service import profile as toy_profile
from tests.contract.test_engine import NO_RAY
from tests.e2e.test_up import Up
from tests.e2e.test_up_gateways import BODY, address
from tests.runtime.site_files import toy_site
from tests.two_ray_nodes import TwoNodes, two_ray_nodes
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=NO_RAY),
]
PATIENCE_S = 600.0
SENDERS = 3
_COMMAND = """
import json, os, pathlib, signal, subprocess, sys
import psutil
said = json.loads(pathlib.Path({said!r}).read_text())
with open({log!r}, "a") as log:
    log.write(sys.argv[1] + "\\n")
raylets = [one for one in psutil.process_iter(["cmdline"]) if said["own"] in (one.info["cmdline"] or [])]
if sys.argv[1] == "sleep":
    for one in raylets:
        one.send_signal(signal.SIGKILL)
elif not raylets:
    sys.exit(subprocess.run(said["join"], env=said["environ"]).returncode)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    with two_ray_nodes() as made:
        yield made


def command(folder: Path, cluster: TwoNodes) -> Path:
    """A program that has the other node sleep (its raylet is killed), or joins it to the cluster again."""
    joining = {name: value for name, value in cluster.environ.items() if name != "RAY_REDIS_ADDRESS"}
    own = f"--node_ip_address={cluster.addresses[1]}"
    (folder / "said.json").write_text(json.dumps({"own": own, "join": cluster.join, "environ": joining}))
    made = folder / "node.py"
    made.write_text(_COMMAND.format(said=str(folder / "said.json"), log=str(folder / "commands")))
    return made


def site_file(folder: Path, cluster: TwoNodes) -> Path:
    write_profile(folder / "profile.json", toy_profile())
    run = f"{sys.executable}, {command(folder, cluster)}"
    sleeps = f"sleep: [{run}, sleep], wake: [{run}, wake], sleep_after: 5 s, wakes_in: 120 s"
    engine = f"\n    kind: ray\n    address: {cluster.address}\n    dashboard: {cluster.dashboard}\n    direct: true"
    engine += f"\n    nodes:\n      - {{name: north, address: {cluster.addresses[0]}, cores: 1}}"
    engine += f"\n      - {{name: south, address: {cluster.addresses[1]}, cores: 1, {sleeps}}}"
    policy = "policy: {kind: clover, lambda: 10 %, base_intensity: 200 g/kWh"
    changed = {
        "fleet: {cpu: {cores: 2}}\n": "",
        "    slo:": "    rate: 20 /s\n    profile: profile.json\n    audit: {share: 0 %}\n    slo:",
        policy: f"{policy}, consolidate: true, consolidate_after: 3 s",
        'serving: {listen: "127.0.0.1:0", drain: 2 s}': f'serving:\n  listen: "127.0.0.1:0"\n  engine:{engine}',
        "load: {": "# load: {",
    }
    return toy_site(folder, changed=changed, replay="1000 h")


def said(folder: Path) -> list[str]:
    """The commands so far, repeated ones once: one decision may take over from another while the node wakes.

    A first wake is left out: the node may not be back yet from the test before.
    """
    log = folder / "commands"
    words = [word for word, _ in groupby(log.read_text().split())] if log.exists() else []
    return words[1:] if words[:1] == ["wake"] else words


def outcomes(folder: Path) -> list[tuple[str, str]]:
    """What was decided of nodes, and its outcome."""
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    found = [(line["decision"]["kind"], line["outcome"]) for line in lines if "decision" in line]
    nodes = [one for one in found if one[0] in ("sleep_node", "wake_node")]
    return nodes[1:] if nodes[:1] == [("wake_node", "applied")] else nodes


class Load:
    """Requests from several threads, as fast as they are answered, until it is ended."""

    def __init__(self, url: str) -> None:
        self._url, self._ends = url, threading.Event()
        self.codes: Counter[int] = Counter()
        self._threads = [threading.Thread(target=self._send) for _ in range(SENDERS)]

    def __enter__(self) -> "Load":
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for one in self._threads:
            one.join()

    def _send(self) -> None:
        with httpx.Client(timeout=PATIENCE_S) as http:
            while not self._ends.is_set():
                self.codes[http.post(self._url, json=BODY).status_code] += 1


def test_an_empty_node_sleeps_is_woken_by_demand_and_again_at_the_end(
    tmp_path: Path, cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "PYTHONPATH"):
        monkeypatch.setenv(name, cluster.environ[name])
    monkeypatch.setenv("JOULERY_STATE", str(tmp_path / "state"))
    out = tmp_path / "report.json"
    with Up(site_file(tmp_path, cluster), tmp_path, "--stay", "--json-out", str(out)) as up:
        url = f"{address(up)}/v2/models/sums/infer"
        wait_until(lambda: said(tmp_path) == ["sleep"], "the node sleeps", PATIENCE_S)
        with httpx.Client(timeout=PATIENCE_S) as http:
            answered = sum(http.post(url, json=BODY).status_code == 200 for _ in range(5))
        with Load(url) as load:
            wait_until(lambda: outcomes(tmp_path)[1:2] == [("wake_node", "applied")], "the node is woken", PATIENCE_S)
            done = load.codes[200]
            wait_until(lambda: load.codes[200] > done + 50, "requests are answered on", PATIENCE_S)
        wait_until(lambda: said(tmp_path) == ["sleep", "wake", "sleep"], "the node sleeps again", PATIENCE_S)
        leases = [path.stem for path in (tmp_path / "state" / "leases").glob("*.json")]
        assert leases == ["node-south.sleep"], "its wake is on record, whatever becomes of joulery"
        up.process.send_signal(signal.SIGINT)
        status, _, errors = up.end()
        assert status == 0, errors
    assert said(tmp_path) == ["sleep", "wake", "sleep", "wake"], "it was found awake, and is left awake"
    assert answered == 5 and set(load.codes) <= {200, 429}, "no request was lost; some may be refused early"
    report = json.loads(out.read_text())
    north, south = report["nodes"]
    assert north["asleep_s"] == 0.0 and south["asleep_s"] > 0 and south["refusal"] is None
    assert north["answered"] + south["answered"] == report["answered"] == 5 + load.codes[200]
    assert "not in the Ray cluster" not in (tmp_path / "run" / "log.jsonl").read_text(), "it is asleep, not lost"
    assert decide_again(open_run(tmp_path / "run").log()).differences == ()


def test_a_node_is_woken_though_joulery_is_killed(
    tmp_path: Path, cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "PYTHONPATH"):
        monkeypatch.setenv(name, cluster.environ[name])
    monkeypatch.setenv("JOULERY_STATE", str(tmp_path / "state"))
    with Up(site_file(tmp_path, cluster), tmp_path, "--stay") as up:
        wait_until(lambda: said(tmp_path) == ["sleep"], "the node sleeps", PATIENCE_S)
        up.process.send_signal(signal.SIGKILL)
        up.process.wait()
        wait_until(lambda: said(tmp_path) == ["sleep", "wake"], "the watchdog wakes it", PATIENCE_S)
    wait_until(lambda: not [*(tmp_path / "state" / "leases").glob("*.json")], "the lease ends", PATIENCE_S)
