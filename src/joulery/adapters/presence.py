"""Detection of vendors' drivers before their modules are imported, since most machines have few.

The sampler of every run starts with these checks. The vendor's own module decides what they cannot exclude.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from joulery.domain.errors import CapabilityError

NVIDIA = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")
"""Paths that indicate NVIDIA's driver; the last one exists under WSL."""
NVML = "libnvidia-ml.so.1"
AMD = "/dev/kfd"
SYS = Path("/sys")
"""The kernel's ``sysfs``."""


def require_nvidia() -> None:
    """Raise unless there is a trace of NVIDIA's driver, or its library.

    A program that has imported ``pynvml`` passes: that module makes the check itself.

    Raises:
        CapabilityError: There is no NVIDIA driver.
    """
    if "pynvml" in sys.modules or any(Path(trace).exists() for trace in NVIDIA):
        return
    try:
        ctypes.CDLL(NVML)
    except OSError as error:
        raise no_nvidia() from error


def no_nvidia() -> CapabilityError:
    """The error for a missing library of NVIDIA's driver."""
    return CapabilityError(
        f"no NVIDIA driver here ({NVML} is not there)",
        resource=NVML,
        hint="a container needs the host's driver: docker run --gpus all ...",
    )


def require_amd() -> None:
    """Raise unless the machine has AMD's compute driver.

    Raises:
        CapabilityError: There is no AMD driver.
    """
    if not Path(AMD).exists():
        raise CapabilityError("no AMD GPU driver here", resource=AMD)


def require_ina3221(root: Path = SYS) -> None:
    """Raise unless the machine has the power monitor of Jetson modules.

    Raises:
        CapabilityError: The kernel reports no such monitor.
    """
    for name in root.glob("class/hwmon/hwmon*/name"):
        try:
            if name.read_text().strip() == "ina3221":
                return
        except OSError:  # a sensor that went away
            continue
    if not any((root / "bus/i2c/drivers/ina3221x").glob("*/iio:device*")):
        raise CapabilityError("no Jetson power monitor (INA3221) here", resource=str(root / "class/hwmon"))
