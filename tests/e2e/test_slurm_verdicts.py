"""No job stops for one that a real Slurm would not start on its slots: nodes, reservations, whole nodes, limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from joulery.adapters.clusters.slurm import open_slurm
from tests.e2e.slurm_jobs import Daemon
from tests.slurm_accounting import accounting_missing, slurm_database
from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

SITE = """\
joulery: 1
mode: act
carbon: {kind: constant, intensity: 250 g/kWh, source: "stated for a test"}
jobs:
  backend: slurm
  quantum: 1 s
  poll: 200 ms
  restart: 1 s
  start_within: 3 s
  power: {slot: 200 W}
  policy: {theta: 100 %}
"""
LINES = """\
PriorityWeightPartition=100000
PartitionName=high Nodes=g[1-3] PriorityJobFactor=65000 State=UP
PartitionName=short Nodes=g[1-3] PriorityJobFactor=65000 MaxTime=5 State=UP
"""
HIGH = ("--partition=high",)


def reserved(cluster: SlurmCluster, name: str, start: str, node: str, user: str) -> None:
    times = (f"StartTime={start}", "Duration=120")
    cluster.run(
        "scontrol", "create", "reservation", f"ReservationName={name}", *times, f"Nodes={node}", f"Users={user}"
    )


def submit(cluster: SlurmCluster, *options: str) -> int:
    """A job of one GPU that sleeps."""
    return int(cluster.submit(cluster.folder / "sleep.sh", "--ntasks=1", "--gres=gpu:1", "--time=10", *options))


@contextmanager
def scheduled(cluster: SlurmCluster) -> Iterator[Daemon]:
    """joulery beside it, after its first round."""
    (cluster.folder / "site.yaml").write_text(SITE)
    daemon = Daemon(cluster.folder / "site.yaml", cluster.env)
    try:
        daemon.until(lambda entry: entry["kind"] == "round")
        yield daemon
    finally:
        code = daemon.stop()
    assert code == 0, daemon.errors


def none_stops(cluster: SlurmCluster, daemon: Daemon, stay: set[int], jobs: Mapping[str, tuple[str, ...]]) -> None:
    """Submit each job, see it wait, and see that no other stops for it."""
    for why, options in jobs.items():
        at = len(daemon.entries)
        waits = submit(cluster, *options)
        daemon.until(lambda _, at=at: [e["kind"] for e in daemon.entries[at:]].count("round") > 4)
        stops = [entry["reason"] for entry in daemon.entries[at:] if entry.get("do") == "stop"]
        assert not stops and stay <= running(cluster), (why, stops)
        assert waits not in running(cluster), why
        cluster.run("scancel", str(waits))


def running(cluster: SlurmCluster) -> set[int]:
    return {number for number, job in cluster.jobs().items() if job["job_state"] == "RUNNING"}


ON_NODES = {
    "required node": (*HIGH, "-w", "g1"),
    "excluded nodes": (*HIGH, "-x", "g2,g3"),
    "reserved before it would end": (*HIGH, "-x", "g2", "--time=60"),
    "in a reservation to come": (*HIGH, "--reservation=soon"),
    "whole node": (*HIGH, "-x", "g3", "--exclusive"),
    "wrong time": ("--partition=short", "--time=60"),
}
LIMITED = {
    "GPUs of its QOS": (*HIGH, "--qos=capped"),
    "time of its QOS": (*HIGH, "--qos=brief", "--time=60"),
    "GPUs of its account": (*HIGH, "--account=lab"),
    "license": (*HIGH, "--licenses=tool:1"),
    "node that is drained": (*HIGH, "-w", "g3"),
}


def test_no_job_stops_for_one_that_cannot_run_on_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On g1 and g2 are jobs that may not be stopped, g3 is reserved in half an hour; g4 is reserved for its job."""
    with slurm_cluster(tmp_path / "slurm", nodes=4, gpus=2, conf_lines=LINES) as made:
        (made.folder / "sleep.sh").write_text("#!/bin/bash\nsleep 600\n")
        reserved(made, "soon", "now+1800", "g3", "root")
        reserved(made, "now", "now", "g4", "root")
        for node in ("g1", "g1", "g2"):
            submit(made, "-w", node, "--no-requeue")
        inside = submit(made, "--reservation=now")
        stoppable = {submit(made, "-w", node) for node in ("g2", "g3", "g3")}
        wait_until(lambda: len(running(made)) == 7, "seven jobs that run")
        monkeypatch.setenv("SLURM_CONF", made.env["SLURM_CONF"])
        with scheduled(made) as daemon:
            none_stops(made, daemon, stoppable, ON_NODES)
            seen = open_slurm().snapshot()
            assert {node.name for node in seen.nodes} == {"g1", "g2", "g3"}, "what is reserved is no capacity"
            assert [job.exempt for job in seen.jobs if job.id == inside] == ["in the reservation now: Slurm places it"]
            whole = submit(made, *HIGH, "-x", "g1,g2", "--exclusive")
            wait_until(lambda: whole in running(made), "the start of a job that takes a whole node")
        stopped = [entry["job"] for entry in daemon.actions("stop")]

        assert len(stopped) == 2 and set(stopped) < stoppable, stopped
        assert [job.slots for job in open_slurm().snapshot().jobs if job.id == whole] == [2]


@pytest.mark.skipif(accounting_missing() is not None, reason=str(accounting_missing()))
def test_no_job_stops_for_one_that_a_limit_keeps_from_starting(tmp_path: Path) -> None:
    """Limits of a QOS and of an account, a license, a drained node; then one job that nothing keeps."""
    folder = tmp_path / "slurm"
    with (
        slurm_database(folder) as accounting,
        slurm_cluster(folder, nodes=3, gpus=2, conf_lines=LINES + "Licenses=tool:1\n", accounting=accounting) as made,
    ):
        (made.folder / "sleep.sh").write_text("#!/bin/bash\nsleep 600\n")
        change = ("sacctmgr", "-i")
        for qos, limit in (("capped", "GrpTRES=gres/gpu=1"), ("brief", "MaxWall=5")):
            made.run(*change, "add", "qos", qos)
            made.run(*change, "modify", "qos", qos, "set", limit)
        made.run(*change, "add", "account", "lab", "GrpTRES=gres/gpu=1")
        made.run(*change, "add", "user", "root", "account=lab")
        made.run(*change, "modify", "user", "root", "set", "qos+=normal,capped,brief")
        made.run("scontrol", "update", "NodeName=g3", "State=DRAIN", "Reason=test")
        for options in (("--qos=capped",), ("--account=lab",), ("--licenses=tool:1",)):
            submit(made, "--no-requeue", *options)
        stoppable = {submit(made)}
        wait_until(lambda: len(running(made)) == 4, "four jobs that run")
        with scheduled(made) as daemon:
            none_stops(made, daemon, stoppable, LIMITED)
            free = submit(made, *HIGH)
            wait_until(lambda: free in running(made), "the start of a job that nothing keeps")
        assert [entry["job"] for entry in daemon.actions("stop")] == list(stoppable)
