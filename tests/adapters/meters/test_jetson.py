"""Jetson modules by their power monitors."""

import math
from pathlib import Path

import pytest

from joulery.adapters.meters.host.polled import DIVIDED
from joulery.adapters.meters.jetson import open_jetson
from joulery.domain.energy.channel import HOST, ReadingKind
from joulery.domain.errors import CapabilityError, ConfigError
from tests.fakes.jetson import hwmon_module, older_module

ORIN_NANO = {"VDD_IN": (5000, 1200), "VDD_CPU_GPU_CV": (5000, 400), "VDD_SOC": (5000, 300)}
AGX_ORIN = {"VDD_GPU_SOC": (19_000, 500), "VDD_CPU_CV": (19_000, 100), "VIN_SYS_5V0": (5000, 800), "NC": (0, 0)}


def test_the_modules_input_is_read_and_not_the_rails_inside(tmp_path: Path) -> None:
    meter = open_jetson(sys=hwmon_module(tmp_path, ORIN_NANO))
    (channel,) = meter.channels
    assert (channel.device, channel.component, channel.kind) == ("machine", HOST, ReadingKind.POWER)
    assert meter.read() == (pytest.approx(6.0),)


def test_the_older_driver(tmp_path: Path) -> None:
    meter = open_jetson(sys=older_module(tmp_path, {"POM_5V_IN": 4123, "POM_5V_GPU": 900}))
    assert meter.read() == (4.123,)


def test_a_module_without_an_input_rail_is_read_by_the_rails_that_are_named(tmp_path: Path) -> None:
    sys = hwmon_module(tmp_path, AGX_ORIN)
    with pytest.raises(CapabilityError, match=r"no rail feeds .*VDD_CPU_CV, VDD_GPU_SOC, VIN"):
        open_jetson(sys=sys)
    meter = open_jetson("VDD_GPU_SOC+VDD_CPU_CV", sys)
    assert meter.channels[0].component == "rails"
    assert meter.read() == (pytest.approx(11.4),)


@pytest.mark.parametrize("rails", ["VDD_XY", "VDD_IN+VDD_IN", "VDD_IN+"])
def test_rails_that_are_not_there(tmp_path: Path, rails: str) -> None:
    with pytest.raises(ConfigError):
        open_jetson(rails, hwmon_module(tmp_path, ORIN_NANO))


@pytest.mark.parametrize("text", ["", "-1", "x"])
def test_a_monitor_that_fails_is_said_once(tmp_path: Path, text: str) -> None:
    meter = open_jetson(sys=hwmon_module(tmp_path, ORIN_NANO))
    assert meter.notes() == (DIVIDED,)
    file = tmp_path / "class/hwmon/hwmon0/curr1_input"
    file.write_text(text)
    assert math.isnan(meter.read()[0]) and math.isnan(meter.read()[0])
    assert len(meter.notes()) == 1
    file.write_text("1200")
    assert meter.read() == (pytest.approx(6.0),)
    assert meter.notes() == ("the power monitor can be read again",)


def test_no_monitor_here(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="no Jetson power monitor"):
        open_jetson(sys=tmp_path)
