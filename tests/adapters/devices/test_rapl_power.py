"""CPU power limits on a tree of files with the kernel's rules."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from joulery.adapters.devices.power.rapl_power import RaplPower
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.gpu.device import PowerSetting
from tests.fakes.powercap import PowercapFiles, limits, powercap_tree


def test_every_package_is_limited_and_enabled_and_nothing_else_is_touched(tmp_path: Path) -> None:
    tree = powercap_tree(tmp_path)
    (tree / "intel-rapl:1/enabled").write_text("0\n")
    before = limits(tree)
    device = RaplPower(str(tree), PowercapFiles())
    former = device.observe()
    device.apply(PowerSetting(75.3))
    changed = {path for path, text in limits(tree).items() if text != before[path]}
    assert changed == {
        "intel-rapl:0/constraint_0_power_limit_uw",
        "intel-rapl:1/constraint_0_power_limit_uw",
        "intel-rapl:1/enabled",
    }
    device.reset(former.memento)
    assert limits(tree) == before


def test_the_constraint_is_found_by_its_name(tmp_path: Path) -> None:
    tree = powercap_tree(tmp_path, 1)
    zone = tree / "intel-rapl:0"
    for suffix in ("name", "power_limit_uw", "max_power_uw"):
        first, second = zone / f"constraint_0_{suffix}", zone / f"constraint_1_{suffix}"
        texts = first.read_text(), second.read_text()
        first.write_text(texts[1])
        second.write_text(texts[0])
    RaplPower(str(tree), PowercapFiles()).apply(PowerSetting(80.0))
    assert limits(tree)["intel-rapl:0/constraint_1_power_limit_uw"] == "80000000"
    assert limits(tree)["intel-rapl:0/constraint_0_power_limit_uw"] == "144000000"


def test_zones_that_only_count_are_named(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="AMD's only count"):
        RaplPower(str(powercap_tree(tmp_path / "amd", constraints=False)))
    with pytest.raises(CapabilityError, match="no RAPL zones"):
        RaplPower(str(tmp_path / "virtual"))


@pytest.mark.parametrize("limit_w", [29.0, 121.0])
def test_limits_outside_the_range_are_refused(tmp_path: Path, limit_w: float) -> None:
    tree = powercap_tree(tmp_path)
    before = limits(tree)
    with pytest.raises(ConfigError, match="30 to 120 W"):
        RaplPower(str(tree), PowercapFiles()).apply(PowerSetting(limit_w))
    assert limits(tree) == before


def test_a_limit_that_the_firmware_locks_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = powercap_tree(tmp_path)

    class Locked(PowercapFiles):
        def write(self, path: Path, text: str) -> None:
            raise OSError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(CapabilityError, match="firmware locks"):
        RaplPower(str(tree), Locked()).apply(PowerSetting(80.0))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CapabilityError, match="may not set") as caught:
        RaplPower(str(tree), Locked()).apply(PowerSetting(80.0))
    assert caught.value.grant


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "many"])
def test_a_limit_that_reads_as_no_number_is_an_error(tmp_path: Path, text: str) -> None:
    tree = powercap_tree(tmp_path)
    device = RaplPower(str(tree), PowercapFiles())
    (tree / "intel-rapl:0/constraint_0_power_limit_uw").write_text(text)
    with pytest.raises(CapabilityError, match="cannot be read"):
        device.observe()


def test_an_unknown_factory_limit_is_said_and_the_former_one_still_comes_back(tmp_path: Path) -> None:
    tree = powercap_tree(tmp_path, 1)
    (tree / "intel-rapl:0/constraint_0_max_power_uw").write_text("0\n")
    device = RaplPower(str(tree), PowercapFiles())
    former, before = device.observe(), limits(tree)
    device.apply(PowerSetting(60.0))
    with pytest.raises(CapabilityError, match="does not state"):
        device.reset()
    device.reset(former.memento)
    assert limits(tree) == before
