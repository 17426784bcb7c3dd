"""The Kueue adapter against an API server in memory that keeps versions, conflicts and Kueue's own rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from joulery.adapters.clusters.kueue.access import KubernetesAccess
from joulery.adapters.clusters.kueue.api import GRANT, KubernetesApi
from joulery.adapters.clusters.kueue.backend import KueueBackend, KueueScope
from joulery.adapters.clusters.kueue.rights import NEEDED, kueue_rights
from joulery.domain.cluster import ClusterJob, Hold, JobState, Release, Split, Start, Stop
from joulery.domain.errors import ActuationError, CapabilityError, DataError
from tests.fakes.kueue import ALL_RIGHTS, REFUSED, FakeKueue


def api_of(fake: FakeKueue, token: Callable[[], str] = lambda: "token") -> KubernetesApi:
    return KubernetesApi(KubernetesAccess("http://k8s", token, None, source="a test"), transport=fake.transport())


def backend(fake: FakeKueue, **scope: Any) -> KueueBackend:
    return KueueBackend(api_of(fake), KueueScope(**scope), now_s=lambda: fake.now_s)


def cluster(gpus: int = 4, **more: Any) -> FakeKueue:
    fake = FakeKueue(**more)
    fake.flavor("a")
    fake.queue("q", {"a": {"nominalQuota": gpus}})
    return fake


def jobs(made: KueueBackend) -> dict[int, ClusterJob]:
    return {job.id: job for job in made.snapshot().jobs}


def test_a_workload_is_a_job_with_the_number_of_its_uid(tmp_path: Path) -> None:
    fake = cluster()
    made = fake.submit(7, 2, priority=50, annotations={"joulery/no-stop": "true", "joulery/by": "2026-11-27T18:00:00Z"})
    made["spec"]["maximumExecutionTimeSeconds"] = 3600
    (tmp_path / "00000000-0007-4000-8000-000000000000").write_text("epoch 1/4\n")
    (job,) = backend(fake, progress=tmp_path).snapshot().jobs
    assert (job.id, job.name, job.owner, job.partition, job.account, job.pool) == (7, "train-7", "team", "q", "q", "q")
    assert (job.shape, job.min_slots, job.max_slots, job.priority) == (2, 2, 2, 50.0)
    assert (job.limit_s, job.deadline_s, job.progress_ratio) == (3600.0, 1795802400.0, 0.25)
    assert job.submit_s == fake.now_s and math.isnan(job.start_s)


def test_a_hold_is_one_change_and_keeps_the_job_out_of_the_queue() -> None:
    fake = cluster()
    fake.submit(1)
    made = backend(fake)
    made.snapshot()
    begun = len(fake.requests)
    made.apply(Hold(1))
    assert [method for method, _ in fake.requests[begun:]] == ["PATCH"], "mark and hold never exist apart"
    document = fake.workload(1)
    assert document["spec"]["active"] is False and document["metadata"]["labels"]["joulery/held"] == "true"
    fake.pass_time(5.0)
    assert fake.running() == {}
    made.apply(Release(1))
    assert document["spec"]["active"] is True and "joulery/held" not in document["metadata"]["labels"]
    fake.pass_time(5.0)
    assert fake.running() == {1: 1}


def test_a_stop_deletes_the_containers_and_gives_the_quota_back_after_the_grace_period() -> None:
    fake = cluster(1, grace_s=10.0)
    fake.submit(1)
    made = backend(fake)
    fake.pass_time(1.0)
    running = jobs(made)[1]
    assert (running.state, running.slots, running.nodes) == (JobState.RUNNING, 1, ("q/a",))
    assert running.start_s == fake.now_s
    made.apply(Stop(1))
    fake.pass_time(1.0)
    stopping, snapshot = jobs(made)[1], made.snapshot()
    assert (stopping.state, stopping.slots, stopping.held_by_us, stopping.restarts) == (JobState.STOPPING, 1, True, 1)
    assert snapshot.nodes[0].free == 0 and fake.containers
    with pytest.raises(ActuationError, match="stopping"):
        made.apply(Start(1, 1))
    fake.pass_time(10.0)
    assert fake.containers == {}
    assert (jobs(made)[1].state, made.snapshot().nodes[0].free) == (JobState.WAITING, 1)
    assert made.apply(Start(1, 1)) == "released"
    fake.pass_time(1.0)
    assert fake.running() == {1: 1}


def test_a_job_that_kueue_admits_at_the_moment_of_its_hold_is_not_stopped_by_it() -> None:
    fake = cluster()
    fake.submit(1)
    made = backend(fake)
    made.snapshot()
    fake.pass_time(1.0)
    with pytest.raises(ActuationError, match="started meanwhile"):
        made.apply(Hold(1))
    fake.pass_time(1.0)
    assert fake.running() == {1: 1}


def test_changes_of_others_are_looked_at_and_then_changed() -> None:
    fake = cluster()
    fake.submit(1)
    made = backend(fake)
    made.snapshot()
    fake.meddle = 3
    assert made.apply(Hold(1)) == "held"
    assert "seen" in fake.workload(1)["metadata"]["annotations"], "what the other wrote is kept"
    fake.meddle = 99
    with pytest.raises(ActuationError, match="4 times in a row"):
        made.apply(Release(1))


def test_what_another_deactivated_is_left_alone() -> None:
    fake = cluster()
    fake.submit(1)["spec"]["active"] = False
    made = backend(fake)
    assert "deactivated" in jobs(made)[1].exempt
    for action in (Hold(1), Release(1), Start(1, 1)):
        with pytest.raises(ActuationError, match="by another"):
            made.apply(action)
    assert fake.workload(1)["spec"]["active"] is False


def test_the_verdict_is_kueues_and_an_old_one_says_nothing() -> None:
    fake = cluster(2)
    for number, gpus in ((1, 2), (2, 1), (3, 5)):
        fake.submit(number, gpus)
    made = backend(fake)
    fake.pass_time(1.0)
    seen = jobs(made)
    assert (seen[2].judged, seen[2].blocked) == (True, ""), "only units are missing"
    made.apply(Hold(2))
    made.apply(Release(2))
    assert not jobs(made)[2].judged, "the verdict is of the workload before the change"
    fake.pass_time(1.0)
    assert jobs(made)[2].judged

    def said(reason: str, message: str) -> tuple[str, bool]:
        fake._set(fake.workload(2), "QuotaReserved", False, reason, message)
        job = jobs(made)[2]
        return job.blocked, job.judged

    assert said("Inadmissible", "LocalQueue q doesn't exist") == ("LocalQueue q doesn't exist", False)
    lacks = REFUSED + ": insufficient unused quota for {} in flavor a, 1 more needed"
    assert said("Pending", lacks.format("cpu"))[1] is False
    both = f"{lacks.format('nvidia.com/gpu')}, insufficient unused quota for cpu in flavor a, 4 more needed"
    assert said("Pending", both) == (both, False)
    other = f"{REFUSED}: flavor b doesn't match node affinity, insufficient unused quota for"
    assert said("Pending", f"{other} nvidia.com/gpu in flavor a, 1 more needed") == ("", True)
    assert said("Pending", lacks.format("nvidia.com/gpu") + ". Pending the preemption of 1 workload(s)") == ("", False)
    assert said("WaitingForQuota", "") == ("", True)
    assert said("Pending", "borrowing limit for nvidia.com/gpu in flavor a exceeded") == ("", True)
    assert said("ExceedsMaxQuota", "")[0] == "ExceedsMaxQuota"


def test_quota_reserved_before_its_checks_are_done_is_not_stopped() -> None:
    fake = cluster()
    fake.submit(1)
    fake.pass_time(1.0)
    fake._set(fake.workload(1), "Admitted", False, "NoReservation")
    job = jobs(backend(fake))[1]
    assert (job.state, job.slots, job.stoppable) == (JobState.RUNNING, 1, False)


def test_pools_are_queues_and_units_are_what_a_queue_could_still_get() -> None:
    fake = FakeKueue()
    fake.flavor("a")
    fake.queue("east", {"a": {"nominalQuota": 4, "borrowingLimit": 2}}, cohort="all")
    fake.queue("west", {"a": {"nominalQuota": 4}}, cohort="all")
    fake.queue("alone", {"a": {"nominalQuota": 3}})
    fake.submit(1, 3, "west")
    fake.pass_time(1.0)
    snapshot = backend(fake).snapshot()
    assert {node.name: (node.slots, node.free) for node in snapshot.nodes} == {
        "east/a": (5, 5), "west/a": (8, 5), "alone/a": (3, 3),
    }  # fmt: skip
    assert snapshot.jobs[0].limits == {"cohort all"}
    fake.objects["clusterqueues"]["", "west"]["spec"]["stopPolicy"] = "Hold"
    snapshot = backend(fake).snapshot()
    assert {node.name: node.free for node in snapshot.nodes}["west/a"] == 0
    assert snapshot.notes == ("ClusterQueue west admits nothing: stopPolicy Hold",)


def test_a_job_stands_on_flavors_that_suit_it_alone() -> None:
    fake = FakeKueue()
    fake.flavor("a100", {"gpu": "a100"})
    fake.flavor("h100", {"gpu": "h100"}, taints=[{"key": "h", "value": "1", "effect": "NoSchedule"}])
    fake.queue("q", {"a100": {"nominalQuota": 2}, "h100": {"nominalQuota": 2}})
    fake.submit(1, nodeSelector={"gpu": "a100", "kubernetes.io/os": "linux"})
    fake.submit(2)
    tolerates = [{"key": "h", "operator": "Exists"}]
    fake.submit(3, tolerations=tolerates)
    rule = {"key": "gpu", "operator": "NotIn", "values": ["a100"]}
    wants = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [rule]}]}}}  # fmt: skip
    fake.submit(4, tolerations=tolerates, affinity=wants)
    seen = jobs(backend(fake))
    assert [seen[number].runs_on for number in (1, 2, 3, 4)] == [{"q/a100"}, {"q/a100"}, None, {"q/h100"}]


def test_jobs_without_gpus_of_other_queues_or_long_over_are_not_scheduled() -> None:
    fake = cluster()
    fake.queue("other", {"a": {"nominalQuota": 4}})
    fake.submit(1, resource="cpu")
    fake.submit(2, 1, "other")
    fake.submit(3, 1, "nowhere")
    fake.submit(4)
    fake.done["00000000-0004-4000-8000-000000000000"] = 0.999
    fake.pass_time(1.0)
    fake.pass_time(1.0)
    made = backend(fake, queues=("q",))
    seen = jobs(made)
    assert set(seen) == {2, 3, 4} and seen[4].state is JobState.DONE
    assert (seen[2].exempt, seen[3].exempt) == (
        "ClusterQueue other is not scheduled",
        "LocalQueue nowhere is not known",
    )
    assert [node.name for node in made.snapshot().nodes] == ["q/a"]
    fake.now_s += 2 * 86400
    assert 4 not in jobs(made)


def test_of_a_workload_that_was_made_anew_the_job_stays() -> None:
    fake = cluster()
    old = fake.submit(1)
    fake.now_s += 60.0
    again = {**old, "metadata": {**old["metadata"], "name": "job-train-1-new", "creationTimestamp": fake._time()}}
    fake._put("workloads", "team", "job-train-1-new", again)
    made = backend(fake)
    assert list(jobs(made)) == [1]
    made.apply(Hold(1))
    assert any("job-train-1-new" in path for method, path in fake.requests if method == "PATCH")


def test_lists_come_in_pages_and_one_that_is_too_old_is_read_again() -> None:
    fake = cluster(page=2)
    for number in range(1, 8):
        fake.submit(number)
    made = backend(fake)
    assert list(jobs(made)) == list(range(1, 8))
    fake.expired = 1
    assert list(jobs(made)) == list(range(1, 8))
    fake.expired = 99
    with pytest.raises(CapabilityError, match="faster than it can be listed"):
        made.snapshot()


@pytest.mark.parametrize(
    ("code", "text", "granted"),
    [(401, "does not know this user", True), (403, "does not let this user", True), (429, "HTTP 429", False),
     (500, "HTTP 500", False), (503, "HTTP 503", False), (410, "faster than", False)],
)  # fmt: skip
def test_an_answer_that_is_none_is_one_clear_error(code: int, text: str, granted: bool) -> None:
    fake = cluster()
    fake.submit(1)
    made = backend(fake)
    made.snapshot()
    fake.failures = [code] * 20
    with pytest.raises(CapabilityError, match=text) as caught:
        made.snapshot()
    assert bool(caught.value.grant) is granted
    if code != 410:
        with pytest.raises(CapabilityError, match=text):
            made.apply(Hold(1))
    fake.failures = []
    assert made.apply(Hold(1)) == "held", "and it goes on where it was"


def test_a_job_that_ended_meanwhile_or_a_change_that_is_invalid_is_a_refusal() -> None:
    fake = cluster()
    for number in (1, 2, 3):
        fake.submit(number)
    made = backend(fake)
    made.snapshot()
    del fake.objects["workloads"]["team", "job-train-1"]
    with pytest.raises(ActuationError, match="ended meanwhile"):
        made.apply(Hold(1))
    fake.failures = [422]
    with pytest.raises(ActuationError, match="made to fail with 422"):
        made.apply(Hold(2))
    with pytest.raises(ActuationError, match="keeps its 1"):
        made.apply(Start(3, 2))
    with pytest.raises(ActuationError, match="no tasks"):
        made.apply(Split(3, 1))


def test_no_connection_or_a_timeout_is_one_clear_error() -> None:
    def never(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("timed out", request=request)

    access = KubernetesAccess("http://k8s", lambda: "token", None, source="kubeconfig")
    made = KueueBackend(KubernetesApi(access, transport=httpx.MockTransport(never)), KueueScope())
    with pytest.raises(CapabilityError, match="does not answer: ReadTimeout timed out"):
        made.snapshot()


def test_a_token_that_was_replaced_is_read_again() -> None:
    fake = cluster()
    tokens = iter(["old", "new", "new", "new", "new", "new"])
    fake.tokens = {"new"}
    made = KueueBackend(api_of(fake, lambda: next(tokens, "new")), KueueScope())
    assert made.snapshot().slots == 4


def test_a_cluster_without_kueue_or_with_an_unknown_one_says_so() -> None:
    with pytest.raises(CapabilityError, match="has no Kueue"):
        backend(cluster(versions=())).snapshot()
    fake = FakeKueue(versions=("v7",))
    with pytest.raises(DataError, match="v7; known here are"):
        backend(fake).snapshot()


def test_the_newer_interface_is_taken_where_it_is_served() -> None:
    fake = FakeKueue(versions=("v1beta2", "v1beta1"))
    fake.flavor("a")
    fake.queue("q", {"a": {"nominalQuota": 1}}, cohort="all")
    fake.submit(1)
    made = backend(fake)
    assert jobs(made)[1].limits == {"cohort all"}
    assert any("/v1beta2/workloads" in path for _, path in fake.requests)


NAMED = {"name": "x", "namespace": "n", "uid": "u"}


@pytest.mark.parametrize(
    "damage",
    [
        {"metadata": {}},
        {"metadata": {**NAMED, "ownerReferences": [1]}},
        {"metadata": NAMED, "spec": "x"},
        {"metadata": NAMED, "spec": {"podSets": [{"count": "two"}]}},
        {"metadata": NAMED, "spec": {"podSets": ["main"]}},
        {"metadata": NAMED, "spec": {"podSets": [{"template": {"spec": {"containers": [
            {"resources": {"requests": {"nvidia.com/gpu": "many"}}}]}}}]}},
    ],
)  # fmt: skip
def test_nonsense_is_one_clear_error(damage: dict[str, Any]) -> None:
    fake = cluster()
    fake.objects["workloads"] = {("n", "x"): damage}
    with pytest.raises(DataError):
        backend(fake).snapshot()


def test_every_right_is_asked_for_and_they_are_all_it_needs() -> None:
    fake = cluster()
    assert all(right.granted and not right.grant for right in kueue_rights(api_of(fake)))
    assert {(verb, resource) for verb, resource, _ in NEEDED} == ALL_RIGHTS
    fake.rights.discard(("patch", "workloads"))
    denied = [right for right in kueue_rights(api_of(fake)) if not right.granted]
    assert [(right.name, right.grant) for right in denied] == [("patch workloads", GRANT)]
    fake.submit(1)
    made = backend(fake)
    made.snapshot()
    with pytest.raises(CapabilityError) as caught:
        made.apply(Hold(1))
    assert caught.value.grant == GRANT
