"""Policies in real time: the live half of "one policy, two drivers" (the other is ``joulery.sim.core.driver``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import JouleryError
from joulery.domain.ports import Policy
from joulery.domain.serving.timeline import DecisionRecord

S = TypeVar("S")
Obs = TypeVar("Obs")

APPLIED, ADVISED, SHADOWED, FAILED = "applied", "advised", "shadowed", "failed"


class LiveDriver(Generic[S, Obs]):
    """Steps one policy on a fixed grid of seconds and has its decisions carried out, one after the other.

    While a decision is carried out the policy is not stepped; grid points that pass meanwhile are left out. An action
    that fails is recorded and does not end the loop: the policy sees at the next step what really runs.

    Args:
        policy: The pure policy.
        observe: What it sees at an instant (Unix seconds).
        act: Carries out one decision, or not; returns the outcome and a remark for the record.
        watch: Called after each step with the observation and the step: the log.
        record: Called for each decision with its outcome: the log, the screen.
        period_s: Distance of the grid.

    Attributes:
        policy: The policy.
        state: The policy's state after its last step.
        busy_cpu_s: CPU seconds spent observing and deciding.
        failure: Why the last action failed; None when it did not.
        policy: The policy; another of its kind may take its place between two steps.
    """

    def __init__(
        self,
        policy: Policy[S, Obs],
        observe: Callable[[float], Obs],
        act: Callable[[Decision], Awaitable[tuple[str, str]]],
        *,
        watch: Callable[[Obs, Step[S]], None],
        record: Callable[[DecisionRecord], None],
        period_s: float = 1.0,
    ) -> None:
        self.state: S = policy.initial()
        self.busy_cpu_s = 0.0
        self.failure: JouleryError | None = None
        self.policy, self._observe, self._act = policy, observe, act
        self._watch, self._record = watch, record
        self._period_s = period_s
        self._wake_s = float("-inf")
        self._changed = asyncio.Event()

    def poke(self) -> None:
        """Something changed: step the policy now instead of at the next point of the grid."""
        self._wake_s = float("-inf")
        self._changed.set()

    def change(self, policy: Policy[S, Obs]) -> None:
        """Go on with another policy, from its beginning."""
        self.policy, self.state, self._wake_s = policy, policy.initial(), float("-inf")

    async def run(self) -> None:
        """Step until cancelled."""
        start = time.monotonic()
        while True:
            self._changed.clear()
            await self.step(time.time())
            elapsed = time.monotonic() - start
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s - elapsed % self._period_s):
                    await self._changed.wait()

    async def step(self, now_s: float) -> None:
        """One step and what it decides."""
        if now_s < self._wake_s:
            return
        before_s = time.thread_time()
        observation = self._observe(now_s)
        step = self.policy.step(self.state, observation)
        self.state = step.state
        self._wake_s = float("-inf") if step.wake_s is None else step.wake_s
        self._watch(observation, step)
        self.busy_cpu_s += time.thread_time() - before_s
        for decision in step.decisions:
            await self._carry_out(decision)

    async def _carry_out(self, decision: Decision) -> None:
        begun_s = time.time()
        self.failure = None
        try:
            outcome, detail = await self._act(decision)
        except JouleryError as error:
            self.failure, outcome, detail = error, FAILED, str(error)
        self._record(DecisionRecord(begun_s, decision, outcome, detail))
