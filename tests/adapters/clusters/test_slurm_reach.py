"""On which nodes a job may run: by name, as a whole, and beside reservations."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.clusters.slurm import SlurmBackend, SlurmScope
from joulery.adapters.clusters.slurm_reach import parse_reservations
from joulery.domain.cluster import ClusterSnapshot, JobState
from joulery.runtime.schedule.actions import FreeSlots
from tests.adapters.clusters.fake_slurm import FakeSlurm

LINE = (
    "ReservationName={name} StartTime={start} EndTime={end} Duration=01:00:00 Nodes={nodes} NodeCnt=2 CoreCnt=8 "
    "Features=(null) PartitionName=(null) Flags={flags} TRES=cpu=8 Users=root Groups=(null) Accounts=(null) "
    "Licenses=(null) State=INACTIVE BurstBuffer=(null) MaxStartDelay=(null)"
)


def line(minutes: float, nodes: str = "g1", flags: str = "SPEC_NODES") -> str:
    start = datetime.now().astimezone() + timedelta(minutes=minutes)
    end = start + timedelta(hours=1)
    return LINE.format(name="r", start=f"{start:%FT%T}", end=f"{end:%FT%T}", nodes=nodes, flags=flags)


def seen(slurm: FakeSlurm) -> ClusterSnapshot:
    return SlurmBackend(slurm, SlurmScope()).snapshot()


def reach(reservations: list[str] | None = None, **job: Any) -> set[str]:
    slurm = FakeSlurm(reservations=reservations or [])
    slurm.submit(1, **{"time_limit": 30, **job})
    (found,) = seen(slurm).jobs
    return {"g1", "g2"} if found.runs_on is None else set(found.runs_on)


def test_nodes_that_a_job_names_or_excludes() -> None:
    assert reach() == {"g1", "g2"}
    assert reach(required_nodes="g2") == {"g2"}
    assert reach(excluded_nodes="g[2-9]") == {"g1"}
    assert reach(required_nodes="g1", node_count=2) == {"g1", "g2"}, "a second node may be any"


def test_a_job_that_would_end_within_a_reservation_does_not_start_on_its_nodes() -> None:
    assert reach([line(60)], time_limit=30) == {"g1", "g2"}
    assert reach([line(20)], time_limit=30) == {"g2"}
    assert reach([line(20)], time_limit=30, time_minimum=10) == {"g1", "g2"}
    assert reach([line(20)], time_limit=None) == {"g2"}, "it may run for ever"
    assert reach([line(20, "g[1-2]")], time_limit=30) == set()
    assert reach([line(-90)], time_limit=30) == {"g1", "g2"}, "it is over"
    for flags in ("MAGNETIC", "SPEC_NODES,MAGNETIC"):
        assert reach([line(20, flags=flags)], time_limit=30) == {"g1", "g2"}
    cores = f"{line(20)} NodeName=g1 CoreIDs=0-1"
    assert reach([cores], time_limit=30) == {"g1", "g2"}, "its other cores are for all"


def test_reserved_nodes_are_no_capacity_and_their_jobs_are_left_alone() -> None:
    slurm = FakeSlurm(reservations=[line(-10)])
    slurm.submit(1, resv_name="r", job_state="RUNNING", nodes="g1")
    slurm.submit(2, resv_name="r")
    slurm.submit(3)
    snapshot = seen(slurm)

    assert {node.name for node in snapshot.nodes} == {"g2"} and snapshot.slots == 2
    assert [bool(job.exempt) for job in snapshot.jobs] == [True, True, False]
    assert not FreeSlots(snapshot).fits(snapshot.jobs[2], 3)


def test_a_job_that_shares_its_node_with_none_takes_all_of_it_and_keeps_its_size() -> None:
    for shared in ("none", ["none"]):
        slurm = FakeSlurm()
        slurm.submit(1, shared=shared)
        slurm.submit(2, job_state="RUNNING", nodes="g1")
        slurm.submit(3, shared=shared, job_state="RUNNING", nodes="g2")
        waits, _, runs = seen(slurm).jobs
        assert (waits.shape, waits.min_slots, waits.max_slots, waits.slots) == (2, 2, 2, 0)
        assert (runs.shape, runs.slots, runs.cpus_per_slot) == (2, 2, 32.0)


def test_slots_of_a_job_on_a_draining_node_are_no_room() -> None:
    slurm = FakeSlurm(nodes=[("g1", "draining", "gpu:2"), ("g2", "mixed", "gpu:2")])
    slurm.submit(1, job_state="RUNNING", nodes="g1")
    slurm.submit(2, tres_per_node="gres:gpu:2", job_state="RUNNING", nodes="g2")
    slurm.submit(3)
    snapshot = seen(slurm)
    free = FreeSlots(snapshot)
    free.give(snapshot.jobs[0])

    assert not free.fits(snapshot.jobs[2], 1)
    assert snapshot.jobs[0].pool not in snapshot.pools, "its end frees no slot"


def test_what_is_not_read_here_is_no_reason_to_stop_another() -> None:
    judged = {
        name: change
        for name, change in {
            "plain": {},
            "cpus of tasks": {"tres_per_task": "cpu=2"},
            "GRES": {"tres_per_node": "gres:gpu:1,gres:nvme:1"},
            "disk": {"minimum_tmp_disk_per_node": {"set": True, "infinite": False, "number": 10}},
            "adjacent": {"contiguous": True},
            "own user's nodes": {"shared": ["user"]},
            "some by name": {"required_nodes": "g1", "node_count": 2},
        }.items()
        if _judged(change)
    }
    assert set(judged) == {"plain", "cpus of tasks"}


def _judged(change: dict[str, Any]) -> bool:
    slurm = FakeSlurm()
    slurm.submit(1, **{"state_reason": "Resources", **change})
    (job,) = seen(slurm).jobs
    assert job.state is JobState.WAITING and not job.blocked
    return job.judged


@given(st.text(max_size=80))
def test_any_text_is_some_reservations_and_never_an_error(text: str) -> None:
    parse_reservations(f"ReservationName=x Nodes=g1 {text}")
    assert parse_reservations(text.replace("ReservationName", "")) == ()
