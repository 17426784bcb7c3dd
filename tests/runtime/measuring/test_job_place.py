"""Which part of a job a process is: by torchrun, by Slurm, as stated, or alone."""

import pytest

from joulery.domain.errors import ConfigError
from joulery.runtime.measuring.job_place import ALONE, JobPlace, detached, job_place

TORCHRUN = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_NODEID": "3", "SLURM_STEP_NUM_NODES": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ALONE),
        (TORCHRUN, JobPlace(1, 2, 3, 4)),
        ({**SLURM, **TORCHRUN}, JobPlace(1, 2, 3, 4)),
        (SLURM, JobPlace(3, 4, 0, 1, "slurm-17.0")),
        ({**SLURM, "SLURM_NODEID": "2", "SLURM_LOCALID": "1"}, JobPlace(2, 4, 1, 2, "slurm-17.0")),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many", "SLURM_LOCALID": "5"}, JobPlace(3, 4, 5, 6, "slurm-17.0")),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "../x"}, JobPlace(3, 4, 0, 1)),
        ({**TORCHRUN, "GROUP_RANK": "2"}, ALONE),
        ({**TORCHRUN, "LOCAL_RANK": ""}, ALONE),
        ({key: SLURM[key] for key in ("SLURM_NODEID", "SLURM_JOB_ID")}, ALONE),  # the batch script of a job
    ],
)
def test_a_process_knows_its_place(environment, expected):
    assert job_place(environment) == expected


def test_a_stated_node_takes_the_launchers_tasks():
    assert job_place({}, "1/2") == JobPlace(1, 2)
    assert job_place(SLURM, "0/8") == JobPlace(0, 8, 0, 1, "slurm-17.0")


@pytest.mark.parametrize("stated", ["", "1", "2/2", "-1/2", "0/0", "a/b", "0/2/3", "0 / 2", "٣/٤", "1/99999999"])
def test_anything_else_is_no_node(stated):
    with pytest.raises(ConfigError, match="not a node of a job"):
        job_place({}, stated)


def test_a_command_that_hands_its_program_to_a_daemon_is_warned_of():
    assert "srun joulery measure" in detached(["/usr/bin/srun", "-N2", "python", "train.py"])
    assert "container" in detached(["docker", "run", "image"])
    assert detached(["python", "srun"]) is None
