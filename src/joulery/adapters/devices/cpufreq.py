"""Control of CPU clocks through the kernel's cpufreq (``/sys/devices/system/cpu/cpufreq/policy*``).

A ceiling is ``scaling_max_freq`` of every policy; the kernel's governor continues to choose the clock below it. Boost
is one file for the machine: ``cpufreq/boost`` (acpi-cpufreq, amd-pstate) or, inverted, ``intel_pstate/no_turbo``.
Kernel documentation: admin-guide/pm/cpufreq and intel_pstate. All clocks are in kHz.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from joulery.adapters.devices.change import Surface, change
from joulery.domain.errors import CapabilityError, ConfigError, JouleryError
from joulery.domain.gpu.device import ClockSetting, DeviceCapability, DeviceChange, DeviceState, Knob

ROOT = "/sys/devices/system/cpu"
GRANT = "sudo chmod a+w /sys/devices/system/cpu/cpu*/cpufreq/scaling_m*_freq"
_STEP_KHZ = 100_000
"""Distance of the clocks that are offered where a driver takes any in a range."""
_ROUNDING = 0.02
"""Largest rounding by a driver of what it is given."""

Files = dict[str, str]
"""Contents by path below the root: everything that is set here."""
Limits = dict[str, tuple[int, int]]
"""Lowest and highest clock of each policy, kHz."""
T = TypeVar("T")


class TextFiles:
    """Small files of the kernel, read and written whole."""

    def read(self, path: Path) -> str:
        """The contents, stripped."""
        return path.read_text(encoding="ascii").strip()

    def write(self, path: Path, text: str) -> None:
        """Replace the contents; the kernel may refuse, which is an ``OSError``."""
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


class CpufreqClock:
    """The clock of this machine's CPUs. Implements :class:`joulery.domain.ports.Device`.

    Args:
        root: The folder of the CPUs; another one in tests and containers.
        cpus: CPUs whose clock is set; all when None. CPUs of one policy share their clock.
        files: Reads and writes the files.

    Raises:
        CapabilityError: There is no cpufreq driver.
    """

    def __init__(self, root: str = ROOT, cpus: tuple[int, ...] | None = None, files: TextFiles | None = None) -> None:
        self.device = "cpu"
        self._root = Path(root)
        self._files = files or TextFiles()
        self._policies = tuple(policy for policy in self._find() if cpus is None or self._covers(policy, cpus))
        if not self._policies:
            raise CapabilityError(
                "CPU clocks cannot be set: no cpufreq driver (usual in a virtual machine)", resource=str(self._root)
            )

    def capability(self) -> DeviceCapability:
        """The clocks that every policy accepts, and whether this process may set them."""
        ceilings = [self._root / policy / "scaling_max_freq" for policy in self._policies]
        settable = all(os.access(path, os.W_OK) for path in ceilings)
        driver, governor = (self._text(self._policies[0], name) for name in ("scaling_driver", "scaling_governor"))
        return DeviceCapability(
            device=self.device,
            name=f"cpufreq {driver}".strip(),
            knob=Knob.CLOCK,
            settable=settable,
            detail=f"governor {governor or 'unknown'}, {len(self._policies)} policies, boost {self._boost_word()}",
            grant="" if settable else GRANT,
            clocks_mhz=tuple(khz / 1e3 for khz in self._offered_khz()),
        )

    def observe(self) -> DeviceState[ClockSetting]:
        """The ceiling of the highest policy; full clock where no policy is limited."""
        files, limits = self._guarded(self._look), self._guarded(self._limits)
        texts = [self._text(policy, "scaling_cur_freq") for policy in self._policies]
        running_mhz = max(map(int, texts)) / 1e3 if all(word.isdigit() for word in texts) else math.nan
        return DeviceState(self._setting(files, limits), {"files": files}, clock_mhz=running_mhz)

    def apply(self, wanted: ClockSetting, /) -> DeviceChange[ClockSetting]:
        """Set the ceiling; a clock between two listed ones is rounded up to the higher one."""
        old, limits = self._guarded(self._look), self._guarded(self._limits)
        return self._change(old, self._target(old, wanted, limits), limits, str(wanted))

    def reset(self, memento: Mapping[str, Any] | None = None, /) -> DeviceChange[ClockSetting]:
        """Restore the observed contents of the files; the hardware's full range when None."""
        old, limits = self._guarded(self._look), self._guarded(self._limits)
        known = {path: text for path, text in (memento or {}).get("files", {}).items() if path in old}
        new = {**old, **known} if memento else self._factory(old, limits)
        return self._change(old, new, limits, "what it was")

    def _change(self, old: Files, new: Files, limits: Limits, asked: str) -> DeviceChange[ClockSetting]:
        before, after = self._setting(old, limits), self._setting(new, limits)
        if old == new:
            return DeviceChange(before, before, 0.0, "it was set so already")
        surface = Surface("the CPU clock", self._write, lambda: self._settled(new, old), (OSError,), self._refused)
        return DeviceChange(before, after, change(surface, old, new, asked))

    def _write(self, wanted: Files) -> None:
        """Write all files. The kernel refuses a ceiling below the floor, so the floor is lowered first."""
        for path in sorted(wanted, key=_rank):
            if path.endswith("scaling_min_freq"):
                self._lower_floor(path, wanted)
        for path in sorted(wanted, key=_rank):
            if self._files.read(self._root / path) != wanted[path]:
                self._files.write(self._root / path, wanted[path])

    def _lower_floor(self, path: str, wanted: Files) -> None:
        ceiling = wanted[path.replace("scaling_min_freq", "scaling_max_freq")]
        if int(self._files.read(self._root / path)) > int(ceiling):
            self._files.write(self._root / path, ceiling)

    def _settled(self, new: Files, old: Files) -> Files:
        """The current setting; a clock that the driver rounded slightly counts as the requested one."""
        found = self._look()
        for path, text in found.items():
            for asked in (new, old):
                if path.endswith("_freq") and abs(int(text) - int(asked[path])) <= _ROUNDING * int(asked[path]):
                    found[path] = asked[path]
                    break
        return found

    def _target(self, old: Files, wanted: ClockSetting, limits: Limits) -> Files:
        new = dict(old)
        for policy in self._policies:
            floor, ceiling = f"{policy}/scaling_min_freq", f"{policy}/scaling_max_freq"
            new[ceiling] = str(self._ceiling_khz(policy, wanted.clock_mhz, limits[policy]))
            new[floor] = str(min(int(old[floor]), int(new[ceiling])))
            if wanted.governor:
                new[f"{policy}/scaling_governor"] = self._governor(policy, wanted.governor)
        if wanted.boost is not None:
            path = self._boost_path()
            if path is None:
                raise CapabilityError("this CPU's boost cannot be set", resource=str(self._root / "cpufreq/boost"))
            new[path] = str(int(wanted.boost != path.endswith("no_turbo")))
        return new

    def _factory(self, old: Files, limits: Limits) -> Files:
        new = self._target(old, ClockSetting(), limits)
        for policy in self._policies:
            new[f"{policy}/scaling_min_freq"] = str(limits[policy][0])
        path = self._boost_path()
        if path is not None:
            new[path] = str(int(not path.endswith("no_turbo")))
        return new

    def _ceiling_khz(self, policy: str, clock_mhz: float | None, limits: tuple[int, int]) -> int:
        lowest, highest = limits
        if clock_mhz is None:
            return highest
        asked = round(clock_mhz * 1e3)
        if not lowest <= asked <= highest:
            raise ConfigError(
                "the CPU has no such clock",
                got=f"{clock_mhz:g} MHz",
                expected=f"{lowest / 1e3:g} to {highest / 1e3:g} MHz",
            )
        return min((khz for khz in self._listed(policy) if khz >= asked), default=asked)

    def _governor(self, policy: str, name: str) -> str:
        known = self._text(policy, "scaling_available_governors").split()
        if known and name not in known:
            raise ConfigError("the kernel has no such governor", got=name, expected=", ".join(known))
        return name

    def _look(self) -> Files:
        """The current contents of all files that this class sets.

        Raises:
            OSError: A file cannot be read.
        """
        names = [
            f"{policy}/{name}"
            for policy in self._policies
            for name in ("scaling_min_freq", "scaling_max_freq", "scaling_governor")
            if name != "scaling_governor" or (self._root / policy / name).exists()
        ]
        boost = self._boost_path()
        found = {name: self._files.read(self._root / name) for name in (*names, *([boost] if boost else []))}
        for path, content in found.items():
            if path.endswith("_freq") and not content.isdigit():
                raise OSError(errno.EIO, f"{path} reads {content!r}")
        return found

    def _limits(self) -> Limits:
        """Lowest and highest clock of each policy, kHz.

        Raises:
            OSError: A file cannot be read.
        """
        found = {}
        for policy in self._policies:
            ends = [self._files.read(self._root / policy / f"cpuinfo_{end}_freq") for end in ("min", "max")]
            if not all(end.isdigit() for end in ends):
                raise OSError(errno.EIO, f"{policy} has no limits: {ends}")
            found[policy] = (int(ends[0]), int(ends[1]))
        return found

    def _setting(self, files: Files, limits: Limits) -> ClockSetting:
        ceilings = [int(files[f"{policy}/scaling_max_freq"]) for policy in self._policies]
        full = [limits[policy][1] for policy in self._policies]
        path = self._boost_path()
        return ClockSetting(
            None if all(map(int.__ge__, ceilings, full)) else max(ceilings) / 1e3,
            None if path is None else (files[path] == "1") != path.endswith("no_turbo"),
            files.get(f"{self._policies[0]}/scaling_governor", ""),
        )

    def _offered_khz(self) -> list[int]:
        """The clocks that every policy accepts: its listed clocks, or steps across its range."""
        offers, limits = [], self._guarded(self._limits)
        for policy in self._policies:
            low, high = limits[policy]
            first = -(-low // _STEP_KHZ) * _STEP_KHZ
            steps = {low, *range(first, high + 1, _STEP_KHZ), high}
            offers.append(set(self._listed(policy)) or steps)
        return sorted(set.intersection(*offers) or offers[0])

    def _listed(self, policy: str) -> list[int]:
        lists = ("scaling_available_frequencies", "scaling_boost_frequencies")
        return sorted({int(word) for name in lists for word in self._text(policy, name).split() if word.isdigit()})

    def _find(self) -> list[str]:
        """The folders of the policies, below the root; older kernels have them only under each CPU."""
        found = sorted(self._root.glob("cpufreq/policy[0-9]*"), key=lambda path: int(path.name[6:]))
        seen = {path.resolve(): path for path in (found or sorted(self._root.glob("cpu[0-9]*/cpufreq")))}
        return [str(path.relative_to(self._root)) for path in seen.values() if (path / "scaling_max_freq").exists()]

    def _covers(self, policy: str, cpus: tuple[int, ...]) -> bool:
        text = self._text(policy, "affected_cpus") or self._text(policy, "related_cpus")
        return bool({int(word) for word in text.split() if word.isdigit()} & set(cpus))

    def _boost_path(self) -> str | None:
        for path in ("intel_pstate/no_turbo", "cpufreq/boost"):
            if (self._root / path).exists():
                return path
        return None

    def _boost_word(self) -> str:
        path = self._boost_path()
        if path is None:
            return "not to be set"
        return "on" if (self._guarded(self._look)[path] == "1") != path.endswith("no_turbo") else "off"

    def _text(self, policy: str, name: str) -> str:
        try:
            return self._files.read(self._root / policy / name)
        except OSError:
            return ""

    def _guarded(self, look: Callable[[], T]) -> T:
        try:
            return look()
        except OSError as error:
            raise self._refused(error) or _unreadable(error) from error

    def _refused(self, error: Exception) -> JouleryError | None:
        code = getattr(error, "errno", None)
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            return CapabilityError("this process may not set the CPU clock", resource=str(self._root), grant=GRANT)
        return None


def _rank(path: str) -> tuple[int, str]:
    """Sort key that puts ceilings before floors: a floor above the old ceiling would be refused."""
    order = ("scaling_max_freq", "scaling_min_freq", "scaling_governor")
    name = path.rpartition("/")[2]
    return (order.index(name) if name in order else len(order), path)


def _unreadable(error: OSError) -> CapabilityError:
    return CapabilityError(
        f"the CPU clock cannot be read: {error.strerror or error}", resource=str(error.filename or ROOT)
    )
