"""The governed clocks of a site, and who lends them."""

import asyncio
import json
import math
from contextlib import AsyncExitStack

import numpy as np
import pytest

from joulery.app.wiring.governed_clocks import governed_clock, governed_clocks
from joulery.config import load
from joulery.config.site import Mode
from joulery.domain.errors import DataError
from joulery.domain.gpu.clock_profile import ClockProfile, ScoredOperator
from joulery.domain.gpu.device import ClockSetting
from joulery.domain.quality import Quality
from joulery.domain.trace.operators import OperationCost
from joulery.policies.clocks.governor import DeviceView, Waiting
from joulery.store.leases import LeaseBook
from tests.fakes.cpufreq import cpu_machine

SITE = """
joulery: 1
mode: MODE
fleet:
  clocks: [{device: cpu, lease: 40 s}, {device: emulated, lease: 20 s}]
"""


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    cpu_machine(tmp_path, monkeypatch)


def site(folder, text):
    (folder / "site.yaml").write_text(text)
    return load(folder / "site.yaml")


def opened(site):
    async def run():
        async with AsyncExitStack() as stack:
            clocks, holder = await governed_clocks(site, stack, lambda message: None)
            return [clock.name for clock in clocks], holder

    return asyncio.run(run())


def test_mode_act_leases_settings_for_the_shortest_term_until_the_stack_unwinds(tmp_path):
    async def run():
        async with AsyncExitStack() as stack:
            acting = site(tmp_path, SITE.replace("MODE", "act"))
            clocks, holder = await governed_clocks(acting, stack, lambda message: None)
            assert [clock.name for clock in clocks] == ["cpu", "emulated:0"]
            emulated = clocks[1]
            holder.set(emulated.device, emulated.spec, ClockSetting(800.0), "nothing waits")
            (lease,) = holder.held
            assert LeaseBook().read(lease.name).lasts_s == 20.0
        assert LeaseBook().names() == ()

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["advise", "shadow"])
def test_other_modes_take_no_lease(tmp_path, mode):
    assert opened(site(tmp_path, SITE.replace("MODE", mode))) == (["cpu", "emulated:0"], None)


def test_a_site_without_clocks_needs_no_lease_holder(tmp_path):
    assert opened(site(tmp_path, "joulery: 1\nmode: act\n")) == ([], None)


def profiled(folder, power_w):
    """A site with an emulated clock and the profile of a model that does not feel it down to 700 MHz."""
    cost = OperationCost("work", 1e9, 1e6, 1)
    curve = ClockProfile(
        "m", "V100", Quality.MEASURED, "a test", (ScoredOperator(cost, 0.0, 1.0),),
        [345.0, 690.0, 1380.0], [2.0, 1.0, 1.0], power_w, [30.0, 32.0, 40.0],
    )  # fmt: skip
    (folder / "m.json").write_text(json.dumps(curve.as_dict()))
    text = "joulery: 1\nmode: advise\nfleet: {clocks: [{device: emulated, profile: m.json}]}\n"
    return governed_clock(site(folder, text).fleet.clocks[0], Mode.ADVISE)


def test_the_curves_of_a_profile_are_what_the_governor_works_with(tmp_path):
    found = profiled(tmp_path, [80.0, 100.0, 240.0])
    assert not found.policy.assumed
    at = {clock: index for index, clock in enumerate(found.clocks_mhz.tolist())}
    assert found.curves.slowdown(0.2) == pytest.approx(found.curves.slowdown(1.0)), "measured, not by elasticity"
    assert found.curves.slowdown(1.0)[at[680.0]] == pytest.approx(2.0 - (680 - 345) / 345)
    assert found.curves.slowdown(1.0)[at[1380.0]] == 1.0
    assert found.curves.above_idle[at[1380.0]] == 1.0
    assert found.curves.above_idle[at[200.0]] == pytest.approx(50 / 210), "below the profile its lowest clock counts"


def test_the_profiled_governor_takes_the_clock_that_the_curves_make_cheapest(tmp_path):
    found = profiled(tmp_path, [200.0, 100.0, 240.0])
    slow = found.curves.slowdown(1.0)
    energy_j = 100.0 * slow * found.curves.above_idle
    request = Waiting(deadline_s=1000.0, slo_s=1000.0, finish_s=slow, energy_j=energy_j)
    view = DeviceView(0.0, found.name, 1380.0, [request], 1000.0, hosted=((1000.0, 1.0),))
    (decision,) = found.policy.step(found.policy.initial(), view).decisions
    assert decision.value == found.clocks_mhz[int(np.argmin(energy_j))] == 680.0


@pytest.mark.parametrize("power_w", [[math.nan, 100.0, 240.0], [30.0, 100.0, 240.0]])
def test_a_profile_without_power_is_refused(tmp_path, power_w):
    with pytest.raises(DataError, match="power of a profile"):
        profiled(tmp_path, power_w)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    (tmp_path / "m.json").write_text("{}")
    text = "joulery: 1\nfleet: {clocks: [{device: emulated, profile: m.json}]}\n"
    with pytest.raises(DataError):
        governed_clock(site(tmp_path, text).fleet.clocks[0], Mode.ADVISE)
