"""Alignment of events and power: against exact oracles, and the edges that real traces have."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.accounting.operations import estimators
from joulery.accounting.operations.align import align
from joulery.accounting.operations.edd import powers_w
from joulery.accounting.operations.precision import Sight, resolution
from joulery.accounting.steps import PowerSteps
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.trace.events import EventTrace
from tests.accounting.fair_oracle import Event, exact, ticks
from tests.accounting.worlds import World, accounted, metered, random_world, trace_of

JOULES = 1e-6
"""Joules in one watt-tick."""


def close(got: float, right: float, scale: float) -> bool:
    return math.isclose(got, right, rel_tol=1e-9, abs_tol=1e-12 * scale)


def assert_equal_to_the_oracle(world: World, distinct: bool = False) -> None:
    got = accounted(world, "set" if distinct else "events")
    right = exact(world.events, world.power, world.window, distinct)
    scale = max((float(total) for total in right.total.values()), default=0.0) * JOULES
    energies = {
        (op, device): joules for op, device, joules in zip(got.op, got.device, got.energy_j.tolist(), strict=True)
    }
    for key in energies.keys() | right.energy.keys():
        if key[1] in world.power:
            assert close(energies.get(key, 0.0), float(right.energy[key]) * JOULES, scale), key
    for device in got.devices:
        assert close(device.total_j, float(right.total[device.device]) * JOULES, scale)
        assert close(device.unattributed_j, float(right.unattributed[device.device]) * JOULES, scale)
        assert close(device.attributed_j + device.unattributed_j, device.total_j, scale)
        assert round(device.uncovered_s * 1e6, 6) == right.uncovered[device.device]


@pytest.mark.parametrize("block", range(10))
def test_a_thousand_random_worlds_equal_exact_arithmetic(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        assert_equal_to_the_oracle(random_world(seed))
        assert_equal_to_the_oracle(random_world(seed), distinct=True)


def test_random_worlds_equal_algorithm_2_tick_by_tick() -> None:
    for seed in range(2000, 2200):
        world = random_world(seed)
        right = ticks(world.events, world.power, world.window)
        got = accounted(world)
        for op, device, joules in zip(got.op, got.device, got.energy_j.tolist(), strict=True):
            assert close(joules, float(right[op, device]) * JOULES, 1e-2), (seed, op, device)


def test_slices_of_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = [random_world(seed) for seed in range(3000, 3100)]
    whole = [accounted(world) for world in worlds]
    monkeypatch.setattr(estimators, "CHUNK", 2)
    for world, one in zip(worlds, whole, strict=True):
        assert_equal_to_the_oracle(world)
        cut = accounted(world)
        assert cut.samples.tolist() == one.samples.tolist()
        assert cut.uncovered_ns.tolist() == one.uncovered_ns.tolist()
        assert [d.active_s for d in cut.devices] == [d.active_s for d in one.devices]


WATTS = [(0, 100.0)]


def test_ten_thousand_events_at_once_share_equally() -> None:
    world = World(tuple(Event(f"op{i % 7}", 0, 50) for i in range(10_000)), {"CPU:0": WATTS}, (0, 100))
    got = accounted(world)
    assert got.devices[0].attributed_j == pytest.approx(50 * 100 * JOULES, rel=1e-12)
    assert got.count.sum() == 10_000
    np.testing.assert_allclose(got.energy_j, got.count * 50 * 100 * JOULES / 10_000, rtol=1e-9)


def test_ten_thousand_events_deep_the_innermost_runs() -> None:
    depth = 10_000
    events = tuple(Event(f"op{i % 3}", i, 3 * depth - i, lane=0) for i in range(depth))
    got = accounted(World(events, {"CPU:0": WATTS}, (0, 3 * depth)))
    runtime = [2 * math.ceil((depth - k) / 3) * 1000 for k in range(3)]
    runtime[(depth - 1) % 3] += (depth + 2 - 2) * 1000
    assert got.runtime_ns.sum() == 3 * depth * 1000
    assert got.runtime_ns.tolist() == runtime
    assert got.devices[0].unattributed_j == 0


@pytest.mark.parametrize("device", ["GPU:0", "gpu:3", "cuda:0", "hip:1", "TPU:0"])
def test_kernels_of_one_stream_do_not_nest(device: str) -> None:
    events = (Event("a", 0, 100, device, 7), Event("b", 20, 80, device, 7))
    got = accounted(World(events, {device: WATTS}, (0, 100)))
    np.testing.assert_allclose(got.energy_j, [70 * 100 * JOULES, 30 * 100 * JOULES], rtol=1e-12)


def test_a_lane_is_a_lane_of_one_device() -> None:
    events = (Event("a", 0, 100, "CPU:0", 0), Event("b", 20, 80, "CPU:1", 0))
    got = accounted(World(events, {"CPU:0": WATTS, "CPU:1": WATTS}, (0, 100)))
    np.testing.assert_allclose(got.energy_j, [100 * 100 * JOULES, 60 * 100 * JOULES], rtol=1e-12)


def test_an_unmetered_device_is_listed_without_energy() -> None:
    got = accounted(World((Event("a", 0, 30, "GPU:3"),), {"CPU:0": WATTS}, (0, 100)))
    assert [device.device for device in got.devices] == ["CPU:0", "GPU:3"]
    idle, blind = got.devices
    assert idle.unattributed_j == idle.total_j == pytest.approx(100 * 100 * JOULES)
    assert math.isnan(blind.total_j) and not blind.metered
    assert (blind.uncovered_s, blind.active_s) == (1e-4, 3e-5)
    assert math.isnan(got.energy_j[0]) and got.uncovered_ns[0] == got.runtime_ns[0] == 30_000
    assert got.energy_by_op == {}
    assert any("GPU:3: no meter" in note for note in got.notes)


def test_events_outside_the_window_are_left_out_and_said() -> None:
    events = (Event("before", 0, 10), Event("at", 10, 20), Event("after", 20, 30))
    got = accounted(World(events, {"CPU:0": WATTS}, (10, 20)))
    assert got.op == ("at",)
    assert "2 events lie outside the window and are not counted" in got.notes


def test_an_event_of_no_length_counts_and_takes_nothing() -> None:
    events = (Event("a", 0, 50, lane=0), Event("none", 50, 50, lane=0), Event("b", 50, 100, lane=0))
    got = accounted(World(events, {"CPU:0": [(0, 100.0), (50, 100.0), (60, 100.0)]}, (0, 100)))
    assert dict(zip(got.op, got.count.tolist(), strict=True)) == {"a": 1, "b": 1, "none": 1}
    assert got.energy_by_op["none"] == 0.0
    assert got.median_ns.tolist() == [50_000, 50_000, 0]


@pytest.mark.parametrize(("at", "count"), [(-1, 0), (0, 1), (50, 1), (100, 1), (101, 0)])
def test_an_event_of_no_length_counts_at_both_ends_of_the_window(at: int, count: int) -> None:
    got = accounted(World((Event("none", at, at),), {"CPU:0": [(0, 100.0)]}, (0, 100)))
    assert got.count.tolist() == [count] * len(got.op)
    assert len(got.op) == count


def test_samples_seen_are_those_inside_the_exclusive_time() -> None:
    events = (Event("outer", 0, 100, lane=0), Event("inner", 20, 40, lane=0))
    got = accounted(World(events, {"CPU:0": [(t, 1.0) for t in (0, 10, 20, 30, 40, 90)]}, (0, 100)))
    assert dict(zip(got.op, got.samples.tolist(), strict=True)) == {"inner": 2, "outer": 4}


def test_components_of_a_device_add_up_and_a_missing_one_is_uncovered_time() -> None:
    trace = trace_of([Event("a", 0, 100, lane=0)])
    package, dram = metered("CPU:0", [(0, 30.0)], 100), metered("CPU:0", [(0, 4.0), (60, None)], 100)
    got = align(trace, {"CPU:0": [package, dram]}, (0, 100_000))
    assert got.devices[0].total_j == pytest.approx((30 * 100 + 4 * 60) * JOULES)
    assert got.devices[0].uncovered_s == pytest.approx(40 * JOULES)
    assert got.uncovered_ns.tolist() == [40_000]


def test_an_operation_whose_power_was_never_known_has_no_power_and_is_said() -> None:
    events = (Event("before", 0, 10), Event("partly", 10, 30), Event("idle", 30, 40), Event("none", 5, 5))
    got = accounted(World(events, {"CPU:0": [(20, 100.0), (30, 0.0)]}, (0, 40)))
    assert [op for op, unread in zip(got.op, got.unread.tolist(), strict=True) if unread] == ["before"]
    sights = dict(zip(got.op, resolution(got), strict=True))
    assert (sights["before"].sight is Sight.UNSEEN, sights["partly"].sight is Sight.UNSEEN) == (True, False)
    for powers in powers_w(got):
        shown = dict(zip(got.op, powers, strict=True))
        assert math.isnan(shown["before"])
        assert (shown["idle"], shown["partly"]) == (0.0, pytest.approx(50.0))
    assert [note for note in got.notes if "without known power" in note] == [
        "CPU:0: operations ran 2e-05 s without known power; their joules and watts are at least what is given"
    ]


def test_two_powers_of_an_operation() -> None:
    events = (Event("a", 0, 60), Event("a", 0, 60), Event("b", 30, 90))
    got = accounted(World(events, {"CPU:0": WATTS}, (0, 100)))
    assert got.active_ns.tolist() == [60_000, 60_000]
    np.testing.assert_allclose(got.active_j, [60 * 100 * JOULES] * 2)
    assert got.runtime_ns.tolist() == [120_000, 60_000]


def test_a_modelled_meter_says_so() -> None:
    channel = Channel("CPU:0", "package", ReadingKind.POWER, "cpu-model", Quality.MODELLED)
    steps = metered("CPU:0", WATTS, 100)
    got = align(
        trace_of([Event("a", 0, 10)]), {"CPU:0": [PowerSteps(channel, steps.edges_ns, steps.watts)]}, (0, 100_000)
    )
    assert got.devices[0].quality is Quality.MODELLED


def test_resolution_is_the_update_distance_or_the_averaging_window() -> None:
    trace = trace_of([Event("a", 0, 10)])
    steps = ([0, 4_000_000, 8_000_000, 9_000_000], [1.0, 2.0, 3.0])
    instant = PowerSteps(Channel("CPU:0", "package", ReadingKind.POWER, "fake", Quality.MEASURED), *steps)
    average = PowerSteps(
        Channel("CPU:0", "package", ReadingKind.AVERAGE, "fake", Quality.MEASURED, averaging_s=1.0), *steps
    )
    assert align(trace, {"CPU:0": [instant]}, (0, 10_000)).devices[0].resolution_s == 0.004
    assert align(trace, {"CPU:0": [average]}, (0, 10_000)).devices[0].resolution_s == 1.0


def test_a_week_long_window_keeps_its_digits() -> None:
    week = 7 * 24 * 3600 * 10**9
    names = [f"op{i}" for i in range(500)]
    start = np.sort(np.random.default_rng(5).integers(0, week - 10_000, 500))
    trace = EventTrace(
        names,
        ["CPU:0"],
        [""],
        op=np.arange(500),
        start_ns=start,
        dur_ns=np.full(500, 1_000),
        device=np.zeros(500),
        lane=np.arange(500),
        phase=np.zeros(500),
    )
    channel = Channel("CPU:0", "package", ReadingKind.POWER, "fake", Quality.MEASURED)
    got = align(trace, {"CPU:0": [PowerSteps(channel, [0, week], [200.0])]}, (0, week))
    np.testing.assert_allclose(got.energy_j, 200.0 * 1e-6, rtol=1e-9)
    assert got.devices[0].attributed_j + got.devices[0].unattributed_j == pytest.approx(got.devices[0].total_j)


@pytest.mark.parametrize("window", [(5, 5), (6, 5)])
def test_an_empty_window_is_refused(window: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="is empty"):
        align(trace_of([]), {}, window)


def test_nothing_at_all_is_an_empty_footprint() -> None:
    got = align(trace_of([]), {}, (0, 10))
    assert len(got) == 0 and got.devices == ()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 50))
def test_energy_scales_with_power(seed: int, factor: int) -> None:
    world = random_world(seed)
    power = {d: [(t, None if w is None else w * factor) for t, w in steps] for d, steps in world.power.items()}
    one, many = accounted(world), accounted(World(world.events, power, world.window))
    np.testing.assert_allclose(many.energy_j, one.energy_j * factor, rtol=1e-9, atol=1e-15)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_session_cut_in_two_adds_up(seed: int) -> None:
    world = random_world(seed)
    t0, t1 = world.window
    if t1 - t0 < 2:
        return
    middle = (t0 + t1) // 2
    whole = accounted(world).energy_by_op
    parts = [accounted(World(world.events, world.power, w)).energy_by_op for w in ((t0, middle), (middle, t1))]
    for op, joules in whole.items():
        assert math.isclose(joules, sum(part.get(op, 0.0) for part in parts), rel_tol=1e-9, abs_tol=1e-15)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_the_order_of_events_in_the_file_does_not_matter(seed: int, rng) -> None:
    world = random_world(seed)
    distinct = {(event.start, event.end, event.lane, event.device): event for event in world.events}
    shuffled = list(distinct.values())
    rng.shuffle(shuffled)
    one = accounted(World(tuple(distinct.values()), world.power, world.window))
    other = accounted(World(tuple(shuffled), world.power, world.window))
    assert one.op == other.op and one.count.tolist() == other.count.tolist()
    np.testing.assert_allclose(one.energy_j, other.energy_j, rtol=1e-9, atol=1e-15)
