"""The simulated pool of batches against the engine's own queue in virtual time, and the pool without batches."""

import heapq
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.serving.dispatch import Dispatcher, Server, Ticket
from joulery.domain.serving.profile import SliceProfile, Timings
from joulery.perf.queues.batched_pool import BatchInstance, batch_value, serve_batches
from joulery.perf.queues.fifo_pool import PoolInstance, serve
from joulery.perf.queues.pull_queue import capacity_rps, poisson_arrivals, replay, uniform_draws
from joulery.policies.serving.search.layout_space import cpu_slices

ONE = cpu_slices((1,))[0]
SIZES, TIMES = (1, 2, 4), (0.010, 0.012, 0.016)


def engine(arrivals, servers: int, delay_s: float):
    """The embedded engine's queue in virtual time: start, server and batch of each request."""
    queue: Dispatcher[int, int] = Dispatcher(10**6)
    for index in range(servers):
        queue.join(Server(index, batch=SIZES[-1], max_delay_s=delay_s))
    found, events = {}, [(at_s, 0, number, None) for number, at_s in enumerate(arrivals)]
    heapq.heapify(events)
    count = len(events)
    while events:
        now_s, _, number, server = heapq.heappop(events)
        if server is not None:
            queue.finish_all(server)
        elif number >= 0:
            queue.offer(Ticket(number, math.inf, kind="k", since_s=now_s))
        while events and events[0][0] == now_s:  # all that happens at one instant comes before the next pull
            _, _, number, server = heapq.heappop(events)
            if server is not None:
                queue.finish_all(server)
            elif number >= 0:
                queue.offer(Ticket(number, math.inf, kind="k", since_s=now_s))
        while (pair := queue.pull(now_s)) is not None:
            held = [ticket.payload for ticket in pair[1].held]
            took_s = float(np.interp(len(held), SIZES, TIMES))
            found |= {one: (now_s, pair[1].payload, len(held)) for one in held}
            heapq.heappush(events, (now_s + took_s, 1, count, pair[1]))
            count += 1
        if queue.ripe_s < math.inf:
            heapq.heappush(events, (queue.ripe_s, 2, -1, None))
    return [found[number] for number in range(len(arrivals))]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=60),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.007]),
)
def test_the_simulation_is_the_engines_queue(gaps_ms, servers, delay_s):
    arrivals = (np.cumsum(gaps_ms) / 1e3 + np.arange(len(gaps_ms)) * 1e-7).tolist()
    one = BatchInstance(SIZES, [[each] * len(arrivals) for each in TIMES])
    run = serve_batches(arrivals, [one] * servers, delay_s)
    expected = engine(arrivals, servers, delay_s)
    assert run.start_s == pytest.approx([start_s for start_s, _, _ in expected], abs=1e-9)
    assert run.batch.tolist() == [batch for _, _, batch in expected]
    ends = run.start_s + run.service_s
    for number in range(len(arrivals)):
        mine = run.first == run.first[number]
        assert mine.sum() == run.batch[number] <= SIZES[-1], "none is lost, none is served twice"
        assert run.start_s[number] >= arrivals[number] and len(set(ends[mine].tolist())) == 1


def test_batches_of_one_are_the_pool_without_batches():
    arrivals = poisson_arrivals(150.0, 2000, 3).tolist()
    times = (0.008 + 0.004 * uniform_draws(2000, 3)).tolist()
    run = serve_batches(arrivals, [BatchInstance((1,), [times])] * 2)
    pool = serve(arrivals, [PoolInstance(times, [0.0] * 2000)] * 2)
    assert run.start_s == pytest.approx(pool.start_s) and run.instance.tolist() == pool.instance.tolist()


def test_between_measured_sizes_a_batch_takes_a_time_in_proportion():
    values = [[1.0], [3.0], [4.0]]
    assert [batch_value((1, 2, 6), values, 0, size) for size in range(1, 7)] == [1.0, 3.0, 3.25, 3.5, 3.75, 4.0]


def entry(batches=(2, 4)) -> SliceProfile:
    times = {size: Timings([second], [second]) for size, second in zip(SIZES, TIMES, strict=True)}
    return SliceProfile("v", ONE, times[1], times[1], 10.0, batches={size: times[size] for size in batches})


def test_a_profile_with_batches_has_their_capacity_and_replays_them():
    both, alone = [entry()] * 2, [entry(())] * 2
    assert capacity_rps(both) == pytest.approx(2 * 4 / 0.016) and capacity_rps(alone) == pytest.approx(200.0)
    arrivals, picks = poisson_arrivals(350.0, 6000, 1), uniform_draws(6000, 1)
    fast, slow = (replay(arrivals, picks, [(-math.inf, items)]) for items in (both, alone))
    assert np.quantile(fast.latency_s, 0.95) < 0.05 < 1.0 < np.quantile(slow.latency_s, 0.95)
    assert fast.cpu_s.mean() < slow.cpu_s.mean() == pytest.approx(0.010)
    rows = zip(fast.server, fast.start_s, fast.service_s, strict=True)
    total_s = sum({(server, start_s): took_s for server, start_s, took_s in rows}.values())
    assert math.fsum(fast.cpu_s) == pytest.approx(total_s), (
        "the CPU seconds of the batches, divided over their requests"
    )


def test_what_a_profile_says_of_batches():
    one = entry()
    assert (one.max_batch, one.each_s) == (4, 0.004) and one.slowest_s(0.95) == 0.016
    assert one.batch_s(3.0) == pytest.approx(0.014) and one.busy_energy_j == pytest.approx(0.04)
    assert one.batched_to(3).max_batch == 2 and one.batched_to(1).batches == {} and one.batched_to(9) is one
    slow = SliceProfile(
        "v", ONE, Timings([0.01], [0.01]), Timings([0.01], [0.01]), 10.0, batches={2: Timings([0.03], [0.03])}
    )
    assert slow.each_s == 0.01, "batches that do not pay are not what it can serve"
