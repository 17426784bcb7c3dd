"""Checks of this machine: which meters and settings it has, which permissions are missing, and the commands that grant
them. Nothing is changed, and no network is used; the sampler runs for a moment as a test.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from joulery.adapters.cgroups import DELEGATE, CpuGroups, make_group
from joulery.adapters.clusters.kueue.access import find_access
from joulery.adapters.clusters.kueue.api import KubernetesApi
from joulery.adapters.clusters.kueue.rights import kueue_rights
from joulery.adapters.clusters.slurm_commands import Runner, command_runner
from joulery.adapters.clusters.slurm_rights import slurm_rights
from joulery.adapters.devices.cpufreq import GRANT
from joulery.adapters.meters.cpu_model import cpu_power
from joulery.app.wiring.devices import open_device, rapl_spec
from joulery.app.wiring.meters import open_meter
from joulery.app.wiring.models import cache_folder
from joulery.domain.energy.channel import MeterSpec, ReadingKind
from joulery.domain.errors import CapabilityError, ConfigError, DataError, JouleryError
from joulery.domain.gpu.device import DeviceCapability, DeviceSpec
from joulery.domain.ports import Device, Meter
from joulery.runtime.measuring.sampler_config import SamplerConfig
from joulery.runtime.measuring.sampling import SamplerProcess
from joulery.runtime.measuring.terms import MAX_CPU_RATIO, PERIOD_S

_SLURM_S = 30.0
LOOK_S = 0.3
"""Time over which meters are read for their watts, and the sampler is tried."""


class Status(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    """It works."""
    PARTLY = "partly"
    """It works, with limitations."""
    DENIED = "denied"
    """It exists and is not permitted: the check contains the command that grants it."""
    ABSENT = "absent"
    """It is not available here."""


@runtime_checkable
class Closing(Protocol):
    """A device that holds a driver open."""

    def close(self) -> None:
        """Close the driver."""
        ...


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        area: ``energy``, ``share``, ``settings``, ``carbon``, ``slurm``, ``kueue``.
        name: Meter, setting or source that was checked.
        status: Outcome of the check.
        detail: Outcome as text.
        grant: The exact command that grants the permission; empty where there is nothing to grant.
        advice: Other advice; empty where there is none.
    """

    area: str
    name: str
    status: Status
    detail: str
    grant: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class MachineReport:
    """Paths and environment of the examined machine; a test gives those of another."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


def examine(machine: MachineReport | None = None) -> tuple[Check, ...]:
    """Run all checks of this machine."""
    machine = machine or MachineReport()
    found = list(energy())
    boards = any(check.name.startswith("nvml") and check.status is Status.OK for check in found)
    return (*found, *shares(), *settings(machine), *(gpu_settings() if boards else ()), *carbon(machine.environ))


_METERS = (
    ("rapl", "CPU energy counters"),
    ("nvml", "NVIDIA GPUs"),
    ("amd", "AMD GPUs"),
    ("jetson", "Jetson modules"),
    ("ipmi", "the host's BMC"),
    ("cpu-model", "CPU power model"),
)
_REMOTE = (
    ("slurm", "Slurm's reading of the node", "--meter slurm, where AcctGatherEnergyType is set"),
    ("dcgm", "NVIDIA's DCGM exporter", "--meter dcgm:http://localhost:9400/metrics"),
    (
        "redfish",
        "the host's BMC over the network",
        "--meter redfish:https://BMC, with REDFISH_USER and REDFISH_PASSWORD",
    ),
)


def energy(open_: Callable[[MeterSpec], Meter] = open_meter) -> Iterable[Check]:
    """Checks of the energy meters."""
    for kind, what in _METERS:
        try:
            meter = open_(MeterSpec(kind))
        except CapabilityError as error:
            yield refusal("energy", f"{kind} ({what})", error)
            continue
        watts = _watts(meter)
        detail = f"{watts}; {'; '.join(meter.notes())}".removesuffix("; ")
        meter.close()
        yield Check("energy", f"{kind} ({what})", Status.PARTLY if kind == "cpu-model" else Status.OK, detail)
    for kind, what, how in _REMOTE:
        yield Check("energy", f"{kind} ({what})", Status.ABSENT, f"not asked now; {how}")
    yield sampler()


def _watts(meter: Meter) -> str:
    """Measure the present power of each channel, as text."""
    before, start_s = meter.read(), time.monotonic()
    time.sleep(LOOK_S)
    after, seconds = meter.read(), time.monotonic() - start_s
    readings = []
    for channel, first, last in zip(meter.channels, before, after, strict=True):
        watts = (last - first) / seconds if channel.kind is ReadingKind.COUNTER else last
        readings.append(f"{channel.device} {channel.component} {watts:.3g} W now")
    return ", ".join(readings)


def sampler() -> Check:
    """Check that the sampler runs."""
    with tempfile.TemporaryDirectory(prefix="joulery-") as folder:
        config = SamplerConfig(folder, os.getpid(), os.getpid(), True, PERIOD_S, MAX_CPU_RATIO)
        try:
            process = SamplerProcess.start(config)
            process.wait_ready()
            time.sleep(LOOK_S)
            process.stop()
        except JouleryError as error:
            return Check("energy", "sampler", Status.ABSENT, str(error), advice=error.hint)
    done = process.done or {}
    return Check("energy", "sampler", Status.OK, f"reads every {PERIOD_S * 1e3:g} ms; {done.get('late', 0)} late ticks")


def shares() -> Iterable[Check]:
    """Checks of how a run's share of the CPUs is read."""
    try:
        group = make_group(os.getpid())
    except CapabilityError as error:
        yield Check(
            "share", "CPU time of a run", Status.PARTLY, f"from /proc: daemons may be missed ({error})", DELEGATE
        )
        return
    group.remove()
    version = 1 if group.per_cpu else 2
    yield Check("share", "CPU time of a run", Status.OK, f"exact, from a control group (version {version})")


def settings(machine: MachineReport) -> Iterable[Check]:
    """Checks of the settings for slices and clocks."""
    yield quota()
    yield cpuset(machine)
    cores = sorted(os.sched_getaffinity(0))
    yield Check("settings", "affinity", Status.OK, f"{len(cores)} of {os.cpu_count()} CPUs may be used")
    yield cpufreq(machine)
    yield cpu_power_limit()
    yield perf(machine)


_GPU_KNOBS = (("nvidia-clock", "clock"), ("nvidia-power", "power limit"), ("nvidia-mig", "MIG"), ("nvidia-mps", "MPS"))


def cpu_power_limit() -> Check:
    """Whether the power limit of the CPUs can be set."""
    try:
        device = open_device(rapl_spec())
    except CapabilityError as error:
        return refusal("settings", "CPU power limit", error)
    return gpu_setting("CPU power limit", device.capability())


def gpu_settings(open_: Callable[[DeviceSpec], Device[Any]] = open_device) -> Iterable[Check]:
    """Checks of the settings of each NVIDIA GPU: clock, power limit, MIG partitions, MPS. Nothing is set."""
    number = 0
    while True:
        for kind, what in _GPU_KNOBS:
            name = f"gpu:{number} {what}"
            try:
                device = open_(DeviceSpec(kind, {"gpu": number}))
            except ConfigError:
                return
            except CapabilityError as error:
                yield refusal("settings", name, error)
                continue
            yield gpu_setting(name, device.capability())
            if isinstance(device, Closing):
                device.close()
        number += 1


def gpu_setting(name: str, able: DeviceCapability) -> Check:
    """Check of one setting of a GPU or of the CPUs."""
    offers = ""
    if able.clocks_mhz:
        offers = f"; {len(able.clocks_mhz)} clocks, {able.clocks_mhz[0]:g} to {able.clocks_mhz[-1]:g} MHz"
    elif able.limits_w:
        offers = f"; {able.limits_w[0]:g} to {able.limits_w[1]:g} W, {able.default_w:g} W by default"
    elif able.profiles:
        offers = f"; {', '.join(able.profiles)}"
    detail = f"{able.name}: {able.detail}{offers}"
    if able.settable:
        return Check("settings", name, Status.OK, detail)
    return Check("settings", name, Status.DENIED if able.grant else Status.ABSENT, detail, able.grant)


def quota(find: Callable[[], CpuGroups] = CpuGroups.find) -> Check:
    """Whether replicas can be given a share of a core."""
    try:
        groups = find()
    except CapabilityError as error:
        return refusal("settings", "CPU quota", error)
    version = "version 2 (cpu.max)" if groups.unified else "version 1 (cpu.cfs_quota_us)"
    if os.access(groups.base, os.W_OK):
        return Check("settings", "CPU quota", Status.OK, f"control groups {version} in {groups.base}")
    detail = f"control groups {version}, but {groups.base} may not be written"
    return Check("settings", "CPU quota", Status.DENIED, detail, DELEGATE if groups.unified else "sudo -E joulery ...")


def cpuset(machine: MachineReport) -> Check:
    """Whether control groups can bind cores; joulery itself binds by affinity, which needs no permission."""
    root = machine.sys / "fs/cgroup"
    offered = root / "cgroup.controllers"
    if (root / "cpuset/cgroup.procs").exists():
        return Check("settings", "cpuset", Status.OK, "control groups version 1")
    if offered.exists() and "cpuset" in offered.read_text().split():
        return Check("settings", "cpuset", Status.OK, "control groups version 2")
    return Check("settings", "cpuset", Status.ABSENT, "no control group offers it; affinity is used instead")


def cpufreq(machine: MachineReport) -> Check:
    """Whether CPU clocks can be read and set."""
    policies = sorted((machine.sys / "devices/system/cpu").glob("cpu[0-9]*/cpufreq"))
    if not policies:
        return Check("settings", "CPU clocks", Status.ABSENT, "no cpufreq driver (usual in a virtual machine)")
    driver, governor = (_text(policies[0] / name) for name in ("scaling_driver", "scaling_governor"))
    detail = f"driver {driver}, governor {governor}, {len(policies)} CPUs"
    limit = policies[0] / "scaling_max_freq"
    if os.access(limit, os.W_OK):
        return Check("settings", "CPU clocks", Status.OK, detail)
    return Check("settings", "CPU clocks", Status.DENIED, f"{detail}; readable, not to be set", GRANT)


def perf(machine: MachineReport) -> Check:
    """Whether the kernel's performance events are permitted; joulery needs none of them yet."""
    paranoid = _text(machine.proc / "sys/kernel/perf_event_paranoid")
    power = (machine.sys / "bus/event_source/devices/power").exists()
    detail = f"perf_event_paranoid {paranoid or 'unknown'}, {'with' if power else 'no'} power events; not needed"
    if not paranoid or not power:
        return Check("settings", "perf events", Status.ABSENT, detail)
    if int(paranoid) <= 0:
        return Check("settings", "perf events", Status.OK, detail)
    return Check("settings", "perf events", Status.DENIED, detail, "sudo sysctl kernel.perf_event_paranoid=0")


def carbon(environ: Mapping[str, str]) -> Iterable[Check]:
    """Checks of the sources of carbon intensity. No service is contacted."""
    yield Check(
        "carbon", "without a network", Status.OK, '--carbon FILE, --carbon "250 g/kWh", --zone typical:GB (FR, DE)'
    )
    yield Check("carbon", "without a key", Status.OK, "--zone GB and its regions (Carbon Intensity API); not asked now")
    for name, variables in (
        ("electricity-maps", ("ELECTRICITYMAPS_TOKEN",)),
        ("watttime", ("WATTTIME_USER", "WATTTIME_PASSWORD")),
    ):
        missing = [variable for variable in variables if not environ.get(variable)]
        grant = " ".join(f"export {variable}=..." for variable in missing)
        detail = f"{', '.join(missing)} not set" if missing else "credentials are set; not tried"
        yield Check("carbon", name, Status.ABSENT if missing else Status.OK, detail, grant)
    folder = cache_folder() / "carbon"
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    if os.access(there, os.W_OK):
        yield Check("carbon", "cache", Status.OK, f"{folder}: {len(files)} files, {size / 1e6:.1f} MB")
    else:
        detail = f"{there} may not be written to, so services are asked every time and built-in models cannot be kept"
        yield Check("carbon", "cache", Status.DENIED, detail, "export JOULERY_CACHE=FOLDER")


def slurm(run: Runner | None = None) -> Iterable[Check]:
    """Checks of this user's rights in the Slurm on PATH; each is tried on a held job, which is then cancelled."""
    try:
        rights = slurm_rights(run or command_runner(_SLURM_S))
    except CapabilityError as error:
        yield refusal("slurm", "rights", error)
        return
    for right in rights:
        status = Status.OK if right.granted else Status.DENIED if right.grant else Status.PARTLY
        yield Check("slurm", right.name, status, right.detail, right.grant)


def kueue(api: KubernetesApi | None = None) -> Iterable[Check]:
    """Checks of this user's rights in Kueue, as the API server reports them; nothing is changed."""
    try:
        opened = api or KubernetesApi(find_access(), _SLURM_S)
        try:
            rights = tuple(kueue_rights(opened))
        finally:
            opened.close()
    except (CapabilityError, ConfigError, DataError) as error:
        grant = error.grant or "" if isinstance(error, CapabilityError) else ""
        yield Check("kueue", "rights", Status.DENIED if grant else Status.ABSENT, str(error), grant, error.hint)
        return
    for right in rights:
        yield Check("kueue", right.name, Status.OK if right.granted else Status.DENIED, right.detail, right.grant)


def refusal(area: str, name: str, error: CapabilityError) -> Check:
    """Turn an error into a check."""
    if error.grant:
        return Check(area, name, Status.DENIED, str(error), error.grant)
    return Check(area, name, Status.ABSENT, str(error), advice=error.hint)


def machine_text(machine: MachineReport | None = None) -> dict[str, str]:
    """The machine: processor, system, whether it is virtual."""
    proc = (machine or MachineReport()).proc
    fields = dict(line.split(":", 1) for line in _text(proc / "cpuinfo").splitlines() if ":" in line)
    known = {key.strip(): value.strip() for key, value in fields.items()}
    return {
        "processor": known.get("model name") or platform.processor() or platform.machine(),
        "cpus": str(os.cpu_count() or 0),
        "model": cpu_power(proc).name,
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "virtual": "yes" if "hypervisor" in known.get("flags", "").split() else "no",
    }


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
