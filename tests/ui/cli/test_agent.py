"""joulery agent as a process, with a job to meter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SITE = """\
joulery: 1
meters: {use: [cpu-model], cpu_model: {idle: 20 W, max: 60 W}}
jobs: {backend: slurm, slurm: {meters: spool}}
"""


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "joulery", "agent", "site.yaml", *flags],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_job_of_this_node_is_metered_into_the_spool(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    busy = subprocess.Popen(
        [sys.executable, "-c", "while True: pass"],
        env={**os.environ, "SLURM_JOB_ID": "4711", "SLURMD_NODENAME": "n7"},
    )
    try:
        done = run(tmp_path, "--once", "--sample", "700 ms", "--node", "n7", "--json")
    finally:
        busy.kill()
        busy.wait()

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert 0 < said["jobs"]["4711"]["slot_j"] <= said["jobs"]["4711"]["energy_j"] <= said["machine_j"]
    (file,) = (tmp_path / "spool").iterdir()
    assert file.name.startswith("n7.")
    assert set(json.loads(file.read_text())["jobs"]) == {"4711"}


def test_a_site_without_a_spool_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("joulery: 1\njobs: {backend: slurm}\n")
    done = run(tmp_path, "--once")

    assert done.returncode == 2
    assert "jobs.slurm.meters" in done.stderr
    assert "Traceback" not in done.stderr
