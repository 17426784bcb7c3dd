from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import psutil

from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.domain.serving.engine import InferRequest, InferResponse, ModelKind, ModelRef, ReplicaSpec
from joulery.domain.serving.service import Slice, SliceKind
from tests.waiting import ended, eventually

CORE = Slice(SliceKind.CPU, cores=1)


def toy(name: str, *, service: str = "toy", variant: str = "v", slice_: Slice = CORE, options: str = "") -> ReplicaSpec:
    return ReplicaSpec(
        service, variant, slice_, ModelRef(ModelKind.PYTHON, f"tests.adapters.engines.toys:{name}", options)
    )


async def ask(engine: LocalEngine, *, service: str = "toy", **inputs: Any) -> InferResponse:
    timeout_s = inputs.pop("timeout_s", None)
    outputs = inputs.pop("outputs", ())
    variant = inputs.pop("variant", "")
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    return await engine.infer(service, InferRequest(arrays, outputs, timeout_s, variant))


@asynccontextmanager
async def running(*specs: ReplicaSpec, **settings: Any) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(LocalSettings(**settings))
    try:
        await engine.apply(specs)
        yield engine
    finally:
        await engine.close()


async def until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait for something that must come; how long is not what is tested."""
    await eventually(condition, what or "the condition")


def alive(pid: int) -> bool:
    return not ended(pid)


def children() -> set[int]:
    """The children of this process, zombies included; a test looks at those that were not there before it."""
    return {child.pid for child in psutil.Process().children()}
