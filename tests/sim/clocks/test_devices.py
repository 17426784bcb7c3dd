import numpy as np
import pytest

from joulery.domain.errors import DataError
from joulery.perf.power.clock_curves import V100
from joulery.policies.clocks.governor import FixedClock, MiadGovernor, PredictiveGovernor, late_budget
from joulery.policies.clocks.lowest_clock import ClockRange
from joulery.sim.clocks.devices import (
    ClockedPlant,
    ClockedRun,
    ModelRequests,
    balanced_devices,
    best_static_clocks,
    run_clocked_devices,
)

CLOCKS = np.array([200.0, 500.0, 800.0, 1000.0, 1200.0, 1380.0])
# A compute-bound model (time follows 1/f) and one that hardly feels the clock.
LATENCY = np.array([0.1 * 1380.0 / CLOCKS, 0.15 * (0.8 + 0.2 * 1380.0 / CLOCKS)])


def plant(scale: float = 5.0, devices: int = 1, switch_s: float = 0.0) -> ClockedPlant:
    device_of = np.array([0, devices - 1])
    slo_s, elasticity = scale * LATENCY[:, -1], np.array([1.0, 0.2])
    power = V100.busy_power_w(CLOCKS), V100.idle_power_w(CLOCKS)
    return ClockedPlant(CLOCKS, *power, LATENCY, slo_s, elasticity, device_of, switch_s)


def poisson(rate_rps: float, duration_s: float, seed: int = 1) -> ModelRequests:
    rng = np.random.default_rng(seed)
    arrival_s = np.sort(rng.uniform(0, duration_s, rng.poisson(rate_rps * duration_s)))
    work = rng.uniform(0.5, 1.5, len(arrival_s))
    return ModelRequests(arrival_s, rng.integers(0, 2, len(arrival_s)), work, np.full(len(work), 1.5))


def fixed(plant: ClockedPlant, requests: ModelRequests, clock_mhz: float = 1380.0) -> ClockedRun:
    return run_clocked_devices(plant, requests, lambda _: FixedClock(clock_mhz), duration_s=200.0)


def test_one_request_by_hand() -> None:
    requests = ModelRequests(np.array([1.0]), np.array([0]), np.array([2.0]), np.array([2.0]))
    run = run_clocked_devices(plant(), requests, lambda _: FixedClock(1380.0), duration_s=10.0)
    assert run.latency_s == pytest.approx([0.2])
    busy_w, idle_w = float(V100.busy_power_w(1380.0)[0]), float(V100.idle_power_w(1380.0)[0])
    assert run.energy_j == pytest.approx([0.2 * busy_w + 9.8 * idle_w])
    assert run.duration_s.tolist() == [10.0]


def test_the_rest_of_a_request_goes_on_at_the_new_clock() -> None:
    requests = ModelRequests(np.array([0.0]), np.array([0]), np.array([10.0]), np.array([10.0]))
    slow = run_clocked_devices(plant(switch_s=0.5), requests, lambda _: FixedClock(200.0), duration_s=20.0)
    done_before = 0.5 / 0.1  # passes at the highest clock until the switch
    assert slow.latency_s == pytest.approx([0.5 + (10.0 - done_before) * 0.69])


def test_a_fixed_clock_is_the_first_come_first_served_recursion() -> None:
    requests = poisson(3.0, 200.0)
    service_s = requests.work * LATENCY[requests.model, -1]
    free_s, expected = 0.0, []
    for arrival_s, need_s in zip(requests.arrival_s, service_s, strict=True):
        free_s = max(free_s, arrival_s) + need_s
        expected.append(free_s - arrival_s)
    run = fixed(plant(), requests)
    assert run.latency_s == pytest.approx(expected)
    assert bool(np.all(run.latency_s >= service_s * (1 - 1e-9)))
    busy_w, idle_w = float(V100.busy_power_w(1380.0)[0]), float(V100.idle_power_w(1380.0)[0])
    assert run.energy_j[0] == pytest.approx(service_s.sum() * busy_w + (run.duration_s[0] - service_s.sum()) * idle_w)


@pytest.mark.parametrize(("scale", "rate_rps"), [(5.0, 1.0), (10.0, 2.0)])
def test_the_predictive_governor_saves_more_than_any_static_clock_and_misses_nothing_more(
    scale: float, rate_rps: float
) -> None:
    p, requests = plant(scale, switch_s=0.02), poisson(rate_rps, 200.0)
    slo_s = p.slo_s[requests.model]
    top = fixed(p, requests)
    static = {k: fixed(p, requests, float(clock)) for k, clock in enumerate(CLOCKS)}
    best = static[best_static_clocks(p, static, requests, 0.99)[0]]
    ours = run_clocked_devices(p, requests, lambda _: PredictiveGovernor(CLOCKS), duration_s=200.0)
    assert ours.attainment_ratio(slo_s) >= top.attainment_ratio(slo_s) - 0.002
    assert ours.power_w < best.power_w < top.power_w


def test_the_reacting_governor_breaks_more_slos_than_the_fixed_clock() -> None:
    p, requests = plant(4.0), poisson(1.0, 600.0)
    slo_s = p.slo_s[requests.model]
    miad_governor = MiadGovernor(ClockRange(step_mhz=200.0), supported_mhz=tuple(CLOCKS))
    miad = run_clocked_devices(p, requests, lambda _: miad_governor, duration_s=600.0, period_s=1.0)
    top = fixed(p, requests)
    assert miad.power_w < top.power_w
    ours = run_clocked_devices(p, requests, lambda _: PredictiveGovernor(CLOCKS), duration_s=600.0)
    assert miad.attainment_ratio(slo_s) < 0.995 < ours.attainment_ratio(slo_s) <= top.attainment_ratio(slo_s)


@pytest.mark.slow
def test_a_spike_is_met_at_once_and_a_lasting_overload_asks_for_help_once() -> None:
    p = plant(5.0)
    calm, spike = np.arange(0, 60, 3.0), np.sort(np.random.default_rng(2).uniform(60, 90, 600))
    arrival_s = np.concatenate((calm, spike))
    n = len(arrival_s)
    requests = ModelRequests(arrival_s, np.zeros(n, np.int64), np.ones(n), np.ones(n))
    run = run_clocked_devices(p, requests, lambda _: PredictiveGovernor(CLOCKS), duration_s=100.0)
    at_top = [t for t, d in run.decisions if d.kind == "set_clock" and d.value == 1380.0 and t >= 60.0]
    assert at_top[0] <= 63.0
    assert sum(d.kind == "scale_out" for _, d in run.decisions) == 1
    assert all(d.reason for _, d in run.decisions)


def test_equal_runs_are_equal_and_an_empty_device_sleeps() -> None:
    p, requests = plant(5.0, devices=2, switch_s=0.02), poisson(1.0, 50.0)
    runs = [run_clocked_devices(p, requests, lambda _: PredictiveGovernor(CLOCKS), duration_s=60.0) for _ in range(2)]
    assert runs[0].latency_s.tobytes() == runs[1].latency_s.tobytes()
    assert runs[0].decisions == runs[1].decisions
    nothing = ModelRequests(np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    empty = run_clocked_devices(p, nothing, lambda _: PredictiveGovernor(CLOCKS), duration_s=60.0)
    assert empty.power_w == pytest.approx(float(V100.idle_power_w(200.0)[0]), rel=0.001)


def test_models_are_balanced_longest_first() -> None:
    assert balanced_devices([4.0, 3.0, 2.0, 1.0], 2).tolist() == [0, 1, 1, 0]


def test_ragged_or_workless_requests_are_refused() -> None:
    with pytest.raises(DataError, match="differ in length"):
        ModelRequests(np.zeros(2), np.zeros(1, np.int64), np.ones(1), np.ones(1))
    with pytest.raises(DataError, match="positive"):
        ModelRequests(np.zeros(1), np.zeros(1, np.int64), np.zeros(1), np.ones(1))


def test_late_answers_are_counted_among_the_last_thousand() -> None:
    """The late budget of a governor is that of the requests it can still see, not of the whole run."""
    budgets: list[float] = []

    class Watching(FixedClock):
        def step(self, state, view):
            budgets.append(view.late_budget)
            return super().step(state, view)

    count = 2500
    arrival_s = np.arange(count) * 0.5
    # The first five hundred take longer than their SLO, all others a tenth of it.
    work = np.where(np.arange(count) < 500, 6.0, 0.5)
    requests = ModelRequests(arrival_s, np.zeros(count, np.int64), work, work)
    run = run_clocked_devices(plant(), requests, lambda _: Watching(1380.0), duration_s=200.0)
    late = int(np.sum(run.latency_s[-1000:] > plant().slo_s[0]))
    assert np.sum(run.latency_s > plant().slo_s[0]) > 0 and late == 0
    assert budgets[-1] == late_budget(1000, 0, plant().slo_quantile) > min(budgets)
