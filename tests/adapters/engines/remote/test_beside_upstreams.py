"""Variants of this machine beside upstreams: shares, charges, and who answers when one of them is lost."""

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.adapters.engines.remote.beside_upstreams import LocalVariants
from joulery.adapters.engines.remote.open_inference import OpenInferenceSettings
from joulery.adapters.engines.remote.upstreams import UpstreamEngine
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.serving.engine import (
    InferRequest,
    ModelKind,
    ModelRef,
    Outcome,
    ReplicaSpec,
    ReplicaState,
    RequestError,
)
from joulery.domain.serving.mix import MixStep, VariantMix
from joulery.domain.serving.service import Slice, SliceKind
from tests.adapters.engines.remote.test_upstreams import Upstreams
from tests.waiting import eventually

CORES = {"net": ((0,),)}
MODELS = {
    "large": ModelRef.parse("http://large:8000/net"),
    "small": ModelRef(ModelKind.PYTHON, "tests.runtime.toy_models:Double", '{"busy_s": 0.002}'),
}


def slots(**counts: int) -> list[ReplicaSpec]:
    others = {name: tuple(one for one in MODELS.items() if one[0] != name) for name in MODELS}
    whole = Slice(SliceKind.WHOLE)
    return [
        ReplicaSpec("net", name, whole, MODELS[name], warm=others[name])
        for name, count in counts.items()
        for _ in range(count)
    ]


@asynccontextmanager
async def engine_of(servers: Upstreams, *specs: ReplicaSpec) -> AsyncIterator[tuple[UpstreamEngine, LocalEngine]]:
    here = LocalEngine(LocalSettings(cores=(0,)))
    engine = UpstreamEngine(OpenInferenceSettings(probe_s=0.001), servers, LocalVariants(here, CORES))
    try:
        await engine.apply(specs)
        yield engine, here
    finally:
        await engine.close()
        assert not [view for view in here.replicas() if view.pid]


async def ask(engine: UpstreamEngine, **fields: Any) -> Any:
    answer = await engine.infer("net", InferRequest({"x": np.ones((1, 2), np.float32)}, **fields))
    assert answer.outputs["y"].tolist() == [[2.0, 2.0]]
    return answer


@pytest.fixture
def servers() -> Upstreams:
    return Upstreams()


async def test_a_layout_shares_requests_and_each_is_charged_its_own_seconds(servers: Upstreams) -> None:
    async with engine_of(servers, *slots(large=1, small=1)) as (engine, here):
        answers = [await ask(engine) for _ in range(20)]
        assert Counter(answer.variant for answer in answers) == {"large": 10, "small": 10}
        for answer in answers:
            took_s = answer.end_s - answer.start_s
            if answer.variant == "small":
                assert answer.cpu_s >= 0.002, "its CPU seconds"
            else:
                assert answer.cpu_s >= took_s - 1e-6, "the seconds of the slot"
        assert len(here.replicas()) == 1
        assert {view.spec.variant for view in engine.replicas()} == {"large", "small"}
        assert all(set(view.warm) == set(MODELS) - {view.spec.variant} for view in engine.replicas())


@pytest.mark.parametrize("share", [0.25, 1.0])
async def test_a_mix_steers_requests_to_this_machine(servers: Upstreams, share: float) -> None:
    async with engine_of(servers, *slots(large=2)) as (engine, here):
        (pid,) = {view.pid for view in here.replicas()}
        engine.set_mix("net", VariantMix((MixStep(100.0, 1.0, (("small", share),)),)))
        answers = [await ask(engine) for _ in range(20)]
        assert Counter(answer.variant for answer in answers)["small"] == round(20 * share)
        await engine.apply(slots(small=2))
        assert {view.pid for view in here.replicas()} == {pid}, "another layout loads nothing"


async def test_this_machine_answers_for_lost_servers_also_at_the_start(servers: Upstreams) -> None:
    servers.dead.add("large")
    async with engine_of(servers, *slots(large=2)) as (engine, _):
        assert {(await ask(engine)).variant for _ in range(4)} == {"small"}
        with pytest.raises(RequestError) as caught:
            await ask(engine, variant="large")
        assert caught.value.outcome is Outcome.UNAVAILABLE
        servers.dead.clear()
        await eventually(lambda: {v.state for v in engine.replicas()} == {ReplicaState.READY}, "the server is back")
        assert (await ask(engine)).variant == "large"


async def test_a_server_answers_while_the_replica_here_starts_again(servers: Upstreams) -> None:
    async with engine_of(servers, *slots(small=1)) as (engine, here):
        (replica,) = here.replicas()
        os.kill(replica.pid, signal.SIGKILL)
        await eventually(lambda: here.replicas()[0].pid != replica.pid, "the worker has ended")
        answers = [await ask(engine) for _ in range(4)]
        assert all(answer.attempts == 1 for answer in answers)
        await eventually(lambda: here.replicas()[0].restarts == 1 and here.replicas()[0].pid != 0, "it is back")
        assert (await ask(engine)).variant == "small"


async def test_a_change_that_fails_leaves_both_sides_as_they_were(servers: Upstreams) -> None:
    broken = ModelRef(ModelKind.PYTHON, "tests.runtime.toy_models:Nothing")
    async with engine_of(servers, *slots(large=1, small=1)) as (engine, _):
        whole = Slice(SliceKind.WHOLE)
        with pytest.raises((ConfigError, CapabilityError)):
            await engine.apply([ReplicaSpec("net", "broken", whole, broken, warm=tuple(MODELS.items()))])
        assert Counter([(await ask(engine)).variant for _ in range(4)]) == {"large": 2, "small": 2}


async def test_a_service_without_cores_runs_no_model_here(servers: Upstreams) -> None:
    with pytest.raises(ConfigError, match="model of this machine"):
        async with engine_of(servers, ReplicaSpec("other", "small", Slice(SliceKind.WHOLE), MODELS["small"])):
            raise AssertionError
