"""A SYNTHETIC T4, not measured anywhere: for examples and tests of mixed fleets only.

The paper reports a T4 plan (Fig. 20) but no T4 coefficients were ever published. This one is the V100 of the paper
slowed down uniformly by a factor: execution times and cache use times the factor, power scaled to a 70 W board. With
the factor 2.06 the paper's logic needs the 15 T4 the paper reports. The one published T4 measurement (VGG-19, 3.39
times the V100's latency) contradicts it: treat every result as an illustration.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from joulery.domain.quality import Quality
from joulery.perf.catalog.v100 import V100
from joulery.perf.interference.model import GpuCoefficients, InterferenceProfile, ModelCoefficients

_KERNELS = {"alexnet": 16.0, "resnet50": 71.0, "vgg19": 29.0, "ssd": 89.0}
"""Kernel counts on a T4: the authors' public repository, commit ec01ff3."""


def synthetic_t4(slowdown: float) -> InterferenceProfile:
    """Generate a synthetic T4 that is ``slowdown`` times slower than the V100 of the paper."""
    cap_w = 70.0
    watts = cap_w / V100.gpu.power_cap_w
    gpu = GpuCoefficients(
        name="synthetic T4",
        power_cap_w=cap_w,
        clock_max_mhz=1590.0,
        idle_w=V100.gpu.idle_w * watts,
        pcie_bytes_per_ms=5909431.0,
        clock_mhz_per_w=V100.gpu.clock_mhz_per_w * 1590.0 / V100.gpu.clock_max_mhz / watts,
        delay_ms_per_neighbour=V100.gpu.delay_ms_per_neighbour,
        delay_offset_ms=V100.gpu.delay_offset_ms,
        unit_percent=5.0,
    )
    models = {name: _slowed(model, slowdown, watts, _KERNELS[name]) for name, model in V100.models.items()}
    return InterferenceProfile(
        gpu=gpu,
        models=MappingProxyType(models),
        source=f"synthetic: the V100 of the paper slowed {slowdown:g} times, not measured",
        quality=Quality.ASSUMED,
    )


def _slowed(model: ModelCoefficients, slowdown: float, watts: float, kernels: float) -> ModelCoefficients:
    return replace(
        model,
        kernels=kernels,
        k1=model.k1 * slowdown,
        k2=model.k2 * slowdown,
        k3=model.k3 * slowdown,
        k5=model.k5 * slowdown,
        power_slope=model.power_slope * slowdown * watts,
        power_offset_w=model.power_offset_w * watts,
        cache_slope=model.cache_slope * slowdown,
    )


SYNTHETIC_T4 = synthetic_t4(2.06)
