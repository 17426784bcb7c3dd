"""Nodes of Slurm and the pools that jobs compete in."""

from __future__ import annotations

from typing import Any

from joulery.adapters.clusters.slurm import SlurmBackend, SlurmScope
from joulery.adapters.clusters.slurm_nodes import satisfies
from joulery.domain.cluster import ClusterSnapshot, JobState
from tests.adapters.clusters.fake_slurm import FakeSlurm

NODES = [("a1", "idle", "gpu:a100:4"), ("a2", "idle", "gpu:a100:4"), ("b1", "mixed", "gpu:2080ti:2")]


def seen(slurm: FakeSlurm, **scope: Any) -> ClusterSnapshot:
    return SlurmBackend(slurm, SlurmScope(**scope)).snapshot()


def test_partitions_and_types_are_pools_of_their_own() -> None:
    slurm = FakeSlurm(nodes=NODES, partitions={"a1": "big", "a2": "big", "b1": "old"})
    slurm.submit(1, partition="big")
    slurm.submit(2, partition="old", tres_per_node="gres:gpu:2080ti:1")
    slurm.submit(3, partition="old", job_state="RUNNING", nodes="b1")
    snapshot = seen(slurm)

    assert snapshot.pools == {"a1": 8, "b1": 2} and snapshot.slots == 10
    assert {job.id: job.pool for job in snapshot.jobs} == {1: "a1", 2: "b1", 3: "b1"}
    assert {node.name: node.free for node in snapshot.nodes} == {"a1": 4, "a2": 4, "b1": 1}


def test_a_job_that_may_run_on_either_joins_the_pools() -> None:
    slurm = FakeSlurm(nodes=NODES)
    slurm.submit(1, tres_per_node="gres:gpu:a100:1")
    assert seen(slurm).pools == {"a1": 8, "b1": 2}
    slurm.submit(2)
    assert seen(slurm).pools == {"": 10}, "an untyped request competes with both"


def test_features_make_pools() -> None:
    slurm = FakeSlurm(nodes=[("g1", "idle", "gpu:2"), ("g2", "idle", "gpu:2")], features={"g1": "nvlink", "g2": "pcie"})
    slurm.submit(1, features="nvlink")
    slurm.submit(2, features="pcie")
    slurm.submit(3, features="infiniband")
    jobs = {job.id: job for job in seen(slurm).jobs}

    assert (jobs[1].pool, jobs[2].pool) == ("g1", "g2")
    assert jobs[3].exempt, "no node has it"


def test_constraints() -> None:
    features = frozenset({"nvlink", "gen4"})
    for constraint, satisfied in (
        ("", True), ("(null)", True), ("nvlink", True), ("nvlink&gen4", True), ("nvlink&gen5", False),
        ("gen5|gen4", True), ("[gen4*2|gen5]", True), ("gen5", False),
    ):  # fmt: skip
        assert satisfies(features, constraint) is satisfied, constraint


def test_a_job_on_nodes_outside_the_scheduled_partitions_takes_none_of_their_slots() -> None:
    slurm = FakeSlurm(nodes=[("g1", "idle", "gpu:2")])
    slurm.submit(1, partition="debug", job_state="RUNNING", nodes="d7")
    (job,) = seen(slurm, partitions=("train",)).jobs

    assert job.state is JobState.RUNNING and job.pool not in seen(slurm).pools
