"""Cutting GPUs through ``sudo nvidia-smi``: a program that speaks as the real one does, and who may run it."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from joulery.adapters.devices.mig_smi import GRANT, SmiMig, smi_command
from joulery.adapters.devices.nvidia_board import open_board
from joulery.adapters.devices.nvidia_mig import NvidiaMig
from joulery.domain.errors import ActuationError, CapabilityError
from joulery.domain.gpu.device import MigSetting
from tests.fakes.mps import PATH
from tests.fakes.nvml import STATE, NvmlFake, as_administrator, gpu
from tests.fakes.path import nvidia_smi

A100 = "NVIDIA A100-SXM4-40GB"
OLD, NEW = ("3g.20gb", "3g.20gb"), ("3g.20gb", "2g.10gb", "1g.5gb")


@pytest.fixture
def boards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., NvmlFake]:
    """A user without CAP_SYS_ADMIN who may run nvidia-smi as root."""
    as_administrator(monkeypatch, may=False)
    monkeypatch.setenv("PATH", f"{PATH}:{PATH.parent / 'sudo'}:/usr/bin:/bin")
    monkeypatch.setenv("JOULERY_FAKE_PYTHON", sys.executable)

    def made(name: str = A100) -> NvmlFake:
        file = tmp_path / "boards.json"
        monkeypatch.setenv(STATE, str(file))
        return NvmlFake(gpu(name), root=False, file=file)

    return made


def within(nvml: NvmlFake, monkeypatch: pytest.MonkeyPatch) -> NvidiaMig:
    """The device, its program run in this process: the same answers in a hundredth of the time."""
    monkeypatch.setenv("JOULERY_FAKE_ROOT", "yes")

    def run(line: Sequence[str]) -> tuple[int, str]:
        with redirect_stdout(StringIO()) as said:
            status = nvidia_smi.main(list(line[1:]))
        return status, said.getvalue().strip()

    return NvidiaMig(0, nvml, SmiMig(open_board(0, nvml), ("nvidia-smi",), run))


def test_the_program_itself(boards: Callable[..., NvmlFake]) -> None:
    nvml = boards()
    device = NvidiaMig(0, nvml)
    assert device.capability().settable
    assert "cut through sudo nvidia-smi" in device.capability().detail
    device.apply(MigSetting(("7g.40gb",)))
    assert nvml.layout() == (True, (("7g.40gb", 0, (7,)),))


def test_a_gpu_is_cut_and_cut_again_and_given_back(
    boards: Callable[..., NvmlFake], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = boards()
    device = within(nvml, monkeypatch)
    memento = device.observe().memento
    device.apply(MigSetting(OLD))
    before = {part.start: part.id for part in device.observe().slices}
    done = device.apply(MigSetting(NEW))
    assert re.findall(r"\d+ \w+", done.detail.replace(" instances", "")) == ["1 kept", "1 destroyed", "2 created"]
    assert device.observe().setting == MigSetting(NEW)
    assert sorted(name for name, _, _ in nvml.layout()[1]) == sorted(NEW)
    assert any(before.get(part.start) == part.id for part in device.observe().slices)
    device.reset(memento)
    assert nvml.layout() == (False, ())


def test_without_permission_the_message_has_the_command_line(
    boards: Callable[..., NvmlFake], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = boards()
    device = NvidiaMig(0, nvml)
    monkeypatch.setenv("JOULERY_FAKE_SUDO", "no")
    with pytest.raises(CapabilityError, match="may not partition") as caught:
        device.apply(MigSetting(OLD))
    assert caught.value.grant == GRANT
    assert smi_command() is None
    without = NvidiaMig(0, nvml)
    assert (without.capability().settable, without.capability().grant) == (False, GRANT)
    monkeypatch.setenv("PATH", "/nowhere")
    assert smi_command() is None


def test_a_mode_that_waits_for_a_reset_is_taken_back(boards: Callable[..., NvmlFake]) -> None:
    nvml = boards()
    device = NvidiaMig(0, nvml)
    with nvml.state() as state:
        state["boards"][0]["processes"] = [{"pid": 1, "gi": None}]
    surface = device._surface
    assert isinstance(surface, SmiMig)
    with pytest.raises(ActuationError, match="busy: process 1"):
        device.apply(MigSetting(OLD))
    assert nvml.boards[0]["mig"] == [0, 0]


def test_whatever_call_fails_the_cut_is_old_or_new(
    boards: Callable[..., NvmlFake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = set()
    for number in itertools.count():
        nvml = boards()
        device = within(nvml, monkeypatch)
        with nvml.state() as state:
            board = state["boards"][0]
            board["mig"] = [1, 1]
            board["instances"] = [
                {"id": 1, "profile": 9, "start": 0, "size": 4, "compute": [{"id": 0, "slices": 3}]},
                {"id": 2, "profile": 9, "start": 4, "size": 4, "compute": [{"id": 0, "slices": 3}]},
            ]
        before, calls = nvml.layout(), tmp_path / "smi-calls"
        calls.write_text("0")
        monkeypatch.setenv("JOULERY_FAKE_SMI_FAIL", f",{number},")
        try:
            device.apply(MigSetting(NEW))
        except ActuationError as error:
            outcomes.add("rolled back")
            assert error.rolled_back
            assert nvml.layout() == before
        except CapabilityError:
            outcomes.add("not begun")
            assert nvml.layout() == before
        else:
            assert sorted(name for name, _, _ in nvml.layout()[1]) == sorted(NEW)
            if int(calls.read_text()) <= number:
                break
    assert outcomes == {"rolled back", "not begun"}
