"""Similarity of footprints, sparser sampling, and what a sensor resolves."""

import math

import numpy as np
import pytest

from joulery.accounting.operations.align import align
from joulery.accounting.operations.precision import (
    Sight,
    matrix,
    mean_difference,
    mean_energies,
    pearson,
    resolution,
    thinned,
)
from joulery.accounting.steps import power_steps
from joulery.domain.errors import DataError
from tests.accounting.fair_oracle import Event
from tests.accounting.simulated_step import DEVICE, simulate
from tests.accounting.worlds import World, accounted

FIG_6 = (
    dict(zip("abcdefghi", (21, 21, 54, 54, 118, 118, 184, 100, 200), strict=True)),
    dict(zip("abcdefghi", (15, 15, 23, 23, 59, 59, 92, 50, 100), strict=True)),
)


def test_the_example_of_the_paper() -> None:
    """Figure 6: the second footprint has about half of everything."""
    assert pearson(*FIG_6) == pytest.approx(np.corrcoef(*(list(f.values()) for f in FIG_6))[0, 1])
    assert pearson(FIG_6[0], FIG_6[0]) == pytest.approx(1.0)
    assert mean_difference(*FIG_6) == pytest.approx(np.mean([*FIG_6[0].values()]) - np.mean([*FIG_6[1].values()]))


def test_only_what_both_have_is_compared() -> None:
    assert pearson({"a": 1, "b": 2, "x": 9}, {"a": 2, "b": 4, "y": 1}) == pytest.approx(1.0)
    assert mean_difference({"a": 1}, {"b": 2}) != mean_difference({"a": 1}, {"b": 2})
    assert math.isnan(pearson({"a": 1, "b": 1}, {"a": 2, "b": 4}))
    with pytest.raises(DataError, match="share 1 operations"):
        pearson({"a": 1, "b": 1}, {"a": 2, "c": 4})


def test_a_matrix_has_rows_minus_columns() -> None:
    assert matrix([{"a": 3.0}, {"a": 1.0}], mean_difference) == [[0.0, 2.0], [-2.0, 0.0]]


def test_a_mean_over_repetitions_counts_what_is_missing_as_nothing() -> None:
    assert mean_energies([{"a": 2.0}, {"a": 4.0, "b": 2.0}]) == {"a": 3.0, "b": 1.0}


def test_sparser_sampling_keeps_similarity_and_the_total_of_a_counter() -> None:
    """ASSS of 5.4: at least 0.90 from 6 to 36 ms against 4 ms; the total of a counter does not change."""
    sim = simulate(7, 0.004, seconds=6.0)

    def at(period_s: float):
        power = thinned(sim.power, period_s)
        return align(sim.trace, {DEVICE: [power_steps(power)]}, sim.window_ns)

    base = at(0.004)
    for period_ms in range(6, 37, 6):
        sparse = at(period_ms / 1e3)
        assert pearson(sparse.energy_by_op, base.energy_by_op) >= 0.90
        assert sparse.devices[0].total_j == pytest.approx(base.devices[0].total_j, rel=0.01)
        assert sparse.devices[0].resolution_s == pytest.approx(period_ms / 1e3, rel=0.5)


def test_thinning_takes_the_first_reading_of_every_period() -> None:
    power = simulate(0, 0.004, seconds=0.2).power
    thin = thinned(power, 0.010)
    assert set(thin.t_ns.tolist()) <= set(power.t_ns.tolist())
    assert thin.t_ns[:4].tolist() == [0, 12_000_000, 20_000_000, 32_000_000]
    assert thin.period_s == 0.010
    assert thinned(power, 0.004).t_ns.tolist() == power.t_ns.tolist()
    with pytest.raises(DataError, match="cannot be thinned"):
        thinned(power, 0.001)


def test_what_a_sensor_sees() -> None:
    events = (Event("long", 0, 5000), Event("short", 5000, 5003), Event("blind", 0, 5, "GPU:0"))
    world = World(events, {"CPU:0": [(t, 10.0) for t in range(0, 6000, 100)]}, (0, 6000))
    rows = dict(zip(accounted(world).op, resolution(accounted(world)), strict=True))
    assert rows["long"].sight is Sight.RESOLVED and rows["long"].ratio == 50
    assert rows["short"].sight is Sight.SHARED and rows["short"].ratio == pytest.approx(0.03)
    assert rows["blind"].sight is Sight.UNSEEN and math.isnan(rows["blind"].error_ratio)
    assert np.isnan(rows["long"].error_ratio), "no steps are known, so no error is stated"
