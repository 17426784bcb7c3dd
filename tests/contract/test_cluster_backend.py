"""What every cluster owes the scheduler, whichever it is: holds, stops, starts and what a second scheduler sees."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import pytest

from joulery.adapters.clusters.kueue.access import KubernetesAccess
from joulery.adapters.clusters.kueue.api import KubernetesApi
from joulery.adapters.clusters.kueue.backend import KueueBackend, KueueScope
from joulery.adapters.clusters.local import LocalBackend, Slot
from joulery.adapters.clusters.slurm import SlurmBackend, SlurmScope
from joulery.domain.cluster import ClusterJob, Hold, JobState, Order, Start, Stop
from joulery.domain.errors import ActuationError
from joulery.domain.ports import ClusterBackend
from joulery.runtime.schedule.scheduler import release_all
from joulery.store.jobs import JobBook
from tests.adapters.clusters.fake_slurm import FakeSlurm
from tests.fakes.kueue import FakeKueue
from tests.waiting import wait_until


class Bench(Protocol):
    """A cluster with room for one job at a time, and what moves it on."""

    def open(self) -> ClusterBackend: ...
    def submit(self) -> int: ...
    def settle(self) -> None: ...


class SlurmBench:
    def __init__(self) -> None:
        self.slurm = FakeSlurm(nodes=[("g1", "idle", "gpu:fake:1")])

    def open(self) -> ClusterBackend:
        return SlurmBackend(self.slurm, SlurmScope(user_range=False))

    def submit(self) -> int:
        number = len(self.slurm.jobs) + 1
        self.slurm.submit(number)
        return number

    def settle(self) -> None:
        for job in self.slurm.jobs.values():
            busy = any(other["job_state"] == "RUNNING" for other in self.slurm.jobs.values())
            if job["job_state"] == "PENDING" and job["priority"] and not busy:
                job.update(job_state="RUNNING", nodes="g1")


class KueueBench:
    def __init__(self, url: str, fake: FakeKueue) -> None:
        self.url, self.fake = url, fake
        fake.flavor("a")
        fake.queue("q", {"a": {"nominalQuota": 1}})

    def open(self) -> ClusterBackend:
        api = KubernetesApi(KubernetesAccess(self.url, lambda: "token", None))
        return KueueBackend(api, KueueScope(), now_s=lambda: self.fake.now_s)

    def submit(self) -> int:
        number = len(self.fake.objects.get("workloads", {})) + 1
        self.fake.submit(number)
        return number

    def settle(self) -> None:
        for _ in range(3):
            self.fake.pass_time(1.0)


class LocalBench:
    """Real processes of this machine; nothing starts by itself here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.opened = folder, list[LocalBackend]()

    def open(self) -> ClusterBackend:
        self.opened.append(
            LocalBackend(JobBook(self.folder), (Slot(cores=(min(os.sched_getaffinity(0)),)),), grace_s=5.0)
        )
        return self.opened[-1]

    def submit(self) -> int:
        command = [sys.executable, "-c", "import time\ntime.sleep(600)"]
        job = {"command": command, "cwd": "/", "environment": {}, "name": "job", "owner": "ada"}
        return JobBook(self.folder).add({**job, "min_slots": 1, "max_slots": 1, "submit_s": 0.0})

    def settle(self) -> None:
        wait_until(lambda: all(job.state is not JobState.STOPPING for job in self.opened[-1].snapshot().jobs))


@pytest.fixture(params=["slurm", "kueue", "local"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SimpleNamespace]:
    with ExitStack() as stack:
        makers: dict[str, Callable[[], Bench]] = {
            "slurm": SlurmBench,
            "kueue": lambda: KueueBench(stack.enter_context((fake := FakeKueue()).serve()), fake),
            "local": lambda: LocalBench(tmp_path),
        }
        made = makers[request.param]()

        def opened() -> ClusterBackend:
            backend = made.open()
            stack.callback(backend.close)
            return backend

        yield SimpleNamespace(open=opened, submit=made.submit, settle=made.settle)
        if isinstance(made, LocalBench):
            for backend in made.opened[-1:]:
                for job in backend.snapshot().jobs:
                    if not job.state.over:
                        backend.cancel(job.id)


def job_of(backend: ClusterBackend, number: int) -> ClusterJob:
    return next(job for job in backend.snapshot().jobs if job.id == number)


def test_a_held_job_waits_and_runs_once_it_is_started(bench: Bench) -> None:
    backend = bench.open()
    number = bench.submit()
    backend.snapshot()
    backend.apply(Hold(number))
    backend.apply(Hold(number))
    bench.settle()
    held = job_of(backend, number)
    assert (held.state, held.slots) == (JobState.WAITING, 0)
    backend.apply(Start(number, 1))
    bench.settle()
    started = job_of(backend, number)
    assert (started.state, started.slots, started.held_by_us, started.marked) == (JobState.RUNNING, 1, False, False)
    with suppress(ActuationError):
        backend.apply(Start(number, 1))
    assert job_of(backend, number).state is JobState.RUNNING, "done again it does no harm"


def test_a_stopped_job_waits_under_its_number_and_starts_again(bench: Bench) -> None:
    backend = bench.open()
    number = bench.submit()
    backend.snapshot()
    backend.apply(Start(number, 1))
    bench.settle()
    backend.snapshot()
    backend.apply(Stop(number))
    bench.settle()
    stopped = job_of(backend, number)
    assert (stopped.state, stopped.slots, stopped.exempt) == (JobState.WAITING, 0, "")
    backend.apply(Start(number, 1))
    bench.settle()
    again = job_of(backend, number)
    assert (again.state, again.slots, again.restarts) == (JobState.RUNNING, 1, 1)


def test_slots_are_never_given_twice(bench: Bench) -> None:
    backend = bench.open()
    first, second = bench.submit(), bench.submit()
    seen = backend.snapshot()
    assert (seen.slots, seen.free) == (1, 1)
    backend.apply(Start(first, 1))
    bench.settle()
    backend.snapshot()
    if backend.snapshot().self_starting:
        backend.apply(Start(second, 1))
    else:
        with pytest.raises(ActuationError):
            backend.apply(Start(second, 1))
    bench.settle()
    seen = backend.snapshot()
    assert sum(job.slots for job in seen.jobs) == 1 and seen.free == 0


def test_a_second_scheduler_sees_the_holds_and_can_give_them_back(bench: Bench) -> None:
    backend = bench.open()
    numbers = [bench.submit(), bench.submit()]
    if not backend.snapshot().self_starting:
        assert release_all(backend) == [], "nothing is held where nothing starts by itself"
        return
    for number in numbers:
        backend.apply(Hold(number))
    bench.settle()
    other = bench.open()
    assert all(job.held_by_us and job.marked and not job.exempt for job in other.snapshot().jobs)
    assert release_all(other) == numbers
    bench.settle()
    assert not any(job.held_by_us or job.marked for job in other.snapshot().jobs)
    assert release_all(other) == []
    other.close()
    other.close()


def test_a_job_that_does_not_exist_is_a_refusal(bench: Bench) -> None:
    backend = bench.open()
    backend.snapshot()
    for action in (Start(99, 1), Stop(99)):
        with pytest.raises(ActuationError):
            backend.apply(action)


def test_an_order_of_jobs_is_no_error(bench: Bench) -> None:
    backend = bench.open()
    numbers = (bench.submit(), bench.submit())
    backend.snapshot()
    assert isinstance(backend.apply(Order(numbers)), str)
