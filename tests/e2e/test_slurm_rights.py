"""The rights that joulery needs beside a real Slurm with accounting, tested as users who have only those."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.clusters.slurm_commands import Done
from joulery.adapters.clusters.slurm_rights import slurm_rights
from tests.e2e.slurm_jobs import Daemon
from tests.slurm_accounting import accounting_missing, slurm_database
from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster
from tests.slurm_users import commands_of
from tests.waiting import wait_until

_REASON = missing() or accounting_missing()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]

SITE = """\
joulery: 1
mode: act
carbon: {kind: constant, intensity: 250 g/kWh, source: "stated for a test"}
jobs:
  backend: slurm
  state: STATE
  quantum: 2 s
  poll: 300 ms
  restart: 1 s
  measure: 1500 ms
  patience: 3 s
  policy: {theta: 100 %}
"""
OPERATOR, OWNER, OTHER = "daemon", "games", "mail"
"""Users that every Debian has, and that own nothing here."""


@dataclass
class Site:
    """A cluster with an operator and two ordinary users."""

    cluster: SlurmCluster
    waits: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def as_user(self, user: str, *words: str) -> Done:
        """What a command came to, run by that user."""
        line = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *words)
        done = subprocess.run(line, env=self.cluster.env, capture_output=True, text=True, check=False)
        return Done(done.returncode, done.stdout, done.stderr)

    def submit(self, user: str) -> int:
        """A job of that user that sleeps."""
        where = self.cluster.folder / user
        done = self.as_user(
            user, "sbatch", "--parsable", "--requeue", f"--chdir={where}", "--gres=gpu:1", "--comment=mine",
            str(self.cluster.folder / "sleep.sh"),
        )  # fmt: skip
        assert done.code == 0, done.err
        return int(done.out)

    def jobs(self) -> dict[int, dict[str, Any]]:
        """What Slurm says of every job."""
        return self.cluster.jobs()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with (
        tempfile.TemporaryDirectory() as name,
        _open_to_all(Path(name)) as folder,
        slurm_database(folder) as accounting,
        slurm_cluster(folder, nodes=1, gpus=2, accounting=accounting) as cluster,
    ):
        (folder / "sleep.sh").write_text("#!/bin/bash\nsleep 600\n")
        cluster.run("sacctmgr", "-i", "add", "account", "lab")
        for user in (OPERATOR, OWNER, OTHER):
            cluster.run("sacctmgr", "-i", "add", "user", user, "account=lab")
            (folder / user).mkdir()
            (folder / user).chmod(0o777)
        cluster.run("sacctmgr", "-i", "modify", "user", OPERATOR, "set", "adminlevel=Operator")
        yield Site(cluster)


@contextmanager
def _open_to_all(folder: Path) -> Iterator[Path]:
    folder.chmod(0o755)
    yield folder / "slurm"


def test_each_right_is_tested_by_doing_it_and_nothing_is_left(site: Site) -> None:
    def granted(user: str) -> dict[str, bool]:
        return {
            right.name: right.granted for right in slurm_rights(lambda words: site.as_user(user, *words))
        }  # fmt: skip

    operator, owner = granted(OPERATOR), granted(OWNER)
    only = {"write AdminComment"}
    assert {name for name, has in operator.items() if not has} == only
    assert {name for name, has in owner.items() if not has} == {*only, "change jobs of all users (SiteFactor)"}
    assert {job["job_state"] for job in site.jobs().values()} <= {"CANCELLED"}


@pytest.mark.parametrize("user", [OPERATOR, OWNER])
def test_jobs_are_scheduled_by_a_user_with_only_those_rights(site: Site, user: str) -> None:
    """An operator schedules all jobs; an ordinary user schedules only his own."""
    folder = site.cluster.folder / user
    (folder / "site.yaml").write_text(SITE.replace("STATE", str(folder / "state")))
    jobs = [site.submit(OWNER) for _ in range(4)] + [site.submit(OTHER) for _ in range(3)]
    others = set(jobs[4:])
    daemon = Daemon(folder / "site.yaml", commands_of(site.cluster, user))
    try:
        daemon.until(lambda entry: entry.get("do") == "hold" and entry["outcome"] == "applied")
        held = wait_until(lambda: {n for n, job in site.jobs().items() if "joulery:held" in job["comment"]}, "a hold")
        at = len(daemon.entries)
        daemon.until(lambda entry: [e["kind"] for e in daemon.entries[at:]].count("round") > 2)
        denied = [entry for entry in daemon.entries if entry.get("outcome") == "failed"]
        touched = {entry["job"] for entry in daemon.actions("hold") if entry["outcome"] == "applied"}
    finally:
        code = daemon.stop()
        for job in jobs:
            site.cluster.run("scancel", str(job))
        wait_until(lambda: not site.cluster.run("squeue", "-h").strip(), "the end of every job")
    assert code == 0, daemon.errors
    assert held and all(job["comment"] == "mine" for n, job in site.jobs().items() if n in jobs), "the mark is gone"
    assert len(denied) <= 1, denied
    if user == OPERATOR:
        assert not denied and touched & others
    else:
        assert "only an operator" in denied[0]["remark"]
        assert touched and not touched & others


def test_doctor_prints_the_rights_of_its_user(site: Site) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "joulery", "doctor", "--slurm", "--json"],
        env={**os.environ, **site.cluster.env}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    checks = [check for check in json.loads(done.stdout)["checks"] if check["area"] == "slurm"]
    assert len(checks) == 5 and {check["status"] for check in checks} == {"ok"}, "root is an administrator"
    assert not Path(site.cluster.folder / "slurm-1.out").exists()
