"""Forty checkpointing jobs beside a real Slurm: quantum 20 s, a daemon killed mid-resize, slurmctld restarted.

``python -m tests.e2e.slurm_forty`` (root, slurm-wlm). Prints one JSON object; exits 1 when a job was lost, run twice or
left held. Takes up to fifteen minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.slurm_jobs import JOB, Daemon, whole
from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster

JOBS, EPOCHS = 40, 60
SITE = """\
joulery: 1
mode: act
carbon: {kind: constant, intensity: 250 g/kWh, source: "stated for a benchmark"}
jobs:
  backend: slurm
  quantum: 20 s
  poll: 1 s
  restart: 6 s
  measure: 8 s
  patience: 30 s
  power: {slot: 200 W}
  policy: {theta: 100 %, cap: 4}
  slurm: {progress: progress}
"""


def states(cluster: SlurmCluster) -> dict[int, tuple[str, str]]:
    jobs = json.loads(cluster.run("squeue", "--json"))["jobs"]
    return {job["job_id"]: (job["job_state"], job["admin_comment"]) for job in jobs}


def play(cluster: SlurmCluster) -> dict[str, object]:
    (cluster.folder / "site.yaml").write_text(SITE)
    (cluster.folder / "progress").mkdir()
    (cluster.folder / "job.py").write_text(JOB)
    jobs = []
    for number in range(JOBS):
        script = cluster.folder / f"job-{number}.sh"
        power = 1.0 if number % 2 else 0.1
        script.write_text(f"#!/bin/bash\nexec {sys.executable} job.py {EPOCHS} 0.5 {power}\n")
        jobs.append(
            int(
                cluster.submit(
                    script,
                    "--gres=gpu:1",
                    "--ntasks=1",
                    f"--job-name=kind{number % 2}",
                    "--comment=joulery:min=1,max=4",
                )
            )
        )
    begun_s = time.monotonic()
    daemon = Daemon(cluster.folder / "site.yaml", cluster.env)
    daemon.until(
        lambda entry: entry.get("do") == "stop" and " to " in entry["reason"] and "from" in entry["reason"], 120
    )
    daemon.kill()
    stops = daemon.actions("stop")
    daemon = Daemon(cluster.folder / "site.yaml", cluster.env)
    time.sleep(30)
    cluster.stop_controller()
    time.sleep(3)
    cluster.start_controller()
    while {state for state, _ in states(cluster).values()} - {"COMPLETED", "FAILED", "CANCELLED"}:
        if time.monotonic() - begun_s > 900:
            break
        time.sleep(1)
    daemon.stop()
    end = states(cluster)
    stops += daemon.actions("stop")
    reasons = [entry["reason"] for entry in stops]
    return {
        "jobs": len(end),
        "numbers_kept": set(end) == set(jobs),
        "states": sorted({state for state, _ in end.values()}),
        "left_held": [job for job, (_, tag) in end.items() if tag],
        "faults": [fault for job in jobs for fault in whole(cluster.folder / f"slurm-{job}.out", EPOCHS)],
        "grown": sum("from 1 to 2" in reason or "from 2 to 3" in reason for reason in reasons),
        "shrunk": sum("from 2 to 1" in reason or "from 3 to 2" in reason for reason in reasons),
        "preempted": sum("go to others" in reason for reason in reasons),
        "took_s": round(time.monotonic() - begun_s),
    }


def main() -> int:
    if reason := missing():
        print(reason)
        return 2
    with tempfile.TemporaryDirectory() as folder, slurm_cluster(Path(folder) / "slurm") as cluster:
        result = play(cluster)
    print(json.dumps(result, indent=2))
    good = not result["faults"] and not result["left_held"] and result["numbers_kept"]
    return 0 if good and result["states"] == ["COMPLETED"] else 1


if __name__ == "__main__":
    sys.exit(main())
