"""NVIDIA V100-SXM2-16GB: the coefficients of the iGniter paper, and two other fits of its measurements.

Source: Xu et al., "iGniter: Interference-Aware GPU Resource Provisioning for Predictable DNN Inference in the Cloud",
IEEE TPDS 34(3):812-827, doi 10.1109/TPDS.2022.3232715; hardware values in section 5.1, model coefficients fitted on the
profile the authors published with the paper (TensorRT 8.0.1, FP32, driver 470, p3.2xlarge).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

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
    bands=MappingProxyType({"alexnet": 0.113, "resnet50": 0.074, "vgg19": 0.051, "ssd": 0.038}),
)
"""The paper's coefficients; ``bands`` are their errors on the published solo and co-located latencies (see below)."""


class _Fit(NamedTuple):
    """Fitted numbers of one model; the rest is the paper's."""

    k1: float
    k2: float
    k3: float
    k4: float
    k5: float
    cache_sensitivity: float
    pcie_contention: float
    shared_launch_ms: float = 0.0


_FITTED = {
    "alexnet": _Fit(-0.0020783063, 9.1848653, 28.070424, 0.80095646, 0.19483443, 0.00023100199, 1.2232871, 0.17001365),
    "resnet50": _Fit(-0.066609755, 60.468947, 0.64791513, 0.85993438, 1.4707424, 0.0021170939, 1.6936562, 0.12802682),
    "vgg19": _Fit(0.02669466, 159.26664, 48.524832, 0.81750637, 0.64362855, 0.0024606255, 1.1511781, 0.081241352),
    "ssd": _Fit(-0.04664801, 232.52945, 12.74168, 0.44419698, 1.4349074, 0.0019195196, 1.5407304, 0.0),
}

V100_CALIBRATED = InterferenceProfile(
    gpu=replace(V100.gpu, name="V100 (calibrated)", clock_mhz_per_w=-1.2824166),
    models=MappingProxyType({name: replace(V100.models[name], **terms._asdict()) for name, terms in _FITTED.items()}),
    form="calibrated",
    source="fitted on the published latencies of Xu et al., iGniter (648 solo runs, 750 co-located pairs on V100)",
    quality=Quality.ASSUMED,
    bands=MappingProxyType({"alexnet": 0.047, "resnet50": 0.077, "vgg19": 0.040, "ssd": 0.046}),
)
"""Co-location terms fitted on measured pairs.

Fitted by :func:`joulery.perf.interference.calibration.calibrate` on the 648 solo latencies and 750 co-located pairs the
authors published (github.com/icloud-ecnu/igniter and its history; hardware and software as above). Mean absolute error
on pairs with batches left out of the fit: 2.2 % (the paper's coefficients: 3.7 %).
"""


_REFITTED = {
    "alexnet": _Fit(-0.000210640, 8.52983626, 25.7223314, 0.187383715, 0.349231118, 0.00220153836, 1.30317179),
    "resnet50": _Fit(-0.0415037091, 58.7193674, -1.42545581, 0.625498018, 1.58828083, 0.00291393771, 1.91384228),
    "vgg19": _Fit(0.0321499924, 158.466226, 46.8438300, 0.647929148, 0.708283690, 0.00251181467, 1.68997462),
    "ssd": _Fit(-0.0577581811, 237.011479, 4.86408609, 0.557741640, 1.58486933, 0.00185705095, 1.42556878),
}

V100_REFIT = InterferenceProfile(
    gpu=replace(V100.gpu, name="V100 (refit)", clock_mhz_per_w=-1.07790087),
    models=MappingProxyType({name: replace(V100.models[name], **terms._asdict()) for name, terms in _REFITTED.items()}),
    form="calibrated",
    source="fitted on the published latencies of Xu et al., iGniter (648 solo runs, 750 co-located pairs on V100)",
    quality=Quality.ASSUMED,
    bands=MappingProxyType({"alexnet": 0.059, "resnet50": 0.081, "vgg19": 0.041, "ssd": 0.037}),
)
"""A second, independent fit, which simulations take as the truth.

The paper's own equations with a cache and a PCIe factor per model, fitted in one go (least squares of the relative
error, soft L1) to the 648 solo latencies and the 1,500 latencies of 750 co-located pairs the authors published: k1 to
k5 and both factors of each model, and the slope of the clock. Mean absolute error: 1.5 % alone, 2.4 % in pairs (the
paper's coefficients have 3.6 % there). It differs from ``V100_CALIBRATED`` in the varied coefficients and in the method
of the fit, so that a plan made with one of them can be evaluated on the other.
"""
