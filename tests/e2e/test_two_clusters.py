"""Two real Slurms on this machine in one site file: a node of each has the same name, and a job the same number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

SITE = """\
joulery: 1
name: two
mode: act
carbon: {{kind: constant, intensity: 250 g/kWh, source: "stated for a test"}}
meters: {{cpu_model: {{idle: 20 W, max: 60 W}}}}
clusters:
- name: east
  jobs: {{backend: slurm, quantum: 2 s, poll: 300 ms, policy: {{theta: 100 %}},
    slurm: {{conf: {east}/slurm.conf, meters: energy}}}}
- name: west
  jobs: {{backend: slurm, quantum: 2 s, poll: 300 ms, policy: {{theta: 100 %}},
    slurm: {{conf: {west}/slurm.conf, meters: energy}}}}
"""


def joulery(folder: Path, *words: str, code: int = 0) -> tuple[str, str]:
    env = {key: value for key, value in os.environ.items() if key != "SLURM_CONF"}
    argv = [sys.executable, "-m", "joulery", *words]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def runs(cluster: SlurmCluster, job: int) -> bool:
    return cluster.run("squeue", "-h", "-t", "R", "-o", "%i").split() == [f"{job}"]


def reason(cluster: SlurmCluster, job: str) -> str:
    """Why a job waits, as Slurm says."""
    return cluster.run("squeue", "-h", "-j", job, "-o", "%r").strip()


def test_jobs_of_two_clusters_do_not_mix(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("east", "west")}
    (tmp_path / "site.yaml").write_text(SITE.format(**folders))
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nwhile [ ! -e enough ]; do sleep 0.05; done\n")
    with (
        slurm_cluster(folders["east"], nodes=1, name="y", cluster="east") as east,
        slurm_cluster(folders["west"], nodes=1, name="y", cluster="west") as west,
    ):
        west.run("scancel", west.submit(script, "--hold"))
        for cluster, first in ((east, 1), (west, 2)):
            name = cluster.folder.name
            assert cluster.submit(script, "--gres=gpu:2", f"--job-name=of-{name}") == f"{first}"
            assert cluster.submit(script, "--gres=gpu:1", f"--job-name=next-{name}") == f"{first + 1}"
            wait_until(partial(runs, cluster, first), f"job {first} of {name} starts")

        said, _ = joulery(tmp_path, "jobs", "--json")
        rows = [(row["cluster"], row["job"], row["name"], row["state"]) for row in json.loads(said)["jobs"]]
        assert sorted(row for row in rows if row[3] in ("running", "waiting")) == [
            ("east", 1, "of-east", "running"), ("east", 2, "next-east", "waiting"),
            ("west", 2, "of-west", "running"), ("west", 3, "next-west", "waiting"),
        ]  # fmt: skip
        assert joulery(tmp_path, "jobs", "--cluster", "west")[0].count("of-west") == 1

        sampled, _ = joulery(tmp_path, "agent", "site.yaml", "--cluster", "east", "--node", "y1", "--once", "--json")
        assert list(json.loads(sampled.splitlines()[-1])["jobs"]) == ["1"], "not the job of the other node of this name"
        assert [file.parent.name for file in (tmp_path / "energy").rglob("*.jsonl")] == ["east"]

        joulery(tmp_path, "schedule", "site.yaml", "--cluster", "east", "--once", "--mode", "act", "--json")
        assert (tmp_path / "joulery-jobs/east/journal-act.jsonl").exists()
        assert not (tmp_path / "joulery-jobs/west").exists()
        # Slurm gives no reason until its scheduler has looked at the job.
        wait_until(lambda: reason(east, "2") in ("JobHeldAdmin", "Resources", "Priority"), "why job 2 waits")
        assert "Held" not in reason(west, "3")

        _, error = joulery(tmp_path, "schedule", "site.yaml", "--once", code=2)
        assert "which cluster?" in error and "east, west" in error
        swapped = (tmp_path / "site.yaml").read_text().replace(f"{folders['east']}/", f"{folders['west']}/")
        (tmp_path / "swapped.yaml").write_text(swapped)
        _, error = joulery(tmp_path, "schedule", "swapped.yaml", "--cluster", "east", "--once", code=2)
        assert "another cluster (got west, expected east)" in error
        for cluster in (east, west):
            (cluster.folder / "enough").touch()
