"""A complete site file as text, and the way tests change one thing in it."""

from pathlib import Path

SITE = """\
joulery: 1
name: quickstart
mode: act
pue: 1.2
meters: {period: 50 ms, cpu_model: {idle: 30 W, max: 120 W}}
fleet: {cpu: {slices: [1, 1]}}
services:
  - name: photos
    family:
      task: image classification
      accuracy_metric: ImageNet top-1
      variants:
        - {name: lite0, accuracy: 75.1 %, accuracy_source: published, model: {kind: efficientnet-lite, size: 0}}
        - {name: lite2, accuracy: 0.776, accuracy_source: published, model: {kind: efficientnet-lite, size: 2}}
    slo: {latency: 80 ms, quantile: 95 %}
    rate: 40 /s
    minimum_accuracy: 74 %
    policy: {kind: clover, lambda: 0.5, base_intensity: 250 g/kWh}
serving: {listen: "127.0.0.1:8080", queue: 256, deadline: 2 s}
load: {kind: poisson, rate: 40 /s, duration: 90 s, seed: 7}
"""


def changed(old: str, new: str) -> str:
    """The site with the first ``old`` replaced."""
    assert old in SITE
    return SITE.replace(old, new, 1)


def written(folder: Path, text: str | bytes) -> Path:
    """``text`` as a file."""
    path = folder / "site.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
