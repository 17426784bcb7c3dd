"""Cutting GPUs through a driver with the real one's structures, errors and rules."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.adapters.devices.nvidia_mig import ASSUMED_STEP_S, NvidiaMig
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError, DataError
from joulery.domain.gpu.device import MigSetting
from joulery.domain.gpu.mig import A30_24GB, A100_40GB, H100_80GB, H200_141GB, MENUS
from tests.fakes.nvml import NvmlFake, gpu

A100 = "NVIDIA A100-SXM4-40GB"
NAMES = {
    A100: A100_40GB,
    "NVIDIA A30": A30_24GB,
    "NVIDIA H100 80GB HBM3": H100_80GB,
    "NVIDIA H200": H200_141GB,
}
FULL = {profile.name: profile.compute_slices for menu in MENUS for profile in menu.profiles}


def cut(nvml: NvmlFake) -> tuple[str, ...]:
    """What a board is cut into, each with one compute instance of its full size."""
    _, instances = nvml.layout()
    assert all(compute == (FULL[name],) for name, _, compute in instances)
    return tuple(sorted(name for name, _, _ in instances))


@pytest.mark.parametrize("name", NAMES)
def test_every_partition_of_every_menu_is_made_from_the_one_before(name: str) -> None:
    nvml = NvmlFake(gpu(name))
    device = NvidiaMig(0, nvml)
    for partition in NAMES[name].partitions:
        device.apply(MigSetting(partition))
        assert cut(nvml) == tuple(sorted(partition))
        found = device.observe()
        assert found.setting == MigSetting(partition)
        assert len({part.id for part in found.slices}) == len(partition)
        assert [dict(part.environ)["CUDA_VISIBLE_DEVICES"] for part in found.slices] == [p.id for p in found.slices]
        assert sorted(str(part.slice) for part in found.slices) == sorted(partition)
    device.reset()
    assert nvml.layout() == (False, ())


def test_instances_that_can_stay_are_left_alone() -> None:
    nvml = NvmlFake(gpu(A100))
    device = NvidiaMig(0, nvml)
    device.apply(MigSetting(("3g.20gb", "2g.10gb", "2g.10gb")))
    before = {part.start: part.id for part in device.observe().slices if str(part.slice) != "3g.20gb"}
    done = device.apply(MigSetting(("2g.10gb", "1g.5gb", "2g.10gb", "1g.5gb", "1g.5gb")))
    assert re.findall(r"\d+ \w+", done.detail.replace(" instances", "")) == ["2 kept", "1 destroyed", "3 created"]
    after = {part.start: part.id for part in device.observe().slices if str(part.slice) == "2g.10gb"}
    assert after == before


def test_prices_are_assumed_until_measured() -> None:
    nvml = NvmlFake(gpu(A100))
    device = NvidiaMig(0, nvml)
    first = device.price(MigSetting(("7g.40gb",)))
    assert (first.mode_change, first.measured, len(first.created)) == (True, False, 1)
    device.apply(MigSetting(("3g.20gb", "3g.20gb")))
    assumed = device.price(MigSetting(("3g.20gb", "4g.20gb")))
    assert (len(assumed.kept), len(assumed.destroyed), len(assumed.created)) == (1, 1, 1)
    assert (assumed.seconds, assumed.measured) == (2 * ASSUMED_STEP_S, False)
    device.apply(MigSetting(("3g.20gb", "4g.20gb")))
    assert device.price(MigSetting(("3g.20gb", "3g.20gb"))).measured


def test_a_busy_gpu_is_left_as_it_is() -> None:
    nvml = NvmlFake(gpu(A100))
    device = NvidiaMig(0, nvml)
    device.apply(MigSetting(("3g.20gb", "3g.20gb")))
    before = nvml.layout()
    nvml.boards[0]["processes"] = [{"pid": 4711, "gi": 1}]
    assert device.price(MigSetting(("7g.40gb",))).busy_pids == (4711,)
    with pytest.raises(ActuationError, match=r"busy: process 4711 .*nothing was changed") as caught:
        device.apply(MigSetting(("7g.40gb",)))
    assert not caught.value.left_dirty
    assert nvml.layout() == before


@pytest.mark.parametrize("number", [1, 2])
def test_what_is_in_use_is_what_stays(number: int) -> None:
    nvml = NvmlFake(gpu(A100))
    device = NvidiaMig(0, nvml)
    device.apply(MigSetting(("3g.20gb", "3g.20gb")))
    nvml.boards[0]["processes"] = [{"pid": 4711, "gi": number}]
    busy = next(part for part in device.observe().slices if part.pids)
    device.apply(MigSetting(("3g.20gb", "2g.10gb", "1g.5gb")))
    assert any(part.id == busy.id for part in device.observe().slices)


def test_who_runs_there_unseen_stops_the_change_too() -> None:
    """Processes of other containers are not listed: the driver refuses half way, and everything is made again."""
    nvml = NvmlFake(gpu(A100))
    device = NvidiaMig(0, nvml)
    device.apply(MigSetting(("3g.20gb", "2g.10gb", "1g.5gb")))
    before = nvml.layout()

    class Blind(NvmlFake):
        def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
            return []

    nvml.__class__ = Blind
    number = next(i["id"] for i in nvml.boards[0]["instances"] if i["profile"] == 19)
    nvml.boards[0]["processes"] = [{"pid": 4711, "gi": number}]
    with pytest.raises(ActuationError, match="set as it was before"):
        device.apply(MigSetting(("7g.40gb",)))
    assert nvml.layout() == before


def test_a_mode_that_waits_for_a_reset_is_taken_back() -> None:
    class Blind(NvmlFake):
        def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
            return []

    nvml = Blind(gpu(A100, processes=[{"pid": 1, "gi": None}]))
    with pytest.raises(ActuationError, match="after a reset only") as caught:
        NvidiaMig(0, nvml).apply(MigSetting(("7g.40gb",)))
    assert caught.value.rolled_back
    assert nvml.boards[0]["mig"] == [0, 0]


def test_what_no_menu_has_is_refused() -> None:
    nvml = NvmlFake(gpu(A100))
    device = NvidiaMig(0, nvml)
    with pytest.raises(ConfigError, match=r"no MIG profile '5g\.30gb'"):
        device.apply(MigSetting(("5g.30gb",)))
    with pytest.raises(ConfigError, match="cannot be partitioned"):
        device.apply(MigSetting(("4g.20gb", "4g.20gb")))
    with pytest.raises(CapabilityError, match="only in MIG mode") as caught:
        device.apply(MigSetting(("1g.10gb",) * 3))
    assert caught.value.grant == "sudo nvidia-smi -i 0 -mig 1"
    device.apply(MigSetting(("7g.40gb",)))
    device.apply(MigSetting(("1g.10gb",) * 3))
    with pytest.raises(ConfigError, match="cannot be partitioned"):
        device.apply(MigSetting(("4g.20gb", "3g.20gb", "1g.5gb")))
    assert cut_names(nvml) == ("1g.10gb",) * 3
    with pytest.raises(DataError, match="not a partition"):
        device.reset({"instances": 3})


def cut_names(nvml: NvmlFake) -> tuple[str, ...]:
    return tuple(name for name, _, _ in nvml.layout()[1])


def test_gpus_that_cannot_be_cut_and_people_who_may_not() -> None:
    with pytest.raises(CapabilityError, match="does not support"):
        NvidiaMig(0, NvmlFake(gpu("Tesla V100-SXM2-16GB")))
    nvml = NvmlFake(gpu(A100))
    NvidiaMig(0, nvml).apply(MigSetting(("3g.20gb", "4g.20gb")))
    with nvml.state() as state:
        state["root"] = False
    device = NvidiaMig(0, nvml)
    assert device.observe().setting == MigSetting(("3g.20gb", "4g.20gb"))
    with pytest.raises(CapabilityError) as caught:
        device.apply(MigSetting(("7g.40gb",)))
    assert caught.value.grant == "sudo -E joulery ..."


def test_partitions_of_others_come_back_with_their_compute_instances() -> None:
    nvml = NvmlFake(gpu(A100, mig=[1, 1]))
    nvml.boards[0]["instances"] = [
        {"id": 2, "profile": 9, "start": 4, "size": 4, "compute": [{"id": 0, "slices": 1}, {"id": 1, "slices": 2}]},
        {"id": 5, "profile": 14, "start": 0, "size": 2, "compute": []},
    ]
    before = nvml.layout()
    device = NvidiaMig(0, nvml)
    memento = device.observe().memento
    device.apply(MigSetting(("7g.40gb",)))
    device.reset(memento)
    assert nvml.layout() == before


PARTITIONS = [(), *A100_40GB.multisets]
SMALL = ("3g.20gb", "2g.10gb", "1g.5gb")
CHANGES = [((), SMALL), (("3g.20gb", "4g.20gb"), SMALL), (("7g.40gb",), ())]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_whatever_single_call_fails_the_cut_is_old_or_new(
    old: tuple[str, ...], new: tuple[str, ...], late: bool
) -> None:
    """Every call of a change in turn fails once."""
    outcomes = set()
    for number in itertools.count():
        nvml = NvmlFake(gpu(A100))
        device = NvidiaMig(0, nvml)
        device.apply(MigSetting(old))
        before = nvml.layout()
        start = len(nvml.calls)
        nvml.fail_at, nvml.late = frozenset({start + number}), late
        try:
            device.apply(MigSetting(new))
        except ActuationError as error:
            outcomes.add("rolled back")
            assert error.rolled_back
            assert not error.left_dirty
            assert nvml.layout() == before
        except CapabilityError:
            outcomes.add("not begun")
            assert nvml.layout() == before
        else:
            assert cut(nvml) == tuple(sorted(new))
            if len(nvml.calls) <= start + number:
                break
    assert outcomes == {"rolled back", "not begun"}


@settings(max_examples=60)
@given(
    old=st.sampled_from(PARTITIONS),
    new=st.sampled_from(PARTITIONS),
    number=st.integers(0, 200),
    width=st.integers(1, 400),
    code=st.sampled_from([pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_IN_USE, pynvml.NVML_ERROR_GPU_IS_LOST]),
    late=st.booleans(),
)
def test_a_storm_of_failures_leaves_one_of_the_two_or_is_called_dirty(
    old: tuple[str, ...], new: tuple[str, ...], number: int, width: int, code: int, late: bool
) -> None:
    nvml = NvmlFake(gpu(A100))
    device = NvidiaMig(0, nvml)
    device.apply(MigSetting(old))
    before = nvml.layout()
    start = len(nvml.calls) + number
    nvml.fail_at, nvml.late, nvml.code = frozenset(range(start, start + width)), late, code
    try:
        device.apply(MigSetting(new))
    except ActuationError as error:
        if not error.left_dirty:
            assert nvml.layout() == before
        assert bool(error.left_dirty) != bool(error.rolled_back)
    except CapabilityError:
        assert nvml.layout() == before
    else:
        assert cut(nvml) == tuple(sorted(new))
