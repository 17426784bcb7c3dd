"""Ray's head is killed under a running service: the gateway's process goes on, and the service returns."""

import importlib.util
import tempfile

import numpy as np
import psutil
import pytest

from joulery.domain.serving.engine import Outcome, ReplicaState, RequestError
from tests.adapters.engines.support import ask, toy
from tests.contract.test_engine import NO_RAY, made
from tests.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=NO_RAY)]

X = np.array([[1.0, 2.0]], np.float32)


def head(folder: str) -> psutil.Process:
    """The head's control process of the cluster that keeps its files in a folder."""
    every = psutil.process_iter(["cmdline"])
    (found,) = [
        one for one in every if "gcs_server" in (line := " ".join(one.info["cmdline"] or [])) and folder in line
    ]
    return found


async def test_a_service_outlives_rays_head():
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        engine = made("ray", folder)
        try:
            await engine.apply([toy("double"), toy("double")])
            await ask(engine, x=X)
            head(folder).kill()
            outcomes = []
            await eventually(
                lambda: {view.state for view in engine.replicas()} == {ReplicaState.RESTARTING}, "the loss"
            )
            try:
                outcomes.append((await ask(engine, x=X, timeout_s=0.2)).outputs["y"].tolist())
            except RequestError as error:
                outcomes.append(error.outcome)
            assert outcomes == [Outcome.UNAVAILABLE]
            await eventually(lambda: {view.state for view in engine.replicas()} == {ReplicaState.READY}, "its return")
            assert (await ask(engine, x=X)).outputs["y"].tolist() == [[2.0, 4.0]]
            assert [view.restarts for view in engine.replicas()] == [1, 1]
        finally:
            await engine.close()
