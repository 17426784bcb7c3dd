"""joulery agent as a process, with a job to meter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from joulery.app.node_agent import AgentConfig
from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobState
from joulery.domain.energy.channel import MeterSpec
from joulery.domain.errors import ConfigError
from joulery.runtime.schedule.polling import AgentTimes
from joulery.runtime.schedule.spool import SpoolReader, machine_id

SITE = """\
joulery: 1
meters: {use: [cpu-model], cpu_model: {idle: 20 W, max: 60 W}}
jobs: {backend: slurm, slurm: {meters: spool}}
"""


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "joulery", "agent", "site.yaml", *flags],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_job_of_this_node_is_metered_into_the_spool(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    busy = subprocess.Popen(
        [sys.executable, "-c", "while True: pass"],
        env={**os.environ, "SLURM_JOB_ID": "4711", "SLURMD_NODENAME": "n7"},
    )
    try:
        flags = ("--once", "--period", "700 ms", "--node", "n7", "--json")
        both = [run(tmp_path, *flags), run(tmp_path, *flags)]
    finally:
        busy.kill()
        busy.wait()

    spent_j = 0.0
    for done in both:
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert 0 < said["jobs"]["4711"]["slot_j"] <= said["jobs"]["4711"]["energy_j"] <= said["machine_j"]
        spent_j += said["jobs"]["4711"]["energy_j"]
    files = list((tmp_path / "spool").glob("n7.*.jsonl"))
    assert len(files) == (1 if machine_id() else 2), "the second took over what the first left"
    job = ClusterJob(4711, "job", "ada", 0.0, JobState.RUNNING)
    total = SpoolReader(tmp_path / "spool", pytest.fail).read(ClusterSnapshot(1, (job,)))[4711]
    assert total.energy_j == pytest.approx(spent_j)


def test_what_samples_has_nothing_in_memory_that_only_the_site_file_needs() -> None:
    heavy = {"pydantic", "yaml", "httpx", "pyarrow", "scipy", "joulery.config"}
    code = "import sys, joulery.ui.cli.agent, joulery.app.node_agent; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "joulery.runtime.schedule.energy" in done.stdout.split()
    assert not heavy & set(done.stdout.split())


def test_orders_survive_the_way_to_the_process_that_samples() -> None:
    orders = AgentConfig(
        "/shared/energy", "n7", "n7", (MeterSpec("cpu-model", {"idle_w": 20.0, "max_w": 60.0}),), AgentTimes(5.0, 3),
        "/run/prolog", ("/run/socket", "/shared/progress"),
    )  # fmt: skip
    assert AgentConfig.from_json(orders.to_json()) == orders
    plain = AgentConfig("/shared/energy", "n7", "", None, AgentTimes())
    assert AgentConfig.from_json(plain.to_json()) == plain


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"meters": 3, "progress": null}'])
def test_orders_that_are_none_are_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="agent"):
        AgentConfig.from_json(text)


def test_a_progress_socket_needs_a_folder_in_the_site(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    done = run(tmp_path, "--once", "--progress-socket", "socket")

    assert done.returncode == 2
    assert "jobs.slurm.progress" in done.stderr


def test_a_site_without_a_spool_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("joulery: 1\njobs: {backend: slurm}\n")
    done = run(tmp_path, "--once")

    assert done.returncode == 2
    assert "jobs.slurm.meters" in done.stderr
    assert "Traceback" not in done.stderr
