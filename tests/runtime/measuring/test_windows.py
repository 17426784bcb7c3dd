"""Named windows on an injected clock: additive, honest about gaps, priced by the intensity of their time."""

import asyncio
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import joulery
from joulery.adapters.meters.fake import Script
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality
from joulery.runtime.measuring.terms import MeasureWarning
from tests.runtime.measuring.hand import Hand

pytestmark = pytest.mark.filterwarnings("ignore::joulery.MeasureWarning")


def test_a_window_is_charged_its_share_and_the_idle_energy():
    hand = Hand()
    hand.meter.begin_window("a")
    hand.run(10, own_s=3.0, others_s=1.0)
    cost = hand.meter.end_window("a")
    assert cost.attributed_j == pytest.approx(450.0)
    assert cost.idle_j == pytest.approx(400.0)
    assert cost.energy_j == pytest.approx(850.0)
    assert (cost.duration_s, cost.coverage_ratio) == (pytest.approx(10.0), 1.0)
    without = Hand(idle="none")
    without.meter.begin_window("a")
    without.run(10, own_s=3.0, others_s=1.0)
    assert without.meter.end_window("a").energy_j == pytest.approx(450.0)


STEPS = st.lists(st.tuples(st.floats(0.01, 50), st.floats(0, 4), st.floats(0, 4)), min_size=1, max_size=6)


@given(STEPS)
def test_parts_add_up_to_the_whole(steps):
    hand = Hand()
    hand.meter.begin_window("whole")
    parts = []
    for seconds, own_s, others_s in steps:
        hand.meter.begin_window("part")
        hand.run(seconds, own_s, others_s)
        parts.append(hand.meter.end_window("part"))
    whole = hand.meter.end_window("whole")
    assert whole.energy_j == pytest.approx(math.fsum(part.energy_j for part in parts), rel=1e-9)
    assert whole.idle_j == pytest.approx(math.fsum(part.idle_j for part in parts), rel=1e-9)
    assert whole.energy_j == pytest.approx(
        math.fsum([*(p.energy_j for p in whole.parts), whole.idle_j, whole.unattributed_j]), rel=1e-9
    )


def test_the_time_that_reading_the_processors_takes_moves_no_joules():
    hand = Hand()
    hand.meter.begin_window("short")
    hand.run(1.0)
    hand.reading_s = 0.5
    short = hand.meter.end_window("short")
    assert (short.duration_s, short.energy_j) == (pytest.approx(1.0), pytest.approx(100.0))


def test_windows_may_overlap_and_be_read_while_open():
    hand = Hand()
    hand.meter.begin_window("a")
    hand.run(10)
    hand.meter.begin_window("b")
    hand.run(10)
    assert hand.meter.read("a").energy_j == pytest.approx(2000.0)
    a = hand.meter.end_window("a")
    hand.run(10)
    b = hand.meter.end_window("b")
    assert (a.energy_j, b.energy_j) == (pytest.approx(2000.0), pytest.approx(2000.0))
    assert hand.meter.read().energy_j == pytest.approx(3000.0)
    assert hand.meter.power_w == pytest.approx(100.0)
    assert hand.meter.open_windows == ()


def test_memory_does_not_grow_with_windows_that_have_ended():
    hand = Hand()
    for _ in range(500):
        hand.meter.begin_window("step")
        hand.run(0.1)
        hand.meter.end_window("step")
        hand.meter.read()
    assert len(hand.meter._sums.t_ns) <= 3


def test_what_goes_wrong_with_names_is_said():
    meter = Hand().meter
    with pytest.raises(ConfigError, match="no window a is open"):
        meter.end_window("a")
    meter.begin_window("a")
    with pytest.raises(ConfigError, match="open already"):
        meter.begin_window("a")
    with pytest.raises(ConfigError, match="idle"):
        Hand(idle="half")
    for pue in (0.5, math.nan, math.inf):
        with pytest.raises(ConfigError, match="pue"):
            Hand(pue=pue)
    meter.close()
    meter.close()
    with pytest.raises(ConfigError, match="closed"):
        meter.read()
    assert str(meter) == meter._repr_html_() == "closed"


def test_a_counter_that_is_silent_is_made_up_for_and_one_that_is_reset_is_a_gap():
    silent = Hand(Script(((0.0, 100.0),), silent_s=((5.0, 15.0),), idle_w=40.0))
    silent.meter.begin_window("a")
    for _ in range(4):
        silent.run(5)
        silent.meter.read()
    assert silent.meter.end_window("a").energy_j == pytest.approx(2000.0)
    power = Hand(Script(((0.0, 100.0),), silent_s=((5.0, 15.0),), idle_w=40.0, kind=ReadingKind.POWER))
    power.meter.begin_window("a")
    for _ in range(4):
        power.run(5)
        power.meter.read()
    cost = power.meter.end_window("a")
    assert cost.coverage_ratio < 1 and cost.energy_j == pytest.approx(100.0 * cost.coverage_ratio * 20)


def test_a_reset_is_warned_of():
    hand = Hand(Script(((0.0, 100.0),), start_j=9000.0, idle_w=40.0))
    hand.meter.begin_window("a")
    hand.run(10)
    hand.meter.read()
    (fake,) = hand.meter._readers.meters
    fake._scripts = (Script(((0.0, 100.0),), idle_w=40.0),)
    hand.run(10)
    with pytest.warns(MeasureWarning, match="reset"):
        cost = hand.meter.end_window("a")
    assert (cost.energy_j, cost.coverage_ratio) == (pytest.approx(1000.0), pytest.approx(0.5, rel=1e-3))


def test_a_gpu_without_other_users_is_the_programs():
    hand = Hand(Script(((0.0, 200.0),), device="gpu:0"))
    hand.meter.begin_window("a")
    hand.run(10)
    cost = hand.meter.end_window("a")
    assert [(part.device, part.energy_j) for part in cost.parts] == [("gpu:0", pytest.approx(2000.0))]


class Grid:
    """360 g/kWh until the middle of a window of 20 s, then 720."""

    def history(self, t0_s, t1_s):
        edges = np.array([t0_s - 100, t0_s + 10, t1_s + 100])
        return CarbonSeries("XX", edges, [360.0, 720.0], source="a test")


class Gone:
    def history(self, t0_s, t1_s):
        raise DataError("the grid is away")


def test_grams_follow_the_intensity_inside_a_window():
    hand = Hand(source=Grid(), pue=1.5)
    hand.meter.begin_window("a")
    for _ in range(20):
        hand.run(1)
        hand.meter._advance(keep=True)
    cost = hand.meter.end_window("a")
    assert cost.carbon_g == pytest.approx(1.5 * (1000 * 360 + 1000 * 720) / 3.6e6, rel=1e-6)
    assert cost.facility_j == pytest.approx(3000.0)


def test_without_an_answer_of_the_grid_joules_stand_and_a_warning_says_why():
    hand = Hand(source=Gone())
    hand.meter.begin_window("a")
    hand.run(10)
    with pytest.warns(MeasureWarning, match="the grid is away"):
        cost = hand.meter.end_window("a")
    assert cost.carbon_g is None and cost.energy_j > 0


FORKED = """
import os, sys, threading
import joulery
from joulery.domain.errors import ConfigError

meter = joulery.Meter(meters=["cpu-model:10,40"])
held, done = threading.Event(), threading.Event()

def hold():  # as the meter's thread does while it reads; in the child no thread lets go of the lock
    with meter._lock:
        held.set()
        done.wait()

threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    refused = 0
    for ask in (meter.read, lambda: meter.power_w, lambda: meter.begin_window("a"), lambda: meter.end_window("a")):
        try:
            ask()
        except ConfigError:
            refused += 1
    meter.close()
    os._exit(refused)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
done.set()
meter.close()
sys.exit(code)
"""


def test_a_forked_child_is_refused_and_waits_for_no_thread_of_its_parent():
    """In a program of its own: threads of other tests, such as gRPC's, do not survive a fork of this process."""
    ran = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    assert ran.returncode == 4, ran.stderr


def test_the_meter_of_this_machine_in_blocks_and_tasks():
    with joulery.Meter(meters=["cpu-model:10,40"], carbon="250 g/kWh") as meter:

        async def task(name):
            with meter.window(name) as window:
                await asyncio.to_thread(sum, range(1000))
            return window

        async def both():
            return await asyncio.gather(task("a"), task("b"))

        with meter.window("all") as whole, pytest.raises(ConfigError, match="not ended"):
            print(whole.footprint)
        windows = asyncio.run(both())
    for window in (whole, *windows):
        assert window.footprint.energy_j > 0 and window.footprint.quality is Quality.MODELLED
        assert window.name in str(window) and "<table>" in window._repr_html_()
    with pytest.raises(ConfigError, match="no such meter"):
        joulery.Meter(meters=["no-such"])
