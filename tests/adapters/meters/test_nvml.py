import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from joulery.adapters import presence
from joulery.adapters.meters import nvml as module
from joulery.adapters.meters.nvml import is_mps_server, open_nvml, sees_host_processes
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.errors import CapabilityError
from joulery.domain.quality import Quality
from tests.adapters.meters.nvml_fake import FakeBoard, FakeNvml, error
from tests.waiting import wait_until

AMPERE, HOPPER, VOLTA = pynvml.NVML_DEVICE_ARCH_AMPERE, pynvml.NVML_DEVICE_ARCH_HOPPER, pynvml.NVML_DEVICE_ARCH_VOLTA


def test_the_energy_counter_is_preferred() -> None:
    fake = FakeNvml(FakeBoard(energy_mj=12_345))
    meter = open_nvml(fake)
    (channel,) = meter.channels
    assert (channel.device, channel.component, channel.kind) == ("gpu:0", "board", ReadingKind.COUNTER)
    assert (channel.meter, channel.quality, channel.averaging_s) == ("nvml", Quality.MEASURED, 0.0)
    assert channel.update_s == pytest.approx(0.1)
    fake.calls.clear()
    assert meter.read() == (12.345,)
    assert fake.calls == ["energy"]
    meter.close()
    assert fake.open == 0


def test_readings_that_the_driver_keeps_are_taken_once() -> None:
    """An H100 keeps one reading every 20 ms for 2.4 s; its counter is renewed every 100 ms (measured)."""
    board = FakeBoard(samples=[(1_000_000, 70_000), (1_020_000, 71_500)])
    other = FakeBoard(uuid="GPU-1", samples=[(1_010_000, 60_000)])
    meter = open_nvml(FakeNvml(board, other, FakeBoard(uuid="GPU-2")))
    assert meter.buffered == (0, 1), "the third board keeps none"
    assert meter.drain() == [], "what was kept before the meter was opened is not of its time"
    board.samples += [(1_040_000, 300_000), (1_060_000, 310_000)]
    other.samples += [(1_050_000, 90_000)]
    assert meter.drain() == [(1_040_000_000, 0, 300.0), (1_050_000_000, 1, 90.0), (1_060_000_000, 0, 310.0)]
    assert meter.drain() == []
    board.lost = True
    other.samples += [(1_070_000, 91_000)]
    assert meter.drain() == [(1_070_000_000, 1, 91.0)]
    meter.close()
    assert meter.drain() == []


def test_a_board_without_a_counter_is_read_as_ever() -> None:
    meter = open_nvml(FakeNvml(FakeBoard(energy_mj=None, samples=[(1_000_000, 70_000)])))
    assert meter.buffered == ()
    meter.close()


def test_instantaneous_power_comes_second() -> None:
    meter = open_nvml(FakeNvml(FakeBoard(energy_mj=None, instant_mw=300_500)))
    assert [channel.kind for channel in meter.channels] == [ReadingKind.POWER]
    assert meter.read() == (300.5,)
    meter.close()


@pytest.mark.parametrize(
    ("name", "architecture", "averaged"),
    [
        ("NVIDIA H100 80GB HBM3", HOPPER, True),
        ("NVIDIA GeForce RTX 3090", AMPERE, True),
        ("NVIDIA RTX A3000 Laptop GPU", AMPERE, True),
        ("NVIDIA A100-SXM4-80GB", AMPERE, False),
        ("NVIDIA A100X", AMPERE, False),
        ("NVIDIA A800-SXM4-80GB", AMPERE, False),
        ("NVIDIA A30", AMPERE, False),
        ("Tesla V100-SXM2-16GB", VOLTA, False),
        ("Some GPU", pynvml.NVML_DEVICE_ARCH_UNKNOWN, False),
    ],
)
def test_power_usage_comes_last_and_is_an_average_where_the_driver_averages(
    name: str, architecture: int, averaged: bool
) -> None:
    board = FakeBoard(name, architecture=architecture, energy_mj=None, instant_mw=None, usage_mw=250_000)
    meter = open_nvml(FakeNvml(board))
    (channel,) = meter.channels
    assert channel.kind is (ReadingKind.AVERAGE if averaged else ReadingKind.POWER)
    assert channel.averaging_s == (1.0 if averaged else 0.0)
    assert meter.read() == (250.0,)
    meter.close()


def test_a_driver_that_does_not_know_architectures_is_old() -> None:
    class Old(FakeNvml):
        def nvmlDeviceGetArchitecture(self, board: FakeBoard) -> int:
            raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    meter = open_nvml(Old(FakeBoard(energy_mj=None, instant_mw=None)))
    assert meter.channels[0].kind is ReadingKind.POWER
    meter.close()


def test_several_boards_each_by_its_best_source() -> None:
    meter = open_nvml(FakeNvml(FakeBoard(), FakeBoard("Quadro P5000", energy_mj=None, architecture=4), FakeBoard()))
    assert [(c.device, c.kind) for c in meter.channels] == [
        ("gpu:0", ReadingKind.COUNTER),
        ("gpu:1", ReadingKind.POWER),
        ("gpu:2", ReadingKind.COUNTER),
    ]
    meter.close()


def test_what_programs_may_see_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    meter = open_nvml(FakeNvml(FakeBoard(), FakeBoard()))
    assert [channel.device for channel in meter.channels] == ["gpu:0", "gpu:1"]
    meter.close()


def test_a_mig_parent_is_read_as_one_board_and_said() -> None:
    meter = open_nvml(FakeNvml(FakeBoard(mig=True)))
    assert meter.boards[0].mig
    assert meter.notes() == ("gpu:0 (NVIDIA H100 80GB HBM3) is in MIG mode: its joules are the whole board's",)
    meter.close()


def test_a_board_that_disappears_is_missing_and_noted_once_and_so_is_its_return() -> None:
    gone, stays = FakeBoard(), FakeBoard(energy_mj=7_000)
    meter = open_nvml(FakeNvml(gone, stays))
    meter.notes()
    gone.lost = True
    for _ in range(3):
        first, second = meter.read()
        assert math.isnan(first)
        assert second == 7.0
    assert len(meter.notes()) == 1
    gone.lost = False
    assert meter.read() == (5.0, 7.0)
    assert meter.notes() == ("gpu:0 (NVIDIA H100 80GB HBM3) answers again",)
    meter.close()


def test_a_board_that_is_not_permitted_is_left_out_and_said() -> None:
    meter = open_nvml(FakeNvml(FakeBoard(denied=True), FakeBoard()))
    assert [channel.device for channel in meter.channels] == ["gpu:1"]
    assert meter.notes()[0].startswith("gpu:0 is left out: ")
    meter.close()


def test_a_board_without_readings_is_left_out_with_every_reason() -> None:
    fake = FakeNvml(FakeBoard(energy_mj=None, instant_mw=None, usage_mw=None))
    with pytest.raises(CapabilityError, match=r"gpu:0 .*: .*counter: .*instant: .*usage: "):
        open_nvml(fake)
    assert fake.open == 0


def test_no_board() -> None:
    with pytest.raises(CapabilityError, match="the driver shows none"):
        open_nvml(FakeNvml())


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver here"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "does not answer"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "does not answer"),
    ],
)
def test_no_driver(code: int, says: str) -> None:
    with pytest.raises(CapabilityError, match=says):
        open_nvml(FakeNvml(init_error=code))


@pytest.mark.parametrize("driver", [True, False])
def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: bool) -> None:
    """A machine without a GPU gets no hint to install a package."""

    def missing(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.setattr(presence, "NVIDIA", ("/no/such/trace", str(tmp_path) if driver else "/nor/this"))
    monkeypatch.setattr(presence, "NVML", "libno-such-driver.so")
    with pytest.raises(CapabilityError) as caught:
        open_nvml()
    if driver:
        assert "needs the package nvidia-ml-py" in str(caught.value)
        assert caught.value.grant == "pip install 'joulery[nvidia]'"
    else:
        assert str(caught.value) == "no NVIDIA driver here (libno-such-driver.so is not there)"
        assert caught.value.grant is None


def test_reading_after_closing_gives_nothing() -> None:
    meter = open_nvml(FakeNvml(FakeBoard()))
    meter.close()
    meter.close()
    assert math.isnan(meter.read()[0])


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sees_host_processes", lambda: True)


@pytest.mark.usefixtures("on_the_host")
def test_who_holds_a_board() -> None:
    boards = [
        FakeBoard(),
        FakeBoard(compute_pids=[10]),
        FakeBoard(compute_pids=[10, 20], graphics_pids=[30], utilisation=[(5, 10, 60), (6, 10, 30), (6, 20, 30)]),
        FakeBoard(compute_pids=[10, 20]),
        FakeBoard(compute_pids=[10, 20], utilisation=error(pynvml.NVML_ERROR_NOT_SUPPORTED)),
        FakeBoard(compute_pids=None),
        FakeBoard(compute_pids=[10, 20], utilisation=[(5, 10, 0), (5, 20, 0)]),
    ]
    meter = open_nvml(FakeNvml(*boards))
    held = meter.holders()
    assert held["gpu:0"] == {}
    assert held["gpu:1"] == {10: 1.0}
    assert held["gpu:2"] == pytest.approx({10: 0.75, 20: 0.25, 30: 0.0})
    assert held["gpu:3"] == {10: 0.0, 20: 0.0}
    unknown = held["gpu:4"]
    assert unknown is not None
    assert set(unknown) == {10, 20}
    assert all(math.isnan(share) for share in unknown.values())
    assert held["gpu:5"] is None
    assert held["gpu:6"] == {10: 0.0, 20: 0.0}
    # Only what is newer than the last sample counts the next time.
    boards[2].utilisation = [(5, 10, 60), (6, 10, 30), (7, 20, 50)]
    assert meter.holders()["gpu:2"] == pytest.approx({10: 0.0, 20: 1.0, 30: 0.0})
    meter.close()


def test_the_server_of_mps_is_no_holder_beside_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_mps_server", lambda pid: pid == 99)
    boards = [
        FakeBoard(compute_pids=[99, 10]),
        FakeBoard(compute_pids=[99]),
        FakeBoard(compute_pids=[99, 10, 20], utilisation=[(5, 10, 60), (6, 20, 20)]),
        FakeBoard(compute_pids=[99, 10, 20], utilisation=[(5, 99, 80)]),
    ]
    meter = open_nvml(FakeNvml(*boards))
    held = meter.holders()
    assert held["gpu:0"] == {10: 1.0}
    assert held["gpu:1"] == {99: 1.0}
    assert held["gpu:2"] == pytest.approx({10: 0.75, 20: 0.25})
    unknown = held["gpu:3"]  # whose work it was is not known: no client is given another's
    assert unknown is not None
    assert set(unknown) == {10, 20}
    assert all(math.isnan(share) for share in unknown.values())
    meter.close()


def test_the_server_of_mps_is_known_by_its_name(tmp_path: Path) -> None:
    assert not is_mps_server(os.getpid())
    assert not is_mps_server(2**22 + 1)
    program = tmp_path / "nvidia-cuda-mps-server"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as server:
        try:
            assert wait_until(lambda: is_mps_server(server.pid), "its name")
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (pynvml.NVML_COMPUTEMODE_DEFAULT, ()),
        (
            pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
            ("is in exclusive-process mode: one process at a time computes on it; MPS shares it",),
        ),
        (
            pynvml.NVML_COMPUTEMODE_PROHIBITED,
            ("is in prohibited compute mode: nothing computes on it, its joules are idle power",),
        ),
    ],
)
def test_the_compute_mode_is_said_once_and_changes_no_number(mode: int, said: tuple[str, ...]) -> None:
    meter = open_nvml(FakeNvml(FakeBoard(compute_mode=mode, compute_pids=[10])))
    assert meter.notes() == tuple(f"gpu:0 (NVIDIA H100 80GB HBM3) {one}" for one in said)
    assert meter.read() == (5.0,)
    assert meter.holders() == {"gpu:0": {10: 1.0}}
    assert meter.notes() == ()
    meter.close()


def test_whether_a_board_computes() -> None:
    boards = [
        FakeBoard(),
        FakeBoard(utilisation=[(5, 10, 0)]),
        FakeBoard(utilisation=[(5, 10, 0), (6, 10, 3)]),
        FakeBoard(utilisation=error(pynvml.NVML_ERROR_NOT_SUPPORTED)),
    ]
    meter = open_nvml(FakeNvml(*boards))
    assert meter.busy() == {"gpu:0": False, "gpu:1": False, "gpu:2": True, "gpu:3": None}
    assert meter.busy()["gpu:2"] is False
    meter.close()


def test_in_a_container_no_process_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sees_host_processes", lambda: False)
    meter = open_nvml(FakeNvml(FakeBoard(compute_pids=[os.getpid()])))
    assert meter.holders() == {"gpu:0": None}
    meter.close()


def test_the_first_process_namespace_is_recognised() -> None:
    assert sees_host_processes() is (str(Path("/proc/self/ns/pid").readlink()) == "pid:[4026531836]")


class WithInstances(FakeNvml):
    """Boards in MIG mode with one instance, in the second place."""

    def nvmlDeviceGetMaxMigDeviceCount(self, board: FakeBoard) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board: FakeBoard, index: int) -> FakeBoard:
        if index != 1:
            raise error(pynvml.NVML_ERROR_NOT_FOUND)
        return FakeBoard(uuid="MIG-instance")


def test_boards_and_their_instances_are_known_by_uuid() -> None:
    meter = open_nvml(WithInstances(FakeBoard(uuid="GPU-a"), FakeBoard(uuid="GPU-b", mig=True)))
    assert meter.uuids == {"GPU-a": "gpu:0", "GPU-b": "gpu:1", "MIG-instance": "gpu:1"}
