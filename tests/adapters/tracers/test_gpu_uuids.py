"""Which boards a program's GPUs are: a program numbers those that ``CUDA_VISIBLE_DEVICES`` lets it see."""

import ctypes
import uuid
from types import SimpleNamespace

import pytest

from joulery.adapters.tracers.inject.xla_cycles import cuda_uuids

BOARDS = [uuid.UUID(int=n + 1) for n in range(4)]


class Driver:
    """``libcuda`` as a process sees it."""

    def __init__(self, visible: tuple[int, ...], *, used: bool = True) -> None:
        self.visible, self.used = visible, used

    def cuDeviceGetCount(self, count):  # the driver's name
        count._obj.value = len(self.visible)
        return 0 if self.used else 3

    def cuDeviceGet(self, device, number):
        device._obj.value = self.visible[number]
        return 0

    def cuDeviceGetUuid_v2(self, name, device):
        ctypes.memmove(name, BOARDS[device.value].bytes, 16)
        return 0


def test_the_driver_says_which_boards_a_program_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: Driver((2, 0)))
    assert cuda_uuids() == {"GPU:0": str(BOARDS[2]), "GPU:1": str(BOARDS[0])}


@pytest.mark.parametrize("driver", [Driver((0,), used=False), SimpleNamespace()])
def test_a_process_that_uses_no_gpu_has_none(monkeypatch: pytest.MonkeyPatch, driver) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: driver)
    assert cuda_uuids() == {}


def test_a_machine_without_a_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name, mode):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert cuda_uuids() == {}
