"""A cpufreq tree as the kernel shows it, on plain files."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from joulery.adapters.devices.cpufreq import TextFiles


def cpu_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine with CPU clocks that can be set, for this process and those it starts: their tree."""
    root = cpufreq_tree(folder / "cpu")
    monkeypatch.setenv("JOULERY_CPUFREQ", str(root))
    monkeypatch.setenv("JOULERY_STATE", str(folder / "state"))
    return root


def cpufreq_tree(
    root: Path,
    policies: int = 2,
    *,
    low_khz: int = 1_500_000,
    high_khz: int = 3_200_000,
    listed: tuple[int, ...] = (),
    driver: str = "acpi-cpufreq",
    governor: str = "schedutil",
    boost: str | None = "1",
    no_turbo: str | None = None,
) -> Path:
    """Files under ``root``; returns it."""
    for number in range(policies):
        folder = root / f"cpufreq/policy{number}"
        folder.mkdir(parents=True)
        files = {
            "cpuinfo_min_freq": low_khz,
            "cpuinfo_max_freq": high_khz,
            "scaling_min_freq": low_khz,
            "scaling_max_freq": high_khz,
            "scaling_cur_freq": low_khz,
            "scaling_driver": driver,
            "scaling_governor": governor,
            "scaling_available_governors": "conservative ondemand userspace powersave performance schedutil",
            "affected_cpus": number,
            "related_cpus": number,
        }
        if listed:
            files["scaling_available_frequencies"] = " ".join(map(str, sorted(listed, reverse=True))) + " "
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
    if boost is not None:
        (root / "cpufreq/boost").write_text(f"{boost}\n")
    if no_turbo is not None:
        (root / "intel_pstate").mkdir()
        (root / "intel_pstate/no_turbo").write_text(f"{no_turbo}\n")
    return root


def settings(root: Path) -> dict[str, str]:
    """Everything that can be set there."""
    names = ("scaling_min_freq", "scaling_max_freq", "scaling_governor")
    files = [path for path in sorted(root.glob("cpufreq/policy*/*")) if path.name in names]
    files += [path for path in (root / "cpufreq/boost", root / "intel_pstate/no_turbo") if path.exists()]
    return {str(path.relative_to(root)): path.read_text().strip() for path in files}


class KernelFiles(TextFiles):
    """Files with the kernel's rules, and calls that fail on request.

    Attributes:
        calls: How many reads and writes there were.
        fail_at: The numbers of calls (from 0) that fail; ``fail_from`` and all after it.
        code: The error they fail with.
        late: Failing writes happen before they fail.
    """

    def __init__(
        self,
        fail_at: frozenset[int] = frozenset(),
        fail_from: int | None = None,
        code: int = errno.EIO,
        late: bool = False,
    ) -> None:
        self.calls = 0
        self.fail_at, self.fail_from, self.code, self.late = fail_at, fail_from, code, late
        self.round_khz = 1

    def _due(self) -> bool:
        number, self.calls = self.calls, self.calls + 1
        return number in self.fail_at or (self.fail_from is not None and number >= self.fail_from)

    def read(self, path: Path) -> str:
        if self._due():
            raise OSError(self.code, "injected", str(path))
        return super().read(path)

    def write(self, path: Path, text: str) -> None:
        due = self._due()
        if due and not self.late:
            raise OSError(self.code, "injected", str(path))
        self._check(path, text)
        if path.name.endswith("_freq"):
            text = str(int(text) // self.round_khz * self.round_khz)
        super().write(path, f"{text}\n")
        if due:
            raise OSError(self.code, "injected", str(path))

    def _check(self, path: Path, text: str) -> None:
        """The kernel refuses a ceiling below the floor, a floor above the ceiling, and what it does not know."""
        folder = path.parent
        if path.name == "scaling_max_freq" and int(text) < int((folder / "scaling_min_freq").read_text()):
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        if path.name == "scaling_min_freq" and int(text) > int((folder / "scaling_max_freq").read_text()):
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        if path.name == "scaling_governor" and text not in (folder / "scaling_available_governors").read_text().split():
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
