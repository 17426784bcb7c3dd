"""AMD's boards through AMD SMI, against a module with the real one's names, results and errors."""

import inspect
import math
import sys

import pytest

from joulery.adapters import presence
from joulery.adapters.meters import amd as module
from joulery.adapters.meters.amd import open_amd
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.errors import CapabilityError
from tests.fakes.amdsmi import SIGNATURES, AmdBoard, AmdSmiFake


def opened(*boards: AmdBoard):
    smi = AmdSmiFake(*boards)
    return open_amd(smi, smi.sleep), smi


def test_the_fake_has_the_real_modules_parameters() -> None:
    for name, parameters in SIGNATURES.items():
        assert list(inspect.signature(getattr(AmdSmiFake(), name)).parameters) == parameters


def test_the_accumulator_counts_joules() -> None:
    board = AmdBoard(count=2_000_000, resolution_uj=15.3, draws_w=300)
    meter, smi = opened(board)
    assert [(c.device, c.component, c.kind, c.meter) for c in meter.channels] == [
        ("gpu:0", "board", ReadingKind.COUNTER, "amd")
    ]
    before = meter.read()[0]
    smi.sleep(10.0)
    assert meter.read()[0] - before == pytest.approx(3000.0, rel=1e-4)


def test_releases_that_call_the_count_power() -> None:
    meter, _ = opened(AmdBoard(key="power", count=1_000_000, resolution_uj=10.0, draws_w=0.0, average_w=0))
    assert meter.read() == (10.0,)


@pytest.mark.parametrize(
    ("board", "watts"),
    [
        (AmdBoard(count=None, average_w=250), 250.0),
        (AmdBoard(count=None, average_w=250, current_w=260), 260.0),
        (AmdBoard(count=0xFFFFFFFFFFFFFFFF, average_w=250), 250.0),
    ],
)
def test_power_where_there_is_no_accumulator(board: AmdBoard, watts: float) -> None:
    meter, _ = opened(board)
    assert meter.channels[0].kind is ReadingKind.POWER
    assert meter.read() == (watts,)
    assert meter.notes() == ()


@pytest.mark.parametrize("draws_w", [0.0, 3.0, 300_000.0])
def test_an_accumulator_that_disagrees_with_the_power_is_not_believed(draws_w: float) -> None:
    meter, _ = opened(AmdBoard(draws_w=draws_w, average_w=300))
    assert (meter.channels[0].kind, meter.read()) == (ReadingKind.POWER, (300.0,))
    (note,) = meter.notes()
    assert "its power is 300 W: the power is read" in note


def test_partitions_of_one_board_are_read_once() -> None:
    meter, _ = opened(AmdBoard(), AmdBoard(partition=1), AmdBoard(partition=2), AmdBoard(uuid="b"))
    assert [c.device for c in meter.channels] == ["gpu:0", "gpu:1"]
    assert meter.uuids == {AmdBoard().uuid: "gpu:0", "b": "gpu:1"}


def test_a_lost_board_is_said_once_and_comes_back() -> None:
    lost = AmdBoard()
    meter, _ = opened(lost, AmdBoard())
    lost.lost = True
    assert [math.isnan(value) for value in meter.read()] == [True, False]
    assert math.isnan(meter.read()[0])
    assert meter.notes() == ("gpu:0 does not answer: Error code: 2 | AMDSMI_STATUS_DRM_ERROR",)
    lost.lost = False
    assert not math.isnan(meter.read()[0])
    assert meter.notes() == ("gpu:0 answers again",)


def test_who_uses_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sees_host_processes", lambda: True)
    meter, _ = opened(AmdBoard(pids=[7]), AmdBoard(pids=[7, 8]), AmdBoard())
    held = meter.holders()
    assert held["gpu:0"] == {7: 1.0}
    assert held["gpu:1"] is not None and all(math.isnan(share) for share in held["gpu:1"].values())
    assert held["gpu:2"] == {}
    monkeypatch.setattr(module, "sees_host_processes", lambda: False)
    assert meter.holders()["gpu:0"] is None


@pytest.mark.parametrize(
    ("smi", "says", "grant"),
    [
        (AmdSmiFake(), "the driver shows none", None),
        (AmdSmiFake(AmdBoard(count=None, average_w=0xFFFF)), "neither energy nor power", None),
        (AmdSmiFake(init_error="DRIVER_NOT_LOADED"), "DRIVER_NOT_LOADED", None),
        (AmdSmiFake(init_error="NO_PERM"), "NO_PERM", "sudo usermod -aG render,video $USER"),
    ],
)
def test_what_stands_in_the_way(smi: AmdSmiFake, says: str, grant: str | None) -> None:
    with pytest.raises(CapabilityError, match=says) as caught:
        open_amd(smi, smi.sleep)
    assert caught.value.grant == grant
    assert smi.open == 0


def test_a_module_that_does_not_find_its_library_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(presence, "AMD", str(tmp_path))
    (tmp_path / "amdsmi.py").write_text("print('Unable to find libamd_smi.so library')\n{}['libamd_smi.so']\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CapabilityError, match="does not fit the installed ROCm"):
        open_amd()
    assert capsys.readouterr().out == ""


def test_no_driver_and_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    with pytest.raises(CapabilityError, match="no AMD GPU driver here"):
        open_amd()
    monkeypatch.setattr(presence, "AMD", str(tmp_path))
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(CapabilityError, match="needs the package amdsmi") as caught:
        open_amd()
    assert caught.value.grant == "pip install /opt/rocm/share/amd_smi"
