"""``joulery up`` with a governed clock: set while it serves, given back when it ends or is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from joulery.app.profiling.service_profile import write_profile
from joulery.store.run.directory import open_run
from tests.app.serving.test_service import profile as toy_profile
from tests.e2e.test_up import Up
from tests.fakes.cpufreq import cpu_machine, settings
from tests.runtime.site_files import toy_site
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("up")]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return cpu_machine(tmp_path, monkeypatch)


def site(folder: Path, clock: str, **options: str) -> Path:
    write_profile(folder / "profile.json", toy_profile())
    changed = {
        "fleet: {cpu: {cores: 2}}": f"fleet: {{cpu: {{cores: 2}}, clocks: [{clock}]}}",
        "    slo: {latency: 500 ms}": "    slo: {latency: 500 ms}\n    profile: profile.json",
    }
    return toy_site(folder, changed=changed, **options)


def clocks_set(run: Path) -> list[float]:
    """Clocks that were set. The last decision of a run may be overtaken by its end."""
    found = [entry for entry in open_run(run).log("decision") if entry["decision"]["kind"] == "set_clock"]
    assert {entry["outcome"] for entry in found} <= {"applied", "superseded"}
    return [entry["decision"]["value"] for entry in found if entry["outcome"] == "applied"]


def test_the_clock_falls_while_it_serves_and_comes_back(tmp_path: Path, tree: Path) -> None:
    before = settings(tree)
    with Up(site(tmp_path, "{device: cpu, period: 250 ms}", duration="2 s", replay="2 s"), tmp_path) as up:
        code, said, complaint = up.end()
        assert up.survivors() == []
    assert code == 0, complaint
    assert "clock" in said
    assert "knee 2328 MHz" in said
    decided = clocks_set(tmp_path / "run")
    assert decided
    assert min(decided) < 3200
    seen = list(open_run(tmp_path / "run").log("clock_step"))
    assert {entry["device"] for entry in seen} == {"cpu"}
    assert settings(tree) == before
    assert not list((tmp_path / "state/leases").glob("*.json"))


def test_a_session_that_is_killed_gives_the_clock_back(tmp_path: Path, tree: Path) -> None:
    before = settings(tree)
    fixed = "{device: cpu, governor: fixed, clock: 2.4 GHz}"
    with Up(site(tmp_path, fixed, duration="600 s", replay="600 s"), tmp_path) as up:
        up.until("/600 s ")
        wait_until(lambda: settings(tree) != before, "another clock")
        assert settings(tree)["cpufreq/policy0/scaling_max_freq"] == "2400000"
        os.kill(up.process.pid, signal.SIGKILL)
        up.end()
        wait_until(lambda: settings(tree) == before, "the clock as it was")
        assert up.survivors() == []
