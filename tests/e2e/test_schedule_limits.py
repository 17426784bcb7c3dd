"""Policy kind ``frugal`` on this machine: its scheduler limits the GPUs of jobs; the driver is the fake one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.slurm_jobs import Daemon
from tests.fakes.nvml import STATE, NvmlFake, gpu
from tests.fakes.powercap import limits, powercap_tree
from tests.privileges import SETS_GPUS
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

FAKES = Path(__file__).resolve().parents[1] / "fakes/path"
SITE = """\
joulery: 1
mode: act
carbon: {kind: constant, intensity: 250 g/kWh, source: "stated for a test"}
meters: {use: [nvml]}
jobs:
  quantum: 20 s
  poll: 200 ms
  grace: 2 s
  slots: {kind: gpu}
  policy: {kind: frugal, theta: 100 %}
  limits: {max_slowdown: 1.3, eta: 100 %, trial: 1 s, settle: 100 ms, period: 50 ms, lease: 4 s, min: 75 %}
"""
JOB = """\
import os, sys, time
for step in range(1, 100_000):
    time.sleep(0.03)
    for zone in sys.argv[1:]:
        # A made-up file is empty for an instant while it is written, as one of the kernel's never is.
        limit_uw = int(open(zone + "/constraint_0_power_limit_uw").read() or 0)
        energy_uj = int(open(zone + "/energy_uj").read())
        with open(zone + "/energy_uj", "r+") as counter:
            counter.write(str(energy_uj + int(0.03 * limit_uw)))
    with open(os.environ["JOULERY_PROGRESS"], "a") as file:
        file.write(f"{step}/100000\\n")
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlFake]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "job.py").write_text(JOB)
    state = tmp_path / "boards.json"
    for name, value in (
        (STATE, str(state)), ("PYTHONPATH", str(FAKES)), ("JOULERY_STATE", str(tmp_path / "state")),
        ("JOULERY_UNGUARDED", "1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    yield NvmlFake(gpu("NVIDIA A30", busy=100, demand_mw=165_000), file=state)
    for run in tmp_path.glob("joulery-jobs/jobs/*/run.json"):
        try:
            os.killpg(json.loads(run.read_text())["pid"], signal.SIGKILL)
        except ProcessLookupError:
            continue


def joulery(*words: str) -> str:
    command = [sys.executable, "-m", "joulery", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@SETS_GPUS
def test_the_scheduler_of_a_machine_limits_its_jobs_and_gives_their_gpus_back(desk: NvmlFake, tmp_path: Path) -> None:
    job = int(json.loads(joulery("submit", "--json", "--", sys.executable, "job.py"))["job"])
    daemon = Daemon(tmp_path / "site.yaml", dict(os.environ))
    try:
        limit = daemon.until(lambda entry: entry["kind"] == "limit" and entry["ratio"] == 0.75)
        assert (limit["job"], limit["work"]) == (job, "progress")
        assert desk.boards[0]["limit_mw"] == 124_000
        joulery("jobs", "--cancel", str(job))
        daemon.until(lambda entry: entry["kind"] == "limit" and entry["ratio"] == 1.0)
        assert desk.boards[0]["limit_mw"] == 165_000
        joulery("submit", "--json", "--", sys.executable, "job.py")
        daemon.until(lambda entry: entry["kind"] == "limit" and entry["ratio"] < 1 and entry["job"] != job)
    finally:
        daemon.kill()
    wait_until(lambda: desk.boards[0]["limit_mw"] == 165_000, "the former limit after kill -9")


@SETS_GPUS
def test_the_agents_of_two_nodes_give_their_job_one_limit_and_one_that_is_killed_frees_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes on this machine, a board each; the job is two processes as Slurm would start them."""
    limits = "{max_slowdown: 3, eta: 100 %, trial: 5 s, settle: 100 ms, period: 100 ms, lease: 4 s, min: 75 %}"
    (tmp_path / "site.yaml").write_text(
        "joulery: 1\nmode: act\nmeters: {use: [nvml]}\njobs:\n  backend: slurm\n  policy: {kind: frugal}\n"
        f"  limits: {limits}\n  slurm: {{meters: energy, progress: progress}}\n"
    )
    (tmp_path / "progress").mkdir()
    (tmp_path / "job.py").write_text(JOB)
    state = tmp_path / "boards.json"
    for name, value in ((STATE, str(state)), ("PYTHONPATH", str(FAKES)), ("JOULERY_UNGUARDED", "1")):
        monkeypatch.setenv(name, value)
    boards = NvmlFake(*(gpu("NVIDIA A30", at, busy=100, demand_mw=165_000) for at in range(2)), file=state)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "z[1-2]"}
    ranks, agents = [], []
    try:
        for at in (0, 1):
            own = {"SLURMD_NODENAME": f"z{at + 1}", "SLURM_JOB_GPUS": str(at)}
            report = {"JOULERY_PROGRESS": str(tmp_path / "progress/7") if at == 0 else os.devnull}
            command = [sys.executable, str(tmp_path / "job.py")]
            ranks.append(subprocess.Popen(command, env={**os.environ, **job, **own, **report}))
            flags = ("--period", "1 s", "--node", f"z{at + 1}")
            env = {**os.environ, "JOULERY_STATE": str(tmp_path / f"state{at}")}
            agents.append(Daemon(tmp_path / "site.yaml", env, *flags, verb="agent"))
        for agent in agents:
            limit = agent.until(lambda entry: entry.get("kind") == "limit" and entry["ratio"] < 1)
            assert (limit["job"], limit["work"]) == (7, "progress")
        wait_until(
            lambda: len({board["limit_mw"] for board in boards.boards} - {165_000}) == 1, "one limit on both boards"
        )
        agents[1].kill()
        said = agents[0].until(lambda entry: "z2 does not answer" in str(entry.get("text")))
        assert said["ratio"] == 1.0
        wait_until(lambda: [board["limit_mw"] for board in boards.boards] == [165_000] * 2, "full power for both")
        ranks[0].kill()
        wait_until(lambda: not (tmp_path / "energy/limits/nodes/7.z1").exists(), "the end of the first node's note")
        assert agents[0].stop() == 0, agents[0].errors
    finally:
        for process in (*ranks, *(agent.process for agent in agents)):
            process.kill()
            process.wait(30)


def test_the_cpus_of_a_machine_are_limited_for_its_job_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed: RAPL's files are a made-up tree, whose counters the job itself moves."""
    tree = powercap_tree(tmp_path / "powercap", 1)
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("JOULERY_POWERCAP", str(tree)), ("JOULERY_STATE", str(tmp_path / "state")), ("JOULERY_UNGUARDED", "1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    site = SITE.replace("meters: {use: [nvml]}", "meters: {cpu_model: {idle: 20 W, max: 60 W}}")
    (tmp_path / "site.yaml").write_text(site.replace("kind: gpu", "kind: cpu, count: 1"))
    (tmp_path / "job.py").write_text(JOB)
    before = limits(tree)
    job = json.loads(joulery("submit", "--json", "--", sys.executable, "job.py", str(tree / "intel-rapl:0")))["job"]
    daemon = Daemon(tmp_path / "site.yaml", dict(os.environ))
    try:
        limit = daemon.until(lambda entry: entry["kind"] == "limit" and entry["ratio"] == 0.75)
        assert limit["limits_w"] == {"cpu": 90.0}
        assert limits(tree)["intel-rapl:0/constraint_0_power_limit_uw"] == "90000000"
        joulery("jobs", "--cancel", str(job))
        daemon.until(lambda entry: entry["kind"] == "limit" and entry["ratio"] == 1.0)
        assert limits(tree) == before
    finally:
        assert daemon.stop() == 0, daemon.errors
