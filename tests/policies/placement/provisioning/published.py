"""The published services and the GPUs they are planned on."""

import json
import random

from joulery.domain.gpu.provisioning import Arrivals, Workload
from joulery.domain.serving.service import Slo
from joulery.perf.catalog import profile
from joulery.perf.catalog.synthetic_t4 import synthetic_t4
from joulery.policies.placement.provisioning.gpu_shares import GpuType
from tests.data_folder import data_folder

V100 = GpuType("V100", profile("v100"), 3.06)
CALIBRATED = GpuType("V100", profile("v100-calibrated"), 3.06)


def t4(slowdown=2.06):
    return GpuType("T4", synthetic_t4(slowdown), 0.526)


def workload(name, model, slo_ms, rate_rps, arrivals=None):
    return Workload(name, model, Slo(slo_ms / 1e3, 0.99), rate_rps, arrivals or Arrivals())


def app12(arrivals=None):
    document = json.loads((data_folder("igniter") / "workloads.json").read_text())["app12"]
    return [workload(w["id"], w["model"], w["slo_ms"], w["rate_rps"], arrivals) for w in document]


def copies(n):
    rows = json.loads((data_folder("igniter") / "workloads.json").read_text())["app12"]
    return [
        workload(f"w{i}", rows[i % 12]["model"], rows[i % 12]["slo_ms"], rows[i % 12]["rate_rps"]) for i in range(n)
    ]


_SLO_MS = {"alexnet": (10, 15, 20), "resnet50": (20, 30, 40), "vgg19": (20, 30, 40), "ssd": (25, 40, 55)}


def random_services(seed, count):
    """Services of all models, tight and loose, large and small."""
    rng = random.Random(seed)
    found = []
    for index in range(count):
        model = rng.choice(sorted(_SLO_MS))
        slo_ms = rng.choice(_SLO_MS[model]) * rng.uniform(1, 1.6)
        found.append(workload(f"s{index}", model, slo_ms, rng.uniform(20, 300)))
    return found
