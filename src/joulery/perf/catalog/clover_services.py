"""The three services of the Clover paper, as a profile calibrated on eighteen measured points, not itself measured.

:func:`joulery.sim.queues.pull_fit.fit` found host and device times, joules, contention, jitter and idle power from
:data:`CLOVER_POINTS`, starting from round numbers. Only YOLOv5 l, x, x6, EfficientNet b3, b7 and ALBERT base, large,
xxlarge appear in a point; b1, b5 and xlarge are interpolated. Slowdowns on MIG slices are typed in from published
measurements of other models of like size: boringlee24/socc22-miso, MunQ-Lee/ParvaGPU_SC24 and
HuaizhengZhang/MIGProfiler (all MIT). YOLOv5x6 is assumed not to fit 5 GB.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from joulery.perf.queues.pull_costs import PullPoint, ServiceCosts, VariantCosts

_PROFILES = ("7g.40gb", "4g.20gb", "3g.20gb", "2g.10gb", "1g.5gb")


def _slowdown(*on_slices: float) -> Mapping[str, float]:
    """Device time on 4g, 3g, 2g, 1g relative to the whole GPU; the model does not fit slices without a number."""
    return MappingProxyType(dict(zip(_PROFILES, (1.0, *on_slices), strict=False)))


_SATURATING = _slowdown(1.65, 1.95, 3.15, 6.1)
_SATURATING_LARGE = _slowdown(1.65, 1.95, 3.15)
_MEDIUM = _slowdown(1.31, 1.43, 1.94, 3.11)
_LIGHT = _slowdown(1.0, 1.1, 1.5, 2.5)
_SINGLE_QUESTION = _slowdown(1.0, 1.0, 1.02, 1.19)
_SOURCE = "a profile calibrated on the 18 measured points of Clover (SC'23) on two A100-40GB"

CLOVER_SERVICES: Mapping[str, ServiceCosts] = MappingProxyType(
    {
        "yolo": ServiceCosts(
            name="yolo",
            variants=(
                VariantCosts("yolov5l", 0.490, 0.1864, 0.02174, 4.827, _LIGHT),
                VariantCosts("yolov5x", 0.507, 0.1905, 0.03256, 7.568, _MEDIUM),
                VariantCosts("yolov5x6", 0.550, 0.2969, 0.07109, 36.76, _SATURATING_LARGE),
            ),
            contention=0.1133,
            size_cv=0.047,
            jitter_s=0.0098,
            idle_w=36.92,
            gpus=2,
            loads_s=(1.0, 0.4, 0.2),
            source=_SOURCE,
        ),
        "efficientnet": ServiceCosts(
            name="efficientnet",
            variants=(
                VariantCosts("efficientnet-b1", 0.78382, 0.2076, 0.01246, 0.4479, _LIGHT),
                VariantCosts("efficientnet-b3", 0.81528, 0.2184, 0.02232, 0.7868, _LIGHT),
                VariantCosts("efficientnet-b5", 0.83776, 0.2491, 0.05753, 9.953, _MEDIUM),
                VariantCosts("efficientnet-b7", 0.84582, 0.2901, 0.1223, 38.27, _SATURATING),
            ),
            contention=0.1111,
            size_cv=0.047,
            jitter_s=0.0098,
            idle_w=36.90,
            gpus=2,
            loads_s=(1.0, 0.4, 0.2),
            source=_SOURCE,
        ),
        "albert": ServiceCosts(
            name="albert",
            variants=(
                VariantCosts("albert-base-v2", 0.832, 0.04005, 0.01703, 0.4003, _SINGLE_QUESTION),
                VariantCosts("albert-large-v2", 0.852, 0.04513, 0.03448, 0.9002, _LIGHT),
                VariantCosts("albert-xlarge-v2", 0.864, 0.04125, 0.04218, 8.964, _MEDIUM),
                VariantCosts("albert-xxlarge-v2", 0.891, 0.03885, 0.05466, 19.74, _SATURATING),
            ),
            contention=0.0590,
            size_cv=0.610,
            jitter_s=0.0050,
            idle_w=38.31,
            gpus=2,
            loads_s=(0.4, 0.16, 0.08),
            source=_SOURCE,
        ),
    }
)
"""Services by name."""


_WHOLE, _THREE_FOUR = ("7g.40gb",), ("3g.20gb", "4g.20gb")
_TABLE = """
yolo          1.0   2000  yolov5x6                            55.00    428.86  120.673
yolo          0.4   1000  yolov5x6                            55.00    600.68   69.698
yolo          0.2   1000  yolov5x6                            55.00   5737.57   48.158
yolo          1.0   2000  yolov5l,yolov5x                     49.85    258.77   78.546
yolo          0.4   1000  yolov5l,yolov5x                     49.85    271.41   34.425
yolo          0.2   1000  yolov5l,yolov5x                     49.84    301.90   21.339
efficientnet  1.0   2000  efficientnet-b7                     84.58    510.30  116.717
efficientnet  0.4   1000  efficientnet-b7                     84.58    975.86   70.550
efficientnet  0.2   1000  efficientnet-b7                     84.58  23317.14   52.293
efficientnet  1.0   2000  efficientnet-b3,efficientnet-b3     81.53    283.62   75.376
efficientnet  0.4   1000  efficientnet-b3,efficientnet-b3     81.53    298.38   29.994
efficientnet  0.2   1000  efficientnet-b3,efficientnet-b3     81.53    342.55   15.431
albert        0.4   2000  albert-xxlarge-v2                   89.10    165.28   52.963
albert        0.16  1000  albert-xxlarge-v2                   89.10    176.11   34.592
albert        0.08  1000  albert-xxlarge-v2                   89.10    229.10   23.774
albert        0.4   2000  albert-base-v2,albert-large-v2      84.19    105.04   30.845
albert        0.16  1000  albert-base-v2,albert-large-v2      84.18    105.36   12.806
albert        0.08  1000  albert-base-v2,albert-large-v2      84.16    109.91    6.791
"""


def _points(service: str) -> tuple[PullPoint, ...]:
    found = []
    for line in _TABLE.strip().splitlines():
        name, gap_s, requests, models, accuracy, p95_ms, energy_j = line.split()
        if name == service:
            variants = models.split(",")
            slices = _WHOLE if len(variants) == 1 else _THREE_FOUR
            found.append(
                PullPoint(
                    interarrival_s=float(gap_s),
                    requests=int(requests),
                    instances=tuple(zip(variants, slices, strict=True)),
                    accuracy_ratio=float(accuracy) / 100,
                    p95_s=float(p95_ms) / 1000,
                    energy_j=float(energy_j),
                )
            )
    return tuple(found)


CLOVER_POINTS = MappingProxyType({name: _points(name) for name in ("yolo", "efficientnet", "albert")})
"""Measured points by service."""
"""The eighteen measured points of the Clover services: all that was ever published of their latency and energy.

Two physical A100-40GB, GPU energy only, PUE 1, Poisson arrivals, a request is 8 images or one question. Source: Li et
al., Clover, SC'23, doi 10.1145/3581784.3607034; repository boringlee24/sc23-clover (MIT), commit 90a3945,
``system/logs/arrival``. Accuracies of the variants: the same repository's ``accuracy.json`` (COCO mAP50-95 of YOLOv5,
ImageNet top-1 of EfficientNet, SQuAD 1.1 exact match of ALBERT v2).
"""
