"""NVIDIA V100-SXM2-16GB: the coefficients of the iGniter paper.

Source: Xu et al., "iGniter: Interference-Aware GPU Resource Provisioning for Predictable DNN Inference in the Cloud",
IEEE TPDS 34(3):812-827, doi 10.1109/TPDS.2022.3232715; hardware values in section 5.1, model coefficients fitted on the
profile the authors published with the paper (TensorRT 8.0.1, FP32, driver 470, p3.2xlarge).
"""

from __future__ import annotations

from types import MappingProxyType

from joulery.domain.quality import Quality
from joulery.perf.interference.model import GpuCoefficients, InterferenceProfile, ModelCoefficients

V100 = InterferenceProfile(
    gpu=GpuCoefficients(
        name="V100",
        power_cap_w=300.0,
        clock_max_mhz=1530.0,
        idle_w=53.5,
        pcie_bytes_per_ms=1e7,
        clock_mhz_per_w=-1.0254136,
        delay_ms_per_neighbour=0.0047506535,
        delay_offset_ms=-0.0090224257,
        unit_percent=2.5,
    ),
    models=MappingProxyType(
        {
            "alexnet": ModelCoefficients(
                load_bytes=602112,
                feedback_bytes=4000,
                kernels=20,
                launch_ms=0.031768278,
                k1=0.004153511,
                k2=8.7115844,
                k3=23.736069,
                k4=0.055520465,
                k5=0.34601099,
                power_slope=0.023892972,
                power_offset_w=37.108146,
                cache_slope=0.0030920459,
                cache_offset_percent=2.0295712,
                cache_sensitivity=0.0023763751,
            ),
            "resnet50": ModelCoefficients(
                load_bytes=602112,
                feedback_bytes=4000,
                kernels=80,
                launch_ms=0.0738162,
                k1=-0.017514658,
                k2=58.264481,
                k3=-0.011862242,
                k4=0.34485782,
                k5=1.9095017,
                power_slope=0.16233532,
                power_offset_w=4.6268645,
                cache_slope=0.021959513,
                cache_offset_percent=-0.18994204,
                cache_sensitivity=0.0021630605,
            ),
            "vgg19": ModelCoefficients(
                load_bytes=602112,
                feedback_bytes=4000,
                kernels=29,
                launch_ms=0.03924937,
                k1=-0.0048346495,
                k2=158.19297,
                k3=44.452131,
                k4=0.18840725,
                k5=0.92619197,
                power_slope=0.5367285,
                power_offset_w=2.081851,
                cache_slope=0.045217532,
                cache_offset_percent=2.7228167,
                cache_sensitivity=0.0020177315,
            ),
            "ssd": ModelCoefficients(
                load_bytes=1080000,
                feedback_bytes=2968880,
                kernels=93,
                launch_ms=0.14787719,
                k1=0.025159606,
                k2=235.84693,
                k3=-16.781574,
                k4=0.26427277,
                k5=3.4169782,
                power_slope=0.64489407,
                power_offset_w=2.3393171,
                cache_slope=0.08863048,
                cache_offset_percent=-0.12858927,
                cache_sensitivity=0.0022808612,
            ),
        }
    ),
    source="Xu et al., iGniter, TPDS 34(3):812-827 (V100-SXM2-16GB, TensorRT 8.0.1 FP32)",
    quality=Quality.ASSUMED,
)
