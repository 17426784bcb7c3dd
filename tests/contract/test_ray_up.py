"""A whole ``joulery up`` through a kill of Ray's head: clients wait or get 503, then answers come again."""

import importlib.util
import json
import signal
from pathlib import Path

import psutil
import pytest

from joulery.app.profiling.service_profile import write_profile
from joulery.app.runs.replay import decide_again
from joulery.store.run.directory import open_run
from tests.app.serving.test_service import profile as toy_profile
from tests.contract.test_engine import NO_RAY
from tests.e2e.test_up import Up
from tests.e2e.test_up_gateways import Clients, address
from tests.runtime.site_files import toy_site
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=NO_RAY),
]
PATIENCE_S = 700.0
"""A cluster takes ten seconds to start on a quiet machine, and minutes on a busy one."""


def site_file(folder: Path) -> Path:
    """The toy site on Ray Serve, without a load of its own."""
    write_profile(folder / "profile.json", toy_profile())
    changed = {
        "    slo:": "    rate: 20 /s\n    profile: profile.json\n    slo:",
        "drain: 2 s}": "drain: 2 s, deadline: 2 s, engine: {kind: ray, cpus: 4}}",
        "load: {": "# load: {",
    }
    return toy_site(folder, changed=changed)


def heads(up: Up) -> list[psutil.Process]:
    """The control processes of clusters that a run has started."""
    below = psutil.Process(up.process.pid).children(recursive=True)
    return [one for one in below if "gcs_server" in one.name()]


def test_up_outlives_rays_head(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    with Up(site_file(tmp_path), tmp_path, "--stay", "--json-out", str(out)) as up:
        url = address(up)
        with Clients(url) as clients:
            clients.more(30, PATIENCE_S)
            assert set(clients.outcomes) <= {"200", "503", "504", "429"}
            (head,) = heads(up)
            head.kill()
            wait_until(lambda: clients.outcomes["503"] > 0, "a request that Ray's absence fails", PATIENCE_S)
            clients.more(30, PATIENCE_S)
        assert clients.outcomes["lost"] == clients.outcomes["500"] == 0, dict(clients.outcomes)
        up.process.send_signal(signal.SIGINT)
        status, _, errors = up.end()
        assert status == 0, errors
        assert up.survivors() == []
    report = json.loads(out.read_text())
    assert report["requests"] == clients.sent, "each request of the clients is in the report, answered or not"
    assert report["answered"] == clients.outcomes["200"]
    parts = ("requests_j", "serving_j", "load_generator_j", "idle_j", "unattributed_j")
    assert sum(report[name] for name in parts) == pytest.approx(report["energy_j"], rel=1e-9)
    assert report["coverage_ratio"] == pytest.approx(1.0, abs=0.02)
    assert decide_again(open_run(tmp_path / "run").log()).differences == ()
