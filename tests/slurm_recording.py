"""What a Slurm prints of a few jobs, cut to what is read of it: ``python -m tests.slurm_recording``.

It records the Slurm that ``JOULERY_SLURM`` names, or the installed one. ``tests/adapters/clusters/recorded`` has such
outputs. Times and the scratch folder are replaced, so that recordings differ only where the versions do.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from joulery.adapters.clusters.slurm_commands import command
from joulery.adapters.clusters.slurm_nodes import FIELDS
from joulery.adapters.clusters.slurm_records import COLUMNS
from tests.slurm_cluster import slurm_cluster
from tests.waiting import wait_until

_JOB = (
    "job_id", "name", "user_name", "user_id", "partition", "job_state", "state_reason", "submit_time", "node_count",
    "cpus", "tasks", "tres_per_node", "tres_per_job", "tres_per_task", "tres_req_str", "comment", "admin_comment",
    "batch_flag", "requeue", "array_job_id", "array_task_id", "array_task_string", "array_max_tasks", "het_job_id",
    "het_job_offset", "restart_cnt", "priority", "standard_output", "current_working_directory", "account", "qos",
    "time_limit", "nodes", "features", "start_time", "eligible_time", "licenses",
)  # fmt: skip
_TIMES = ("submit_time", "start_time", "eligible_time")
_AT_S = 1_795_000_000


def record() -> dict[str, Any]:
    """Jobs as JSON and as text, and the nodes, of a cluster with one job of each sort."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "slurm"
        with slurm_cluster(folder, nodes=2, types=("a100", "2080ti"), conf_lines="Licenses=tool:1\n") as cluster:
            script = folder / "train.sh"
            script.write_text("#!/bin/bash\nsleep 600\n")
            first = cluster.submit(script, "--gres=gpu:a100:2", "--ntasks=1", "--comment=joulery:min=1,max=4")
            cluster.submit(script, "--gpus=2", "--constraint=2080ti", "--time=30", "--output=%x-%j.log")
            wait_until(lambda: cluster.run("squeue", "-h", "-t", "R", "-o", "%i").split() == [first, "2"], "two jobs")
            cluster.submit(script, "--gres=gpu:a100:1", "--nodes=1", "--licenses=tool:1")
            cluster.submit(script, "--gres=gpu:1", "--array=1-5%2")
            cluster.submit(script, "--ntasks=2", "--gpus-per-task=1", "--hold")
            cluster.run("scontrol", "update", "JobId=5", "AdminComment=green:held rank 1 of 2")
            components = ("--gres=gpu:1", "--nodes=1", ":", "--gres=gpu:2", "--nodes=1")
            cluster.run("sbatch", "--requeue", "--hold", f"--chdir={folder}", *components, str(script))
            gone = cluster.submit(script, "--gres=gpu:1", "--hold")
            cluster.run("scancel", gone)
            columns = ",".join(f"{field}:{width}" for field, width in COLUMNS)
            nodes = ",".join(f"{field}:{width}" for field, width in FIELDS)
            jobs = json.loads(cluster.run(*command("jobs")))["jobs"]
            return {
                "version": cluster.run("sinfo", "-V").split()[-1],
                "jobs": [_cut(job, str(folder)) for job in jobs],
                "table": cluster.run(*command("jobs as text", columns=columns)).splitlines(),
                "nodes": cluster.run(*command("nodes", columns=nodes)).splitlines(),
            }


def _cut(job: dict[str, Any], folder: str) -> dict[str, Any]:
    found = json.loads(json.dumps({name: job[name] for name in _JOB if name in job}).replace(folder, "/work"))
    for name in _TIMES:
        at_s = found[name]["number"] if isinstance(found[name], dict) else found[name]
        if at_s and isinstance(found[name], dict):
            found[name]["number"] = _AT_S
        elif at_s:
            found[name] = _AT_S
    return dict(found)


if __name__ == "__main__":
    json.dump(record(), sys.stdout, indent=1)
    print()
