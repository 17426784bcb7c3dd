"""The eighteen measured points of the Clover services: all that was ever published of their latency and energy.

Two physical A100-40GB, GPU energy only, PUE 1, Poisson arrivals, a request is 8 images or one question. Source: Li et
al., Clover, SC'23, doi 10.1145/3581784.3607034; repository boringlee24/sc23-clover (MIT), commit 90a3945,
``system/logs/arrival``. Accuracies of the variants: the same repository's ``accuracy.json`` (COCO mAP50-95 of YOLOv5,
ImageNet top-1 of EfficientNet, SQuAD 1.1 exact match of ALBERT v2).
"""

from __future__ import annotations

from types import MappingProxyType

from joulery.perf.queues.pull_costs import PullPoint

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
