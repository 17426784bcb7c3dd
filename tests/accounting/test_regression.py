"""Regression over the windows of a slow sensor: how close, how much is kept, when it declines."""

import numpy as np
import pytest

from joulery.accounting.operations.align import align
from joulery.accounting.operations.precision import Sight, pearson, resolution
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.errors import DataError
from tests.accounting.simulated_step import DEVICE, Simulated, simulate


def accounted_step(sim: Simulated, estimator: str) -> TensorFootprint:
    return align(sim.trace, {DEVICE: [sim.meter]}, sim.window_ns, estimator=estimator)


def median_error(got: TensorFootprint, truth: dict[str, float]) -> float:
    return float(np.median([abs(joules / truth[op] - 1) for op, joules in got.energy_by_op.items()]))


@pytest.mark.parametrize(("update_s", "bound"), [(0.004, 0.03), (0.020, 0.06)])
def test_it_finds_powers_a_slow_sensor_cannot_see(update_s: float, bound: float) -> None:
    errors, recency = [], []
    for seed in range(5):
        sim = simulate(seed, update_s)
        got = accounted_step(sim, "regression")
        errors.append(median_error(got, sim.truth_j))
        recency.append(median_error(accounted_step(sim, "recency"), sim.truth_j))
        (device,) = got.devices
        assert device.estimator == "regression" and got.estimator == "regression"
        assert device.attributed_j + device.unattributed_j == pytest.approx(device.total_j, rel=1e-9)
        assert device.attributed_j == pytest.approx(float(got.energy_j.sum()), rel=1e-12)
    assert float(np.mean(errors)) <= bound
    assert float(np.mean(recency)) <= 0.13
    assert float(np.mean(errors)) < 0.5 * float(np.mean(recency))


def weighted_error(got: TensorFootprint, truth: dict[str, float]) -> float:
    return sum(abs(joules - truth[op]) for op, joules in got.energy_by_op.items()) / sum(truth.values())


@pytest.mark.parametrize(("update_s", "bound"), [(0.020, 0.05), (0.100, 0.10)])
def test_readings_of_instants_are_no_means(update_s: float, bound: float) -> None:
    """Watts of an instant, as a CSV of power holds them: as means they mislead, as instants they do not."""
    for seed in range(3):
        sim = simulate(seed, update_s)
        got = align(sim.trace, {DEVICE: [sim.instant]}, sim.window_ns, estimator="regression")
        (device,) = got.devices
        assert device.estimator == "regression"
        assert device.attributed_j + device.unattributed_j == pytest.approx(device.total_j, rel=1e-9)
        assert weighted_error(got, sim.truth_j) <= bound
        hottest = [sorted(joules, key=joules.__getitem__)[-5:] for joules in (got.energy_by_op, sim.truth_j)]
        assert set(hottest[0]) == set(hottest[1])


@pytest.mark.parametrize("kind", ["meter", "mean", "instant"])
@pytest.mark.parametrize(("update_s", "seconds", "bound"), [(0.020, 14.0, 0.05), (0.100, 60.0, 0.10)])
def test_every_kind_of_reading_is_taken_for_what_it_is(
    kind: str, update_s: float, seconds: float, bound: float
) -> None:
    """A counter's interval, a mean of the time before its reading, an instant: each equation says what it holds."""
    errors = []
    for seed in range(3):
        sim = simulate(seed, update_s, seconds)
        got = align(sim.trace, {DEVICE: [getattr(sim, kind)]}, sim.window_ns, estimator="regression")
        (device,) = got.devices
        assert device.estimator == "regression"
        assert device.attributed_j + device.unattributed_j == pytest.approx(device.total_j, rel=1e-9)
        errors.append(weighted_error(got, sim.truth_j))
    assert float(np.mean(errors)) <= bound


def test_a_correlation_does_not_tell_them_apart() -> None:
    """Why the paper's measure proves little: recency is off by a tenth and still correlates."""
    sim = simulate(1, 0.020)
    got = accounted_step(sim, "recency")
    assert pearson(got.energy_by_op, sim.truth_j) > 0.94
    assert median_error(got, sim.truth_j) > 0.05


def test_it_declines_where_the_sensor_is_too_slow_or_too_little_was_read() -> None:
    for sim, says in ((simulate(0, 0.1), "every 100 ms"), (simulate(0, 0.004, seconds=0.1), "only")):
        got = accounted_step(sim, "regression")
        assert got.devices[0].estimator == "recency"
        assert any("accounted by recency" in note and says in note for note in got.notes)
        np.testing.assert_array_equal(got.energy_j, accounted_step(sim, "recency").energy_j)


def test_one_power_everywhere_is_found_exactly() -> None:
    sim = simulate(3, 0.004, seconds=1.0, noise=0.0)
    meter = type(sim.meter)(sim.meter.channel, sim.meter.edges_ns, np.full(len(sim.meter), 70.0))
    got = align(sim.trace, {DEVICE: [meter]}, sim.window_ns, estimator="regression")
    np.testing.assert_allclose(got.energy_j, 70.0 * got.runtime_ns / 1e9, rtol=1e-6)


def test_gaps_in_the_readings_are_left_out() -> None:
    sim = simulate(4, 0.004, seconds=2.0)
    watts = sim.meter.watts.copy()
    watts[100:150] = np.nan
    meter = type(sim.meter)(sim.meter.channel, sim.meter.edges_ns, watts)
    got = align(sim.trace, {DEVICE: [meter]}, sim.window_ns, estimator="regression")
    (device,) = got.devices
    assert device.uncovered_s == pytest.approx(0.2)
    assert device.attributed_j + device.unattributed_j == pytest.approx(device.total_j, rel=1e-9)


def test_it_is_for_events_only() -> None:
    with pytest.raises(DataError, match="not on sets"):
        align(simulate(0, 0.004, seconds=0.2).trace, {}, (0, 10), estimator="regression", multiplicity="set")


def test_every_row_says_what_the_sensor_sees_of_it() -> None:
    sim = simulate(5, 0.004, seconds=2.0)
    for estimator, sight in (("recency", Sight.SHARED), ("regression", Sight.ESTIMATED)):
        rows = resolution(accounted_step(sim, estimator))
        assert {row.sight for row in rows} == {sight}
        assert all(0 < row.ratio < 1 for row in rows)
