"""Clocks of a joint plan: which device gets which bounds, and what happens to them while plans change."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from joulery.app.serving.governed.planned_clocks import planned_configs, widest
from joulery.app.wiring.governed_clocks import bounded, governed_clock, governed_clocks
from joulery.config import load
from joulery.config.devices import ClockConfig
from joulery.config.site import Mode
from joulery.domain.errors import ConfigError
from joulery.domain.gpu.provisioning import PlannedGpu
from joulery.runtime.serving.governing import ClockController
from joulery.runtime.serving.plans.plan_in_force import PlanInForce


def gpu(floor_mhz, ceiling_mhz=1530.0):
    return PlannedGpu("V100", 3.0, floor_mhz, 1530.0, 0.0, 0.0, (), floor_mhz, clock_ceiling_mhz=ceiling_mhz)


def test_each_device_has_the_bounds_of_the_gpu_it_stands_for():
    plan = PlanInForce((gpu(900.0), gpu(1200.0, 1200.0)), ((1,), (0,)), (), ("gpu:4", "gpu:7"))
    assert plan.clock_bounds_mhz == {"gpu:7": (900.0, 1530.0), "gpu:4": (1200.0, 1200.0)}
    assert PlanInForce((gpu(900.0),), ((0,),), ()).clock_bounds_mhz == {}, "CPU cores have no clock of their own"


def test_while_plans_change_both_must_keep_their_slos():
    assert widest([]) is None
    assert widest([(900.0, 1200.0), (1100.0, 1530.0)]) == (1100.0, 1530.0)


def test_devices_that_the_site_governs_get_no_second_clock(tmp_path):
    text = (
        "joulery: 1\nfleet: {devices: [{gpu: 0, mode: mps}, {gpu: 1, mode: mps}], clocks: [{device: nvidia, gpu: 1}]}\n"
    )
    (tmp_path / "site.yaml").write_text(text)
    site = load(tmp_path / "site.yaml")
    plan = PlanInForce((gpu(900.0),), ((0,),), (), ("gpu:0", "gpu:1"))
    assert [config.gpu for config in planned_configs(site, plan)] == [0]
    assert planned_configs(site, None) == ()
    unset = PlanInForce((PlannedGpu("V100", 3.0, 1.0, 1.0, 0.0, 0.0, ()),), ((0,),), (), ("gpu:0", "gpu:1"))
    assert planned_configs(site, unset) == ()


@pytest.fixture
def emulated(tmp_path, monkeypatch):
    monkeypatch.setenv("JOULERY_STATE", str(tmp_path))
    return governed_clock(ClockConfig(device="emulated"), Mode.ADVISE)


def test_a_governor_stays_within_the_bounds(emulated):
    clock = bounded(emulated, (800.0, 1100.0))
    assert clock.clocks_mhz.min() >= 800.0 and clock.clocks_mhz.max() <= 1100.0
    assert len(bounded(clock, None).clocks_mhz) == len(emulated.clocks_mhz)
    one = bounded(emulated, (831.0, 831.0))
    assert one.clocks_mhz.tolist() == [800.0], "under a power cap: the nearest below"
    with pytest.raises(ConfigError, match="no clock within these bounds"):
        bounded(emulated, (5000.0, 6000.0))


def test_a_controller_goes_on_within_other_bounds(emulated):
    keeper = ClockController(emulated, lambda now_s: (), Mode.ADVISE, None)
    decided = []
    driver = keeper.driver(lambda *_, **__: None, decided.append)
    keeper.rebound(bounded(emulated, (800.0, 1100.0)))
    asyncio.run(driver.step(1.0))
    values = [record.decision.value for record in decided]
    assert values == [800.0], "idle: the lowest clock of the plan, not of the device"
    assert np.all(keeper.clock.clocks_mhz <= 1100.0)


def test_the_clocks_of_a_plan_come_beside_those_of_the_site(tmp_path, monkeypatch):
    monkeypatch.setenv("JOULERY_STATE", str(tmp_path))
    site = cast(Any, SimpleNamespace(fleet=SimpleNamespace(clocks=()), mode=Mode.ADVISE))

    async def opened():
        async with AsyncExitStack() as stack:
            return await governed_clocks(site, stack, lambda text: None, (ClockConfig(device="emulated"),))

    clocks, holder = asyncio.run(opened())
    assert [clock.name for clock in clocks] == ["emulated:0"] and holder is None
