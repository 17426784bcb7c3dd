"""The published services and the GPUs they are planned on."""

import json

from joulery.domain.gpu.provisioning import Arrivals, Workload
from joulery.domain.serving.service import Slo
from joulery.perf.catalog import profile
from joulery.perf.catalog.synthetic_t4 import synthetic_t4
from joulery.policies.placement.provisioning.predict import GpuType
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
