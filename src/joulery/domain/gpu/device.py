"""Settings, capabilities, state, changes and leases of devices.

A knob is one thing that can be set, and has one owner: the clock belongs to a governor, the power limit to the agent of
a node, the cut of a GPU (MIG, MPS) to the planner of layouts. An adapter is one knob of one device; several may stand
for the same board.
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
"""The variable that names what a worker runs its model on: ``cuda``; the CPU where it is not set."""


class Knob(StrEnum):
    """A setting of a device."""

    CLOCK = "clock"
    """Clock limit."""
    POWER = "power"
    """Power limit."""
    MIG = "mig"
    """The hardware instances into which a GPU is partitioned."""
    MPS = "mps"
    """Whether processes share a GPU side by side, each with a share of its SMs."""
    SLEEP = "sleep"
    """Whether a machine of a cluster sleeps."""


@dataclass(frozen=True, slots=True)
class ClockSetting:
    """Clock limit of a device.

    Attributes:
        clock_mhz: The highest clock allowed, MHz; None for what the factory allows.
        boost: Whether it may go beyond its base clock; None leaves that as it is. CPUs alone.
        governor: The kernel's own rule below that limit (``performance``, ``schedutil``); empty leaves it. CPUs alone.

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
    """The instances into which a GPU is partitioned. A multiset: the device finds the places.

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
    """Sharing of a GPU by processes side by side.

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
        name: What the vendor calls it.
        knob: What can be set.
        settable: True where this process may set it.
        detail: In words.
        grant: The exact line that grants it where it may not; empty where nothing has to be or can be granted.
        clocks_mhz: Clocks that can be asked for, ascending; empty for other knobs.
        limits_w: Lowest and highest power limit that can be asked for, W; empty for other knobs.
        default_w: The factory's power limit, W; NaN for other knobs and where it is unknown.
        parts: Parts of the device that have such a limit each: packages of a CPU.
        profiles: MIG profiles the board offers; empty for other knobs.
        emulated: True where nothing real is set.
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
    """A part of a device that a process can run on.

    Attributes:
        slice: Its kind and size.
        id: The vendor's identity (``MIG-…``).
        environ: What a process needs in its environment to run there, as (name, value).
        start: First memory slice it lies on; 0 where places mean nothing.
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
    """A part of a GPU that a replica is to run on.

    Attributes:
        slice: Its kind and size.
        device: The GPU it must be on (``gpu:0``); empty for any.
        together: Processes with the same word share one MIG instance, under MPS where its slice says that each has
            less than all of it; empty for an instance to itself.
    """

    slice: Slice
    device: str = ""
    together: str = ""


@dataclass(frozen=True, slots=True)
class DeviceState(Generic[S]):
    """Present setting of a device.

    Attributes:
        setting: In the terms of ``apply``.
        memento: JSON-ready: what ``reset`` needs to bring this very state back, by another process too.
        clock_mhz: How fast it runs at the moment, MHz; NaN where that is not reported.
        slices: Its slices; empty where it is not partitioned.
    """

    setting: S
    memento: Mapping[str, Any] = field(default_factory=dict)
    clock_mhz: float = math.nan
    slices: tuple[DeviceSlice, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceChange(Generic[S]):
    """Result of a change.

    Attributes:
        before, after: The settings.
        duration_s: How long it took, s.
        detail: What was done, in words.
    """

    before: S
    after: S
    duration_s: float
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.before} -> {self.after} in {self.duration_s:.3g} s" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Device kind and opener's arguments (JSON-ready), with which another process can open the device too.

    Attributes:
        kind: ``nvidia-clock``, ``nvidia-power``, ``nvidia-mig``, ``nvidia-mps``, ``cpufreq``, ``rapl-power``,
            ``node-commands``, ``emulated-clock``.
        options: Keyword arguments of its opener.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def knob(self) -> Knob:
        """The knob that it sets."""
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
    """A process that holds leases. Its number alone is not enough: numbers are used again.

    Attributes:
        pid: Process number.
        start_ticks: When it started, in the kernel's ticks since boot (field 22 of ``/proc/PID/stat``).
        boot_id: Which boot that was (``/proc/sys/kernel/random/boot_id``).
        program: What it is, for people.
        pid_namespace: The namespace of ``pid``, an inode number; 0 in leases of older versions: the reader's own.
    """

    pid: int
    start_ticks: int
    boot_id: str
    program: str = ""
    pid_namespace: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease: a device returns to its former setting; recorded before anything changes.

    Attributes:
        device: ``gpu:0``, ``cpu`` ...
        spec: How the watchdog opens it to reset it.
        before: The memento of the state found before the first change.
        wanted: What was asked for last, in words.
        reason: Why.
        owner: Who holds it.
        renewed_s: When the owner last said that it still cares, Unix seconds.
        lasts_s: For how long that holds, s.
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
        """Unique for a knob of a device, and fit for a file name: ``cpu.clock``, ``GPU-8f5b….clock``."""
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
    """The lease behind a JSON object.

    Args:
        document: The object.
        renewed_s: When it was last renewed, Unix seconds: kept beside the object, not in it.
        file: Where it was read, for messages.

    Raises:
        DataError: It is none, or of another schema.
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
