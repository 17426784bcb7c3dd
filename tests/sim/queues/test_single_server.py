"""The single server: Pollaczek-Khinchine, exact orders, conservation of jobs and of work."""

import json
from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.sim.core.arrivals import poisson
from joulery.sim.core.streams import Streams
from joulery.sim.queues.single_server import by_key, by_queue, fcfs
from tests.data_folder import data_folder

JOBS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.integers(0, 4)), max_size=40).map(
    lambda jobs: (
        np.sort(np.array([a for a, _, _ in jobs], float)) / 4,
        np.array([s for _, s, _ in jobs], float) / 2,
        np.array([k for _, _, k in jobs], float),
    )
)


class DelayedAging:
    """Two heaps: the young by size; those who waited ``w0_s`` by size plus ``alpha`` times their due time."""

    def __init__(self, predicted, alpha, w0_s):
        self.predicted, self.alpha, self.w0_s = predicted, alpha, w0_s
        self.young, self.by_age, self.aged, self.gone = [], [], [], set()

    def push(self, job, arrival_s):
        heappush(self.young, (self.predicted[job], job))
        heappush(self.by_age, (arrival_s + self.w0_s, job))

    def pop(self, now_s):
        while self.by_age and self.by_age[0][0] <= now_s:
            due_s, job = heappop(self.by_age)
            if job not in self.gone:
                heappush(self.aged, (self.predicted[job] + self.alpha * due_s, job))
                self.gone.add(job)
        while self.young and self.young[0][1] in self.gone:
            heappop(self.young)
        young = self.young[0] if self.young else None
        aged = (self.aged[0][0] - self.alpha * now_s, self.aged[0][1]) if self.aged else None
        if aged is None or (young is not None and young < aged):
            job = heappop(self.young)[1]
            self.gone.add(job)
            return job
        return heappop(self.aged)[1]


def brute_force(arrival_s, service_s, key):
    """Look at every job whenever the server is free; the definition, quadratic."""
    waiting, order, start, now = set(range(len(arrival_s))), [], {}, 0.0
    while waiting:
        here = [job for job in waiting if arrival_s[job] <= now]
        if not here:
            now = min(arrival_s[job] for job in waiting)
            continue
        job = min(here, key=lambda j: (key[j], j))
        waiting.remove(job)
        order.append(job)
        start[job] = now
        now += service_s[job]
    return order, [start[job] for job in range(len(arrival_s))]


def test_hand_worked_example():
    served = by_key([0.0, 1.0, 1.0, 9.0], [4.0, 3.0, 1.0, 2.0], [4.0, 3.0, 1.0, 2.0])
    assert served.order.tolist() == [0, 2, 1, 3]
    assert served.start_s.tolist() == [0.0, 5.0, 4.0, 9.0]
    assert served.finish_s.tolist() == [4.0, 8.0, 5.0, 11.0]
    assert served.wait_s.tolist() == [0.0, 4.0, 3.0, 0.0]
    assert served.sojourn_s.tolist() == [4.0, 7.0, 4.0, 2.0]


def test_a_job_that_arrives_when_the_server_frees_itself_may_be_chosen():
    assert by_key([0.0, 1.0, 2.0], [2.0, 5.0, 1.0], [0.0, 5.0, 1.0]).order.tolist() == [0, 2, 1]


def test_equal_keys_are_served_in_order_of_arrival():
    assert by_key([0.0, 1.0, 1.0, 1.0], [3.0, 1.0, 1.0, 1.0], [0.0, 7.0, 7.0, 7.0]).order.tolist() == [0, 1, 2, 3]


@given(JOBS)
def test_any_key_equals_the_brute_force(jobs):
    arrival_s, service_s, key = jobs
    served = by_key(arrival_s, service_s, key)
    order, start = brute_force(arrival_s, service_s, key)
    assert served.order.tolist() == order
    assert served.start_s.tolist() == start


@given(JOBS)
def test_fcfs_in_closed_form_equals_the_queue(jobs):
    arrival_s, service_s, _ = jobs
    closed, queued = fcfs(arrival_s, service_s), by_key(arrival_s, service_s, arrival_s)
    assert closed.order.tolist() == queued.order.tolist()
    assert np.allclose(closed.start_s, queued.start_s, rtol=0, atol=1e-9)
    assert np.all(closed.start_s >= arrival_s)


@given(JOBS)
def test_every_order_serves_each_job_once_and_keeps_the_server_as_busy(jobs):
    arrival_s, service_s, key = jobs
    for served in (fcfs(arrival_s, service_s), by_key(arrival_s, service_s, key)):
        assert sorted(served.order.tolist()) == list(range(len(arrival_s)))
        assert np.all(served.wait_s >= 0)
        starts, finishes = served.start_s[served.order], served.finish_s[served.order]
        assert np.all(starts[1:] >= finishes[:-1] - 1e-9), "one job at a time"
        if len(arrival_s):
            assert finishes[-1] == pytest.approx(fcfs(arrival_s, service_s).finish_s.max()), "work is conserved"


@given(JOBS)
def test_delayed_aging_without_delay_is_linear_aging(jobs):
    arrival_s, service_s, size = jobs
    linear = by_key(arrival_s, service_s, size + 0.25 * arrival_s)
    delayed = by_queue(arrival_s, service_s, DelayedAging(size.tolist(), 0.25, 0.0))
    assert delayed.order.tolist() == linear.order.tolist()
    never = by_queue(arrival_s, service_s, DelayedAging(size.tolist(), 0.25, 1e9))
    assert never.order.tolist() == by_key(arrival_s, service_s, size).order.tolist()


@pytest.mark.parametrize("load", [0.5, 0.7])
@pytest.mark.parametrize("cv2", [0.0, 0.644, 1.0])
def test_mean_completion_time_is_pollaczek_khinchine(load, cv2):
    mean_s = 3.635
    streams = Streams(2)
    arrival_s = poisson(load / mean_s).times_s(160_000 * mean_s / load, streams("arrivals"))
    sizes = streams("sizes").standard_gamma(1 / cv2, len(arrival_s)) * cv2 if cv2 else np.ones(len(arrival_s))
    served = fcfs(arrival_s, mean_s * sizes)
    expected_s = mean_s * (1 + load / (1 - load) * (1 + cv2) / 2)
    assert len(arrival_s) >= 158_000
    assert np.mean(served.sojourn_s) == pytest.approx(expected_s, rel=0.03)


def test_shortest_first_waits_less_on_the_mean_and_more_at_worst():
    streams = Streams(4)
    arrival_s = poisson(0.9).times_s(50_000.0, streams("arrivals"))
    service_s = streams("sizes").exponential(1.0, len(arrival_s))
    first, shortest = fcfs(arrival_s, service_s), by_key(arrival_s, service_s, service_s)
    assert np.mean(shortest.sojourn_s) < 0.65 * np.mean(first.sojourn_s)
    assert shortest.wait_s.max() > 1.5 * first.wait_s.max()


def test_published_dispatch_orders_and_finish_times():
    cases = json.loads((data_folder("muserve") / "cases_ssjf_aging_examples.json").read_text())
    assert len(cases) >= 6
    for case in cases:
        arrival_s = np.array(case["arrival_s"])
        key = np.array(case["predicted_s"]) + case["alpha"] * arrival_s
        served = by_key(arrival_s, case["service_s"], key)
        assert served.order.tolist() == case["dispatch_order"]
        finish_s = {int(job): t_s for job, t_s in case["finish_s"].items()}
        assert served.finish_s == pytest.approx([finish_s[job] for job in range(len(arrival_s))], abs=1e-9)


class Broken:
    def __init__(self, answers):
        self.answers = iter(answers)

    def push(self, job, arrival_s):
        pass

    def pop(self, now_s):
        return next(self.answers)


@pytest.mark.parametrize("answers", [[0, 0], [1, 0]])
def test_a_queue_that_cheats_is_caught(answers):
    with pytest.raises(DataError, match=r"never served job|before it came"):
        by_queue([0.0, 1.0], [5.0, 1.0], Broken(answers))


@pytest.mark.parametrize(
    ("arrival_s", "service_s", "text"),
    [
        ([0.0, 1.0], [1.0], "one service time"),
        ([1.0, 0.0], [1.0, 1.0], "never step back"),
        ([-1.0], [1.0], "start at 0"),
        ([np.nan], [1.0], "finite"),
        ([0.0], [-1.0], "0 s or more"),
        ([0.0], [np.inf], "finite"),
    ],
)
def test_impossible_jobs_are_refused(arrival_s, service_s, text):
    for serve in (fcfs, lambda a, s: by_key(a, s, np.zeros(len(a)))):
        with pytest.raises(DataError, match=text):
            serve(arrival_s, service_s)


@pytest.mark.parametrize("key", [[1.0], [1.0, np.nan], [1.0, np.inf]])
def test_impossible_keys_are_refused(key):
    with pytest.raises(DataError, match="finite key"):
        by_key([0.0, 1.0], [1.0, 1.0], key)


def test_no_jobs_is_no_problem():
    assert len(fcfs([], []).order) == len(by_key([], [], []).order) == 0
