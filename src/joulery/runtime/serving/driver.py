"""Policies in real time: a :class:`~joulery.policies.stepper.PolicyStepper` on the wall clock."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import JouleryError
from joulery.domain.ports import Policy
from joulery.domain.serving.timeline import DecisionRecord
from joulery.policies.stepper import PolicyStepper

S = TypeVar("S")
Obs = TypeVar("Obs")

APPLIED, ADVISED, SHADOWED, FAILED = "applied", "advised", "shadowed", "failed"


class LiveDriver(Generic[S, Obs]):
    """Steps one policy at a fixed period and carries out its decisions, one after the other.

    While a decision is carried out the policy is not stepped; periods that pass meanwhile are left out. An action that
    fails is recorded and does not end the loop: the next observation shows the policy what runs.

    Args:
        policy: The pure policy.
        observe: Its observation at an instant (Unix seconds).
        act: Carries out one decision, or not; returns the outcome and a remark for the record.
        watch: Called after each step with the observation and the step: the log.
        record: Called for each decision with its outcome: the log, the screen.
        period_s: Seconds between two steps.
        now_s: The wall clock, Unix seconds.

    Attributes:
        busy_cpu_s: CPU seconds spent observing and deciding.
        failure: Why the last action failed; None when it did not.
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
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._stepper = PolicyStepper(policy, observe, lambda _, seen, step: watch(seen, step))
        self.busy_cpu_s = 0.0
        self.failure: JouleryError | None = None
        self._act, self._record = act, record
        self._period_s, self._now_s = period_s, now_s
        self._changed = asyncio.Event()

    @property
    def policy(self) -> Policy[S, Obs]:
        """The policy; another of its kind may replace it between two steps."""
        return self._stepper.policy

    @policy.setter
    def policy(self, policy: Policy[S, Obs]) -> None:
        self._stepper.policy = policy

    @property
    def state(self) -> S:
        """The policy's state after its last step."""
        return self._stepper.state

    def change(self, policy: Policy[S, Obs]) -> None:
        """Go on with another policy, from its initial state."""
        self._stepper.change(policy)

    def poke(self) -> None:
        """Something changed: step the policy now instead of at its next period."""
        self._stepper.wake_s = -math.inf
        self._changed.set()

    async def run(self) -> None:
        """Step until cancelled."""
        start = time.monotonic()
        while True:
            self._changed.clear()
            await self.step(self._now_s())
            elapsed = time.monotonic() - start
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s - elapsed % self._period_s):
                    await self._changed.wait()

    async def step(self, now_s: float) -> None:
        """One step, if the policy is due, and its decisions."""
        if not self._stepper.due(now_s):
            return
        before_s = time.thread_time()
        step = self._stepper.step(now_s)
        self.busy_cpu_s += time.thread_time() - before_s
        for decision in step.decisions:
            await self._carry_out(decision)

    async def _carry_out(self, decision: Decision) -> None:
        begun_s = self._now_s()
        self.failure = None
        try:
            outcome, detail = await self._act(decision)
        except JouleryError as error:
            self.failure, outcome, detail = error, FAILED, str(error)
        self._record(DecisionRecord(begun_s, decision, outcome, detail))
