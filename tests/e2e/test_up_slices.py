"""A joint plan on MIG slices that are not there: cut, shared and clocked under leases, its shares of requests kept."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from joulery.app.runs.replay import decide_again
from joulery.store.run.directory import open_run
from tests.e2e.test_up import Up
from tests.e2e.test_up_joint import clocks_set
from tests.fakes.mps import daemon, gpu_machine
from tests.fakes.nvml import NvmlFake, gpu
from tests.privileges import SETS_GPUS
from tests.runtime.slice_files import sliced_service, sliced_site
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("up")]
UNCUT = (False, ())


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlFake]:
    with gpu_machine(tmp_path, monkeypatch, gpu(idle_w=50.0)) as nvml:
        yield nvml


@SETS_GPUS
def test_slices_processes_clocks_and_shares_are_the_plans_and_are_given_back(tmp_path: Path, nvml: NvmlFake) -> None:
    site = sliced_site(tmp_path, sliced_service("one", 76, 60), sliced_service("two", 72, 30))
    with Up(site, tmp_path) as up:
        heard = up.until("dashboard")
        cut, running = nvml.layout(), daemon(tmp_path)
        code, said, complaint = up.end()
        assert up.survivors() == []
    assert code == 0, complaint
    (planned,) = json.loads((tmp_path / "run/plan.json").read_text())["gpus"]
    slices = [each["slice"] for each in planned["instances"]]
    processes = sum(each["processes"] for each in planned["instances"])
    assert planned["mode"] == "mig" and processes > len(slices) > 2
    assert cut[0] and sorted(name for name, _, _ in cut[1]) == sorted(slices), "cut as planned, nothing beside it"
    assert running is not None and running[2].startswith("MIG-"), "processes of a slice share it under MPS"
    assert f"A100-40GB on gpu:0: {slices[0]} " in heard and "of one: large 60 %, small 40 %" in heard
    assert "bounds of the plan" in heard
    floor_mhz, ceiling_mhz = planned["clock_floor_mhz"], planned["clock_ceiling_mhz"]
    assert all(floor_mhz - 15 <= clock <= ceiling_mhz for clock in clocks_set(tmp_path / "run")["gpu:0"])
    report = json.loads((tmp_path / "run/report.json").read_text())
    for each, floor in zip(report["services"], (0.76, 0.72), strict=True):
        assert each["failed"] == each["refused"] and each["requests"] >= 50, said
        assert each["minimum_accuracy_ratio"] == floor
        assert each["accuracy_ratio"] >= floor - 0.1 / each["answered"] * 2, "within one request a variant"
    assert nvml.layout() == UNCUT, "given back"
    assert nvml.boards[0]["locked"] is None and daemon(tmp_path) is None
    assert not list((tmp_path / "state/leases").glob("*.json"))
    assert decide_again(open_run(tmp_path / "run").log()).differences == ()


@SETS_GPUS
def test_a_session_that_is_killed_gives_slices_back(tmp_path: Path, nvml: NvmlFake) -> None:
    site = sliced_site(tmp_path, sliced_service("one", 76, 30, duration=60))
    with Up(site, tmp_path) as up:
        up.until("/60 s ")
        assert nvml.layout() != UNCUT and daemon(tmp_path) is not None
        os.kill(up.process.pid, signal.SIGKILL)
        up.end()
        wait_until(lambda: daemon(tmp_path) is None, "the end of the daemons")
        wait_until(lambda: nvml.layout() == UNCUT, "the GPU as it was")
        assert up.survivors() == []


def test_where_no_gpu_can_be_cut_one_error_says_it_before_anything_is_set(tmp_path: Path, nvml: NvmlFake) -> None:
    with Up(sliced_site(tmp_path, sliced_service("one", 76, 30), devices=""), tmp_path) as up:
        code, _, complaint = up.end()
    assert code != 0 and "CPU cores cannot stand in for those" in complaint and "mode: mig" in complaint
    assert complaint.count("joulery:") == 1 and nvml.layout() == UNCUT
