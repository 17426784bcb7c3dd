"""The run's power inside a busy interval: energy stays in its interval, and goes to the times when threads ran."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.charge import divide_power
from joulery.accounting.operations.cpu_lanes import RunCpu
from joulery.accounting.operations.run_power import at_run_times
from joulery.accounting.steps import PowerSteps
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import BusyTimes
from joulery.domain.quality import Quality

MS = 1_000_000
CHANNEL = Channel("cpu:0", "package", ReadingKind.POWER, "fake", Quality.MEASURED)


def stepped(watts: list[float], step_ms: int = 10) -> PowerSteps:
    return PowerSteps(CHANNEL, np.arange(len(watts) + 1) * step_ms * MS, watts)


def by_interval(steps: PowerSteps, times: BusyTimes) -> np.ndarray:
    """Joules of each busy interval, whose edges are edges of steps."""
    at = np.searchsorted(times.edges_ns, steps.edges_ns[:-1], "right") - 1
    return np.bincount(at, steps.watts * np.diff(steps.edges_ns) / 1e9, len(times.app_s))


def sweeps(cpus: list[float], sweep_ms: int = 20) -> RunCpu:
    """Readings of a run whose threads use so many CPUs between them."""
    return RunCpu(np.arange(len(cpus) + 1) * sweep_ms * MS, np.cumsum([0.0, *cpus]) * sweep_ms / 1e3)


def test_on_a_machine_that_others_keep_busy_the_power_follows_the_runs_threads():
    """Two CPUs, always busy, 60 W: 30 W for each CPU that the run has, whatever it has on average."""
    cpus = [1.0] * 5 + [0.2] * 5
    power, cpu = stepped([60.0] * 20), sweeps(cpus)
    times = BusyTimes([0, 200 * MS], [cpu.spent_s[-1]], [0.4], 2)
    even = divide_power(power, times)
    assert even.run.watts == pytest.approx([60 * 0.12 / 0.4] * 20)
    found = at_run_times(even, times, cpu)
    assert found.run.watts == pytest.approx(np.repeat(30 * np.array(cpus), 2), rel=1e-6)
    assert found.run.watts + found.other.watts == pytest.approx([60.0] * 20)


def test_where_the_run_is_alone_nothing_changes():
    """Its pauses included: their power is the run's, whether or not a thread ran."""
    power, cpu = stepped([40.0, 35.0, 8.0, 7.0, 9.0, 40.0, 41.0, 12.0]), sweeps([1.5, 0.0, 0.3, 1.0])
    times = BusyTimes([0, 80 * MS], [cpu.spent_s[-1]], [cpu.spent_s[-1]], 2)
    before = divide_power(power, times)
    found = at_run_times(before, times, cpu)
    assert found.run.watts == pytest.approx(before.run.watts) and found.other.watts == pytest.approx([0.0] * 8)


def test_others_use_at_most_the_cpus_that_the_run_leaves():
    """The run has both CPUs for a while: what others used then, they used before and after."""
    power, cpu = stepped([50.0] * 8), sweeps([0.0, 2.0, 2.0, 0.0])
    times = BusyTimes([0, 80 * MS], [cpu.spent_s[-1]], [0.16], 2)
    found = at_run_times(divide_power(power, times), times, cpu)
    assert found.run.watts == pytest.approx([0.0, 0.0, 50.0, 50.0, 50.0, 50.0, 0.0, 0.0], abs=1e-6)


def test_unknown_power_stays_unknown_and_steps_outside_the_readings_stay():
    power = stepped([30.0, float("nan"), 30.0, 30.0, 30.0, 30.0])
    times = BusyTimes([0, 60 * MS], [0.03], [0.06], 2)
    before = divide_power(power, times)
    found = at_run_times(before, times, sweeps([1.0, 0.0]))
    assert np.isnan(found.run.watts).tolist() == [False, True, False, False, False, False]
    assert found.run.watts[4:].tolist() == before.run.watts[4:].tolist()
    assert found.run.watts[0] > before.run.watts[0], "the readings show that the run worked then"


def test_no_step_is_no_error():
    nothing = divide_power(PowerSteps(CHANNEL, [], []), times := BusyTimes([0, 10 * MS], [0.01], [0.01], 1))
    assert len(at_run_times(nothing, times, sweeps([1.0])).run) == 0


@given(
    st.lists(st.floats(0, 100), min_size=12, max_size=12),
    st.lists(st.floats(0, 2), min_size=6, max_size=6),
    st.lists(st.floats(0, 0.08), min_size=3, max_size=3),
    st.sampled_from([0, 2, 4]),
)
def test_every_interval_keeps_its_energy_and_no_part_is_negative(watts, cpus, others_s, count):
    power, cpu = stepped(watts), sweeps(cpus)
    app_s = cpu.between(np.arange(4) * 40 * MS)
    times = BusyTimes(np.arange(4) * 40 * MS, app_s, app_s + others_s, count)
    before = divide_power(power, times)
    found = at_run_times(before, times, cpu)
    assert by_interval(found.run, times) == pytest.approx(by_interval(before.run, times), rel=1e-9, abs=1e-12)
    assert by_interval(found.other, times) == pytest.approx(by_interval(before.other, times), rel=1e-9, abs=1e-9)
    assert (found.run.watts >= 0).all() and (found.other.watts >= -1e-9).all()
    assert found.idle.watts.tolist() == before.idle.watts.tolist()
