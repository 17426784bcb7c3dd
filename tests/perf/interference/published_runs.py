"""The published profiling runs as the fit takes them (data/igniter/profile_inputs_v100.json)."""

import json

from joulery.domain.quality import Quality
from joulery.perf.interference.fit import (
    CachePoint,
    CopiesPoint,
    GpuRuns,
    ModelRuns,
    SoloPoint,
    TwoCopies,
    fit_gpu,
    fit_model,
    solo_fit,
)
from joulery.perf.interference.model import InterferenceProfile
from tests.data_folder import data_folder

BATCHES, SHARES = (1, 16, 32), (10, 50, 100)


def published_fit():
    """The profile fitted on the published runs, by the two steps of ``joulery profile``."""
    gpu, models = published_runs()
    hardware = fit_gpu(gpu)
    fitted = {name: fit_model(hardware, runs) for name, runs in models.items()}
    fits = tuple(solo_fit(hardware, name, fitted[name], runs.points) for name, runs in models.items())
    return InterferenceProfile(hardware, fitted, "igniter", "published runs", Quality.MODELLED, fits)


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
