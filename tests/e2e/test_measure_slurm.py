"""``srun joulery measure`` on two nodes of a real Slurm, with two tasks each: one report, each node in it once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from joulery.store.run.directory import open_run
from tests.slurm_cluster import missing, slurm_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

JOULERY = [sys.executable, "-m", "joulery"]
JOB = """\
import os, time
end = time.process_time() + (0.1 if os.environ["SLURMD_NODENAME"] == "m1" else 0.7)
while time.process_time() < end: pass
print(os.environ["SLURMD_NODENAME"], os.environ["SLURM_PROCID"])
"""


def test_a_job_on_two_nodes_has_one_report_and_each_node_counts_once(tmp_path: Path) -> None:
    """Both slurmd share this machine: nodes are reported apart by what srun says, never by the host's name."""
    (tmp_path / "job.py").write_text(JOB)
    tasks = ["srun", "--nodes=2", "--ntasks-per-node=2", f"--chdir={tmp_path}"]
    meter = ["--meter", "fake:40", "--idle", "share"]
    command = [*tasks, *JOULERY, "measure", *meter, "--", sys.executable, "job.py"]
    with slurm_cluster(tmp_path / "slurm", nodes=2, gpus=1, name="m") as cluster:
        ran = subprocess.run(command, env=cluster.env, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.split()) == ["0", "1", "2", "3", "m1", "m1", "m2", "m2"]
    assert "the job, 2 of 2 nodes" in ran.stderr
    (job,) = (tmp_path / "runs").iterdir()
    assert sorted(folder.name for folder in job.iterdir()) == ["node-0", "node-1"]
    nodes = [open_run(folder) for folder in sorted(job.iterdir())]
    assert [run.manifest["job"]["node"] for run in nodes] == [0, 1]
    # Two tasks of 0.1 s on the first, two of 0.7 s on the second: equal if each were charged with the other's.
    first_s, second_s = (float(run.series("busy")["run_s"].sum()) for run in nodes)
    assert second_s - first_s > 0.6
    reported = subprocess.run([*JOULERY, "report", str(job), "--json"], capture_output=True, text=True)
    together = json.loads(reported.stdout)
    assert [run["path"] for run in together["runs"]] == [str(run.path) for run in nodes]
    energies_j = [run.report["energy_j"] for run in nodes if run.report is not None]
    assert together["energy_j"] == pytest.approx(sum(energies_j), rel=1e-9)
