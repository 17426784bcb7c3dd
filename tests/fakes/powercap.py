"""RAPL zones with power limits as the kernel shows them, on plain files."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.cpufreq import KernelFiles

_UNIT_UW = 125_000
"""Unit of the register: the kernel reads back whole ones."""


def powercap_tree(root: Path, packages: int = 2, *, tdp_w: int = 120, constraints: bool = True) -> Path:
    """Files under ``root``; returns it. Without ``constraints`` zones only count energy, as AMD's."""
    for number in range(packages):
        zone = root / f"intel-rapl:{number}"
        zone.mkdir(parents=True)
        files = {"name": f"package-{number}", "energy_uj": 5_000_000, "max_energy_range_uj": 262_143_328_850}
        if constraints:
            files |= {
                "enabled": 1,
                "constraint_0_name": "long_term",
                "constraint_0_power_limit_uw": tdp_w * 1_000_000,
                "constraint_0_max_power_uw": tdp_w * 1_000_000,
                "constraint_0_time_window_us": 999_424,
                "constraint_1_name": "short_term",
                "constraint_1_power_limit_uw": round(1.2 * tdp_w * 1_000_000),
                "constraint_1_max_power_uw": 0,
                "constraint_1_time_window_us": 7_808,
            }
        for name, value in files.items():
            (zone / name).write_text(f"{value}\n")
        core = root / f"intel-rapl:{number}:0"
        core.mkdir()
        (core / "name").write_text("core\n")
        (core / "constraint_0_name").write_text("long_term\n")
        (core / "constraint_0_power_limit_uw").write_text("0\n")
    return root


def limits(root: Path) -> dict[str, str]:
    """Everything that can be set there."""
    files = [path for path in sorted(root.glob("*/*")) if path.name == "enabled" or path.name.endswith("limit_uw")]
    return {str(path.relative_to(root)): path.read_text().strip() for path in files}


class PowercapFiles(KernelFiles):
    """Files with the kernel's rules: limits are rounded down to whole units; calls fail on request."""

    def write(self, path: Path, text: str) -> None:
        if path.name.endswith("_uw"):
            text = str(int(text) // _UNIT_UW * _UNIT_UW)
        super().write(path, text)
