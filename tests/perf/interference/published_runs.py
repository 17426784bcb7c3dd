"""The published profiling runs as the fit takes them (data/igniter/profile_inputs_v100.json)."""

import json

from joulery.perf.interference.fit import CachePoint, CopiesPoint, GpuRuns, ModelRuns, SoloPoint, TwoCopies
from tests.data_folder import data_folder

BATCHES, SHARES = (1, 16, 32), (10, 50, 100)


def published_runs(name="artifact_config_v100"):
    document = json.loads((data_folder("igniter") / "profile_inputs_v100.json").read_text())[name]
    hardware = document.pop("hardware")
    gpu = GpuRuns(
        name="V100",
        power_cap_w=hardware["maxGPUpower"],
        clock_max_mhz=hardware["maxGPUfrequency"],
        idle_w=hardware["idlepower"],
        pcie_bytes_per_ms=hardware["bandwidth"],
        unit_percent=hardware["unit"],
        copies=[
            CopiesPoint(*each)
            for each in zip(hardware["power"], hardware["frequency"], hardware["idletime"], strict=True)
        ],
    )
    return gpu, {model: model_runs(runs) for model, runs in document.items()}


def model_runs(runs):
    points = [
        SoloPoint(b, r, runs["gpulatency"][i][j], runs["power"][i][j], runs["frequency"][i][j])
        for i, b in enumerate(BATCHES)
        for j, r in enumerate(SHARES)
    ]
    cache = [CachePoint(BATCHES[i], SHARES[i], runs["gpulatency"][i][i], runs["l2caches"][i]) for i in range(3)]
    pair = TwoCopies(runs["activetime_1"], runs["activetime_2"], runs["frequency_2"], runs["l2cache"])
    return ModelRuns(runs["inputdata"], runs["outputdata"], runs["kernel"], runs["idletime_1"], points, cache, pair)
