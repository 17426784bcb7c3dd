"""Measuring neighbours: the design of the runs, and that a known law is found again."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.app.profiling.colocation import fitted, one_request
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    ModelKind,
    ModelRef,
    Outcome,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestError,
    Transition,
)
from joulery.domain.serving.tensors import TensorSpec
from joulery.perf.interference.model import Neighbourhood, colocated_latency, solo
from joulery.runtime.profiling.colocation import ColocatedInstance, Design, cpu_as_gpu, measure_together

MODELS = {name: ModelRef(ModelKind.PYTHON, f"toys:{name}") for name in ("light", "heavy")}
WORK_MS = {"light": 2.0, "heavy": 9.0}
SLOWED = {"light": 0.4, "heavy": 0.1}
"""How much each suffers beside a neighbour that has half of the device."""


class Laws:
    """An engine whose models take what a law says; time is computed, not spent."""

    def __init__(self) -> None:
        self.specs: list[ReplicaSpec] = []
        self.seen: list[tuple[str, ...]] = []
        self.fails = False

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        self.specs = list(target)
        self.seen.append(tuple(str(spec.slice) for spec in target))
        return Transition((), (), (), 0.0, 0.0, 0.0, 0.0)

    def replicas(self) -> tuple[ReplicaView, ...]:
        tensors = (TensorSpec("x", "FP32", (-1, 3)),)
        return tuple(ReplicaView(f"r{i}", s, ReplicaState.READY, inputs=tensors) for i, s in enumerate(self.specs))

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        await asyncio.sleep(0)
        if self.fails:
            raise RequestError("no", Outcome.FAILED, variant="light")
        spec = next(spec for spec in self.specs if spec.service == service)
        batch = len(request.inputs["x"])
        share = spec.slice.share_ratio * (len(spec.cores) / 2)
        others = [other for other in self.specs if other is not spec]
        stretch = 1.0
        for other in others:
            stretch += SLOWED[spec.variant] * other.slice.share_ratio * len(other.cores) / 2
        seconds = 1e-3 * (0.5 + WORK_MS[spec.variant] * batch / share) * stretch
        return InferResponse({}, spec.variant, "r", 10.0, 10.0, 10.0 + seconds, seconds, seconds)

    async def close(self) -> None:
        return None


async def test_every_model_is_timed_alone_and_beside_every_other_and_itself():
    engine = Laws()
    found = await measure_together(engine, MODELS, (3, 5), one_request, Design(runs=3))
    assert len(found.solo) == 2 * 3 * 3 and len(found.pairs) == 5 + 9 + 5, (
        "nothing is measured twice the other way round"
    )
    assert {(p.model_1, p.model_2) for p in found.pairs} == {("light", "light"), ("light", "heavy"), ("heavy", "heavy")}
    assert all(p.share_1_percent + p.share_2_percent <= 100 for p in found.pairs)
    alone = next(s for s in found.solo if (s.model, s.batch, s.share_percent) == ("heavy", 4, 40.0))
    assert alone.latency_ms == pytest.approx(0.5 + 9.0 * 4 / 0.4)
    pair = next(p for p in found.pairs if (p.model_1, p.model_2, p.share_1_percent) == ("light", "heavy", 50.0))
    assert pair.latency_1_ms == pytest.approx((0.5 + 2.0 * pair.batch_1 / 0.5) * 1.2)
    assert engine.specs == [], "nothing is left running"


async def test_the_fit_finds_the_law_and_says_how_well():
    found = await measure_together(Laws(), MODELS, (3, 5), one_request, Design(runs=3))
    profile = fitted(found, 2)
    assert profile.gpu.unit_percent == min(s.share_percent for s in found.solo), "no plan goes below what was measured"
    assert fitted(found, 2, apart=True).gpu.unit_percent == 50.0
    assert profile.form == "calibrated" and "19 pairs on quotas" in profile.source
    errors = {(fit.model, fit.data): fit.mape_ratio for fit in profile.fits}
    assert {data for _, data in errors} == {"solo", "pairs", "held-out pairs"}
    assert max(errors.values()) < 0.06
    light, heavy = profile["light"], profile["heavy"]
    assert light.pcie_contention == heavy.pcie_contention == 1.0, "a CPU core has no PCIe"
    mine = solo(light, 4, 50.0)
    around = Neighbourhood().with_process(mine).with_process(solo(heavy, 4, 50.0))
    beside = colocated_latency(profile.gpu, light, 4, mine, around).total_ms
    assert beside > 1.1 * colocated_latency(profile.gpu, light, 4, mine, Neighbourhood().with_process(mine)).total_ms


async def test_apart_every_instance_has_cores_of_its_own():
    engine = Laws()
    design = Design.on_cores(2, runs=2)
    found = await measure_together(engine, MODELS, (3, 5), one_request, design)
    assert {(p.share_1_percent, p.share_2_percent) for p in found.pairs} == {(50.0, 50.0)}
    assert (
        ("cpu:1", "cpu:1") in engine.seen
        and ("cpu:2",) in engine.seen
        and not any("@" in s for t in engine.seen for s in t)
    )
    with pytest.raises(ConfigError, match="two cores"):
        Design.on_cores(1)


def test_designs_that_cannot_be():
    for wrong in ({"batches": ()}, {"batches": (0,)}, {"runs": 0}):
        with pytest.raises(ConfigError, match="1 or more"):
            Design(**wrong)
    for wrong in ({"shares": (0.0,)}, {"shares": (101.0,)}, {"pair_shares": ((60.0, 50.0),)}):
        with pytest.raises(ConfigError, match="100 % at most"):
            Design(**wrong)
    assert Design(batches=(2,)).pairs(["a"]) == [
        (ColocatedInstance("a", 2, 50.0), ColocatedInstance("a", 2, 50.0)),
        (ColocatedInstance("a", 2, 30.0), ColocatedInstance("a", 2, 70.0)),
    ]


@pytest.mark.parametrize("models", [["a"], ["a", "b"], ["a", "b", "c"]])
@pytest.mark.parametrize("design", [Design(), Design.on_cores(2), Design.on_cores(5)])
def test_however_few_models_there_are_pairs_enough_to_fit_and_batches_to_leave_out(design, models):
    pairs = design.pairs(models)
    assert len(pairs) >= 10 and len({frozenset(Counter(pair).items()) for pair in pairs}) == len(pairs)
    assert len({one.batch for pair in pairs for one in pair}) >= 3


async def test_a_model_that_does_not_answer_is_named():
    engine = Laws()
    engine.fails = True
    with pytest.raises(DataError, match="light does not answer"):
        await measure_together(engine, MODELS, (3, 5), one_request, Design(runs=1))


def test_cores_as_a_device_know_no_power_and_no_transfers():
    gpu = cpu_as_gpu(4).gpu
    assert gpu.name == "cpu-4" and gpu.unit_percent == 10.0 and gpu.idle_w == 0.0
    assert np.isfinite(gpu.power_cap_w) and gpu.delay_ms_per_neighbour == 0.0


async def test_the_embedded_engine_times_neighbours_on_cores_of_their_own(tmp_path):
    """For real, and as little of it as there can be."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("neighbours need two cores")
    model = ModelRef(ModelKind.PYTHON, "tests.runtime.toy_models:Sum", '{"busy_s": 0.002}')
    design = Design(batches=(1,), shares=(50.0,), pair_shares=((50.0, 50.0),), runs=2, apart=True)
    with (tmp_path / "log").open("wb") as log:
        engine = LocalEngine(LocalSettings(cores=tuple(cores), stderr=log.fileno()))
        try:
            found = await measure_together(engine, {"sum": model}, cores, one_request, design)
        finally:
            await engine.close()
    (alone,), (pair,) = found.solo, found.pairs
    assert alone[:3] == ("sum", 1, 50.0) and alone.latency_ms >= 2.0
    assert min(pair.latency_1_ms, pair.latency_2_ms) >= 2.0 and engine.replicas() == ()
