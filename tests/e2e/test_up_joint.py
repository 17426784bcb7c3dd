"""A joint plan on GPUs that are not there: clocks and shares leased, governed within the plan's bounds, given back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from joulery.perf.interference.document import as_document
from joulery.perf.interference.model import GpuCoefficients, InterferenceProfile, ModelCoefficients
from joulery.store.run.directory import open_run
from tests.e2e.test_up import Up
from tests.fakes.mps import daemon, gpu_machine
from tests.fakes.nvml import NvmlFake, gpu
from tests.runtime.plan_files import service
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("up")]
V100 = "Tesla V100-SXM2-16GB"
BOARD = GpuCoefficients("V100", 300.0, 1530.0, 40.0, 1e9, -0.001, 0.0, 0.0, 10.0)
MODEL = ModelCoefficients(0, 0, 0, 0.0, 0.0, 1e-6, 200.0, 0.0, 0.0, 0.4, 5.0, 0.0, 0.0, 0.0)
"""2 ms on a whole V100 whatever the batch, 0.4 J a request, 5 W for being there."""
SITE = """\
joulery: 1
name: joint
mode: act
meters: {period: 50 ms, use: [nvml]}
fleet:
  devices: [{gpu: 0, mode: mps}, {gpu: 1, mode: mps}]
  gpus: [{name: V100, profile_file: v100.json, price: 3 USD/h, available: 2, clocks: 4}]
plan: {preset: joint, replicas: 2, max_batch: 2, margin: 5 %PLAN}
serving: {listen: "127.0.0.1:0", drain: 2 s, deadline: 5 s}
services:
"""


def joint_site(folder: Path, *services: str, plan: str = "") -> Path:
    profile = InterferenceProfile(BOARD, {"quick": MODEL}, source="made up")
    (folder / "v100.json").write_text(json.dumps(as_document(profile)))
    file = folder / "joint.yaml"
    file.write_text(SITE.replace("PLAN", plan) + "".join(services).replace(":Sum", ":GpuSum"))
    return file


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlFake]:
    with gpu_machine(tmp_path, monkeypatch, gpu(V100, idle_w=40.0), gpu(V100, 1, idle_w=40.0)) as nvml:
        yield nvml


def clocks_set(run: Path) -> dict[str, list[float]]:
    """Clocks that were set, by device. The last decision of a run may be overtaken by its end."""
    found: dict[str, list[float]] = {}
    for entry in open_run(run).log("decision"):
        decision: dict[str, Any] = entry["decision"]
        if decision["kind"] == "set_clock":
            assert entry["outcome"] in ("applied", "superseded"), entry
            if entry["outcome"] == "applied":
                found.setdefault(decision["target"], []).append(decision["value"])
    return found


def test_clocks_and_shares_of_the_plan_are_set_and_given_back(tmp_path: Path, nvml: NvmlFake) -> None:
    site = joint_site(tmp_path, service("one", duration=2, rate=20), service("two", duration=2, rate=20))
    with Up(site, tmp_path) as up:
        heard = up.until("dashboard")
        running = daemon(tmp_path)
        code, said, complaint = up.end()
        assert up.survivors() == []
    assert code == 0, complaint
    assert "bounds of the plan" in heard
    assert running is not None
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert plan["policy"] == "joint"
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert {one["service"]: one["failed"] - one["refused"] for one in report["services"]} == {"one": 0, "two": 0}, said
    bounds = {f"gpu:{at}": (g["clock_floor_mhz"], g["clock_ceiling_mhz"]) for at, g in enumerate(plan["gpus"])}
    assert bounds["gpu:0"][0] < 1530, "the plan holds a clock below the highest"
    found = clocks_set(tmp_path / "run")
    for device, (floor_mhz, ceiling_mhz) in bounds.items():
        assert found[device], "the plan's clock was set"
        assert all(floor_mhz - 1e-6 <= clock <= ceiling_mhz + 1e-6 for clock in found[device])
    assert [board["locked"] for board in nvml.boards] == [None, None], "given back"
    assert daemon(tmp_path) is None
    assert not list((tmp_path / "state/leases").glob("*.json"))


def test_a_session_that_is_killed_gives_clocks_and_shares_back(tmp_path: Path, nvml: NvmlFake) -> None:
    site = joint_site(tmp_path, service("one", duration=60, rate=20))
    with Up(site, tmp_path) as up:
        up.until("/60 s ")
        wait_until(lambda: nvml.boards[0]["locked"] is not None, "the plan's clock")
        assert daemon(tmp_path) is not None
        os.kill(up.process.pid, signal.SIGKILL)
        up.end()
        wait_until(lambda: [board["locked"] for board in nvml.boards] == [None, None], "the clocks as they were")
        wait_until(lambda: daemon(tmp_path) is None, "the end of the daemon")
        assert up.survivors() == []
