"""A model timed at clock after clock: on a device that is only written down, in time that a test turns."""

import math
from pathlib import Path

import numpy as np
import pytest

from joulery.adapters.devices.emulated import EmulatedClock
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.gpu.device import DeviceSpec
from joulery.domain.quality import Quality
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.profiling.clock_sweep import PowerWatch, SweepPlan, sweep
from joulery.store.leases import LeaseBook


class Turned:
    """Time that a test advances, and energy that flows while it does."""

    def __init__(self) -> None:
        self.time_s, self.joules, self.watts = 0.0, 0.0, 10.0

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds
        self.joules += self.watts * seconds


class NoWatchdog:
    """Nothing can go wrong in a test that ends."""

    alive = True
    pid = 0

    def dismiss(self, *, wait: bool) -> None:
        pass


class Reading:
    """A meter of one channel."""

    def __init__(self, clock: Turned, kind: ReadingKind, device: str = "emulated:0") -> None:
        self.clock, self.kind = clock, kind
        self.channels = (Channel(device, "board", kind, "fake", Quality.MEASURED),)

    def read(self) -> tuple[float, ...]:
        return (self.clock.joules if self.kind is ReadingKind.COUNTER else self.clock.watts,)

    def notes(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        pass


def measured(folder: Path, clocks=(500.0, 700.0, 1000.0), meters=(), plan=None, turned=None):
    """A model of 1000 megacycles and 10 W + 20 W per GHz."""
    turned = turned or Turned()
    device = EmulatedClock(clocks_mhz=clocks)

    def one_pass() -> None:
        mhz = device.observe().clock_mhz
        turned.watts = 10 + mhz / 50
        turned.sleep(1000 / mhz)
        turned.watts = 10.0

    book = LeaseBook(folder)
    with LeaseHolder(book, watch=lambda book, owner: NoWatchdog()) as holder:
        spec = DeviceSpec("emulated-clock", {"clocks_mhz": list(clocks)})
        plan = plan or SweepPlan(passes=3, warm_up=1, settle_s=0.1, idle_s=1.0)
        curve = sweep(device, spec, holder, one_pass, PowerWatch(meters, "emulated:0"), plan, turned)
    assert device.observe().setting.clock_mhz is None  # given back
    assert book.names() == ()
    return curve


@pytest.mark.parametrize("kind", [ReadingKind.COUNTER, ReadingKind.POWER])
def test_latency_and_power_at_every_clock(tmp_path: Path, kind: ReadingKind) -> None:
    turned = Turned()
    curve = measured(tmp_path, meters=[Reading(turned, kind)], turned=turned)
    assert curve.clocks_mhz.tolist() == [500, 700, 1000]
    assert curve.latency_s == pytest.approx([2.0, 1000 / 700, 1.0])
    if kind is ReadingKind.COUNTER:
        assert curve.power_w == pytest.approx([20.0, 24.0, 30.0])
    assert curve.idle_w == pytest.approx([10.0, 10.0, 10.0])
    assert curve.source == "measured on emulated: median of 3 passes at each clock; power measured by fake"


def test_no_meter_is_not_zero_watts(tmp_path: Path) -> None:
    turned = Turned()
    for meters in ((), [Reading(turned, ReadingKind.COUNTER, device="gpu:7")]):
        curve = measured(tmp_path, meters=meters, turned=turned)
        assert np.isnan(curve.power_w).all()
        assert "no meter reads its power" in curve.source


def test_a_counter_that_starts_again_gives_no_power() -> None:
    turned = Turned()
    watch = PowerWatch([Reading(turned, ReadingKind.COUNTER)], "emulated:0")
    turned.joules = 100.0
    watch.start(0.0)
    turned.joules = 3.0
    watch.mark(1.0)
    assert math.isnan(watch.mean_w())


def test_the_cpu_is_all_its_sockets_or_the_machine() -> None:
    turned = Turned()
    sockets = [Reading(turned, ReadingKind.POWER, device=f"cpu:{number}") for number in range(2)]
    machine = Reading(turned, ReadingKind.POWER, device="machine")
    for meters, expected in (([*sockets, machine], 20.0), ([machine], 10.0)):
        watch = PowerWatch(meters, "cpu")
        watch.start(0.0)
        watch.mark(1.0)
        assert watch.mean_w() == pytest.approx(expected)


def test_many_clocks_are_thinned_out(tmp_path: Path) -> None:
    clocks = tuple(float(mhz) for mhz in range(200, 1401, 15))
    curve = measured(tmp_path, clocks=clocks, plan=SweepPlan(passes=1, warm_up=0, clocks=5))
    assert len(curve.clocks_mhz) == 5
    assert (curve.clocks_mhz[0], curve.clocks_mhz[-1]) == (200, 1400)


def test_a_device_that_may_not_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    able = replace(EmulatedClock().capability(), settable=False, detail="not permitted", grant="sudo chmod x")
    monkeypatch.setattr(EmulatedClock, "capability", lambda self: able)
    with pytest.raises(CapabilityError, match="may not be set: not permitted") as caught:
        measured(tmp_path)
    assert caught.value.grant == "sudo chmod x"


def test_one_clock_is_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="offers 1 clocks"):
        measured(tmp_path, clocks=(1000.0,))
