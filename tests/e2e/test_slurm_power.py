"""Policy kind ``lean`` beside a real Slurm that puts idle nodes to sleep; its GPUs are the fake driver's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.slurm_jobs import Daemon
from tests.fakes.nvml import STATE, NvmlFake, gpu
from tests.slurm_cluster import SLURMD, SlurmCluster, missing, slurm_cluster
from tests.waiting import ended, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

# At half the limit the clock that the fake driver shows is 31 % lower, and the job's own progress 7 %: the bound allows
# either, as the first trial judges by the clock where a busy machine has not written progress yet.
FAKES = Path(__file__).resolve().parents[1] / "fakes/path"
SITE = """\
joulery: 1
mode: act
carbon: {kind: constant, intensity: 250 g/kWh, source: "stated for a test"}
meters: {use: [nvml]}
jobs:
  backend: slurm
  quantum: 20 s
  poll: 300 ms
  restart: 1 s
  patience: 3 s
  power: {slot: 200 W}
  policy: {kind: lean, theta: 100 %}
  limits: {max_slowdown: 1.5, eta: 100 %, trial: 2 s, settle: 100 ms, period: 100 ms, lease: 4 s}
  slurm: {progress: progress, meters: energy}
"""
POWER_SAVING = """
SuspendProgram={folder}/suspend
ResumeProgram={folder}/resume
SuspendTime=1
SuspendTimeout=1
ResumeTimeout=60
SlurmctldParameters=enable_configless,idle_on_node_suspend,power_save_interval=1,power_save_min_interval=0
"""
SUSPEND = """\
#!/bin/bash
# As a node that loses power: one that is asked to end may take minutes, and the next one waits for it.
for node in $({scontrol} show hostnames $1); do kill -KILL $(cat {folder}/slurm/slurmd-$node.pid); done
"""
RESUME = """\
#!/bin/bash
# Newer versions end what the script leaves in its session: it waits until slurmd has one of its own.
for node in $({scontrol} show hostnames $1); do
  rm -f {folder}/$node.up
  setsid --fork bash -c "touch {folder}/$node.up; exec {slurmd} -D -b -N $node -f {folder}/slurm/slurm.conf" \\
    </dev/null &>> {folder}/resumed.out
  until [ -e {folder}/$node.up ]; do sleep 0.02; done
done
"""
JOB = """\
import json, os, sys, time
work, state, last = 0.0, sys.argv[1], time.monotonic()
while not os.path.exists("enough"):
    time.sleep(0.05)
    now = time.monotonic()
    seconds, last = now - last, now  # a busy machine must not look like a slow GPU
    try:
        board = json.load(open(state))["boards"][0]
    except ValueError:
        continue
    work += seconds * min(1.0, board["limit_mw"] / board["demand_mw"]) ** 0.1
    with open("progress/" + os.environ["SLURM_JOB_ID"], "a") as file:
        file.write(f"{work / 1e4:.9f}\\n")
"""


@contextmanager
def sleeping_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Three nodes that Slurm suspends by ending their slurmd, and resumes by starting it."""
    # Slurm's own scripts have a PATH of their own.
    slurmd = " ".join((str(shutil.which("slurmd")), *SLURMD[1:]))
    for name, script in (("suspend", SUSPEND), ("resume", RESUME)):
        (folder / name).write_text(script.format(folder=folder, slurmd=slurmd, scontrol=shutil.which("scontrol")))
        (folder / name).chmod(0o755)
    try:
        lines = POWER_SAVING.format(folder=folder)
        with slurm_cluster(folder / "slurm", nodes=3, gpus=2, conf_lines=lines, name="s") as made:
            yield made
    finally:
        for file in (folder / "slurm").glob("slurmd-*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def nodes(cluster: SlurmCluster) -> dict[str, str]:
    return dict(line.split() for line in cluster.run("sinfo", "-h", "-N", "-O", "nodelist,statelong").splitlines())


def place(cluster: SlurmCluster, job: int) -> str:
    return cluster.run("squeue", "-h", "-j", str(job), "-t", "all", "-o", "%T %N").strip()


def known(cluster: SlurmCluster) -> list[str]:
    """Kinds of job whose limits are known."""
    return [json.loads(file.read_text())["kind"] for file in (cluster.folder / "energy/limits").glob("*.json")]


def test_lean_limits_jobs_within_the_bound_packs_them_and_nodes_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "boards.json"
    boards = NvmlFake(
        *(gpu("NVIDIA A100-SXM4-40GB", at, busy=100, demand_mw=400_000, limit_mw=380_000) for at in range(2)),
        file=state,
    )
    for name, value in (
        (STATE, str(state)), ("PYTHONPATH", str(FAKES)), ("JOULERY_STATE", str(tmp_path / "leases")),
        ("JOULERY_UNGUARDED", "1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    with sleeping_cluster(tmp_path) as cluster:
        (cluster.folder / "site.yaml").write_text(SITE)
        (cluster.folder / "job.py").write_text(JOB)
        (cluster.folder / "progress").mkdir()
        script = cluster.folder / "train.sh"
        script.write_text(f"#!/bin/bash\nexec {sys.executable} job.py {state}\n")
        daemon = Daemon(cluster.folder / "site.yaml", cluster.env)
        agents: list[Daemon] = []
        try:
            daemon.until(lambda entry: entry["kind"] == "round")
            wait_until(lambda: set(nodes(cluster).values()) == {"idle~"}, "the sleep of all nodes")
            one = ("--gres=gpu:1", "--ntasks=1", "--comment=joulery:min=1,max=1", "--export=ALL")
            first = int(cluster.submit(script, *one))
            wait_until(lambda: place(cluster, first).startswith("RUNNING s"), "the node that wakes for the job")
            home = place(cluster, first).split()[1]
            flags = ("--period", "1 s", "--node", home)
            agents.append(Daemon(cluster.folder / "site.yaml", cluster.env, *flags, verb="agent"))
            agents[0].until(lambda entry: entry.get("ratio") == 0.5 and entry["job"] == first)
            assert boards.boards[0]["limit_mw"] == 190_000  # half of what an administrator had set
            agents[0].until(lambda entry: entry.get("kind") == "limit" and entry.get("work") == "progress")

            wait_until(lambda: known(cluster), "what the limits did to its kind")

            second = int(cluster.submit(script, *one))
            wait_until(lambda: place(cluster, second) == f"RUNNING {home}", "the second job on the awake node")
            wait_until(
                lambda: [state for node, state in nodes(cluster).items() if node != home] == ["idle~"] * 2,
                "the sleep of the others",
            )
            agents[0].kill()
            wait_until(lambda: [board["limit_mw"] for board in boards.boards] == [380_000] * 2, "the former limits")
            # A lease is forgotten after its setting was reverted.
            wait_until(lambda: not list((tmp_path / "leases/leases").glob("*.json")), "the end of the leases")

            agents.append(Daemon(cluster.folder / "site.yaml", cluster.env, *flags, verb="agent"))
            agents[1].until(lambda entry: entry.get("ratio", 1) < 1)
            (cluster.folder / "enough").touch()
            wait_until(lambda: place(cluster, first).startswith("COMPLETED"), "the end of the jobs")
            agents[1].until(lambda entry: entry.get("text") == "ended")
            wait_until(lambda: [board["limit_mw"] for board in boards.boards] == [380_000] * 2, "the former limits")
            wait_until(lambda: set(nodes(cluster).values()) == {"idle~"}, "the sleep of all nodes")
            assert agents[1].stop() == 0, agents[1].errors
        finally:
            assert daemon.stop() == 0, daemon.errors
            for agent in agents:
                if not ended(agent.process.pid):
                    agent.kill()
        assert all("root/train.sh on 1" in kind for kind in known(cluster))
