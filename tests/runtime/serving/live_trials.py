"""A policy of live trials, its driver, a real engine, and clients that never stop asking."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from joulery.domain.gpu.layout import Layout
from joulery.domain.ports import Engine
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import EnergyShare, InferRequest, ModelRef, Outcome, RequestError, RequestRecord
from joulery.policies.serving.policy import ServicePolicy
from joulery.runtime.serving.controller import ServiceObserver
from joulery.runtime.serving.layout_actuator import LayoutActuator, running_layout
from joulery.runtime.serving.live_sample import LiveSample
from joulery.runtime.session.driver import LiveDriver
from joulery.runtime.session.history import POLICY, STEP, policy_entry, step_entry
from joulery.runtime.session.requests import RequestWindow

JOULES = {"small": 1.0, "large": 4.0}
INPUTS = {"x": np.ones((1, 2), np.float32)}


class Live:
    """Trials on an engine.

    Attributes:
        records: Every decision with its outcome and the layout that ran after it.
        failed: Requests that were not answered, those before the first replica left aside.
        log: What a run's log would hold.
        asking: Clients send requests while it is set.
    """

    def __init__(self, policy: ServicePolicy, engine: Engine, model: ModelRef) -> None:
        self.engine, self.service = engine, policy.service
        self.window, self.sample = RequestWindow(self.service, 1e9), LiveSample(self.service, 0.9, warm_up_s=0.0)
        self.g_per_kwh, self.failed = 300.0, 0
        self.records: list[tuple[Any, Layout | None]] = []
        self.asking = asyncio.Event()
        self.asking.set()
        self.log: list[dict[str, Any]] = [{"kind": POLICY, **policy_entry(policy)}]
        observer = ServiceObserver(
            self.window, self.engine, policy.objectives.slo, lambda now_s: self.g_per_kwh, lambda: 0.0, self.sample
        )
        self.driver: LiveDriver[Any, Any] = LiveDriver(
            policy,
            observer.observe,
            LayoutActuator(self.engine, self.service, dict.fromkeys(policy.search.accuracy_ratio, model)).carry_out,
            watch=lambda seen, step: self.log.append({"kind": STEP, **step_entry(self.service, seen, step)}),
            record=lambda record: self.records.append((record, running_layout(self.engine, self.service))),
        )

    async def client(self) -> None:
        while True:
            await self.asking.wait()
            at_s = time.time()
            try:
                answer = await self.engine.infer(self.service, InferRequest(INPUTS))
            except RequestError as error:
                self.failed += error.outcome is not Outcome.UNKNOWN
                await asyncio.sleep(0.01)
                continue
            joules = EnergyShare(JOULES[answer.variant], None, Quality.MODELLED)
            name, replica = answer.variant, answer.replica
            end_s = time.time()
            self.sample.add(
                RequestRecord(self.service, name, replica, at_s, at_s, end_s, Outcome.OK, 0.0, 0.0, 1, joules)
            )
            await asyncio.sleep(0.002)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Step until something holds; how long that takes is not what is tested."""
        for _ in range(3000):
            await self.driver.step(time.time())
            if condition():
                return
            await asyncio.sleep(0.02)
        raise AssertionError([str(record.decision.reason) for record, _ in self.records])

    def settled(self) -> bool:
        return bool(self.records) and self.driver.state.trying is None

    async def __aenter__(self) -> "Live":
        self.clients = [asyncio.ensure_future(self.client()) for _ in range(3)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            client.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await client
