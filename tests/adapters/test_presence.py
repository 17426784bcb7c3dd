"""A driver that is not here is refused without importing its module; where it may be here, the module decides."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from joulery.adapters import presence
from joulery.domain.errors import CapabilityError


def lacking(require: Callable[[], None]) -> str | None:
    """The resource that is missing; None where the question is left to the module."""
    try:
        require()
    except CapabilityError as error:
        return error.resource
    return None


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only trace of NVIDIA's driver that is looked for; not there yet, nor is its library."""
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(presence, "NVIDIA", (str(tmp_path / "trace"),))
    monkeypatch.setattr(presence, "NVML", "libno-such-driver.so")
    return tmp_path / "trace"


def test_a_trace_of_nvidias_driver_is_enough(nvidia: Path) -> None:
    assert lacking(presence.require_nvidia) == "libno-such-driver.so"
    nvidia.touch()
    assert lacking(presence.require_nvidia) is None


@pytest.mark.usefixtures("nvidia")
def test_its_library_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "NVML", "libc.so.6")
    assert lacking(presence.require_nvidia) is None


@pytest.mark.usefixtures("nvidia")
def test_a_program_that_imported_pynvml_asks_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", sys)
    assert lacking(presence.require_nvidia) is None


def test_amds_driver_is_its_device_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(presence, "AMD", str(tmp_path / "kfd"))
    assert lacking(presence.require_amd) == str(tmp_path / "kfd")
    (tmp_path / "kfd").touch()
    assert lacking(presence.require_amd) is None


@pytest.mark.parametrize(
    ("file", "text"),
    [("class/hwmon/hwmon3/name", "ina3221\n"), ("bus/i2c/drivers/ina3221x/1-0040/iio:device0/rail_name_0", "VDD_IN")],
)
def test_a_jetson_is_its_power_monitor(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / "class/hwmon/hwmon0").mkdir(parents=True)
    (tmp_path / "class/hwmon/hwmon0/name").write_text("coretemp\n")
    assert lacking(lambda: presence.require_ina3221(tmp_path)) == str(tmp_path / "class/hwmon")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert lacking(lambda: presence.require_ina3221(tmp_path)) is None
