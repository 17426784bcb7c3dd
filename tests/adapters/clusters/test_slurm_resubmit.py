"""Another size by submitting anew, where Slurm refuses a resize."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.clusters.slurm import SlurmBackend, SlurmScope
from joulery.adapters.clusters.slurm_commands import Done
from joulery.adapters.clusters.slurm_records import SlurmRecord, parse_jobs
from joulery.adapters.clusters.slurm_resubmit import resubmission
from joulery.domain.cluster import Start
from joulery.domain.errors import ActuationError
from joulery.user import account_name
from tests.adapters.clusters.fake_slurm import FakeSlurm

MORE = {
    "user_name": account_name(os.geteuid()),
    "current_working_directory": "/home/ada",
    "account": "lab",
    "time_limit": 90,
}


class Cluster:
    """The fake, with sbatch, scancel and the scripts of jobs."""

    def __init__(self, *, crash: bool = False) -> None:
        self.slurm, self.submitted, self.crash = FakeSlurm(), [], crash

    def __call__(self, command: Sequence[str]) -> Done:
        if tuple(command[:3]) == ("scontrol", "write", "batch_script"):
            Path(command[4]).write_text("#!/bin/bash\n")
            return Done(0, "", "")
        if command[0] == "sbatch":
            self.submitted.append(tuple(command))
            comment = next(word.partition("=")[2] for word in command if word.startswith("--comment="))
            self.slurm.submit(70 + len(self.submitted), comment=comment, tres_per_node="", tres_per_task="gres:gpu:1",
                              tasks=2, cpus=2, **MORE)  # fmt: skip
            return Done(0, f"{70 + len(self.submitted)}\n", "")
        if command[0] == "scancel":
            if self.crash:
                self.crash = False
                return Done(1, "", "error: no reason")
            self.slurm.jobs[int(command[1])]["job_state"] = "CANCELLED"
            return Done(0, "", "")
        return self.slurm(command)


def record(**changes: Any) -> SlurmRecord:
    slurm = FakeSlurm()
    slurm.submit(7, **{**MORE, **changes})
    return parse_jobs(json.dumps({"jobs": list(slurm.jobs.values())}))[0]


def test_a_refused_resize_becomes_a_new_job_in_the_place_of_the_old(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.slurm.submit(7, tres_per_node="", tres_per_task="gres:gpu:1", **MORE)
    backend = SlurmBackend(cluster, SlurmScope(resubmit=True))
    assert backend.apply(Start(7, 2)).startswith("as job 71, because: job 7 has --gpus-per-task")
    by_id = {job.id: job for job in backend.snapshot().jobs}
    assert by_id[71].follows == 7 and by_id[7].state.over and by_id[71].max_slots == 4
    with pytest.raises(ActuationError, match="gpus-per-task"):
        SlurmBackend(cluster, SlurmScope()).apply(Start(71, 1))


def test_a_crash_in_between_does_not_make_two_of_it() -> None:
    cluster = Cluster(crash=True)
    cluster.slurm.submit(7, tres_per_node="", tres_per_task="gres:gpu:1", **MORE)
    backend = SlurmBackend(cluster, SlurmScope(resubmit=True))
    with pytest.raises(ActuationError, match="cannot make room for job 71"):
        backend.apply(Start(7, 2))
    assert backend.apply(Start(7, 2)).startswith("as job 71")
    assert len(cluster.submitted) == 1


def test_what_is_asked_for_anew() -> None:
    flags = resubmission(record(comment="mine joulery:min=1,max=4"), 4, 2)
    for flag in ("--parsable", "--requeue", "--open-mode=append", "--nodes=2",
                 "--gres=gpu:2", "--ntasks=4", "--dependency=afterany:7", "--account=lab", "--time=90",
                 "--chdir=/home/ada", "--output=/home/ada/slurm-7.out", "--export=ALL,JOULERY_JOB=7",
                 "--comment=mine joulery:min=1,max=4 joulery:family=7 joulery:after=7"):  # fmt: skip
        assert flag in flags, flag
    again = resubmission(record(comment="joulery:min=1,max=4 joulery:family=3 joulery:after=5"), 1, 2)
    assert "--comment=joulery:min=1,max=4 joulery:family=3 joulery:after=7" in again
    assert "--export=ALL,JOULERY_JOB=3" in again
    assert "--gpus=3" in resubmission(record(tres_per_node="", tres_per_job="gres:gpu:1"), 3, 2)
    tasks = resubmission(record(tres_per_node="", tres_per_task="gres:gpu:2"), 4, 2)
    assert {"--ntasks=2", "--gpus-per-task=2"} < set(tasks)
    with pytest.raises(ActuationError, match="2 GPUs a task, and 3"):
        resubmission(record(tres_per_node="", tres_per_task="gres:gpu:2"), 3, 2)


def test_only_root_submits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 65534)
    with pytest.raises(ActuationError, match="only root can submit for ada"):
        resubmission(record(user_name="ada"), 1, 2)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert {"--uid=ada", "--get-user-env"} < set(resubmission(record(user_name="ada"), 1, 2))


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [(90, 90), ({"set": True, "number": 5}, 5), ({"infinite": True}, 0), (4294967295, 0), (525600, 0), (None, 0)],
)
def test_time_limits_of_every_version(limit: Any, minutes: int) -> None:
    assert record(time_limit=limit).limit_min == minutes
