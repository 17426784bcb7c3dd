"""Processes that go together on MIG slices: one instance each, one MPS daemon where they are several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.devices.nvidia_mig import NvidiaMig
from joulery.adapters.devices.nvidia_mps import NvidiaMps
from joulery.adapters.devices.places import GpuPlaces
from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.device import DeviceSpec, MpsSetting, WantedPart
from joulery.domain.serving.service import Slice, SliceKind
from tests.fakes.mps import no_daemon_left, on_path
from tests.fakes.nvml import NvmlFake, gpu


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PATH", on_path())
    with no_daemon_left(tmp_path):
        yield tmp_path


@pytest.fixture
def nvml() -> NvmlFake:
    return NvmlFake(gpu())


def places(nvml: NvmlFake, folder: Path) -> GpuPlaces:
    def turn(device: Any, spec: DeviceSpec, wanted: Any, reason: str) -> object:
        return device.apply(wanted)

    def within(name: str, instance: str) -> tuple[NvidiaMps, DeviceSpec]:
        options = {"gpu": 0, "instance": instance}
        return NvidiaMps(0, nvml, str(folder), instance), DeviceSpec("nvidia-mps", options)

    return GpuPlaces(turn, {"gpu:0": NvidiaMig(0, nvml)}, specs={"gpu:0": DeviceSpec("nvidia-mig")}, within=within)


def wanted(profile: str, together: str, processes: int = 1) -> list[WantedPart]:
    piece = Slice(SliceKind.MIG, profile=profile, share_ratio=1 / processes)
    return [WantedPart(piece, "gpu:0", together)] * processes


def test_processes_of_an_instance_share_its_slice_under_a_daemon_of_its_own(nvml: NvmlFake, folder: Path) -> None:
    here = places(nvml, folder)
    parts = [*wanted("3g.20gb", "a/0", 2), *wanted("3g.20gb", "b/0")]
    assert here.vacate(parts) == frozenset()
    with pytest.raises(CapabilityError, match="room for 1g"):
        here.settle([*parts, *wanted("1g.5gb", "d/0")])
    here.settle(parts)
    given = here.assign(parts, [])
    assert Counter(part.id for part in given).most_common() == [(given[0].id, 2), (given[2].id, 1)]
    shared, alone = dict(given[0].environ), dict(given[2].environ)
    assert shared["CUDA_VISIBLE_DEVICES"] == given[0].id and given[0].id in shared["CUDA_MPS_PIPE_DIRECTORY"]
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in shared, "no process of a slice is held to a part of it"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in alone
    assert [part.share_ratio for part in given] == pytest.approx([3 / 14, 3 / 14, 3 / 7]), "of the whole GPU"
    assert here.settle(parts) == "", "there is nothing more to do"


def test_instances_keep_their_slices_and_others_take_free_ones_first(nvml: NvmlFake, folder: Path) -> None:
    here = places(nvml, folder)
    first = [*wanted("2g.10gb", "a/0"), *wanted("2g.10gb", "b/0"), *wanted("2g.10gb", "c/0")]
    here.settle(first)
    before = {one.together: part.id for one, part in zip(first, here.assign(first, []), strict=True)}
    second = [*wanted("2g.10gb", "d/0"), *wanted("2g.10gb", "a/0")]
    assert here.vacate(second) == frozenset() and here.settle(second) == ""
    new, kept = here.assign(second, [])
    assert kept.id == before["a/0"] and new.id in (before["b/0"], before["c/0"])


def test_a_daemon_ends_before_its_slice_does(nvml: NvmlFake, folder: Path) -> None:
    here = places(nvml, folder)
    here.settle(wanted("7g.40gb", "a/0", 2))
    instance = here.assign(wanted("7g.40gb", "a/0", 2), [])[0].id
    daemon = NvidiaMps(0, nvml, str(folder), instance)
    assert daemon.observe().setting.running
    assert here.vacate(wanted("3g.20gb", "b/0")) == {instance}
    here.settle(wanted("3g.20gb", "b/0"))
    assert daemon.observe().setting == MpsSetting()
    assert nvml.layout()[1][0][0] == "3g.20gb"


def test_where_daemons_of_slices_cannot_be_opened_several_processes_are_refused(nvml: NvmlFake, folder: Path) -> None:
    here = places(nvml, folder)
    here.within = None
    with pytest.raises(CapabilityError, match="cannot share the slices of gpu:0"):
        here.settle(wanted("3g.20gb", "a/0", 2))


def test_a_slice_is_written_with_the_part_of_a_process() -> None:
    piece = Slice(SliceKind.MIG, profile="3g.20gb", share_ratio=0.5)
    assert str(piece) == "3g.20gb@0.5" and Slice.parse("3g.20gb@0.5") == piece
    assert Slice.parse("3g.20gb") == Slice(SliceKind.MIG, profile="3g.20gb")
