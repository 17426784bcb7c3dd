"""Beside Kueue: the scheduler on the adapter on an API server in memory, against Kueue alone on the same jobs."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.adapters.clusters.kueue.access import KubernetesAccess
from joulery.adapters.clusters.kueue.api import KubernetesApi
from joulery.adapters.clusters.kueue.backend import KueueBackend, KueueScope
from joulery.domain.cluster import ClusterAction, ClusterSnapshot, JobEnergy, Start, Stop
from joulery.runtime.schedule.rounds import JournaledPolicy
from tests.fakes.kueue import FakeKueue
from tests.runtime.schedule.test_never_idler import InOrder
from tests.runtime.schedule.test_scheduler import ACTING, T0_S, World

LOOK_S = 10.0
HORIZON_S = 2000
LEAST_RATIO = 0.98
Submission = tuple[int, int, str]
"""Time, GPUs and ClusterQueue."""
QUEUES = ("east", "west", "alone")
_SUBMISSIONS = st.lists(
    st.tuples(st.integers(0, 600), st.sampled_from([1, 1, 1, 2, 4]), st.sampled_from(QUEUES)), min_size=6, max_size=16
)


class KueueCluster:
    """What a world needs of a cluster: the adapter, energy, and time."""

    def __init__(self, fake: FakeKueue, api: KubernetesApi | None = None) -> None:
        self.fake = fake
        if api is None:
            access = KubernetesAccess("http://k8s", lambda: "token", None)
            api = KubernetesApi(access, transport=fake.transport())
        self.backend = KueueBackend(api, KueueScope(), now_s=lambda: fake.now_s)
        self.actions: list[ClusterAction] = []

    def snapshot(self) -> ClusterSnapshot:
        return self.backend.snapshot()

    def apply(self, action: ClusterAction, /) -> str:
        self.actions.append(action)
        return self.backend.apply(action)

    def close(self) -> None:
        self.backend.close()

    def read(self, snapshot: ClusterSnapshot) -> dict[int, JobEnergy]:
        return {}

    def pass_time(self, seconds: float) -> None:
        self.fake.pass_time(seconds)


def cluster(strategy: str = "BestEffortFIFO") -> FakeKueue:
    """Two queues of a cohort, and one alone."""
    fake = FakeKueue(now_s=T0_S, rate=0.002)
    fake.flavor("a")
    fake.queue("east", {"a": {"nominalQuota": 3, "borrowingLimit": 1}}, cohort="all", queueingStrategy=strategy)
    fake.queue("west", {"a": {"nominalQuota": 3, "borrowingLimit": 2}}, cohort="all", queueingStrategy=strategy)
    fake.queue("alone", {"a": {"nominalQuota": 4}}, queueingStrategy=strategy)
    return fake


class Played:
    """A load with a policy beside Kueue, or with Kueue alone. ``busy_gpu_s`` has a value after each look."""

    def __init__(self, submissions: list[Submission], strategy: str, policy: JournaledPolicy | None = None) -> None:
        self.fake, self.busy_gpu_s, self.idle_while_startable_s = cluster(strategy), list[float](), 0.0
        with tempfile.TemporaryDirectory() as folder:
            adapter = KueueCluster(self.fake, self.fake.api())
            world = World(Path(folder), adapter, policy=policy or ACTING, quantum_s=600.0)  # type: ignore[arg-type]
            for at_s in range(0, HORIZON_S, int(LOOK_S)):
                for number, (submit_s, gpus, queue) in enumerate(sorted(submissions), 1):
                    if at_s - LOOK_S < submit_s <= at_s:
                        self.fake.submit(number, gpus, queue)
                if policy is None:
                    self.fake.pass_time(LOOK_S)
                else:
                    world.run(LOOK_S, LOOK_S)
                    self.idle_while_startable_s += LOOK_S * self._startable_is_held()
                self.busy_gpu_s.append(self.fake.busy_gpu_s)
                if self._ended() == len(submissions):
                    break  # nothing happens any more
            world.journal.close()
        self.busy_gpu_s += [self.fake.busy_gpu_s] * (int(HORIZON_S / LOOK_S) - len(self.busy_gpu_s))
        self.ended = self._ended()

    def _ended(self) -> int:
        return sum(self.fake.holds(one, "Finished") for one in self.fake.objects.get("workloads", {}).values())

    def _startable_is_held(self) -> bool:
        """Whether joulery holds a job that Kueue would admit there and then."""
        return not self.fake.stopping_s and any(
            not one["spec"]["active"]
            and not self.fake.holds(one, "QuotaReserved")
            and self.fake.gpus_of(one) <= self.fake.available(str(one["spec"]["queueName"]), "a")
            for one in self.fake.objects.get("workloads", {}).values()
        )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["BestEffortFIFO", "StrictFIFO"])
@settings(max_examples=3, deadline=None)
@given(_SUBMISSIONS)
def test_no_job_that_kueue_would_admit_is_held(strategy: str, submissions: list[Submission]) -> None:
    played = Played(submissions, strategy, ACTING)
    assert played.idle_while_startable_s <= 2 * LOOK_S * (1 + played.ended), "at most two looks for each that ended"


@pytest.mark.slow
@pytest.mark.parametrize("policy", [InOrder(), ACTING], ids=["in order", "green"])
@pytest.mark.parametrize("strategy", ["BestEffortFIFO", "StrictFIFO"])
def test_a_cluster_is_as_busy_as_under_kueue_alone(strategy: str, policy: JournaledPolicy) -> None:
    """Each load where a job that does not fit keeps none waiting; over all loads where it does.

    There what fits later depends on which job Kueue refused to overtake.
    """
    alone_gpu_s = beside_gpu_s = 0.0
    for seed in range(3):
        draw = random.Random(seed)
        load = [(draw.randint(0, 600), draw.choice([1, 1, 1, 2, 4]), draw.choice(QUEUES)) for _ in range(16)]
        alone, beside = Played(load, strategy), Played(load, strategy, policy)
        alone_gpu_s += sum(alone.busy_gpu_s)
        beside_gpu_s += sum(beside.busy_gpu_s)
        assert strategy == "StrictFIFO" or sum(beside.busy_gpu_s) >= LEAST_RATIO * sum(alone.busy_gpu_s), seed
    assert beside_gpu_s >= LEAST_RATIO * alone_gpu_s


def play(fake: FakeKueue, folder: Path, **more: Any) -> tuple[World, KueueCluster]:
    adapter = KueueCluster(fake)
    return World(folder, adapter, quantum_s=60.0, **more), adapter  # type: ignore[arg-type]


def test_jobs_of_one_queue_end_and_nothing_stays_held(tmp_path: Path) -> None:
    fake = cluster()
    fake.rate = 0.01
    world, _ = play(fake, tmp_path)
    for number in range(1, 13):
        fake.submit(number, 1 + number % 2, "alone")
    world.run(900, 5.0)
    assert all(fake.holds(one, "Finished") for one in fake.objects["workloads"].values())
    assert not any("joulery/held" in one["metadata"]["labels"] for one in fake.objects["workloads"].values())
    assert len(world.said("over")) == 12
    world.journal.close()


def test_no_job_stops_for_one_that_kueue_would_not_start(tmp_path: Path) -> None:
    """One has no queue, one is wider than its queue's quota: Kueue says so, and the running ones run on."""
    fake = cluster()
    fake.rate = 0.0001
    world, adapter = play(fake, tmp_path, priority_step=1.0)
    for number in (1, 2, 3, 4):
        fake.submit(number, 1, "alone")
    world.run(120, 5.0)
    fake.submit(5, 1, "nowhere", priority=100)
    fake.submit(6, 8, "alone", priority=100)
    world.run(600, 5.0)
    assert sorted(fake.running()) == [1, 2, 3, 4]
    assert not [action for action in adapter.actions if isinstance(action, Stop)]
    world.journal.close()


def test_an_urgent_job_takes_the_slots_of_another_once_kueue_lacks_nothing_else(tmp_path: Path) -> None:
    fake = cluster()
    fake.rate = 0.0001
    world, adapter = play(fake, tmp_path, priority_step=1.0)
    for number in (1, 2, 3):
        fake.submit(number, 1, "alone")
    fake.submit(4, 1, "alone", annotations={"joulery/no-stop": "true"})
    world.run(120, 5.0)
    fake.submit(5, 2, "alone", priority=100)
    world.run(300, 5.0)
    running = fake.running()
    assert running[5] == 2 and 4 in running and len(running) == 4 - 1
    stopped = [at for at, action in enumerate(adapter.actions) if isinstance(action, Stop)]
    released = [at for at, action in enumerate(adapter.actions) if isinstance(action, Start) and action.job == 5]
    assert stopped and (not released or released[0] < stopped[0])
    assert all(action.job != 4 for action in adapter.actions if isinstance(action, Stop))
    world.journal.close()


def test_without_the_right_to_change_jobs_it_pauses(tmp_path: Path) -> None:
    fake = cluster()
    world, adapter = play(fake, tmp_path)
    fake.rights.discard(("patch", "workloads"))
    for number in range(1, 9):
        fake.submit(number, 2, "alone")
    world.run(60, 5.0)
    refused = [fields for fields in world.said("action") if fields["outcome"] == "failed"]
    assert len(refused) == 1 and "does not let this user" in refused[0]["remark"]
    assert any("no rights" in fields["text"] for fields in world.said("note"))
    world.journal.close()
    assert len(adapter.actions) <= 2


def test_without_the_right_to_read_it_says_so_once_and_looks_again_later(tmp_path: Path) -> None:
    fake = cluster()
    world, _ = play(fake, tmp_path)
    fake.submit(1, 2, "alone")
    world.run(20, 5.0)
    fake.rights.discard(("list", "workloads"))
    asked = len(fake.requests)
    world.run(200, 5.0)
    assert len(world.said("unreachable")) == 1
    assert len(fake.requests) - asked <= 2
    fake.rights.add(("list", "workloads"))
    world.run(400, 5.0)
    assert [fields["text"] for fields in world.said("note")][-1] == "the cluster answers again"
    world.journal.close()
