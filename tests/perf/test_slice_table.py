"""Measured batches on slices: measurements are predicted exactly, left-out ones closely; limits of older models."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.app.planning.measurements import read_slice_table
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.mig import A100_80GB
from joulery.domain.serving.service import Slo
from joulery.perf.instances import capacity_rps
from joulery.perf.slice_table import BatchCurve, SlicedGpu, SliceProcess, SliceTable, largest_batch
from tests.data_folder import data_folder

CURVE = BatchCurve(1, (1, 2, 4, 8, 16, 32), (5e-3, 5e-3, 6.1e-3, 11e-3, 21e-3, 41e-3))
SLO = Slo(0.1, 0.99)
EMPTY = SliceTable("none", {})


def quantile(values, at):
    return sorted(values)[math.ceil(at * len(values)) - 1]


def test_batches_left_out_of_the_measured_table_are_predicted_from_the_others():
    file = data_folder("clover") / "related_mig" / "parvagpu_a100_80gb_inference.csv"
    errors = []
    for curves in read_slice_table(file, A100_80GB).curves.values():
        for curve in curves:
            if len(curve.batches) > 2:
                pairs = zip(curve.batches, curve.times_s, strict=True)
                errors += [abs(curve.without(batch).time_s(batch) / time_s - 1) for batch, time_s in pairs]
    assert len(errors) == 1747
    assert quantile(errors, 0.5) <= 0.03
    assert math.fsum(errors) / len(errors) <= 0.08
    assert quantile(errors, 0.9) <= 0.13


def test_what_was_measured_is_predicted_as_it_was():
    assert [CURVE.time_s(batch) for batch in CURVE.batches] == list(CURVE.times_s)


def test_times_between_measurements_lie_between_the_chord_and_the_neighbouring_segments():
    assert 16e-3 - 1e-12 <= CURVE.time_s(12) <= 16e-3 + 1e-12  # a straight piece
    assert 5e-3 <= CURVE.time_s(3) <= 5.55e-3
    assert CURVE.time_s(64) == pytest.approx(81e-3)


@pytest.mark.parametrize("batch", [1, 2, 5, 8, 20, 32])
def test_a_lower_clock_slows_kernels_and_not_launches(batch):
    full, half = SliceProcess(CURVE, 32), SliceProcess(CURVE, 32, 0.5)
    kernels_s = min(batch * CURVE.kernel_s, CURVE.time_s(batch))
    assert full.time_s(batch) == pytest.approx(CURVE.time_s(batch))
    assert half.time_s(batch) == pytest.approx(max(CURVE.time_s(batch), 2 * kernels_s))
    assert half.kernel_s == pytest.approx(2 * full.kernel_s)


def test_at_full_clock_without_neighbours_the_capacity_is_that_of_the_other_predictor():
    one = SliceProcess(CURVE, 12)
    other = capacity_rps([CURVE.time_s(batch) for batch in range(1, 13)], SLO)
    assert one.capacity_rps(SLO, 1.0) == pytest.approx(other, rel=0.01)
    single = SliceProcess(CURVE, 1)
    assert single.capacity_rps(SLO, 1.0) == pytest.approx(capacity_rps([5e-3], SLO), rel=0.01)


def test_larger_batches_are_counted_in_bundles_on_the_safe_side():
    exact = capacity_rps([CURVE.time_s(batch) for batch in range(1, 33)], SLO)
    assert 0.97 * exact <= SliceProcess(CURVE, 32).capacity_rps(SLO, 1.0) <= exact * (1 + 1e-3)


def test_capacity_falls_with_the_margin_the_clock_and_the_variation_of_arrivals():
    one = SliceProcess(CURVE, 16)
    base = one.capacity_rps(SLO, 1.0)
    assert one.capacity_rps(SLO, 1.0, 0.2) < base
    assert SliceProcess(CURVE, 16, 0.7).capacity_rps(SLO, 1.0) < base
    assert one.capacity_rps(SLO, 4.0) < base
    assert one.capacity_rps(SLO, 0.0) >= base
    assert one.capacity_rps(Slo(0.004, 0.99), 1.0) == 0.0


def test_the_largest_batch_leaves_room_to_wait_for_the_one_in_service():
    assert largest_batch(CURVE, 1.0, SLO, 0.05, 128) == 32
    assert largest_batch(CURVE, 1.0, SLO, 0.05, 10) == 8
    assert largest_batch(CURVE, 1.0, Slo(0.03, 0.99), 0.05, 128) < 16
    assert largest_batch(CURVE, 1.0, Slo(0.004, 0.99), 0.05, 128) == 0


def test_slices_that_are_all_busy_draw_what_the_busy_board_draws():
    gpu = SlicedGpu(EMPTY, A100_80GB, 60.0, 400.0)
    for cut in A100_80GB.partitions:
        some = [A100_80GB[name] for name in cut]
        expected = 340.0 * sum(each.compute_slices for each in some) / 7
        assert math.fsum(gpu.slice_w(each, 1.0) for each in some) == pytest.approx(expected)
    seventh = A100_80GB["1g.10gb"]
    assert gpu.slice_w(seventh, 0.75) < 0.75 * gpu.slice_w(seventh, 1.0)


def test_three_numbers_come_close_to_a_measured_curve_and_keep_an_exact_one():
    ratios = [a / b for a, b in zip(CURVE.fitted().times_s, CURVE.times_s, strict=True)]
    assert max(abs(each - 1) for each in ratios) <= 0.05
    exact = BatchCurve(1, (1, 2, 4, 8), (3e-3, 3e-3, 5e-3, 9e-3))
    assert exact.fitted().times_s == pytest.approx(exact.times_s)


@pytest.mark.parametrize(
    ("batches", "times"),
    [((), ()), ((1, 1), (0.1, 0.1)), ((2, 1), (0.1, 0.2)), ((0, 1), (0.1, 0.2)), ((1, 2), (0.1,)), ((1,), (math.nan,))],
)
def test_a_curve_that_cannot_be_meant_is_refused(batches, times):
    with pytest.raises(DataError):
        BatchCurve(1, batches, times)


@pytest.mark.parametrize(("idle_w", "busy_w"), [(-1.0, 400.0), (60.0, 50.0), (math.nan, 400.0), (60.0, math.inf)])
def test_power_that_cannot_be_meant_is_refused(idle_w, busy_w):
    with pytest.raises(ConfigError, match="more when busy than idle"):
        SlicedGpu(EMPTY, A100_80GB, idle_w, busy_w)


def test_a_largest_batch_that_is_implausibly_fast_is_named():
    """densenet169 on 3g of an A100-80GB: 128 requests in 88 ms after 64 in 75 ms, where 32 took 41 ms."""
    lucky = BatchCurve(2, (16, 32, 64, 128), (0.0217, 0.0415, 0.0753, 0.0877))
    assert lucky.implausible() == (128,)
    assert BatchCurve(2, (16, 32, 64, 128, 256), (0.0217, 0.0415, 0.0753, 0.0877, 0.08)).implausible() == (256, 128)
    table = SliceTable("mine", {("b", "3g"): (lucky,), ("a", "1g"): (lucky.without(128),)})
    assert table.implausible == ("b on 3g, 2 processes, batch 128",)


@given(st.floats(1e-3, 0.1), st.floats(1e-5, 0.01), st.integers(3, 9), st.lists(st.floats(-0.05, 0.05), min_size=9))
def test_launches_and_kernels_with_errors_of_five_percent_are_plausible(launch_s, item_s, count, off):
    batches = tuple(1 << power for power in range(count))
    times = tuple(max(launch_s, item_s * n) * (1 + e) for n, e in zip(batches, off, strict=False))
    assert BatchCurve(1, batches, times).implausible() == ()
