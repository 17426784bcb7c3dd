"""Released jobs from one look to the next: which of them give their slots to others."""

from __future__ import annotations

from dataclasses import replace

from joulery.domain.cluster import ClusterJob, ClusterNode, ClusterSnapshot, JobState
from joulery.runtime.schedule.released import ReleasedJobs


def job(number: int, slots: int = 1, state: JobState = JobState.WAITING) -> ClusterJob:
    held = slots if state is JobState.RUNNING else 0
    return ClusterJob(
        number, "job", "ada", 0.0, state, shape=slots, min_slots=slots, max_slots=slots, slots=held, spread=False
    )


def cluster(free: dict[str, int], *jobs: ClusterJob) -> ClusterSnapshot:
    nodes = tuple(ClusterNode(name, 2, count, "") for name, count in free.items())
    return ClusterSnapshot(2 * len(nodes), jobs, nodes=nodes)


def refused(looks: list[ClusterSnapshot], target: dict[int, int], step_s: float = 1.0) -> dict[int, str]:
    """What the looks refuse together."""
    released, found = ReleasedJobs(60.0), dict[int, str]()
    for at, snapshot in enumerate(looks):
        found |= released.look(snapshot, target, at * step_s, lambda number: 0.0)
    return found


def test_a_job_is_passed_over_where_one_that_was_not_before_it_started() -> None:
    looks = [cluster({"g1": 1}, job(1), job(2)), cluster({"g1": 0}, job(1), job(2, state=JobState.RUNNING))]
    assert "passed over" in refused(looks, {1: 1, 2: 1})[1]
    looks = [cluster({"g1": 1}, job(1)), cluster({"g1": 0}, job(1), job(9, state=JobState.RUNNING))]
    assert "passed over" in refused(looks, {1: 1})[1]


def test_a_job_that_fits_beside_those_before_it_is_not_passed_over_by_them() -> None:
    """The first needs two slots on one node; once they come free it starts, on the node where the other one fitted."""
    apart = cluster({"g1": 1, "g2": 1}, job(1, 2), job(2))
    looks = [apart, cluster({"g1": 0, "g2": 0}, job(1, 2, JobState.RUNNING), job(2))]
    assert refused(looks, {1: 2, 2: 1}) == {}
    assert refused([*looks, cluster({"g1": 1, "g2": 0}, job(2))], {1: 2, 2: 1}) == {}


def test_time_counts_from_the_look_at_which_the_slots_are_free() -> None:
    full, free = cluster({"g1": 0}, job(1)), cluster({"g1": 1}, job(1))
    assert refused([*[full] * 10, *[free] * 6], {1: 1}, 12.0) == {}
    assert "within 60 s" in refused([*[full] * 10, *[free] * 7], {1: 1}, 12.0)[1]


def test_a_job_that_is_held_still_is_not_expected_to_start() -> None:
    free = cluster({"g1": 1}, replace(job(1), held_by_us=True))
    assert refused([free] * 20, {1: 1}, 12.0) == {}


def test_a_verdict_on_free_slots_counts_at_once_and_one_from_before_does_not() -> None:
    judged, new = job(1), replace(job(1), judged=False)
    assert "lacks resources" in refused([cluster({"g1": 1}, new), cluster({"g1": 1}, judged)], {1: 1})[1]
    assert refused([cluster({"g1": 0}, judged), *[cluster({"g1": 1}, judged)] * 5], {1: 1}) == {}
