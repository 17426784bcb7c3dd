"""Slices left empty by a running service: replicas end and come back, no request is lost, nothing survives a kill."""

import json
import os
import signal
from dataclasses import replace

import pytest

from joulery.app.profiling.service_profile import write_profile
from joulery.domain.serving.service import Slice
from joulery.policies.serving.consolidation import CONSOLIDATION
from joulery.policies.serving.search.layout_space import cpu_slices
from joulery.store.run.directory import open_run
from tests.app.serving.test_service import profile as toy_profile
from tests.e2e.test_up import Up, site  # noqa: F401 - a fixture
from tests.e2e.test_up_gpus import on_gpu
from tests.fakes.mps import gpu_machine
from tests.fakes.nvml import gpu
from tests.privileges import SETS_GPUS
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("up")]
PARKS = {
    "lambda: 10 %": "lambda: 10 %, consolidate: true, consolidate_after: 3 s",
    "rate: 30 /s": "rate: 4 /s",
    "500 ms": "5 s",  # while the SLO is threatened every core stays awake: not on a busy machine's account
}


def test_a_service_that_is_asked_little_leaves_a_core_empty(tmp_path, site):  # noqa: F811
    out = tmp_path / "summary.json"
    with Up(site(PARKS, duration="300 s", replay="9000 s"), tmp_path, "--json-out", str(out)) as up:
        up.until("stays awake, 1 of 2 slices empty")
        run = open_run(tmp_path / "run")
        wait_until(lambda: any(one["decision"]["cause"] == CONSOLIDATION for one in run.log("decision")), "the change")
        os.killpg(up.process.pid, signal.SIGINT)
        code, _, complaint = up.end()
        assert code == 0, complaint
        assert up.survivors() == []
    summary = json.loads(out.read_text())
    assert summary["failed"] == summary["refused"], "a busy machine may refuse, never fail"
    assert summary["answered"] > 0
    (parked,) = [entry for entry in run.log("decision") if entry["decision"]["cause"] == CONSOLIDATION]
    assert parked["outcome"] == "applied" and "0 replicas started, 1 stopped" in parked["detail"]
    assert len(parked["decision"]["value"]) == 1


def test_kill_9_while_a_core_is_empty_leaves_nothing(tmp_path, site):  # noqa: F811
    with Up(site(PARKS, duration="300 s", replay="9000 s"), tmp_path) as up:
        up.until("stays awake, 1 of 2 slices empty")
        up.process.kill()
        up.process.wait()
        assert up.survivors() == []


@pytest.mark.slow
@SETS_GPUS
def test_a_gpu_that_is_left_empty_has_its_idle_clock_until_it_wakes(tmp_path, monkeypatch):
    name = "NVIDIA A100-SXM4-40GB"
    boards = (gpu(name, idle_w=50.0), gpu(name, 1, idle_w=50.0))
    with gpu_machine(tmp_path, monkeypatch, *boards) as nvml:
        clocks = "clocks: [{device: nvidia, gpu: 0}, {device: nvidia, gpu: 1}"
        shared = "mode: mps, shares: [[100 %]]"
        path = on_gpu(tmp_path, f"{{gpu: 0, {shared}}}, {{gpu: 1, {shared}}}], {clocks}")
        text = path.read_text()
        # A measured profile may say, on a busy machine, that one replica takes more joules than two.
        with_profile = {"    slo:": "    profile: profile.json\n    slo:"}
        for old, new in {**PARKS, **with_profile, "duration: 2 s": "duration: 300 s"}.items():
            assert old in text, old
            text = text.replace(old, new)
        path.write_text(text)
        known = toy_profile()
        entries = [
            replace(one, slice=Slice.parse("mps:1")) for one in known.entries if one.slice == cpu_slices((1,))[0]
        ]
        write_profile(tmp_path / "profile.json", replace(known, entries=tuple(entries)))
        with Up(path, tmp_path) as up:
            up.until("stays awake, 1 of 2 slices empty")
            run = open_run(tmp_path / "run")
            wait_until(lambda: nvml.boards[1]["locked"] == [210, 210], "the idle clock of the empty GPU")
            wait_until(lambda: nvml.boards[0]["locked"] not in (None, [210, 210]), "a clock of the GPU that serves")
            os.killpg(up.process.pid, signal.SIGINT)
            code, _, complaint = up.end()
            assert code == 0, complaint
            assert up.survivors() == []
        (parked,) = [entry for entry in run.log("decision") if entry["decision"]["cause"] == CONSOLIDATION]
        assert parked["outcome"] == "applied" and len(parked["decision"]["value"]) == 1
        assert [board["locked"] for board in nvml.boards] == [None, None], "given back"
