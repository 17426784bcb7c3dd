"""Policies in virtual time: a :class:`~joulery.policies.stepper.PolicyStepper` on a kernel's instants.

:class:`Driver` steps a policy on a grid of instants, after everything else of the instant
(:attr:`~joulery.sim.core.kernel.Rank.POLICY`), and skips it until its ``wake_s``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

from joulery.domain.decisions import Decision, Step
from joulery.domain.ports import Policy
from joulery.policies.stepper import PolicyStepper
from joulery.sim.core.kernel import Kernel, Rank

S = TypeVar("S")
Obs = TypeVar("Obs")


_SURELY_NEXT = 0.999
"""Share of a period: a step due in less than that is the next grid instant; the rest allows for rounding."""


class Driver(Generic[S, Obs]):
    """Steps one policy inside a kernel.

    The policy is stepped at ``start_s + k * period_s``. After a step with ``wake_s``, grid instants before ``wake_s``
    are skipped: for a policy whose ``wake_s`` is right the decisions are those of stepping it every period.
    Without a period the policy is stepped exactly at ``wake_s``, and otherwise only when :meth:`poke` reports
    a change.

    Args:
        kernel: The kernel to run in.
        name: Unique name of this driver; names its events.
        policy: The pure policy.
        observe: Returns the policy's observation at an instant.
        act: Carries out one decision; called in the policy's order.
        period_s: Interval of the grid, seconds; None for a policy that acts only when woken.
        start_s: First step, seconds; now when None.
        watch: Called after each step with the instant, the observation and the step, for logs and tests.
    """

    def __init__(
        self,
        kernel: Kernel,
        name: str,
        policy: Policy[S, Obs],
        observe: Callable[[float], Obs],
        act: Callable[[float, Decision], None],
        *,
        period_s: float | None,
        start_s: float | None = None,
        watch: Callable[[float, Obs, Step[S]], None] | None = None,
    ) -> None:
        if period_s is not None and not 0 < period_s < math.inf:
            raise ValueError(f"{name}: a policy needs a positive, finite period or none, not {period_s} s")
        self._stepper = PolicyStepper(policy, observe, watch)
        self._kernel, self._kind, self._act = kernel, f"policy {name}", act
        self._period_s = period_s
        self._start_s = kernel.now_s if start_s is None else start_s
        self._due_s, self._last_s, self._acting = self._start_s, -math.inf, False
        kernel.on(self._kind, Rank.POLICY, self._step)
        kernel.at(self._due_s, self._kind)

    @property
    def state(self) -> S:
        """The policy's state after its last step."""
        return self._stepper.state

    @property
    def steps(self) -> int:
        """Number of steps of the policy."""
        return self._stepper.steps

    @property
    def due_s(self) -> float:
        """Time of the policy's next step, seconds; infinity when only :meth:`poke` can wake it."""
        return self._due_s

    def poke(self) -> None:
        """Request a step after a change: at the next grid instant, or within this instant if the policy has no grid.

        Several pokes cause one step. Changes made by the policy's own decisions do not wake it.
        """
        if self._acting:
            return
        now_s = self._kernel.now_s
        if self._period_s is None:
            due_s = max(now_s, self._start_s)
        elif self._due_s - now_s < _SURELY_NEXT * self._period_s:
            return
        else:
            due_s = self._grid_at_or_after(now_s if self._last_s < now_s else math.nextafter(now_s, math.inf))
        if due_s < self._due_s:
            self._due_s = due_s
            self._kernel.at(due_s, self._kind)

    def _step(self, t_s: float, _payload: object) -> None:
        if t_s != self._due_s:
            return  # a poke moved this step forward; it has been taken
        step = self._stepper.step(t_s)
        self._last_s, self._due_s = t_s, self._next(t_s, step.wake_s)
        if self._due_s < math.inf:
            self._kernel.at(self._due_s, self._kind)
        self._acting = True
        for decision in step.decisions:
            self._act(t_s, decision)
        self._acting = False

    def _next(self, t_s: float, wake_s: float | None) -> float:
        if self._period_s is None:
            return math.inf if wake_s is None else max(wake_s, math.nextafter(t_s, math.inf))
        following = self._grid_at_or_after(math.nextafter(t_s, math.inf))
        return following if wake_s is None or wake_s <= following else self._grid_at_or_after(wake_s)

    def _grid_at_or_after(self, t_s: float) -> float:
        """The first grid instant at or after ``t_s``, by multiplication: a long run does not drift."""
        assert self._period_s is not None
        if not t_s < math.inf:
            return math.inf
        count = max(0, math.ceil((t_s - self._start_s) / self._period_s))
        while count > 0 and self._start_s + (count - 1) * self._period_s >= t_s:
            count -= 1
        while self._start_s + count * self._period_s < t_s:
            count += 1
        return self._start_s + count * self._period_s
