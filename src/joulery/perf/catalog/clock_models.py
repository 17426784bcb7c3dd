"""Emulated GPU types by name: latency and power against the clock.

The V100 is fitted to measurements. Of the A100 and the H100 only the data sheet is known here (clocks, peak rates,
power limit; NVIDIA A100 Tensor Core GPU data sheet, SXM4 40 GB; NVIDIA H100 Tensor Core GPU data sheet, SXM5 80 GB).
The shape of their curves (the knee at 73 % of the highest clock, voltage and bandwidth ratios, what share of the power
limit a busy or an idle board takes) is the V100's, carried over: *assumed* until measured.
"""

from __future__ import annotations

from dataclasses import replace

from joulery.domain.errors import ConfigError
from joulery.domain.gpu import gpu_types
from joulery.domain.gpu.gpu_types import GpuTypeFacts
from joulery.domain.quality import Quality
from joulery.perf.power.clock_curves import V100, ClockModel


def _carried_over(name: str, facts: GpuTypeFacts) -> ClockModel:
    """Emulate a GPU type with its own data sheet and the V100's curve shapes.

    Raises:
        ValueError: The catalog does not contain its clocks.
    """
    if facts.max_mhz is None or facts.min_mhz is None:
        raise ValueError(f"the clocks of {facts.name} are unknown")
    clock, power = facts.max_mhz / V100.max_mhz, facts.tdp_w / V100.cap_w
    return replace(
        V100,
        name=name,
        min_mhz=facts.min_mhz,
        max_mhz=facts.max_mhz,
        knee_mhz=V100.knee_mhz * clock,
        bandwidth_mhz=tuple(mhz * clock for mhz in V100.bandwidth_mhz),
        peak_flops=facts.flops["fp32"],
        peak_bandwidth=facts.bandwidth_bytes_s,
        busy_w=V100.busy_w * power,
        busy_dynamic_w=V100.busy_dynamic_w * power,
        idle_w=V100.idle_w * power,
        idle_dynamic_w=V100.idle_dynamic_w * power,
        cap_w=facts.tdp_w,
        memory_bytes=facts.memory_bytes,
        source=f"clocks, peaks (32-bit floats) and power limit: {facts.source}; "
        "shape of the curves: the V100's, assumed",
        quality=Quality.ASSUMED,
    )


A100 = _carried_over("A100", gpu_types.A100_40GB)
"""Emulated NVIDIA A100 SXM4 40 GB."""
H100 = _carried_over("H100", gpu_types.H100)
"""Emulated NVIDIA H100 SXM5 80 GB."""
_MODELS = {"v100": V100, "a100": A100, "h100": H100}


def clock_model(name: str) -> ClockModel:
    """Find an emulated GPU type by its name; upper and lower case are equal.

    Raises:
        ConfigError: There is no emulated GPU type of that name.
    """
    try:
        return _MODELS[name.lower()]
    except KeyError:
        raise ConfigError("no such emulated GPU", got=name, expected=", ".join(_MODELS)) from None
