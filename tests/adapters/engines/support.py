import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.domain.serving.engine import InferRequest, InferResponse, ModelKind, ModelRef, ReplicaSpec
from joulery.domain.serving.service import Slice, SliceKind

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
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"never came: {what or condition}")


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def children() -> set[int]:
    """The children of this process, unburied ones included; a test looks at those that were not there before it."""
    return {child.pid for child in psutil.Process().children()}
