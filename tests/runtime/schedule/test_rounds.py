"""What the policy sees of a cluster at a round."""

from __future__ import annotations

import json
import math

from joulery.accounting.training_jobs import Tally
from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobState
from joulery.runtime.schedule.intensity_tracker import GridIntensity
from joulery.runtime.schedule.rounds import capacity, cluster_view
from joulery.runtime.schedule.state import SchedulerState, job_document, tally_from


def _job(number: int, slots: int = 0, *, array: int = 0) -> ClusterJob:
    state = JobState.RUNNING if slots else JobState.WAITING
    return ClusterJob(number, "job", "ada", 0.0, state, slots=slots, array=array)


def test_of_an_array_the_tasks_that_run_come_first_then_the_others_and_the_rest_last() -> None:
    """The rest was released while it was all that there was of the array, and runs as its last task."""
    grid = GridIntensity(100.0, 100.0, "stated")
    waiting = [_job(number, array=7) for number in (8, 9)]
    for rest, expected in ((_job(7, array=7), [8, 9, 7]), (_job(7, 1, array=7), [7, 8, 9])):
        view = cluster_view([rest, *waiting], SchedulerState(), grid, 10.0, 5.0, 4)
        assert view.job.tolist() == expected


def test_where_the_intensity_is_unknown_no_power_is_shown_and_slots_are_never_negative() -> None:
    state = SchedulerState(tallies={1: Tally(slot_w=200.0)})
    job = ClusterJob(1, "job", "ada", 0.0, JobState.RUNNING, slots=1)
    others = ClusterJob(2, "other", "bob", 0.0, JobState.RUNNING, slots=3, exempt="left alone")
    seen = ClusterSnapshot(2, (job, others))
    gpus = capacity(seen, "", [job])
    dark = cluster_view([job], state, GridIntensity(math.nan, math.nan, "nothing"), 10.0, 5.0, gpus)
    lit = cluster_view([job], state, GridIntensity(100.0, 200.0, "forecast"), 10.0, 5.0, gpus)

    assert math.isnan(dark.gpu_w[0]) and (dark.g_per_kwh, dark.mean_g_per_kwh, dark.gpus) == (0.0, 0.0, 0)
    assert (lit.gpu_w[0], lit.g_per_kwh, lit.mean_g_per_kwh) == (200.0, 100.0, 200.0)


def test_the_policy_sees_a_jobs_power_on_the_slots_it_has_and_an_earlier_journal_is_read() -> None:
    tally = Tally(efficiency={1: 1.0, 2: 0.9}, job_w={1: 300.0, 2: 580.0})
    written = json.loads(json.dumps(job_document(SchedulerState(tallies={1: tally}), 1)))
    assert tally_from(written).job_w == {1: 300.0, 2: 580.0}
    del written["job_w"]
    assert tally_from(written).job_w == {}
    seen = {}
    for slots in (2, 3, 0):
        job = ClusterJob(1, "job", "ada", 0.0, JobState.RUNNING if slots else JobState.WAITING, slots=slots)
        state = SchedulerState(tallies={1: tally})
        seen[slots] = cluster_view([job], state, GridIntensity(100.0, 200.0, "forecast"), 10.0, 5.0, 4).job_w
    assert {slots: None if math.isnan(w[0]) else w[0] for slots, w in seen.items()} == {2: 580.0, 3: None, 0: None}
