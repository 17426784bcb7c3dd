"""``joulery up`` with a limited device: the limit falls while it serves, and comes back when it ends or is killed.

RAPL's files are a made-up tree, whose counter the model itself moves.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from joulery.app.profiling.service_profile import write_profile
from joulery.app.runs.replay import decide_again
from joulery.store.run.directory import open_run
from tests.app.serving.test_service import profile as toy_profile
from tests.e2e.test_up import Up
from tests.fakes.powercap import limits, powercap_tree
from tests.runtime.site_files import toy_site
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("up")]
LIMIT = (
    "{device: cpu, max_slowdown: 2, eta: 100 %, min: 80 %, trial: 1 s, settle: 50 ms, period: 100 ms, baseline: 50 %}"
)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = powercap_tree(tmp_path / "powercap", 1)
    monkeypatch.setenv("JOULERY_POWERCAP", str(root))
    monkeypatch.setenv("JOULERY_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("JOULERY_UNGUARDED", "1")
    return root


def site(folder: Path, limit: str = LIMIT, clocks: str = "") -> Path:
    write_profile(folder / "profile.json", toy_profile())
    text = toy_site(folder, duration="600 s", replay="600 s").read_text()
    large = text[text.index("        - {name: large") : text.index("    slo: {latency")]
    for old, new in (
        (large, ""),
        ("toy_models:Sum\", options: {busy_s: 0.002}", "toy_models:LimitedSum\", options: {busy_s: 0.01}"),
        ("fleet: {cpu: {cores: 2}}", f"fleet: {{cpu: {{slices: [1]}}, power_limits: [{limit}]{clocks}}}"),
        ("    slo: {latency: 500 ms}", "    slo: {latency: 20 s}\n    profile: profile.json"),
    ):  # fmt: skip
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "site.yaml"
    path.write_text(text)
    return path


def limits_set(run: Path) -> list[dict[str, Any]]:
    found = [entry for entry in open_run(run).log("decision") if entry["decision"]["kind"] == "set_power_limit"]
    assert {entry["outcome"] for entry in found} <= {"applied", "superseded"}, "the end may overtake the last one"
    return [entry for entry in found if entry["outcome"] == "applied"]


def test_a_limit_falls_while_it_serves_and_comes_back(tmp_path: Path, tree: Path) -> None:
    before = limits(tree)
    with Up(site(tmp_path), tmp_path) as up:
        up.until("/600 s ")
        wait_until(lambda: limits(tree) != before, "a limit")
        assert int(limits(tree)["intel-rapl:0/constraint_0_power_limit_uw"]) in (110_000_000, 110_040_000, 99_960_000)
        os.kill(up.process.pid, signal.SIGINT)
        _, said, complaint = up.end()
        assert up.survivors() == [], complaint
    assert limits(tree) == before
    assert "service time at most 2 x that at full power; set, leased" in said
    first = limits_set(tmp_path / "run")[0]["decision"]
    assert (first["target"], first["value"], first["reason"]) == ("cpu", 0.917, "tries 92 % of its power")
    replayed = decide_again(open_run(tmp_path / "run").log())
    assert replayed.differences == ()
    assert replayed.decisions > 0
    assert not list((tmp_path / "state/leases").glob("*.json"))


def test_a_session_that_is_killed_gives_the_limit_back(tmp_path: Path, tree: Path) -> None:
    before = limits(tree)
    with Up(site(tmp_path), tmp_path) as up:
        up.until("/600 s ")
        wait_until(lambda: limits(tree) != before, "a limit")
        os.kill(up.process.pid, signal.SIGKILL)
        up.end()
        wait_until(lambda: limits(tree) == before, "the limit as it was")
        assert up.survivors() == []


def test_a_device_has_one_owner(tmp_path: Path, tree: Path) -> None:
    with Up(site(tmp_path, clocks=", clocks: [{device: cpu}]"), tmp_path) as up:
        code, _, complaint = up.end()
    assert code == 2
    assert "fleet.power_limits.0" in complaint
    assert "a governor sets the clock of this device already" in complaint
