"""Energy of a node, divided: nothing is lost, nothing is counted twice, and a reset counter gives no number."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.node_energy import ENDED, NodeBook, NodeUse, counter_delta, divide
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.workload import NodeWorkload
from joulery.domain.quality import Quality

A, B = NodeWorkload("slurm", "7"), NodeWorkload("container", "0123456789ab")
NAN = math.nan


def channel(device="cpu:0", kind=ReadingKind.COUNTER, quality=Quality.MEASURED, **more):
    return Channel(device, "package", kind, "rapl", quality, **more)


def use(cpu_s, busy_s, boards=None, elapsed_s=10.0, cpus=4):
    return NodeUse(elapsed_s, cpus * elapsed_s, busy_s, cpu_s, boards or {})


JOULES = st.one_of(st.just(NAN), st.floats(0, 1e6))
SECONDS = st.floats(0, 1e3)
SHARES = st.one_of(
    st.none(),
    st.dictionaries(st.sampled_from([A, B]), st.one_of(st.just(NAN), st.floats(0, 1)), max_size=2),
)


@given(
    cpu=JOULES,
    other=JOULES,
    gpu=JOULES,
    cpu_s=st.dictionaries(st.sampled_from([A, B]), SECONDS),
    busy_s=st.one_of(st.just(NAN), SECONDS),
    shares=SHARES,
    idle_w=st.one_of(st.just(NAN), st.floats(0, 1e3)),
)
def test_workloads_idle_and_the_rest_add_up_to_the_devices(cpu, other, gpu, cpu_s, busy_s, shares, idle_w):
    energies = [(channel(idle_w=idle_w), cpu), (channel("cpu:1"), other), (channel("gpu:0"), gpu)]
    divisions = divide(energies, use(cpu_s, busy_s, {"gpu:0": shares}))
    metered = math.fsum(energy_j for _, energy_j in energies if not math.isnan(energy_j))
    assert math.fsum(part.energy_j for part in divisions) == pytest.approx(metered, rel=1e-9, abs=1e-9)
    for part in divisions:
        parts = [*part.workloads.values(), part.idle_j, part.unattributed_j]
        assert min(parts) >= 0
        assert math.fsum(parts) == pytest.approx(part.energy_j, rel=1e-9, abs=1e-9)


def test_idle_power_that_is_known_is_idle_and_the_excess_is_the_workloads():
    (part,) = divide([(channel(idle_w=5.0), 100.0)], use({A: 3.0, B: 1.0}, 5.0))
    assert part.idle_j == 50.0
    assert part.workloads == pytest.approx({A: 30.0, B: 10.0})
    assert part.unattributed_j == pytest.approx(10.0)


def test_without_idle_power_the_unused_time_is_idle():
    (part,) = divide([(channel(), 100.0)], use({A: 10.0}, 20.0))
    assert (part.workloads[A], part.idle_j, part.unattributed_j) == pytest.approx((25.0, 50.0, 25.0))


@pytest.mark.parametrize(
    ("shares", "workloads", "idle_j", "rest_j"),
    [
        (None, {}, 0.0, 90.0),
        ({}, {}, 90.0, 0.0),
        ({A: 1.0}, {A: 90.0}, 0.0, 0.0),
        ({A: 0.5, B: 0.5}, {A: 45.0, B: 45.0}, 0.0, 0.0),
        ({A: 0.0, B: 0.0}, {}, 90.0, 0.0),
        ({A: NAN}, {A: 90.0}, 0.0, 0.0),
        ({A: NAN, B: NAN}, {}, 0.0, 90.0),
    ],
)
def test_a_board_belongs_to_those_who_used_it(shares, workloads, idle_j, rest_j):
    (part,) = divide([(channel("gpu:0"), 90.0)], use({}, 0.0, {"gpu:0": shares}))
    assert (part.workloads, part.idle_j, part.unattributed_j) == (workloads, idle_j, rest_j)


@pytest.mark.parametrize(
    ("shares", "workloads", "idle_j"),
    [
        ({A: 1.0}, {A: 50.0}, 40.0),
        ({A: 0.5, B: 0.25}, {A: 25.0, B: 12.5}, 52.5),
        ({A: NAN}, {A: 50.0}, 40.0),
        ({}, {}, 90.0),
    ],
)
def test_what_a_board_draws_idle_is_no_workloads(shares, workloads, idle_j):
    used = use({}, 0.0, {"gpu:0": shares})
    (part,) = divide([(channel("gpu:0"), 90.0)], replace(used, idle_w={"gpu:0": 40.0 / used.elapsed_s}))
    assert (part.workloads, part.idle_j, part.unattributed_j) == (workloads, idle_j, 0.0)
    (less,) = divide([(channel("gpu:0"), 30.0)], replace(used, idle_w={"gpu:0": 40.0 / used.elapsed_s}))
    assert (less.workloads or dict.fromkeys(workloads, 0.0), less.idle_j) == (dict.fromkeys(workloads, 0.0), 30.0)


def test_the_quality_of_a_device_is_its_weakest():
    parts = divide([(channel(), 1.0), (channel("cpu:1", quality=Quality.MODELLED), 1.0)], use({}, 0.0))
    assert [part.quality for part in parts] == [Quality.MODELLED]


@pytest.mark.parametrize(
    ("of", "before", "now", "peak_w", "expected"),
    [
        (channel(), 100.0, 150.0, 0.0, 50.0),
        (channel(), 100.0, 100.0, 0.0, 0.0),
        (channel(), 1e9, 12.0, 0.0, NAN),  # reset: no number, not the new reading
        (channel(wrap_j=1000.0), 990.0, 40.0, 10.0, 50.0),
        (channel(wrap_j=1e6), 5000.0, 40.0, 10.0, NAN),  # a wrap would need 100 kW
        (channel(wrap_j=1e6, max_w=200.0), 999_500.0, 40.0, 0.0, 540.0),
        (channel(wrap_j=1000.0, max_w=200.0), 10.0, 20.0, 0.0, NAN),  # may have wrapped twice
        (channel(kind=ReadingKind.POWER), 30.0, 99.0, 0.0, 300.0),
        (channel(kind=ReadingKind.AVERAGE), 30.0, 99.0, 0.0, 990.0),
        (channel(kind=ReadingKind.AVERAGE), 30.0, NAN, 0.0, NAN),
    ],
)
def test_joules_between_two_readings(of, before, now, peak_w, expected):
    assert counter_delta(of, before, now, 10.0, peak_w) == pytest.approx(expected, nan_ok=True)


def test_a_book_never_falls_and_keeps_the_joules_of_what_has_ended():
    book = NodeBook()
    for g_per_kwh in (360.0, NAN):
        book.settle(divide([(channel(), 100.0)], use({A: 20.0, B: 20.0}, 40.0)), g_per_kwh)
    before = math.fsum(total.energy_j for total in book.workloads.values())
    book.retire(A)
    assert {key[0] for key in book.workloads} == {ENDED, B}
    assert math.fsum(total.energy_j for total in book.workloads.values()) == before == 200.0
    total = book.workloads[ENDED, "cpu", Quality.MEASURED]
    assert (total.energy_j, total.carbon_g, total.unknown_j) == pytest.approx((100.0, 50 * 1e-4, 50.0))
