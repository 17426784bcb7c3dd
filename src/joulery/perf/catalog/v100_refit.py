"""The V100 of the iGniter paper, fitted once more: a second opinion for simulations to call the truth.

The paper's own equations with a cache and a PCIe factor per model, fitted in one go (least squares of the relative
error, soft L1) to the 648 solo latencies and the 1,500 latencies of 750 co-located pairs the authors published: k1 to
k5 and both factors of each model, and the slope of the clock. Mean absolute error: 1.5 % alone, 2.4 % in pairs (the
paper's coefficients have 3.6 % there). It differs from ``v100_calibrated`` in what it lets vary and how it is fitted;
a plan made with one of them is not judged by itself on the other.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from joulery.domain.quality import Quality
from joulery.perf.catalog.v100 import V100
from joulery.perf.interference.model import InterferenceProfile


class _Refit(NamedTuple):
    k1: float
    k2: float
    k3: float
    k4: float
    k5: float
    cache_sensitivity: float
    pcie_contention: float


_FITTED = {
    "alexnet": _Refit(-0.000210640, 8.52983626, 25.7223314, 0.187383715, 0.349231118, 0.00220153836, 1.30317179),
    "resnet50": _Refit(-0.0415037091, 58.7193674, -1.42545581, 0.625498018, 1.58828083, 0.00291393771, 1.91384228),
    "vgg19": _Refit(0.0321499924, 158.466226, 46.8438300, 0.647929148, 0.708283690, 0.00251181467, 1.68997462),
    "ssd": _Refit(-0.0577581811, 237.011479, 4.86408609, 0.557741640, 1.58486933, 0.00185705095, 1.42556878),
}

V100_REFIT = InterferenceProfile(
    gpu=replace(V100.gpu, name="V100 (refit)", clock_mhz_per_w=-1.07790087),
    models=MappingProxyType({name: replace(V100.models[name], **terms._asdict()) for name, terms in _FITTED.items()}),
    form="calibrated",
    source="fitted on the published latencies of Xu et al., iGniter (648 solo runs, 750 co-located pairs on V100)",
    quality=Quality.ASSUMED,
)
