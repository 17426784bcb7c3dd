"""The power monitors of a Jetson as the kernel shows them, on plain files."""

from __future__ import annotations

from pathlib import Path


def hwmon_module(sys: Path, rails: dict[str, tuple[int, int]]) -> Path:
    """JetPack 5 and later: ``rails`` are millivolts and milliamperes by label, three a chip; returns ``sys``."""
    for number, (label, (millivolts, milliamperes)) in enumerate(rails.items()):
        folder = sys / f"class/hwmon/hwmon{number // 3}"
        folder.mkdir(parents=True, exist_ok=True)
        channel = number % 3 + 1
        files = {
            "name": "ina3221",
            f"in{channel}_label": label,
            f"in{channel}_input": millivolts,
            f"curr{channel}_input": milliamperes,
        }
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
    (sys / "class/hwmon/hwmon9").mkdir(parents=True)
    (sys / "class/hwmon/hwmon9/name").write_text("gpu_thermal\n")
    return sys


def older_module(sys: Path, rails: dict[str, int]) -> Path:
    """JetPack 4: ``rails`` are milliwatts by label."""
    folder = sys / "bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    folder.mkdir(parents=True)
    for number, (label, milliwatts) in enumerate(rails.items()):
        (folder / f"rail_name_{number}").write_text(f"{label}\n")
        (folder / f"in_power{number}_input").write_text(f"{milliwatts}\n")
    return sys
