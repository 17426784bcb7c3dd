"""The scheduler killed again and again beside a busy Slurm: no job lost, run twice or left held, no comment changed.

``python -m tests.e2e.slurm_kills [KILLS] [--operator]`` (root, slurm-wlm, slurmdbd). Two partitions with a GPU type
each, a limit of GPUs per user, two QOS, arrays and jobs that may be resized; all checkpoint. The scheduler writes why
jobs wait into their Comment, is killed (``kill -9``) at random moments of its first seconds and started again at once,
25 times unless KILLS says. With ``--operator`` it is a user who has no more than Slurm's operator right: its marks are
then in the owners' Comment, too. Prints one JSON object; exits 1 where something is wrong. About two minutes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joulery.adapters.clusters.slurm_records import COMMENT_TAG, owner_comment
from tests.e2e.slurm_jobs import JOB, Daemon, whole
from tests.slurm_accounting import accounting_missing, slurm_database
from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster
from tests.slurm_users import commands_of
from tests.waiting import wait_until

SITE = """\
joulery: 1
mode: act
carbon: {kind: constant, intensity: 250 g/kWh, source: "stated for a test"}
jobs:
  backend: slurm
  state: STATE
  quantum: 3 s
  poll: 300 ms
  restart: 1 s
  measure: 1 s
  patience: 60 s
  power: {slot: 200 W}
  policy: {theta: 100 %, cap: 4, order: service, preempt_after: 2 s}
  slurm: {progress: progress, reason_in_comment: true}
"""
OPERATOR, USERS = "daemon", ("games", "mail")
PARTITIONS = "PartitionName=old Nodes=g[1-2] State=UP\nPartitionName=new Nodes=g[3-4] State=UP\n"
PYTHON = "/usr/bin/python3"
"""One that every user may run."""
OWN = "joulery:min=1,max=4 my  own [words]"
EPOCHS, EPOCH_S = 60, 0.5
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass
class KillReport:
    """What came of it.

    Attributes:
        jobs: Jobs and tasks of arrays.
        kills: How often the scheduler was killed.
        held: Most jobs that were held at the moment of a kill.
        preemptions, reasons: Stops, and reasons seen in comments, over all lives of the scheduler.
        marked_at_end: Jobs that ended between a kill and the next scheduler's look with a mark that was to be removed:
            Slurm lets no one change an ended job.
        faults: What went wrong.
        seconds: How long it took.
    """

    jobs: int = 0
    kills: int = 0
    held: int = 0
    preemptions: int = 0
    reasons: int = 0
    marked_at_end: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


def play(kills: int, *, operator: bool, seed: int = 0) -> KillReport:
    """Submit, kill, end in peace; what came of it."""
    report, chance, begun_s = KillReport(), random.Random(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "slurm"
        types = ("2080ti", "2080ti", "a100", "a100")
        with (
            slurm_database(folder) as accounting,
            slurm_cluster(folder, types=types, conf_lines=PARTITIONS, accounting=accounting) as cluster,
        ):
            _prepare(cluster, operator=operator)
            env = commands_of(cluster, OPERATOR) if operator else cluster.env
            numbers = _submitted(cluster)
            for number in range(kills):
                daemon = Daemon(folder / "site.yaml", env)
                _looked(report, cluster, daemon)
                if operator and number == 0:
                    wait_until(lambda: _reasons(cluster), "a job that says why it waits")
                time.sleep(chance.uniform(0.0, 2.5))
                daemon.kill()
                report.kills += 1
                _count(report, cluster, daemon)
            (folder / "out/hurry").touch()
            daemon = Daemon(folder / "site.yaml", env)
            try:
                _looked(report, cluster, daemon)
                wait_until(lambda: _all_over(cluster, report), "every job ends")
            finally:
                code = daemon.stop()
                _count(report, cluster, daemon)
            report.faults += [f"the scheduler ended with {code}: {daemon.errors}"] if code else []
            report.faults += _wrong(cluster, numbers, report.marked_at_end)
            report.jobs = len(cluster.jobs())
    report.seconds = round(time.monotonic() - begun_s, 1)
    return report


def _prepare(cluster: SlurmCluster, *, operator: bool) -> None:
    folder = cluster.folder
    for part in ("out", "out/progress", "state-of-joulery"):
        (folder / part).mkdir()
        (folder / part).chmod(0o777)
    (folder / "progress").symlink_to(folder / "out/progress")
    site = SITE.replace("STATE", str(folder / "state-of-joulery"))
    (folder / "site.yaml").write_text(site)
    (folder / "out/job.py").write_text(JOB)
    (folder / "out/job.sh").write_text(f"#!/bin/bash\nexec {PYTHON} job.py {EPOCHS} {EPOCH_S} 0.5\n")
    add = ("sacctmgr", "-i", "add")
    cluster.run(*add, "account", "lab")
    for user in (OPERATOR, *USERS):
        cluster.run(*add, "user", user, "account=lab")
    if operator:
        cluster.run("sacctmgr", "-i", "modify", "user", OPERATOR, "set", "adminlevel=Operator")
    cluster.run("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxTRESPerUser=gres/gpu=4")
    cluster.run(*add, "qos", "urgent")
    cluster.run("sacctmgr", "-i", "modify", "qos", "urgent", "set", "Priority=1000")
    cluster.run("sacctmgr", "-i", "modify", "account", "lab", "set", "qos+=urgent")


def _submitted(cluster: SlurmCluster) -> dict[int, str]:
    """The number of each submission, and the comment that its owner gave it."""
    wanted: list[tuple[str, tuple[str, ...], str]] = []
    for at in range(6):
        user = USERS[at % 2]
        wanted.append((user, ("--partition=old", "--gres=gpu:1"), OWN if at % 3 else ""))
        wanted.append((user, ("--partition=new", f"--gres=gpu:a100:{1 + at % 2}"), OWN))
    wanted.append((USERS[0], ("--partition=old,new", "--gres=gpu:1", "--array=1-5"), OWN))
    wanted.append((USERS[1], ("--partition=new", "--gres=gpu:1", "--array=1-4%2"), ""))
    wanted += [(user, ("--partition=new", "--gres=gpu:2", "--qos=urgent"), OWN) for user in USERS]
    numbers = {}
    for user, options, comment in wanted:
        line = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "sbatch", "--parsable", "--requeue"]
        line += ["--open-mode=append", f"--chdir={cluster.folder}/out", "--ntasks=1", f"--comment={comment}", *options]
        line += ["--output=job-%j.out", str(cluster.folder / "out/job.sh")]
        done = subprocess.run(line, env=cluster.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        numbers[int(done.stdout)] = comment
    return numbers


def _count(report: KillReport, cluster: SlurmCluster, daemon: Daemon) -> None:
    jobs = cluster.jobs().values()
    report.held = max(report.held, sum(job["priority"] == 0 and job["job_state"] == "PENDING" for job in jobs))
    report.preemptions += len(daemon.actions("stop"))
    report.reasons += _reasons(cluster)


def _reasons(cluster: SlurmCluster) -> int:
    """How many comments say why their job waits."""
    return sum("[joulery: rank" in str(job["comment"]) for job in cluster.jobs().values())


def _looked(report: KillReport, cluster: SlurmCluster, daemon: Daemon) -> None:
    """Wait for the first look of a scheduler, and note the jobs that had ended by then with a mark."""
    daemon.until(lambda entry: entry["kind"] in ("action", "round"))
    ended = (job for job in cluster.jobs().items() if job[1]["job_state"] in _ENDED)
    report.marked_at_end |= {number for number, job in ended if COMMENT_TAG in job["comment"]}


def _all_over(cluster: SlurmCluster, report: KillReport) -> bool:
    jobs = cluster.jobs().values()
    report.reasons += sum("[joulery: rank" in str(job["comment"]) for job in jobs)
    return all(job["job_state"] in _ENDED for job in jobs)


def _wrong(cluster: SlurmCluster, numbers: dict[int, str], marked_at_end: set[int]) -> list[str]:
    """Jobs that did not end well or did not run each epoch once, and comments that are not their owners' own."""
    faults: list[str] = []
    jobs: dict[int, dict[str, Any]] = cluster.jobs()
    tasks = {number: sum(job["array_job_id"] == number for job in jobs.values()) for number in numbers}
    if len(jobs) != len(numbers) - 2 + 5 + 4:
        faults.append(f"{len(jobs)} jobs; tasks by array {tasks}")
    for number, job in jobs.items():
        if job["job_state"] != "COMPLETED":
            said = cluster.folder / f"out/job-{number}.out"
            text = said.read_text()[-200:] if said.exists() else "no output"
            faults.append(f"job {number} ended as {job['job_state']} ({job['state_reason']}): {text}")
            continue
        faults += whole(cluster.folder / f"out/job-{number}.out", EPOCHS)
        own = numbers[job["array_job_id"] or number]
        comment = owner_comment(job["comment"]) if number in marked_at_end else job["comment"]
        if comment != own or job["admin_comment"]:
            faults.append(f"job {number}: comment {job['comment']!r}, not {own!r}; {job['admin_comment']!r}")
    return faults


def main() -> None:
    """Play and print."""
    reason = missing() or accounting_missing()
    if reason:
        sys.exit(reason)
    words = [word for word in sys.argv[1:] if word != "--operator"]
    report = play(int(words[0]) if words else 25, operator="--operator" in sys.argv[1:])
    print(json.dumps(vars(report), indent=1))
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
