"""Settings, capabilities, state, changes and leases of devices.

A knob is one setting of a device and has one owner: the clock belongs to a governor, the power limit to the agent of a
node, the partition of a GPU (MIG, MPS) to the layout planner. An adapter controls one knob of one device; several
adapters may control the same board.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.serving.service import Slice

DEVICE = "JOULERY_DEVICE"
"""Environment variable with the device on which a worker runs its model: ``cuda``; the CPU where it is not set."""


class Knob(StrEnum):
    """A setting of a device."""

    CLOCK = "clock"
    """Clock limit."""
    POWER = "power"
    """Power limit."""
    MIG = "mig"
    """The hardware instances into which a GPU is partitioned."""
    MPS = "mps"
    """Whether processes share a GPU at the same time, each with a share of its SMs."""
    SLEEP = "sleep"
    """Whether a machine of a cluster sleeps."""


@dataclass(frozen=True, slots=True)
class ClockSetting:
    """Clock limit of a device.

    Attributes:
        clock_mhz: The highest clock allowed, MHz; None for the factory's limit.
        boost: Whether the device may exceed its base clock; None leaves that unchanged. CPUs only.
        governor: The kernel's governor below that limit (``performance``, ``schedutil``); empty leaves it. CPUs only.

    Raises:
        ConfigError: A clock that is not positive.
    """

    clock_mhz: float | None = None
    boost: bool | None = None
    governor: str = ""

    def __post_init__(self) -> None:
        if self.clock_mhz is not None and not 0 < self.clock_mhz < math.inf:
            raise ConfigError("a clock must be positive", got=f"{self.clock_mhz} MHz")

    def __str__(self) -> str:
        parts = ["full clock" if self.clock_mhz is None else f"at most {self.clock_mhz:g} MHz"]
        parts += [f"boost {'on' if self.boost else 'off'}"] if self.boost is not None else []
        parts += [f"governor {self.governor}"] if self.governor else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class PowerSetting:
    """Power limit of a device.

    Attributes:
        limit_w: The limit, W (of each package of a CPU); None for the factory's.

    Raises:
        ConfigError: A limit that is not positive.
    """

    limit_w: float | None = None

    def __post_init__(self) -> None:
        if self.limit_w is not None and not 0 < self.limit_w < math.inf:
            raise ConfigError("a power limit must be positive", got=f"{self.limit_w} W")

    def __str__(self) -> str:
        return "the factory's power limit" if self.limit_w is None else f"at most {self.limit_w:g} W"


@dataclass(frozen=True, slots=True)
class MigSetting:
    """The instances into which a GPU is partitioned. A multiset: the device chooses their places.

    Attributes:
        profiles: Names of profiles (``3g.20gb``), in any order; empty for a GPU that is not partitioned (MIG mode off).
    """

    profiles: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MigSetting) and Counter(self.profiles) == Counter(other.profiles)

    def __hash__(self) -> int:
        return hash(frozenset(Counter(self.profiles).items()))

    def __str__(self) -> str:
        return " + ".join(self.profiles) if self.profiles else "not partitioned"


@dataclass(frozen=True, slots=True)
class MpsSetting:
    """Concurrent use of a GPU by several processes (MPS).

    Attributes:
        running: True while a control daemon serves clients.
        default_share_ratio: Share of the SMs of a client that names none itself, in (0, 1].

    Raises:
        ConfigError: A share outside (0, 1].
    """

    running: bool = False
    default_share_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.default_share_ratio <= 1:
            raise ConfigError("a share lies above 0 and at most at 1", got=str(self.default_share_ratio))

    def __str__(self) -> str:
        return f"MPS, {100 * self.default_share_ratio:g} % by default" if self.running else "no MPS"


@dataclass(frozen=True, slots=True)
class SleepSetting:
    """Sleep of a machine of a cluster.

    Attributes:
        asleep: True where it was sent to sleep.
    """

    asleep: bool = False

    def __str__(self) -> str:
        return "asleep" if self.asleep else "awake"


Setting = ClockSetting | PowerSetting | MigSetting | MpsSetting | SleepSetting
S = TypeVar("S", ClockSetting, PowerSetting, MigSetting, MpsSetting, SleepSetting)


@dataclass(frozen=True, slots=True)
class DeviceCapability:
    """One setting of a device and its range.

    Attributes:
        device: ``gpu:0``, ``cpu`` ...
        name: The vendor's name of the device.
        knob: The setting.
        settable: True where this process may set it.
        detail: Details, as text.
        grant: The exact command line that grants the permission where it is missing; empty where none is needed or
            possible.
        clocks_mhz: Clocks that can be set, ascending; empty for other knobs.
        limits_w: Lowest and highest power limit that can be set, W; empty for other knobs.
        default_w: The factory's power limit, W; NaN for other knobs and where it is unknown.
        parts: Number of parts of the device that each have such a limit: packages of a CPU.
        profiles: MIG profiles the board offers; empty for other knobs.
        emulated: True where no real device is set.
        uuid: The vendor's identity of the device, the same in every container; empty where it has none.
    """

    device: str
    name: str
    knob: Knob
    settable: bool
    detail: str = ""
    grant: str = ""
    clocks_mhz: tuple[float, ...] = ()
    profiles: tuple[str, ...] = ()
    emulated: bool = False
    uuid: str = ""
    limits_w: tuple[float, ...] = ()
    default_w: float = math.nan
    parts: int = 1


@dataclass(frozen=True, slots=True)
class DeviceSlice:
    """A slice of a device that a process can run on.

    Attributes:
        slice: Its kind and size.
        id: The vendor's identity (``MIG-…``).
        environ: Environment variables that a process needs to run there, as (name, value).
        start: First memory slice that it occupies; 0 where places have no meaning.
        pids: Processes that run there now, as far as the driver reports.
        share_ratio: Share of the device's arithmetic it has.
    """

    slice: Slice
    id: str
    environ: tuple[tuple[str, str], ...]
    start: int = 0
    pids: tuple[int, ...] = ()
    share_ratio: float = 1.0


class WantedPart(NamedTuple):
    """Request for a slice of a GPU that a replica is to run on.

    Attributes:
        slice: Its kind and size.
        device: The GPU it must be on (``gpu:0``); empty for any.
        together: Processes with the same label share one MIG instance, under MPS where the slice gives each of them
            less than all of it; empty for an instance of its own.
    """

    slice: Slice
    device: str = ""
    together: str = ""


@dataclass(frozen=True, slots=True)
class DeviceState(Generic[S]):
    """Present setting of a device.

    Attributes:
        setting: The setting, in the form that ``apply`` accepts.
        memento: JSON-ready data with which ``reset`` restores this exact state, also from another process.
        clock_mhz: Its current clock, MHz; NaN where that is not reported.
        slices: Its slices; empty where it is not partitioned.
    """

    setting: S
    memento: Mapping[str, Any] = field(default_factory=dict)
    clock_mhz: float = math.nan
    slices: tuple[DeviceSlice, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceChange(Generic[S]):
    """Result of a change of a device's setting.

    Attributes:
        before, after: The setting before and after the change.
        duration_s: Duration of the change, s.
        detail: Details of the change, as text.
    """

    before: S
    after: S
    duration_s: float
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.before} -> {self.after} in {self.duration_s:.3g} s" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Device kind and its opener's arguments (JSON-ready), so that another process can open the device too.

    Attributes:
        kind: ``nvidia-clock``, ``nvidia-power``, ``nvidia-mig``, ``nvidia-mps``, ``cpufreq``, ``rapl-power``,
            ``node-commands``, ``emulated-clock``.
        options: Keyword arguments of its opener.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def knob(self) -> Knob:
        """The knob that this kind of device sets."""
        return _KNOBS.get(self.kind, Knob.CLOCK)


_KNOBS = {
    "nvidia-mig": Knob.MIG,
    "nvidia-mps": Knob.MPS,
    "nvidia-power": Knob.POWER,
    "rapl-power": Knob.POWER,
    "node-commands": Knob.SLEEP,
}


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that holds leases. Its number alone does not identify it, because numbers are reused.

    Attributes:
        pid: Process number.
        start_ticks: When it started, in the kernel's ticks since boot (field 22 of ``/proc/PID/stat``).
        boot_id: Identifier of that boot (``/proc/sys/kernel/random/boot_id``).
        program: Description of the program, for people.
        pid_namespace: The namespace of ``pid``, an inode number; 0 in leases of older versions: the reader's own.
    """

    pid: int
    start_ticks: int
    boot_id: str
    program: str = ""
    pid_namespace: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """A leased setting, which reverts to the former one when the lease ends; recorded before anything changes.

    Attributes:
        device: ``gpu:0``, ``cpu`` ...
        spec: Specification with which the watchdog opens the device to reset it.
        before: The memento of the state found before the first change.
        wanted: The setting requested last, as text.
        reason: Reason for the setting.
        owner: The process that holds the lease.
        renewed_s: When the owner last renewed the lease, Unix seconds.
        lasts_s: Duration of the lease after a renewal, s.
        uuid: The vendor's identity of the device; empty where it has none.
    """

    device: str
    spec: DeviceSpec
    before: Mapping[str, Any]
    wanted: str
    reason: str
    owner: Owner
    renewed_s: float
    lasts_s: float
    uuid: str = ""

    @property
    def name(self) -> str:
        """Name that is unique for a knob of a device and valid as a file name: ``cpu.clock``, ``GPU-8f5b….clock``."""
        return lease_name(self.uuid or self.device, self.spec.knob)

    @property
    def expires_s(self) -> float:
        """End of the lease unless it is renewed, Unix seconds."""
        return self.renewed_s + self.lasts_s


def lease_name(device: str, knob: Knob) -> str:
    """The name of the lease of one knob of one device (its UUID, else its label)."""
    return f"{''.join(c if c.isalnum() else '-' for c in device)}.{knob}"


def lease_as_dict(lease: Lease) -> dict[str, Any]:
    """A lease as a JSON-ready object for :func:`lease_from_dict`; the time of its renewal is kept elsewhere."""
    owner = lease.owner
    return {
        "schema": "joulery.lease/1",
        "device": lease.device,
        "kind": lease.spec.kind,
        "options": dict(lease.spec.options),
        "before": dict(lease.before),
        "wanted": lease.wanted,
        "reason": lease.reason,
        "owner": {
            "pid": owner.pid,
            "start_ticks": owner.start_ticks,
            "boot_id": owner.boot_id,
            "program": owner.program,
            "pid_namespace": owner.pid_namespace,
        },
        "lasts_s": lease.lasts_s,
        "uuid": lease.uuid,
    }


def lease_from_dict(document: Any, renewed_s: float, file: str | None = None) -> Lease:
    """The lease in a JSON object.

    Args:
        document: The object.
        renewed_s: When it was last renewed, Unix seconds: kept beside the object, not in it.
        file: The file it was read from, for messages.

    Raises:
        DataError: The object is not a lease, or has another schema.
    """
    try:
        if document["schema"] != "joulery.lease/1":
            raise DataError(f"not a lease this version knows: {document['schema']!r}", file=file)
        owner = document["owner"]
        return Lease(
            device=str(document["device"]),
            spec=DeviceSpec(str(document["kind"]), dict(document["options"])),
            before=dict(document["before"]),
            wanted=str(document["wanted"]),
            reason=str(document["reason"]),
            owner=Owner(
                int(owner["pid"]),
                int(owner["start_ticks"]),
                str(owner["boot_id"]),
                str(owner.get("program", "")),
                int(owner.get("pid_namespace", 0)),
            ),
            renewed_s=renewed_s,
            lasts_s=float(document["lasts_s"]),
            uuid=str(document.get("uuid", "")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a lease: {error!r}", file=file, hint="look what it set, then remove the file") from error
