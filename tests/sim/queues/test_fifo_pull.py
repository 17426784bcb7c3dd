"""Clover's FIFO-pull service: against an event-by-event twin, the measured points and the exhaustive tables."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError, DataError
from joulery.sim.core.arrivals import poisson
from joulery.sim.core.kernel import Kernel, Rank
from joulery.sim.core.streams import Streams
from joulery.sim.queues.fifo_pull import PullInstance, Requests, metrics, pull
from tests.data_folder import data_folder
from tests.sim.serving.clover_profile import load_service, rows

SERVICES = ("yolo", "efficientnet", "albert")


def instance(gpu_s, host_s=0.0, **changes):
    fields = {"floor_s": 0.0, "dynamic_j": 10.0, "accuracy_ratio": 0.5, **changes}
    return PullInstance(f"{gpu_s}", host_s, gpu_s, **fields)


def requests(arrival_s, size=None, jitter_s=None):
    arrivals = np.array(arrival_s, float)
    count = len(arrivals)
    return Requests(
        arrivals,
        np.ones(count) if size is None else np.array(size, float),
        np.zeros(count) if jitter_s is None else np.array(jitter_s, float),
    )


def event_by_event(work, instances, contention, on=()):
    """The same service as an artifact would run it: a deque of idle instances, a deque of waiting requests."""
    kernel, idle, waiting = Kernel(), deque(range(len(instances))), deque()
    outcome = {}

    def dispatch(t_s):
        while idle and waiting:
            server, job = idle.popleft(), waiting.popleft()
            others = [other for other in range(len(instances)) if other not in idle and other != server]
            busy = sum(not on or on[other] == on[server] for other in others)
            spec = instances[server]
            alone_s = spec.host_s + spec.gpu_s * work.size[job] + work.jitter_s[job]
            service = alone_s + spec.host_s * contention * busy
            outcome[job] = (t_s, server)
            kernel.at(t_s + max(service, spec.floor_s), "done", server)

    def done(t_s, server):
        idle.append(server)
        dispatch(t_s)

    def arrive(t_s, job):
        waiting.append(job)
        dispatch(t_s)

    kernel.on("done", Rank.COMPLETION, done)
    kernel.on("request", Rank.ARRIVAL, arrive)
    kernel.feed(work.arrival_s, "request")
    kernel.run()
    return [outcome[job] for job in range(len(work))]


POOLS = st.lists(
    st.builds(instance, st.floats(0.1, 3.0), st.floats(0.0, 1.0), floor_s=st.floats(0.0, 1.0)), min_size=1, max_size=5
)
WORK = st.lists(st.tuples(st.floats(0.001, 2.0), st.floats(0.1, 3.0), st.floats(-0.5, 0.5)), max_size=40).map(
    lambda jobs: requests(np.cumsum([gap for gap, _, _ in jobs]), [x for _, x, _ in jobs], [n for _, _, n in jobs])
)


@given(WORK, POOLS, st.floats(0.0, 0.5))
def test_equals_the_event_by_event_twin(work, pool, contention):
    pulled = pull(work, pool, contention=contention)
    expected = event_by_event(work, pool, contention)
    assert pulled.instance.tolist() == [server for _, server in expected]
    assert pulled.start_s.tolist() == [start for start, _ in expected]


@given(WORK, POOLS, st.floats(0.0, 0.5), st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_neighbours_on_other_hosts_do_not_count(work, pool, contention, on):
    pulled = pull(work, pool, contention=contention, hosts=on[: len(pool)])
    expected = event_by_event(work, pool, contention, on)
    assert list(zip(pulled.start_s.tolist(), pulled.instance.tolist(), strict=True)) == expected
    alone = pull(work, pool, contention=contention, hosts=[7] * len(pool))
    assert alone.finish_s.tolist() == pull(work, pool, contention=contention).finish_s.tolist(), "one host"


@given(WORK, POOLS)
def test_fifo_no_request_lost_and_no_instance_serves_two_at_once(work, pool):
    pulled = pull(work, pool)
    assert len(pulled.start_s) == len(pulled.finish_s) == len(work)
    assert np.all(np.diff(pulled.start_s) >= 0), "first come, first taken"
    assert np.all(pulled.start_s >= work.arrival_s)
    for server in range(len(pool)):
        mine = pulled.instance == server
        assert np.all(pulled.start_s[mine][1:] >= pulled.finish_s[mine][:-1])
        assert pulled.free_s[server] == (pulled.finish_s[mine][-1] if np.any(mine) else 0.0)


@given(WORK, POOLS, st.integers(0, 40))
def test_a_run_in_two_stretches_is_the_run_in_one(work, pool, cut):
    whole = pull(work, pool)
    first = pull(requests(work.arrival_s[:cut], work.size[:cut], work.jitter_s[:cut]), pool)
    rest = requests(work.arrival_s[cut:], work.size[cut:], work.jitter_s[cut:])
    second = pull(rest, pool, available_s=first.free_s.tolist())
    assert np.allclose(np.concatenate([first.finish_s, second.finish_s]), whole.finish_s)


def test_longest_idle_goes_first_and_contention_counts_busy_neighbours():
    pool = [instance(1.0, host_s=1.0), instance(1.0, host_s=1.0), instance(1.0, host_s=1.0)]
    pulled = pull(requests([0.0, 0.5, 10.0, 10.0, 10.0, 10.0]), pool, contention=0.5)
    assert pulled.instance.tolist() == [0, 1, 2, 0, 1, 2]
    assert pulled.finish_s.tolist() == [2.0, 3.0, 12.0, 12.5, 13.0, 15.0]


def test_floor_binds_and_starting_instances_wait_until_available():
    pool = [instance(1.0, floor_s=4.0), instance(1.0)]
    pulled = pull(requests([0.0, 0.0]), pool, available_s=[3.0, 5.0])
    assert pulled.start_s.tolist() == [3.0, 5.0]
    assert pulled.finish_s.tolist() == [7.0, 6.0]


def test_instances_serve_equal_counts_when_idle_ones_are_at_hand_and_by_speed_when_none_is():
    pool = [instance(0.05), instance(0.1), instance(0.3), instance(0.4)]
    streams = Streams(1)
    arrival_s = poisson(0.5).times_s(20_000.0, streams("arrivals"))
    spread = []
    for speed_up in (1.0, 40.0, 400.0):
        work = Requests.draw(arrival_s / speed_up, streams, size_cv=0.1, jitter_s=0.0)
        served = metrics(work, pull(work, pool), pool, idle_w=1.0).served
        spread.append(max(served) / min(served))
    assert spread[0] < 1.08
    assert 1.3 < spread[1] < 7
    assert spread[2] == pytest.approx(0.4 / 0.05, rel=0.05)


def test_published_mixtures_serve_equal_counts_at_their_load():
    """Measured: the mean accuracy of detection's large and medium variants is the midpoint of the two."""
    service = load_service("yolo")
    pool = service.instances("1", "lx")
    streams = Streams(0)
    work = Requests.draw(poisson(5.0).times_s(4000.0, streams("arrivals")), streams, size_cv=0.05, jitter_s=0.009)
    measured = metrics(work, pull(work, pool, contention=service.kappa), pool, idle_w=75.2)
    assert max(measured.served) / min(measured.served) < 1.02
    assert 100 * measured.accuracy_ratio == pytest.approx((49.0 + 50.7) / 2, abs=0.05)


def test_metrics_add_up():
    pool = [instance(1.0, dynamic_j=10.0, accuracy_ratio=0.4), instance(3.0, dynamic_j=50.0, accuracy_ratio=0.8)]
    work = requests([0.0, 0.0, 5.0, 6.0])
    measured = metrics(work, pull(work, pool), pool, idle_w=20.0)
    assert measured.served == (2, 2)
    assert measured.requests == 4
    assert measured.accuracy_ratio == pytest.approx(0.6)
    assert measured.window_s == 9.0
    assert measured.idle_j == pytest.approx(180.0)
    assert measured.dynamic_j == pytest.approx(120.0)
    assert measured.energy_j_per_request == pytest.approx(75.0)
    assert measured.p50_s == pytest.approx(2.0)
    assert measured.p95_s == pytest.approx(3.0)
    warm = metrics(work, pull(work, pool), pool, idle_w=20.0, skip=2)
    assert (warm.requests, warm.served, warm.window_s) == (2, (1, 1), 4.0)
    assert warm.energy_j_per_request == pytest.approx((80.0 + 60.0) / 2)


def test_drawn_sizes_have_their_moments_and_do_not_depend_on_one_another():
    streams = Streams(3)
    work = Requests.draw(np.arange(200_000.0), streams, size_cv=0.8, jitter_s=0.01)
    assert np.mean(work.size) == pytest.approx(1.0, abs=0.01)
    assert np.std(work.size) == pytest.approx(0.8, rel=0.03)
    assert np.mean(work.jitter_s) == pytest.approx(0.0, abs=1e-4)
    assert np.std(work.jitter_s) == pytest.approx(0.01, rel=0.01)
    other = Requests.draw(np.arange(200_000.0), streams, size_cv=0.0, jitter_s=0.01)
    assert np.array_equal(other.jitter_s, work.jitter_s)
    assert np.all(other.size == 1.0)


def test_measured_points_are_replayed_by_the_calibrated_profile():
    """Accuracy, energy and p95 of the 18 points measured on two A100s, on the arrivals of the published runs."""
    points = rows(data_folder("clover") / "measured_arrival_sweep.csv")
    assert len(points) == 18
    p95_errors = []
    for point in points:
        service = load_service(point["service"])
        pool = service.instances(point["partition_code"], point["models"])
        gaps = np.random.RandomState(1).exponential(float(point["mean_interarrival_s"]), int(point["n_requests"]))
        seeds = []
        for seed in range(5):
            work = Requests.draw(np.cumsum(gaps), Streams(seed), size_cv=service.size_cv, jitter_s=service.jitter_s)
            pulled = pull(work, pool, contention=service.kappa)
            seeds.append(metrics(work, pulled, pool, idle_w=2 * service.idle_w_per_gpu))
        accuracy_pct = 100 * np.mean([m.accuracy_ratio for m in seeds])
        assert accuracy_pct == pytest.approx(float(point["accuracy_pct"]), abs=0.05)
        energy_j = np.mean([m.energy_j_per_request for m in seeds])
        assert energy_j == pytest.approx(float(point["energy_j_per_request"]), rel=0.10)
        p95_errors.append(1000 * np.mean([m.p95_s for m in seeds]) / float(point["p95_latency_ms"]) - 1)
    assert sum(abs(error) <= 0.10 for error in p95_errors) >= 17
    assert max(map(abs, p95_errors)) <= 0.35


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVICES)
def test_exhaustive_table_lies_within_the_spread_of_our_seeds(name):
    """Every 17th configuration of the black-box table, compared with ten seeds of our own simulation of it."""
    service = load_service(name)
    sample = rows(data_folder("clover") / "synth_v1" / f"exhaustive_{name}.csv")[::17]
    unit = [Streams(seed)("gaps").exponential(1.0, 1000) for seed in range(10)]
    energy_z, p95_z, accuracy_off = [], [], []
    for row in sample:
        pool = service.instances(row["partition_code"], row["models"])
        runs = []
        for seed, gaps in enumerate(unit):
            arrival_s = np.cumsum(gaps) * float(row["mean_interarrival_s"])
            work = Requests.draw(arrival_s, Streams(seed), size_cv=service.size_cv, jitter_s=service.jitter_s)
            pulled = pull(work, pool, contention=service.kappa)
            runs.append(metrics(work, pulled, pool, idle_w=2 * service.idle_w_per_gpu))
        energy = np.array([run.energy_j_per_request for run in runs])
        p95 = np.log([run.p95_s for run in runs])
        energy_z.append((float(row["energy_j_per_request"]) - energy.mean()) / energy.std(ddof=1))
        p95_z.append((np.log(float(row["p95_ms"]) / 1000) - p95.mean()) / p95.std(ddof=1))
        accuracy_off.append(float(row["accuracy_pct"]) - 100 * np.mean([run.accuracy_ratio for run in runs]))
    assert np.mean(np.abs(energy_z) < 3) >= 0.97
    assert np.mean(np.abs(p95_z) < 3) >= 0.95
    assert abs(np.mean(p95_z)) < 1.5
    assert np.max(np.abs(accuracy_off)) < 0.25


def test_impossible_pools_and_windows_are_refused():
    work = requests([0.0, 1.0])
    pool = [instance(1.0)]
    with pytest.raises(ConfigError, match="at least one instance"):
        pull(work, [])
    for available in ([1.0, 2.0], [np.nan]):
        with pytest.raises(DataError, match="available time"):
            pull(work, pool, available_s=available)
    for skip in (2, 3, -1):
        with pytest.raises(DataError, match="measures nothing"):
            metrics(work, pull(work, pool), pool, idle_w=1.0, skip=skip)
    for values in ((-1.0, 1.0), (np.nan, 1.0), (0.0, 0.0)):
        with pytest.raises(ConfigError):
            instance(values[1], host_s=values[0])
    for arrival_s in ([1.0, 0.0], [-1.0], [np.inf]):
        with pytest.raises(DataError, match="never step back"):
            Requests.draw(arrival_s, Streams(0), size_cv=0.1, jitter_s=0.0)
