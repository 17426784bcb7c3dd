"""The kernel profiler of this machine, where there is one."""

from __future__ import annotations

from joulery.adapters.devices.nvidia_kernels import Kernel, NsightCompute, nsight_compute

__all__ = ["Kernel", "NsightCompute", "nsight_compute"]
