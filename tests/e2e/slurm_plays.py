"""The same jobs beside a real Slurm twice: under plain backfill and under joulery, for busy GPU-seconds.

Four plays: a limit of GPUs per user, two partitions with two GPU types, arrays, two QOS. ``python -m benchmarks slurm``
prints them; ``tests/e2e/test_slurm_plays.py`` plays them small. Both runs of a play submit the same jobs at the same
times. Busy GPU-seconds are those of the jobs that Slurm says run, read four times a second up to the same moment.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.slurm_jobs import Daemon
from tests.slurm_accounting import slurm_database
from tests.slurm_cluster import SlurmCluster, slurm_cluster

SITE = """\
joulery: 1
mode: act
carbon: {kind: constant, intensity: 250 g/kWh, source: "stated for a benchmark"}
jobs:
  backend: slurm
  quantum: 10 s
  poll: 300 ms
  restart: 1 s
  measure: 2 s
  patience: 30 s
  start_within: 10 s
  power: {slot: 200 W}
  policy: {theta: 100 %}
"""
USERS = ("daemon", "games")
INTERVAL_S = 0.25
"""Between two samples of what runs."""


@dataclass(frozen=True)
class Job:
    """One submission.

    Attributes:
        at_s: When, since the beginning.
        length_s: How long it runs.
        options: Flags of sbatch.
        user: Who submits it; root when empty.
    """

    at_s: float
    length_s: float
    options: tuple[str, ...]
    user: str = ""


@dataclass(frozen=True)
class LivePlay:
    """A cluster and the jobs that come to it.

    Attributes:
        name: Its name.
        jobs: The jobs.
        until_s: Busy GPU-seconds are counted up to here; work is left then.
        types: GPU type of each node, each with two GPUs.
        conf: Further lines of slurm.conf.
        accounting: Commands of sacctmgr; without any there is no accounting.
    """

    name: str
    jobs: tuple[Job, ...]
    until_s: float
    types: tuple[str, ...] = ("fake",) * 4
    conf: str = ""
    accounting: tuple[tuple[str, ...], ...] = ()


@dataclass
class Outcome:
    """What came of one run of a play.

    Attributes:
        busy_gpu_s: GPU-seconds in which jobs ran, up to the play's end.
        started: Start of each job, by its place in the play; absent where it did not start.
        faults: What went wrong.
        stops: How many running jobs joulery stopped.
        overtaken: Urgent jobs that joulery held while it started one of the others.
    """

    busy_gpu_s: float
    started: dict[int, float]
    faults: list[str] = field(default_factory=list)
    stops: int = 0
    overtaken: list[int] = field(default_factory=list)


def _gpus(count: int, *more: str) -> tuple[str, ...]:
    return (f"--gres=gpu:{count}", "--ntasks=1", *more)


def plays(scale: float = 1.0) -> tuple[LivePlay, ...]:
    """The four plays; ``scale`` stretches them in time."""
    add = ("sacctmgr", "-i", "add")
    users = ((*add, "account", "lab"), *((*add, "user", user, "account=lab") for user in USERS))
    limit = (*users, ("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxTRESPerUser=gres/gpu=4"))
    qos = (
        *users,
        (*add, "qos", "urgent"),
        ("sacctmgr", "-i", "modify", "qos", "urgent", "set", "Priority=1000"),
        ("sacctmgr", "-i", "modify", "account", "lab", "set", "qos+=urgent"),
    )
    lengths = (7.0, 11.0, 5.0, 13.0)

    def length_s(number: int) -> float:
        return scale * lengths[number % len(lengths)]

    limited = [Job(0.0, length_s(n), _gpus(1), "daemon") for n in range(18)]
    limited += [Job(scale * 8.0, length_s(n), _gpus(1), "games") for n in range(14)]
    mixed = [Job(0.0, length_s(n), _gpus(1, "--partition=old")) for n in range(10)]
    mixed += [Job(scale * (n % 3) * 4.0, length_s(n), _gpus(1, "--partition=new")) for n in range(10)]
    mixed += [Job(scale * 3.0, length_s(n), ("--gres=gpu:a100:2", "--ntasks=1", "--partition=new")) for n in range(3)]
    arrays = [Job(0.0, length_s(n), _gpus(1)) for n in range(6)]
    arrays += [Job(scale, length_s(1), _gpus(1, "--array=1-14")), Job(scale * 2.0, length_s(2), _gpus(2))]
    arrays += [Job(scale * 4.0, length_s(3), _gpus(1, "--array=1-8%2"))]
    classes = [Job(0.0, length_s(n), _gpus(1, "--qos=normal"), USERS[n % 2]) for n in range(22)]
    classes += [Job(scale * 6.0, length_s(n), _gpus(1, "--qos=urgent"), USERS[n % 2]) for n in range(5)]
    two = "PartitionName=old Nodes=g[1-2] State=UP\nPartitionName=new Nodes=g[3-4] State=UP\n"
    until_s = scale * 30.0
    return (
        LivePlay("limit per user", tuple(limited), until_s, accounting=limit),
        LivePlay("two partitions, two GPU types", tuple(mixed), until_s, ("2080ti", "2080ti", "a100", "a100"), two),
        LivePlay("arrays", tuple(arrays), until_s),
        LivePlay("two QOS", tuple(classes), until_s, conf="PriorityWeightQOS=10000\n", accounting=qos),
    )


def run_play(play: LivePlay, *, scheduled: bool) -> Outcome:
    """One run of a play on a cluster of its own, under plain backfill or under joulery; two may run at once."""
    with _cluster(play) as cluster:
        (cluster.folder / "site.yaml").write_text(SITE)
        daemon = Daemon(cluster.folder / "site.yaml", cluster.env) if scheduled else None
        try:
            if daemon is not None:
                daemon.until(lambda entry: entry["kind"] == "round")
            begun_s = time.time()
            end_s = begun_s + play.until_s
            samples: list[tuple[float, int]] = []
            watch = threading.Thread(target=_watch, args=(cluster, end_s, samples))
            watch.start()
            numbers = _submitted(cluster, play, begun_s)
            watch.join()
            jobs = list(cluster.jobs().values())
        finally:
            code = 0 if daemon is None else daemon.stop()
        outcome = _outcome(jobs, numbers, begun_s, _integral(samples, end_s))
        if daemon is not None:
            outcome.stops = len(daemon.actions("stop"))
            outcome.faults += [daemon.errors] if code else []
            failed = [entry for entry in daemon.entries if entry.get("outcome") == "failed"]
            outcome.faults += [f"{entry['do']}: {entry['remark']}" for entry in failed]
            urgent = {number for number, place in numbers.items() if "--qos=urgent" in play.jobs[place].options}
            outcome.overtaken = overtaken(daemon.entries, urgent)
        return outcome


def overtaken(entries: list[dict[str, Any]], urgent: set[int]) -> list[int]:
    """The urgent jobs that were held while another job was started; by the log's order, whatever the time."""
    held: set[int] = set()
    found: dict[int, None] = {}
    for entry in entries:
        if entry["kind"] != "action" or entry.get("outcome") != "applied":
            continue
        if entry["do"] == "hold" and entry["job"] in urgent:
            held.add(entry["job"])
        elif entry["do"] in ("start", "release") and entry["job"] in urgent:  # released: it began before its hold came
            held.discard(entry["job"])
        elif entry["do"] == "start":
            found.update(dict.fromkeys(held))
    return list(found)


@contextmanager
def _cluster(play: LivePlay) -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "slurm"
        Path(name).chmod(0o755)
        if not play.accounting:
            with slurm_cluster(folder, types=play.types, nodes=len(play.types), conf_lines=play.conf) as cluster:
                (folder / "out").mkdir(mode=0o777)
                yield cluster
            return
        with (
            slurm_database(folder) as accounting,
            slurm_cluster(
                folder, types=play.types, nodes=len(play.types), conf_lines=play.conf, accounting=accounting
            ) as cluster,
        ):
            (folder / "out").mkdir()
            (folder / "out").chmod(0o777)
            for command in play.accounting:
                cluster.run(*command)
            yield cluster


def _submitted(cluster: SlurmCluster, play: LivePlay, begun_s: float) -> dict[int, int]:
    """Submit every job at its time; the place in the play by Slurm's number."""
    numbers: dict[int, int] = {}
    order = sorted(range(len(play.jobs)), key=lambda place: (play.jobs[place].at_s, place))
    for place in order:
        job = play.jobs[place]
        time.sleep(max(0.0, begun_s + job.at_s - time.time()))
        line = ["sbatch", "--parsable", "--requeue", f"--chdir={cluster.folder}/out", *job.options]
        line += [f"--wrap=sleep {job.length_s:g}"]
        who = ("setpriv", f"--reuid={job.user}", f"--regid={job.user}", "--clear-groups") if job.user else ()
        done = subprocess.run((*who, *line), env=cluster.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        numbers[int(done.stdout)] = place
    return numbers


def _watch(cluster: SlurmCluster, end_s: float, samples: list[tuple[float, int]]) -> None:
    """Time and GPUs of the jobs that run, four times a second."""
    while time.time() < end_s:
        running = [job for job in cluster.jobs().values() if job["job_state"] == "RUNNING"]
        samples.append((time.time(), sum(int(str(job["tres_per_node"]).rpartition(":")[2]) for job in running)))
        time.sleep(INTERVAL_S)


def _integral(samples: list[tuple[float, int]], end_s: float) -> float:
    """GPU-seconds of samples, each of which holds until the next."""
    ends = [*(at_s for at_s, _ in samples[1:]), end_s]
    return sum(gpus * (stop_s - at_s) for (at_s, gpus), stop_s in zip(samples, ends, strict=True))


def _outcome(jobs: list[dict[str, Any]], numbers: dict[int, int], begun_s: float, busy_gpu_s: float) -> Outcome:
    started: dict[int, float] = {}
    for job in jobs:
        start_s = float(job["start_time"] or 0.0)
        place = numbers.get(job["array_job_id"] or job["job_id"], numbers.get(job["job_id"]))
        if job["job_state"] != "PENDING" and start_s and place is not None:
            started[place] = min(start_s - begun_s, started.get(place, start_s - begun_s))
    states = {job["job_state"] for job in jobs} - {"COMPLETED", "RUNNING", "PENDING", "COMPLETING"}
    return Outcome(busy_gpu_s, started, [f"jobs ended as {sorted(states)}"] if states else [])
