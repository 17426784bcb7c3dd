"""Sites that are planned and then run on this machine: toy models, with a profile of one CPU core that knows them."""

import json
from pathlib import Path

from joulery.perf.interference.document import as_document
from joulery.perf.interference.model import GpuCoefficients, InterferenceProfile, ModelCoefficients

CORE = GpuCoefficients("core", 1000.0, 1000.0, 0.0, 1e9, -0.001, 0.0, 0.0, 10.0)
"""A CPU core as a GPU type: no transfers, no power cap, shares in steps of 10 %."""


def model(busy_ms: float) -> ModelCoefficients:
    """A model that takes so long on a whole core, whatever the batch, and in inverse proportion to its share."""
    return ModelCoefficients(0, 0, 0, 0.0, 0.0, 1e-6, 100 * busy_ms, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


SITE = """\
joulery: 1
name: planned
mode: act
meters: {{period: 50 ms, use: [cpu-model], cpu_model: {{idle: 20 W, max: 60 W}}}}
fleet:
  cpu: {{cores: 2}}
  gpus: [{{name: core, profile_file: core.json, price: 1 USD/h, available: 2}}]
plan: {{arrivals: {{kind: constant}}, accounting: full-slo, max_batch: 2, replicas: 1}}
serving: {{listen: "127.0.0.1:0", drain: 2 s, deadline: 5 s}}
services:
"""
SERVICE = """\
  - name: {name}
    family:
      accuracy_metric: share of right sums
      variants:
        - {{name: {model}, accuracy: 75 %, accuracy_source: made up,
            model: {{kind: python, target: "tests.runtime.toy_models:Sum", options: {{busy_s: {busy_s}}}}}}}
    rate: {rate} /s
    slo: {{latency: {slo}, quantile: 99 %}}
    load: {{kind: constant, rate: {rate} /s, duration: {duration} s}}
"""


def service(
    name: str, *, model: str = "quick", busy_s: float = 0.002, rate: int = 20, slo: str = "400 ms", duration: float = 4
) -> str:
    """One service of the site."""
    return SERVICE.format(name=name, model=model, busy_s=busy_s, rate=rate, slo=slo, duration=duration)


def planned_site(folder: Path, *services: str) -> Path:
    """The site file, beside the profile of its fleet."""
    profile = InterferenceProfile(CORE, {"quick": model(2.0), "heavy": model(20.0)}, source="made up")
    (folder / "core.json").write_text(json.dumps(as_document(profile)))
    file = folder / "planned.yaml"
    file.write_text(SITE.format() + "".join(services))
    return file
