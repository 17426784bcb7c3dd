import os
import sys
from pathlib import Path

import pytest

from joulery.adapters.cgroups import DELEGATE, CpuGroups, GroupFiles
from joulery.adapters.devices.mig_smi import GRANT as SMI_GRANT
from joulery.adapters.meters.fake import FakeMeter, Script
from joulery.adapters.meters.rapl import GRANT
from joulery.app import doctor
from joulery.app.doctor import (
    Check,
    MachineReport,
    Status,
    carbon,
    cpufreq,
    cpuset,
    energy,
    gpu_settings,
    perf,
    quota,
)
from joulery.domain.energy.channel import MeterSpec, ReadingKind
from joulery.domain.errors import CapabilityError
from joulery.domain.ports import Meter
from tests.fakes.nvml import NvmlFake, as_administrator, gpu
from tests.fakes.powercap import powercap_tree


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LOOK_S", 0.01)


@pytest.fixture
def machine(tmp_path: Path) -> MachineReport:
    return MachineReport(tmp_path / "proc", tmp_path / "sys", {})


def put(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def by_name(*checks: Check) -> dict[str, Check]:
    return {check.name.split(" (")[0]: check for check in checks}


def test_meters_tell_their_watts_and_what_stands_in_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "sampler", lambda: Check("energy", "sampler", Status.OK, ""))

    def open_(spec: MeterSpec) -> Meter:
        if spec.kind == "rapl":
            raise CapabilityError("denied", grant=GRANT)
        if spec.kind == "nvml":
            return FakeMeter([Script(((0.0, 70.0),), device="gpu:0", component="board", kind=ReadingKind.POWER)])
        return FakeMeter([Script(((0.0, 30.0),))])

    found = by_name(*energy(open_))
    assert (found["rapl"].status, found["rapl"].grant) == (Status.DENIED, GRANT)
    assert found["nvml"].status is Status.OK
    assert found["nvml"].detail.startswith("gpu:0 board 70 W now; these joules are scripted")
    assert found["cpu-model"].status is Status.PARTLY
    watts = float(found["cpu-model"].detail.split()[2])
    assert watts == pytest.approx(30, rel=0.5)


def test_what_is_missing_is_reported_with_advice() -> None:
    def open_(spec: MeterSpec) -> Meter:
        raise CapabilityError(f"no {spec.kind}", hint="buy one")

    found = by_name(*energy(open_))
    assert (found["rapl"].status, found["rapl"].detail, found["rapl"].advice) == (Status.ABSENT, "no rapl", "buy one")
    assert found["sampler"].status is Status.OK
    assert "reads every 10 ms" in found["sampler"].detail


def test_cpu_clocks(machine: MachineReport, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpufreq(machine).status is Status.ABSENT
    for cpu in range(2):
        folder = machine.sys / f"devices/system/cpu/cpu{cpu}/cpufreq"
        put(folder / "scaling_driver", "intel_pstate\n")
        put(folder / "scaling_governor", "powersave\n")
        put(folder / "scaling_max_freq", "3000000\n")
    assert cpufreq(machine).status is Status.OK
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    denied = cpufreq(machine)
    assert denied.status is Status.DENIED
    assert all(fact in denied.detail for fact in ("intel_pstate", "powersave", "2 CPUs", "not to be set"))
    assert denied.grant == "sudo chmod a+w /sys/devices/system/cpu/cpu*/cpufreq/scaling_m*_freq"


@pytest.mark.parametrize(
    ("paranoid", "power", "status", "grant"),
    [
        ("", True, Status.ABSENT, ""),
        ("2", False, Status.ABSENT, ""),
        ("2", True, Status.DENIED, "sudo sysctl kernel.perf_event_paranoid=0"),
        ("0", True, Status.OK, ""),
        ("-1", True, Status.OK, ""),
    ],
)
def test_perf_events(machine: MachineReport, paranoid: str, power: bool, status: Status, grant: str) -> None:
    if paranoid:
        put(machine.proc / "sys/kernel/perf_event_paranoid", paranoid + "\n")
    if power:
        (machine.sys / "bus/event_source/devices/power").mkdir(parents=True)
    check = perf(machine)
    assert (check.status, check.grant) == (status, grant)


def test_cpuset(machine: MachineReport) -> None:
    assert cpuset(machine).status is Status.ABSENT
    put(machine.sys / "fs/cgroup/cgroup.controllers", "cpu memory\n")
    assert cpuset(machine).status is Status.ABSENT
    put(machine.sys / "fs/cgroup/cgroup.controllers", "cpuset cpu memory\n")
    assert cpuset(machine).detail == "control groups version 2"
    put(machine.sys / "fs/cgroup/cpuset/cgroup.procs", "")
    assert cpuset(machine).detail == "control groups version 1"


@pytest.mark.parametrize(("unified", "grant"), [(True, DELEGATE), (False, "sudo -E joulery ...")])
def test_cpu_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unified: bool, grant: str) -> None:
    groups = CpuGroups(tmp_path, unified=unified, files=GroupFiles())
    assert quota(lambda: groups).status is Status.OK
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert (quota(lambda: groups).status, quota(lambda: groups).grant) == (Status.DENIED, grant)

    def nothing() -> CpuGroups:
        raise CapabilityError("none here")

    assert quota(nothing).status is Status.ABSENT


def test_what_can_be_set_on_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = NvmlFake(gpu("NVIDIA A100-SXM4-40GB"), gpu("Tesla V100-SXM2-16GB", 1))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    as_administrator(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = by_name(*gpu_settings())
    knobs = ("clock", "power limit", "MIG", "MPS")
    assert list(found) == [f"gpu:{number} {knob}" for number in (0, 1) for knob in knobs]
    statuses = [check.status.value for check in found.values()]
    assert statuses == ["ok", "ok", "ok", "absent", "ok", "ok", "absent", "absent"]
    assert "100 to 400 W" in found["gpu:0 power limit"].detail
    assert "81 clocks, 210 to 1410 MHz" in found["gpu:0 clock"].detail
    assert "MIG mode off; 7g.40gb, 4g.20gb, 3g.20gb" in found["gpu:0 MIG"].detail
    as_administrator(monkeypatch, may=False)
    denied = by_name(*gpu_settings())
    assert (denied["gpu:0 clock"].status, denied["gpu:0 clock"].grant) == (Status.DENIED, "sudo -E joulery ...")
    assert (denied["gpu:0 power limit"].status, denied["gpu:1 power limit"].grant) == (
        Status.DENIED,
        "sudo -E joulery ...",
    )
    assert (denied["gpu:0 MIG"].status, denied["gpu:0 MIG"].grant) == (Status.DENIED, SMI_GRANT)
    assert nvml.opened == 0


def test_the_power_limit_of_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULERY_POWERCAP", str(tmp_path / "none"))
    assert doctor.cpu_power_limit().status is Status.ABSENT
    monkeypatch.setenv("JOULERY_POWERCAP", str(powercap_tree(tmp_path / "powercap")))
    found = doctor.cpu_power_limit()
    assert found.status is Status.OK
    assert "2 packages" in found.detail
    assert "30 to 120 W" in found.detail


def test_carbon_credentials_are_looked_for_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULERY_CACHE", str(tmp_path))
    put(tmp_path / "carbon/uk/day.json", "x" * 2_000_000)
    without = by_name(*carbon({}))
    assert without["watttime"].grant == "export WATTTIME_USER=... export WATTTIME_PASSWORD=..."
    assert without["electricity-maps"].status is Status.ABSENT
    assert without["cache"].detail == f"{tmp_path / 'carbon'}: 1 files, 2.0 MB"
    secrets = {"ELECTRICITYMAPS_TOKEN": "s3cret", "WATTTIME_USER": "me", "WATTTIME_PASSWORD": "s3cret"}
    found = by_name(*carbon(secrets))
    assert found["watttime"].status is Status.OK
    assert not any("s3cret" in check.detail + check.grant for check in found.values())


def test_a_cache_that_cannot_be_written_is_not_called_working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULERY_CACHE", str(tmp_path / "joulery"))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != tmp_path)
    cache = by_name(*carbon({}))["cache"]
    assert (cache.status, cache.grant) == (Status.DENIED, "export JOULERY_CACHE=FOLDER")
    assert cache.detail.startswith(f"{tmp_path} may not be written to")


def test_the_whole_examination_of_this_machine() -> None:
    checks = doctor.examine()
    assert len({check.name for check in checks}) == len(checks)
    assert {check.area for check in checks} == {"energy", "share", "settings", "carbon"}
    for check in checks:
        assert check.detail
        assert check.status is not Status.DENIED or check.grant, check


def test_the_machine_in_words(machine: MachineReport) -> None:
    put(machine.proc / "cpuinfo", "processor: 0\nvendor_id: GenuineIntel\nmodel name: Xeon\nflags: fpu hypervisor\n")
    words = doctor.machine_text(machine)
    assert (words["processor"], words["virtual"]) == ("Xeon", "yes")
    assert "unknown processor" in words["model"]
    assert int(words["cpus"]) >= 1
