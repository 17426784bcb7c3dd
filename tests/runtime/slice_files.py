"""A site whose joint plan cuts GPUs: toy models in two variants, with a table of batches measured on slices."""

from __future__ import annotations

from pathlib import Path

SITE = """\
joulery: 1
name: slices
mode: act
meters: {period: 50 ms, use: [nvml]}
fleet:
  devices: [DEVICES]
  gpus: [{name: A100-40GB, measurements: slices.csv, idle: 50 W, busy: 300 W, price: 3 USD/h, available: 2, clocks: 3}]
plan: {preset: joint, max_batch: 4, margin: 5 %, judge: falsePLAN}
serving: {listen: "127.0.0.1:0", drain: 2 s, deadline: 5 s}
services:
"""
SERVICE = """\
  - name: NAME
    minimum_accuracy: FLOOR %
    family:
      accuracy_metric: share of right sums
      variants:
        - {name: large, accuracy: 80 %, accuracy_source: made up,
            model: {kind: python, target: "tests.runtime.toy_models:GpuSum", options: {busy_s: 0.0005}}}
        - {name: small, accuracy: 70 %, accuracy_source: made up,
            model: {kind: python, target: "tests.runtime.toy_models:GpuSum", options: {busy_s: 0.0002}}}
    rate: RATE /s
    slo: {latency: 400 ms, quantile: 99 %}
    load: {kind: constant, rate: RATE /s, duration: DURATION s}
"""


def sliced_service(name: str, floor: float, rate: float, duration: float = 2) -> str:
    """One service of the site; ``floor``: its accuracy in percent."""
    text = SERVICE.replace("NAME", name).replace("FLOOR", f"{floor:g}")
    return text.replace("RATE", f"{rate:g}").replace("DURATION", f"{duration:g}")


def sliced_site(folder: Path, *services: str, devices: str = "{gpu: 0, mode: mig}", plan: str = "") -> Path:
    """The site file, beside the table of what was measured."""
    rows = ["model,slice,batch,n_processes_mps,latency_s"]
    for model, busy_ms in (("large", 16.0), ("small", 8.0)):
        for size in (1, 2, 3, 4, 7):
            for processes in (1, 2):
                for batch in (1, 2, 4):
                    ms = 0.5 + busy_ms * batch**0.8 * (3.5 / size) ** 0.8 * (1.0 if processes == 1 else 1.5)
                    rows.append(f"{model},{size}g,{batch},{processes},{ms / 1e3:.6f}")
    (folder / "slices.csv").write_text("\n".join(rows) + "\n")
    file = folder / "slices.yaml"
    file.write_text(SITE.replace("DEVICES", devices).replace("PLAN", plan) + "".join(services))
    return file
