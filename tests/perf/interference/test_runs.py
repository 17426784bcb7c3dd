"""Coefficients from runs under MPS: those that made the runs come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from joulery.domain.errors import DataError
from joulery.perf import catalog
from joulery.perf.interference.model import (
    InterferenceProfile,
    ModelCoefficients,
    Neighbourhood,
    clock_mhz,
    colocated_latency,
    demand_w,
    solo,
)
from joulery.perf.interference.runs import (
    BATCHES,
    FASTEST_CACHE_PERCENT,
    GpuFacts,
    ModelFacts,
    ShareRun,
    configurations,
    profile_of_runs,
)

V100 = catalog.profile("v100")
FACTS = GpuFacts("A GPU", 300.0, 1530.0, 53.5, 1e7)


def played(profile: InterferenceProfile, name: str, *, hardware: bool) -> list[ShareRun]:
    """What a GPU with these coefficients would show."""
    runs = []
    for copies, batch, share in configurations(hardware=hardware):
        own, around = solo(profile[name], batch, share), Neighbourhood()
        for _ in range(copies):
            around = around.with_process(own)
        took = colocated_latency(profile.gpu, profile[name], batch, own, around)
        power = min(demand_w(profile.gpu, around), profile.gpu.power_cap_w)
        runs.append(ShareRun(copies, batch, share, took.total_ms, power, clock_mhz(profile.gpu, around)))
    return runs


def truth(name: str) -> ModelCoefficients:
    """A published model whose use of the cache is what the estimate takes it to be."""
    model = V100[name]
    rates = []
    for batch in (1, 16, 32):
        for share in (10.0, 50.0, 100.0):
            own = solo(model, batch, share)
            rates.append(1000 * batch / own.active_ms)
    return replace(model, cache_slope=FASTEST_CACHE_PERCENT / max(rates), cache_offset_percent=0.0)


@pytest.mark.parametrize("name", ["alexnet", "resnet50", "vgg19"])
def test_what_made_the_runs_is_found_again(name: str) -> None:
    model = truth(name)
    real = replace(V100, models={name: model})
    known = ModelFacts(name, model.load_bytes, model.feedback_bytes, model.kernels, model.launch_ms)
    profile = profile_of_runs(FACTS, known, played(real, name, hardware=True), V100, hardware=True)
    found = profile[name]
    for key in ("k1", "k2", "k3", "k4", "k5", "cache_sensitivity"):
        assert getattr(found, key) == pytest.approx(getattr(model, key), rel=0.02, abs=2e-3), key
    assert profile.gpu.clock_mhz_per_w == pytest.approx(V100.gpu.clock_mhz_per_w, rel=0.05, abs=1e-9) or (
        profile.gpu.clock_mhz_per_w == 0.0
    )
    by_data = {fit.data: fit for fit in profile.fits}
    assert by_data["solo"].max_ratio < 0.01
    assert by_data["held-out pairs"].max_ratio < 0.02
    assert any("L2 cache is estimated" in note for note in profile.notes)
    assert not any("kernels were not counted" in note for note in profile.notes)


@pytest.mark.parametrize("name", ["alexnet", "resnet50", "vgg19"])
def test_use_of_the_cache_is_what_a_profiler_read(name: str) -> None:
    model = replace(truth(name), cache_slope=0.5 * truth(name).cache_slope)
    real = replace(V100, models={name: model})
    read = tuple((batch, solo(model, batch, 100.0).cache_percent) for batch in BATCHES)
    known = ModelFacts(name, model.load_bytes, model.feedback_bytes, model.kernels, model.launch_ms, read)
    runs = played(real, name, hardware=True)
    profile = profile_of_runs(FACTS, known, runs, V100, hardware=True)
    found = profile[name]
    assert found.cache_slope == pytest.approx(model.cache_slope, rel=0.02)
    assert found.cache_offset_percent == pytest.approx(0.0, abs=0.5)
    assert found.cache_sensitivity == pytest.approx(model.cache_sensitivity, rel=0.05, abs=2e-3)
    assert not any("L2 cache is estimated" in note for note in profile.notes)
    with pytest.raises(DataError, match="not read at batch 32"):
        profile_of_runs(FACTS, replace(known, cache_percent=read[:2]), runs, V100, hardware=True)


def test_a_second_model_keeps_the_gpu_and_the_first() -> None:
    model = truth("resnet50")
    real = replace(V100, models={"resnet50": model}, gpu=V100.gpu)
    known = ModelFacts("mine", model.load_bytes, model.feedback_bytes, model.kernels, model.launch_ms)
    runs = played(real, "resnet50", hardware=False)
    assert len(runs) == 12
    profile = profile_of_runs(FACTS, known, runs, V100, hardware=False)
    assert profile.gpu == V100.gpu
    assert set(profile.models) == {*V100.models, "mine"}
    assert profile.fits[-1].model == "mine"


def test_what_was_not_measured_is_said() -> None:
    model = replace(truth("alexnet"), kernels=0.0, launch_ms=0.0)
    real = replace(V100, models={"alexnet": model})
    known = ModelFacts("alexnet", model.load_bytes, model.feedback_bytes)
    profile = profile_of_runs(FACTS, known, played(real, "alexnet", hardware=False), V100, hardware=False)
    assert any("kernels were not counted" in note for note in profile.notes)
    assert profile["alexnet"].k2 == pytest.approx(model.k2, rel=0.02)


def test_neighbours_that_seem_to_help_are_noise() -> None:
    model = truth("alexnet")
    real = replace(V100, models={"alexnet": model})
    runs = [
        run._replace(latency_ms=0.9 * run.latency_ms, power_w=100.0 - run.batch) if run.copies == 2 else run
        for run in played(real, "alexnet", hardware=False)
    ]
    known = ModelFacts("alexnet", model.load_bytes, model.feedback_bytes, model.kernels, model.launch_ms)
    profile = profile_of_runs(FACTS, known, runs, V100, hardware=False)
    assert profile["alexnet"].cache_sensitivity == 0.0


def test_runs_that_cannot_be() -> None:
    model = truth("alexnet")
    runs = played(replace(V100, models={"alexnet": model}), "alexnet", hardware=False)
    with pytest.raises(DataError, match=r"no solo .*1 at 10 %"):
        profile_of_runs(FACTS, ModelFacts("alexnet", 1.0, 1.0), runs[1:], V100, hardware=False)
    with pytest.raises(DataError, match="no run of two copies"):
        profile_of_runs(FACTS, ModelFacts("alexnet", 1.0, 1.0), runs[:9], V100, hardware=False)
    with pytest.raises(DataError, match="transfers and launches alone"):
        profile_of_runs(FACTS, ModelFacts("alexnet", 1e9, 1.0), runs, V100, hardware=False)
