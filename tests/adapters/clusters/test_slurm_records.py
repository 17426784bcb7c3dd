"""What Slurm prints, of several versions."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from joulery.adapters.clusters.slurm_jobs import owner_deadline_s, owner_range, to_job
from joulery.adapters.clusters.slurm_records import COLUMNS, HELD_TAG, expand_hosts, parse_jobs, parse_table
from joulery.domain.cluster import ClusterJob, JobState
from joulery.domain.errors import DataError

# As Slurm 22.05.8 prints it, the fields that matter.
JOB: dict[str, Any] = {
    "job_id": 1, "name": "train.sh", "user_name": "ada", "partition": "train", "job_state": "PENDING",
    "state_reason": "Priority", "submit_time": 1795155977, "node_count": 1, "cpus": 4, "tasks": 2,
    "tres_per_node": "gres:gpu:2", "tres_per_job": "", "tres_per_task": "", "comment": "joulery:min=1,max=4",
    "admin_comment": "", "batch_flag": True, "requeue": True, "array_job_id": 0, "array_task_id": None,
    "het_job_id": 0, "restart_cnt": 0, "priority": 7,
}  # fmt: skip


def number(value: int, *, is_set: bool = True) -> dict[str, Any]:
    return {"set": is_set, "infinite": False, "number": value}


def job(partitions: tuple[str, ...] = (), **changes: Any) -> ClusterJob:
    (record,) = parse_jobs(json.dumps({"jobs": [{**JOB, **changes}]}))
    found = to_job(record, partitions, user_range=True, progress_ratio=math.nan)
    assert found is not None
    return found


def test_a_waiting_job() -> None:
    found = job()

    assert (found.id, found.name, found.owner, found.partition) == (1, "train.sh", "ada", "train")
    assert (found.state, found.slots, found.shape, found.min_slots, found.max_slots) == (JobState.WAITING, 0, 2, 1, 4)
    assert (found.exempt, found.held_by_us, found.submit_s) == ("", False, 1795155977.0)


def test_newer_versions_say_the_same_in_other_words() -> None:
    newer = job(
        job_state=["PENDING"],
        submit_time=number(1795155977),
        node_count=number(1),
        cpus=number(4),
        tasks=number(2),
        array_job_id=number(0),
        array_task_id=number(0, is_set=False),
        het_job_id=number(0),
        priority=number(7),
        tres_per_node="gres/gpu:2",
    )
    assert newer == job()
    assert job(comment={"administrator": "", "job": "joulery:min=1,max=4", "system": ""}) == job()
    held = job(comment={"administrator": HELD_TAG, "job": "", "system": ""}, priority=number(0))
    assert held.held_by_us


@pytest.mark.parametrize(
    ("state", "expected", "slots"),
    [
        ("RUNNING", JobState.RUNNING, 2),
        (["RUNNING", "COMPLETING"], JobState.STOPPING, 2),
        ("COMPLETING", JobState.STOPPING, 2),
        ("CONFIGURING", JobState.RUNNING, 2),
        ("SUSPENDED", JobState.RUNNING, 2),
        ("REQUEUE_HOLD", JobState.WAITING, 0),
        ("COMPLETED", JobState.DONE, 0),
        ("FAILED", JobState.FAILED, 0),
        ("NODE_FAIL", JobState.FAILED, 0),
        ("TIMEOUT", JobState.FAILED, 0),
        ("CANCELLED", JobState.CANCELLED, 0),
    ],
)
def test_states(state: Any, expected: JobState, slots: int) -> None:
    found = job(job_state=state)

    assert (found.state, found.slots) == (expected, slots)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"array_job_id": 3}, "job array"),
        ({"array_job_id": {"set": True, "number": 3}}, "job array"),
        ({"priority": 0, "state_reason": "JobHeldUser"}, "held by its owner"),
        ({"priority": 0, "state_reason": "JobHeldAdmin"}, "held by its owner or an operator"),
        ({"state_reason": "Dependency"}, "waits for Dependency"),
        ({"state_reason": "BeginTime"}, "waits for BeginTime"),
        ({"job_state": "QUANTUM"}, "not known here"),
    ],
)
def test_what_is_left_alone(changes: dict[str, Any], why: str) -> None:
    assert why in job(**changes).exempt


def test_a_job_that_may_not_be_requeued_is_started_and_never_stopped() -> None:
    fixed = job(requeue=False)
    assert (fixed.exempt, fixed.stoppable) == ("", False)


@pytest.mark.parametrize(
    ("reason", "blocked"),
    [
        ("Resources", ""), ("Priority", ""), ("None", ""), ("QOSMaxGRESPerUser", "QOSMaxGRESPerUser"),
        ("AssocGrpGRES", "AssocGrpGRES"), ("Licenses", "Licenses"), ("PartitionTimeLimit", "PartitionTimeLimit"),
        ("ReqNodeNotAvail, UnavailableNodes:g1", "ReqNodeNotAvail"), ("Reservation", "Reservation"),
        ("BadConstraints", "BadConstraints"),
    ],
)  # fmt: skip
def test_every_reason_but_missing_slots_is_slurms_verdict(reason: str, blocked: str) -> None:
    assert job(state_reason=reason).blocked == blocked
    assert job(state_reason=reason, job_state="RUNNING").blocked == ""


def test_host_lists() -> None:
    assert expand_hosts("g[1-3,07],login,n[09-11]-ib") == (
        "g1", "g2", "g3", "g07", "login", "n09-ib", "n10-ib", "n11-ib",
    )  # fmt: skip
    assert expand_hosts("") == ()


@pytest.mark.parametrize(
    ("word", "held_s"), [("RUNNING", math.nan), ("COMPLETED", 90.0), ("FAILED", 90.0), ("COMPLETING", math.nan)]
)
def test_a_run_is_timed_by_slurms_start_and_when_it_is_over_by_its_end(word: str, held_s: float) -> None:
    run = job(job_state=word, start_time=number(1000), end_time=number(1090)).run
    assert run is not None and (run.start_s, run.slots) == (1000.0, job().shape)
    assert run.held_s == pytest.approx(held_s, nan_ok=True)


def test_a_requeued_job_has_no_run_for_its_start_is_a_forecast() -> None:
    assert job(job_state="PENDING", start_time=number(1000), end_time=number(1090)).run is None


def test_an_unknown_state_keeps_its_slots_out_of_reach() -> None:
    assert job(job_state="QUANTUM").slots == 2


def test_a_requeued_job_that_waits_for_its_old_credential_is_not_left_alone() -> None:
    assert job(state_reason="BeginTime", restart_cnt=1).exempt == ""


def test_other_partitions_are_left_alone() -> None:
    assert "partition train" in job(("night",)).exempt
    assert job(("night", "train")).exempt == ""
    assert job(("train",), partition="debug,train").exempt == ""


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("REQUEUE_FED", JobState.WAITING), ("SPECIAL_EXIT", JobState.WAITING), ("REQUEUE_HOLD", JobState.WAITING),
        ("RESV_DEL_HOLD", JobState.WAITING), ("CONFIGURING", JobState.RUNNING), ("RESIZING", JobState.RUNNING),
        ("SUSPENDED", JobState.RUNNING), ("STAGE_OUT", JobState.RUNNING), ("REVOKED", JobState.CANCELLED),
        ("BOOT_FAIL", JobState.FAILED), ("NODE_FAIL", JobState.FAILED), ("DEADLINE", JobState.FAILED),
    ],
)  # fmt: skip
def test_every_state_that_is_known_here(word: str, state: JobState) -> None:
    assert job(job_state=word).state is state


def test_who_asks_for_less_than_its_own_least_starts_with_what_it_asks_for() -> None:
    asked = job(comment="joulery:min=4,max=8")
    assert (asked.shape, asked.min_slots, asked.max_slots) == (asked.shape, asked.shape, 8)


def test_an_unknown_output_file_is_none() -> None:
    slurm = {"job_id": 7, "job_state": "RUNNING", "cpus": 1, "node_count": 1, "name": "n", "user_name": "ada"}
    for said, file in (("/out/%x-%j.%u", "/out/n-7.ada"), ("/out/%N.log", ""), ("/out/plain", "/out/plain")):
        (record,) = parse_jobs(json.dumps({"jobs": [{**slurm, "standard_output": said}]}))
        assert record.output == file


def test_a_running_job_has_the_nodes_it_has_whatever_it_asked_for() -> None:
    assert job(job_state="RUNNING", node_count=2, tres_req_str="cpu=1,node=1").slots == 2 * job().shape


def test_our_tag_without_a_hold_is_no_hold() -> None:
    assert not job(admin_comment=HELD_TAG).held_by_us
    assert job(admin_comment=HELD_TAG, priority=0, state_reason="JobHeldAdmin").held_by_us
    assert job(admin_comment=HELD_TAG, state_reason="job requeued in held state").held_by_us
    for state in ("COMPLETING", "RUNNING"):  # it would be held when it is back in the queue
        assert job(admin_comment=HELD_TAG, priority=0, job_state=state).held_by_us
    assert not job(admin_comment=HELD_TAG, priority=0, job_state="COMPLETED").held_by_us


def test_a_job_without_gpus_is_no_training_job() -> None:
    (record,) = parse_jobs(json.dumps({"jobs": [{**JOB, "tres_per_node": ""}]}))
    assert to_job(record, (), user_range=True, progress_ratio=math.nan) is None


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("joulery:min=1,max=8", (1, 8)),
        ("mine; joulery:max=4 please", (1, 4)),
        ("joulery:min=2", (2, 2)),
        ("", (2, 2)),
        ("joulery:min=5,max=4", (2, 2)),
        ("joulery:min=0,max=4", (2, 2)),
        ("joulery:max=many", (2, 2)),
        ("joulery:min=1,by=2026-11-27T18:00,max=8", (1, 8)),
        ("joulery:by=2026-11-27T18:00", (2, 2)),
    ],
)
def test_what_owners_allow(comment: str, expected: tuple[int, int]) -> None:
    assert owner_range(comment, 2) == expected


def test_when_owners_need_a_job() -> None:
    assert owner_deadline_s("mine joulery:by=2026-11-27T18:00+01:00") == 1795798800.0
    assert owner_deadline_s("joulery:min=1,by=2026-11-27T17:00:00Z,max=4") == 1795798800.0
    for none in ("", "joulery:min=1,max=4", "joulery:by=2026", "by=2026-11-27T18:00", "joulery:by=2026-13-27T18:00"):
        assert owner_deadline_s(none) == math.inf
    (record,) = parse_jobs(json.dumps({"jobs": [{**JOB, "comment": "joulery:by=2026-11-27T17:00Z", "time_limit": 90}]}))
    job = to_job(record, (), user_range=True, progress_ratio=math.nan)
    assert job is not None and (job.deadline_s, job.limit_s) == (1795798800.0, 5400.0)
    others = to_job(record, (), user_range=False, progress_ratio=math.nan)
    assert others is not None and others.deadline_s == math.inf, "owners say nothing where user_range is off"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"jobs": [{}]}', '{"jobs": [{"job_id": "x", "job_state": "R"}]}'])
def test_nonsense_is_one_clear_error(text: str) -> None:
    with pytest.raises(DataError, match="squeue --json"):
        parse_jobs(text)


def row(**changes: str) -> str:
    cells = {
        "jobid": "1", "jobarrayid": "1", "hetjobid": "N/A", "statecompact": "PD", "username": "ada",
        "partition": "train", "name": "train.sh", "submittime": "2026-11-20T06:26:17", "numnodes": "1",
        "numcpus": "4", "numtasks": "2", "tres-per-node": "gres:gpu:2", "tres-per-job": "N/A",
        "tres-per-task": "N/A", "reason": "Priority", "comment": "joulery:min=1,max=4", "admin_comment": "(null)",
        "batchflag": "1", "requeue": "1", "restartcnt": "0", "prioritylong": "7", **changes,
    }  # fmt: skip
    return "".join(cells[name].ljust(width) for name, width in COLUMNS)


def test_columns_say_what_json_says() -> None:
    (record,) = parse_table(row() + "\n\n")
    found = to_job(record, (), user_range=True, progress_ratio=math.nan)

    assert found is not None
    assert (found.shape, found.min_slots, found.max_slots, found.owner, found.exempt) == (2, 1, 4, "ada", "")
    (array,) = parse_table(row(jobarrayid="1_[2-3]"))
    assert array.array
    (spaced,) = parse_table(row(name="a b  c", comment="x y"))
    assert (spaced.name, spaced.comment) == ("a b  c", "x y")


def test_a_line_of_other_columns_is_one_clear_error() -> None:
    with pytest.raises(DataError, match="not understood"):
        parse_table("1 train ada R 0:05 1 g1")
