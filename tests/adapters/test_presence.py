"""A driver that is not here is said so without importing its module; where it may be here, the module decides."""

import sys
from pathlib import Path

import pytest

from joulery.adapters import presence
from joulery.domain.errors import CapabilityError


def test_without_a_trace_and_without_the_library_there_is_no_nvidia(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(presence, "NVIDIA", (str(tmp_path / "none"),))
    monkeypatch.setattr(presence, "NVML", "libno-such-driver.so")
    with pytest.raises(CapabilityError, match=r"no NVIDIA driver here \(libno-such-driver.so is not there\)"):
        presence.require_nvidia()
    (tmp_path / "none").touch()
    presence.require_nvidia()


def test_the_library_alone_is_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(presence, "NVIDIA", ())
    monkeypatch.setattr(presence, "NVML", "libc.so.6")
    presence.require_nvidia()


def test_amds_driver_is_its_device_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(presence, "AMD", str(tmp_path / "kfd"))
    with pytest.raises(CapabilityError, match="no AMD GPU driver here"):
        presence.require_amd()
    (tmp_path / "kfd").touch()
    presence.require_amd()


@pytest.mark.parametrize(
    ("file", "text"),
    [("class/hwmon/hwmon3/name", "ina3221\n"), ("bus/i2c/drivers/ina3221x/1-0040/iio:device0/rail_name_0", "VDD_IN")],
)
def test_a_jetson_is_its_power_monitor(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / "class/hwmon/hwmon0").mkdir(parents=True)
    (tmp_path / "class/hwmon/hwmon0/name").write_text("coretemp\n")
    with pytest.raises(CapabilityError, match="INA3221"):
        presence.require_ina3221(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    presence.require_ina3221(tmp_path)
