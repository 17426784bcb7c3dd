"""The MPS daemon, through a program that answers as the real one does and keeps a real process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from joulery.adapters.devices.nvidia_mps import NvidiaMps
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError
from joulery.domain.gpu.device import MpsSetting
from tests.fakes.mps import daemon, no_daemon_left, on_path, serve
from tests.fakes.nvml import NvmlFake, gpu
from tests.waiting import wait_until


@pytest.fixture
def nvml() -> NvmlFake:
    return NvmlFake(gpu("Tesla V100-SXM2-16GB"), gpu("NVIDIA A100-SXM4-40GB", 1))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PATH", on_path())
    with no_daemon_left(tmp_path):
        yield tmp_path


def test_a_daemon_is_started_configured_and_ended(nvml: NvmlFake, folder: Path) -> None:
    device = NvidiaMps(0, nvml, str(folder))
    memento = device.observe().memento
    assert device.observe().setting == MpsSetting()
    device.apply(MpsSetting(True, 0.375))
    found = daemon(folder)
    assert found is not None
    assert found[1:] == (37.5, nvml.boards[0]["uuid"])
    assert device.observe().setting == MpsSetting(True, 0.375)
    assert device.apply(MpsSetting(True, 0.375)).detail == "it was set so already"
    device.apply(MpsSetting(True, 0.5))
    assert device.observe().setting.default_share_ratio == 0.5
    NvidiaMps(nvml.boards[0]["uuid"], nvml, str(folder)).reset(memento)
    assert daemon(folder) is None
    device.reset()


def test_clients_receive_the_pipe_and_the_share(nvml: NvmlFake, folder: Path) -> None:
    device = NvidiaMps(0, nvml, str(folder))
    environ = dict(device.environment(0.375))
    uuid = nvml.boards[0]["uuid"]
    assert environ == {
        "CUDA_VISIBLE_DEVICES": uuid,
        "JOULERY_DEVICE": "cuda",
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / uuid / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / uuid / "log"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "37.5",
    }


def test_each_gpu_has_a_daemon_of_its_own(nvml: NvmlFake, folder: Path) -> None:
    NvidiaMps(0, nvml, str(folder)).apply(MpsSetting(True))
    second = NvidiaMps(1, nvml, str(folder))
    assert not second.observe().setting.running
    second.apply(MpsSetting(True, 0.2))
    assert len(list(folder.rglob("daemon"))) == 2


def test_a_daemon_with_clients_is_not_ended_but_is_reset(nvml: NvmlFake, folder: Path) -> None:
    device = NvidiaMps(0, nvml, str(folder))
    assert device.clients() == ()
    device.apply(MpsSetting(True))
    serve(folder, 4711, 4712)
    assert device.clients() == (4711, 4712)
    with pytest.raises(ActuationError, match=r"4711, 4712; nothing was changed"):
        device.apply(MpsSetting())
    assert device.observe().setting.running
    device.reset()
    assert daemon(folder) is None


def test_a_daemon_that_died_is_started_again(nvml: NvmlFake, folder: Path) -> None:
    import os
    import signal

    device = NvidiaMps(0, nvml, str(folder))
    device.apply(MpsSetting(True))
    first = daemon(folder)
    assert first is not None
    os.kill(first[0], signal.SIGKILL)
    wait_until(lambda: not device.observe().setting.running, "the end of the daemon")
    device.apply(MpsSetting(True))
    second = daemon(folder)
    assert second is not None
    assert second[0] != first[0]


def test_a_cut_gpu_is_not_shared(nvml: NvmlFake, folder: Path) -> None:
    nvml.boards[1]["mig"] = [1, 1]
    device = NvidiaMps(1, nvml, str(folder))
    assert not device.capability().settable
    with pytest.raises(CapabilityError, match="MPS shares whole GPUs"):
        device.apply(MpsSetting(True))


def test_without_the_program(nvml: NvmlFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CapabilityError, match="is not installed"):
        NvidiaMps(0, nvml, str(tmp_path))


@pytest.mark.parametrize("share", [0.0, 1.1, -0.5])
def test_impossible_shares(share: float) -> None:
    with pytest.raises(ConfigError):
        MpsSetting(True, share)


@pytest.mark.parametrize(("old", "new"), [(MpsSetting(), MpsSetting(True, 0.5)), (MpsSetting(True, 0.5), MpsSetting())])
def test_whatever_call_fails_it_is_old_or_new(
    nvml: NvmlFake, folder: Path, monkeypatch: pytest.MonkeyPatch, old: MpsSetting, new: MpsSetting
) -> None:
    for number in itertools.count():
        home = folder / str(number)
        device = NvidiaMps(0, nvml, str(home))
        if old.running:
            device.apply(old)
        done = next(home.rglob("calls"), None)
        start = int(done.read_text()) if done is not None else 0
        monkeypatch.setenv("JOULERY_FAKE_MPS_FAIL", str(start + number))
        expected = new
        try:
            device.apply(new)
        except ActuationError as error:
            assert error.rolled_back
            expected = old
        except CapabilityError:
            expected = old
        monkeypatch.delenv("JOULERY_FAKE_MPS_FAIL")
        calls = int(next(home.rglob("calls")).read_text())
        assert device.observe().setting == expected
        device.reset()
        if calls <= start + number:
            break
