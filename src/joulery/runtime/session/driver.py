"""Run policies in real time: a :class:`~joulery.policies.stepper.PolicyStepper` on the wall clock."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import JouleryError
from joulery.domain.ports import Policy
from joulery.domain.serving.timeline import DecisionRecord
from joulery.policies.stepper import PolicyStepper
from joulery.steady_time import unix_s

S = TypeVar("S")
Obs = TypeVar("Obs")

APPLIED, ADVISED, SHADOWED, FAILED = "applied", "advised", "shadowed", "failed"
SUPERSEDED = "superseded"


class LiveDriver(Generic[S, Obs]):
    """Steps one policy at a fixed period and carries out its decisions, one after the other.

    While a decision is carried out the policy is not stepped; periods that pass meanwhile are left out. With ``quick``
    kinds, stepping continues: decisions of those kinds are carried out at once while a slow one runs, and another slow
    one cancels it. An action that fails is recorded and does not end the loop: the next observation shows the policy
    what runs.

    Args:
        policy: The pure policy.
        observe: Its observation at an instant (Unix seconds).
        act: Carries out one decision, or not; returns the outcome and a remark for the record.
        watch: Called after each step with the observation and the step: the log.
        record: Called for each decision with its outcome: the log, the screen.
        period_s: Seconds between two steps.
        now_s: The wall clock, Unix seconds.
        quick: Kinds of decisions that take no time; None where the policy waits for each of its decisions.
        refresh: Awaited before each step to renew the observed values; None where they are always current.

    Attributes:
        busy_cpu_s: CPU seconds spent observing and deciding.
        failure: Error of the last action; None when it did not fail.
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
        now_s: Callable[[], float] = unix_s,
        quick: frozenset[str] | None = None,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._stepper = PolicyStepper(policy, observe, lambda _, seen, step: watch(seen, step))
        self.busy_cpu_s = 0.0
        self.failure: JouleryError | None = None
        self._act, self._record = act, record
        self._period_s, self._now_s = period_s, now_s
        self._changed, self._quick = asyncio.Event(), quick
        self._refresh = refresh
        self._acting: asyncio.Task[None] | None = None

    @property
    def acting(self) -> bool:
        """Whether a decision is being carried out."""
        return self._acting is not None and not self._acting.done()

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
        """Continue with another policy, from its initial state."""
        self._stepper.change(policy)

    def poke(self) -> None:
        """Step the policy now instead of at its next period, because something changed."""
        self._stepper.wake_s = -math.inf
        self._changed.set()

    async def run(self) -> None:
        """Step until cancelled."""
        start = time.monotonic()
        try:
            while True:
                self._changed.clear()
                if self._refresh is not None:
                    await self._refresh()
                if self._quick is None:
                    await self.step(self._now_s())
                else:
                    await self._step_beside(self._now_s(), self._quick)
                elapsed = time.monotonic() - start
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._period_s - elapsed % self._period_s):
                        await self._changed.wait()
        finally:
            await self._end_action()

    async def step(self, now_s: float) -> None:
        """Make one step, if the policy is due, and carry out its decisions."""
        for decision in self._decisions(now_s):
            await self._carry_out(decision)

    def _decisions(self, now_s: float) -> tuple[Decision, ...]:
        """The decisions of one step; none where the policy is not due."""
        if not self._stepper.due(now_s):
            return ()
        before_s = time.thread_time()
        step = self._stepper.step(now_s)
        self.busy_cpu_s += time.thread_time() - before_s
        return step.decisions

    async def _step_beside(self, now_s: float, quick: frozenset[str]) -> None:
        """Make one step while a decision is being carried out; another slow decision cancels that one."""
        if self._acting is not None and self._acting.done():
            self._acting.result()  # a defect is not swallowed
            self._acting = None
        slow = []
        for decision in self._decisions(now_s):
            if decision.kind in quick:
                await self._carry_out(decision)
            else:
                slow.append(decision)
        if slow:
            await self._end_action()
            self._acting = asyncio.create_task(self._carry_out_all(slow), name="decision")
            self._acting.add_done_callback(lambda _: self._changed.set())

    async def _end_action(self) -> None:
        """Cancel the running action and wait until it has cleaned up."""
        acting, self._acting = self._acting, None
        if acting is None:
            return
        acting.cancel()
        await asyncio.wait({acting})
        if not acting.cancelled():
            acting.result()  # a defect is not swallowed

    async def _carry_out_all(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            await self._carry_out(decision)

    async def _carry_out(self, decision: Decision) -> None:
        begun_s = self._now_s()
        self.failure = None
        try:
            outcome, detail = await self._act(decision)
        except JouleryError as error:
            self.failure, outcome, detail = error, FAILED, str(error)
        except asyncio.CancelledError:
            self._record(DecisionRecord(begun_s, decision, SUPERSEDED, "another decision took its place"))
            raise
        self._record(DecisionRecord(begun_s, decision, outcome, detail))
