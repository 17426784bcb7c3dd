"""CPU clocks on a tree of files that follows the kernel's rules."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from joulery.adapters.devices.cpufreq import GRANT, CpufreqClock
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError
from joulery.domain.gpu.device import ClockSetting
from tests.fakes.cpufreq import KernelFiles, cpufreq_tree, settings


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return cpufreq_tree(tmp_path / "cpu")


def ceilings(tree: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(tree.glob("cpufreq/policy*/scaling_max_freq"))]


def test_a_ceiling_goes_to_every_policy_and_back(tree: Path) -> None:
    device, before = CpufreqClock(str(tree), files=KernelFiles()), settings(tree)
    found = device.observe()
    assert found.setting == ClockSetting(None, True, "schedutil")
    assert found.clock_mhz == 1500.0
    done = device.apply(ClockSetting(2000.0))
    assert ceilings(tree) == [2_000_000, 2_000_000]
    assert (done.before.clock_mhz, done.after.clock_mhz) == (None, 2000.0)
    assert device.observe().setting.clock_mhz == 2000.0
    device.reset(found.memento)
    assert settings(tree) == before


def test_what_was_found_comes_back_and_not_the_factory(tree: Path) -> None:
    """A limit that the administrator sets stays."""
    (tree / "cpufreq/policy1/scaling_max_freq").write_text("2500000\n")
    device, before = CpufreqClock(str(tree), files=KernelFiles()), settings(tree)
    memento = device.observe().memento
    device.apply(ClockSetting(1600.0))
    device.reset(memento)
    assert settings(tree) == before
    device.reset()
    assert ceilings(tree) == [3_200_000, 3_200_000]


def test_another_process_can_reset_with_what_was_written_down(tree: Path) -> None:
    import json

    before = settings(tree)
    device = CpufreqClock(str(tree), files=KernelFiles())
    memento = json.loads(json.dumps(dict(device.observe().memento)))
    device.apply(ClockSetting(1700.0, boost=False, governor="performance"))
    assert settings(tree)["cpufreq/boost"] == "0"
    assert settings(tree)["cpufreq/policy0/scaling_governor"] == "performance"
    CpufreqClock(str(tree), files=KernelFiles()).reset(memento)
    assert settings(tree) == before


def test_a_floor_above_the_ceiling_is_lowered_first_and_restored(tree: Path) -> None:
    for number in range(2):
        (tree / f"cpufreq/policy{number}/scaling_min_freq").write_text("2800000\n")
    device, before = CpufreqClock(str(tree), files=KernelFiles()), settings(tree)
    memento = device.observe().memento
    device.apply(ClockSetting(2000.0))
    assert settings(tree)["cpufreq/policy1/scaling_min_freq"] == "2000000"
    device.reset(memento)
    assert settings(tree) == before


def test_listed_clocks_are_offered_and_the_next_higher_is_taken(tmp_path: Path) -> None:
    tree = cpufreq_tree(tmp_path, listed=(1_500_000, 2_100_000, 3_200_000))
    device = CpufreqClock(str(tree), files=KernelFiles())
    assert device.capability().clocks_mhz == (1500.0, 2100.0, 3200.0)
    assert device.apply(ClockSetting(1600.0)).after.clock_mhz == 2100.0


def test_a_range_is_offered_in_steps(tmp_path: Path) -> None:
    tree = cpufreq_tree(
        tmp_path, low_khz=1_450_000, high_khz=1_750_000, driver="intel_pstate", boost=None, no_turbo="0"
    )
    device = CpufreqClock(str(tree), files=KernelFiles())
    assert device.capability().clocks_mhz == (1450.0, 1500.0, 1600.0, 1700.0, 1750.0)
    device.apply(ClockSetting(boost=False))
    assert settings(tree)["intel_pstate/no_turbo"] == "1"
    assert device.observe().setting.boost is False
    device.reset()
    assert settings(tree)["intel_pstate/no_turbo"] == "0"


def test_a_driver_that_rounds_is_believed_and_one_that_ignores_is_not(tree: Path) -> None:
    files = KernelFiles()
    device = CpufreqClock(str(tree), files=files)
    files.round_khz = 37_000
    device.apply(ClockSetting(2000.0))
    assert all(abs(khz - 2_000_000) < 40_000 for khz in ceilings(tree))
    before = settings(tree)
    files.round_khz = 1_000_000
    with pytest.raises(ActuationError, match="reads") as caught:
        device.apply(ClockSetting(2900.0))
    assert settings(tree) != before or caught.value.rolled_back
    assert caught.value.rolled_back or caught.value.left_dirty


def test_only_the_policies_of_the_cpus_meant(tree: Path) -> None:
    CpufreqClock(str(tree), cpus=(1,), files=KernelFiles()).apply(ClockSetting(2000.0))
    assert ceilings(tree) == [3_200_000, 2_000_000]


def test_setting_what_is_set_writes_nothing(tree: Path) -> None:
    device = CpufreqClock(str(tree), files=KernelFiles())
    device.apply(ClockSetting(2000.0))
    assert device.apply(ClockSetting(2000.0)).detail == "it was set so already"


@pytest.mark.parametrize("clock_mhz", [1499.0, 3201.0])
def test_clocks_outside_the_range_are_refused(tree: Path, clock_mhz: float) -> None:
    before = settings(tree)
    with pytest.raises(ConfigError, match="no such clock"):
        CpufreqClock(str(tree), files=KernelFiles()).apply(ClockSetting(clock_mhz))
    assert settings(tree) == before


def test_unknown_governors_and_missing_boost_are_refused(tmp_path: Path) -> None:
    tree = cpufreq_tree(tmp_path, boost=None)
    device = CpufreqClock(str(tree), files=KernelFiles())
    with pytest.raises(ConfigError, match="no such governor"):
        device.apply(ClockSetting(governor="warp"))
    with pytest.raises(CapabilityError, match="boost cannot be set"):
        device.apply(ClockSetting(boost=False))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_no_permission_names_the_line_that_grants_it(tree: Path, code: int) -> None:
    files = KernelFiles(code=code)
    device, before = CpufreqClock(str(tree), files=files), settings(tree)
    device.apply(ClockSetting(2000.0))
    device.reset()

    class Denied(KernelFiles):
        def write(self, path: Path, text: str) -> None:
            raise OSError(code, "Permission denied", str(path))

    with pytest.raises(CapabilityError) as caught:
        CpufreqClock(str(tree), files=Denied()).apply(ClockSetting(2000.0))
    assert caught.value.grant == GRANT
    assert settings(tree) == before


def test_a_cpu_that_goes_offline_is_an_error_for_a_person(tree: Path) -> None:
    device = CpufreqClock(str(tree))
    for path in (tree / "cpufreq/policy1").iterdir():
        path.unlink()
    with pytest.raises(CapabilityError, match="cannot be read"):
        device.observe()


def test_no_driver(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="no cpufreq driver"):
        CpufreqClock(str(tmp_path))


@pytest.mark.parametrize("late", [False, True])
def test_whatever_single_call_fails_the_tree_is_old_or_new(tmp_path: Path, late: bool) -> None:
    """Every call of a change in turn fails once; the state is one of the two, and the error says which."""
    wanted = ClockSetting(1600.0, boost=False, governor="performance")
    reference = cpufreq_tree(tmp_path / "reference")
    files = KernelFiles()
    old = settings(reference)
    device = CpufreqClock(str(reference), files=files)
    start = files.calls
    device.apply(wanted)
    new, count = settings(reference), files.calls - start
    assert count > 20
    refusals = 0
    for number in range(count):
        tree = cpufreq_tree(tmp_path / f"{late}-{number}")
        device = CpufreqClock(str(tree), files=(files := KernelFiles(late=late)))
        files.fail_at = frozenset({files.calls + number})
        try:
            device.apply(wanted)
        except ActuationError as error:
            refusals += 1
            assert error.rolled_back, number
            assert not error.left_dirty
            assert settings(tree) == old, number
        except CapabilityError:
            assert settings(tree) == old, number
        else:
            assert settings(tree) == new, number
    assert refusals > 5


def test_a_device_that_refuses_everything_from_some_call_on_is_called_dirty_unless_it_is_not(
    tmp_path: Path,
) -> None:
    wanted = ClockSetting(1600.0)
    for number in range(0, 60, 3):
        tree = cpufreq_tree(tmp_path / str(number))
        old = settings(tree)
        device = CpufreqClock(str(tree), files=(files := KernelFiles()))
        files.fail_from = files.calls + number
        try:
            device.apply(wanted)
        except ActuationError as error:
            assert bool(error.left_dirty) != bool(error.rolled_back)
            if error.rolled_back:
                assert settings(tree) == old
        except CapabilityError:
            assert settings(tree) == old
