"""The V100 of the iGniter paper, with co-location terms fitted on measured pairs.

Fitted by :func:`joulery.perf.interference.calibration.calibrate` on the 648 solo latencies and 750 co-located pairs the
authors published (github.com/icloud-ecnu/igniter and its history; hardware and software as in ``v100.py``). Mean
absolute error on pairs with batches left out of the fit: 2.2 % (the paper's coefficients: 3.7 %).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from joulery.domain.quality import Quality
from joulery.perf.catalog.v100 import V100
from joulery.perf.interference.model import InterferenceProfile


class _Calibrated(NamedTuple):
    k1: float
    k2: float
    k3: float
    k4: float
    k5: float
    cache_sensitivity: float
    pcie_contention: float
    shared_launch_ms: float


_FITTED = {
    "alexnet": _Calibrated(
        -0.0020783063, 9.1848653, 28.070424, 0.80095646, 0.19483443, 0.00023100199, 1.2232871, 0.17001365
    ),
    "resnet50": _Calibrated(
        -0.066609755, 60.468947, 0.64791513, 0.85993438, 1.4707424, 0.0021170939, 1.6936562, 0.12802682
    ),
    "vgg19": _Calibrated(
        0.02669466, 159.26664, 48.524832, 0.81750637, 0.64362855, 0.0024606255, 1.1511781, 0.081241352
    ),
    "ssd": _Calibrated(-0.04664801, 232.52945, 12.74168, 0.44419698, 1.4349074, 0.0019195196, 1.5407304, 0.0),
}

V100_CALIBRATED = InterferenceProfile(
    gpu=replace(V100.gpu, name="V100 (calibrated)", clock_mhz_per_w=-1.2824166),
    models=MappingProxyType({name: replace(V100.models[name], **terms._asdict()) for name, terms in _FITTED.items()}),
    form="calibrated",
    source="fitted on the published latencies of Xu et al., iGniter (648 solo runs, 750 co-located pairs on V100)",
    quality=Quality.ASSUMED,
)
