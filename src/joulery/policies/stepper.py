"""Steps a policy: observes, decides and logs. The simulator and the live loops share this code.

A driver owns time: :class:`joulery.sim.core.driver.Driver` steps at a kernel's instants, the live loops by the wall
clock. The step itself, and the time at which a policy needs the next one, are the same for all drivers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

from joulery.domain.decisions import Step
from joulery.domain.ports import Policy

S = TypeVar("S")
Obs = TypeVar("Obs")


class PolicyStepper(Generic[S, Obs]):
    """Holds one policy's state and steps it.

    Args:
        policy: The pure policy.
        observe: The policy's observation at an instant, seconds.
        watch: Called after each step with the instant, the observation and the step: the log.

    Attributes:
        policy: The policy; another of its kind may replace it between two steps.
        state: The policy's state after its last step.
        steps: Steps taken.
        wake_s: The policy need not be stepped before this instant; minus infinity for the driver's own period.
    """

    def __init__(
        self,
        policy: Policy[S, Obs],
        observe: Callable[[float], Obs],
        watch: Callable[[float, Obs, Step[S]], None] | None = None,
    ) -> None:
        self.policy = policy
        self.state: S = policy.initial()
        self.steps = 0
        self.wake_s = -math.inf
        self._observe, self._watch = observe, watch

    def due(self, now_s: float) -> bool:
        """Whether the policy is due for a step at an instant of the driver's grid."""
        return now_s >= self.wake_s

    def step(self, now_s: float) -> Step[S]:
        """Observe, decide and log; the driver carries out the decisions, in order."""
        observation = self._observe(now_s)
        step = self.policy.step(self.state, observation)
        self.state = step.state
        self.steps += 1
        self.wake_s = -math.inf if step.wake_s is None else step.wake_s
        if self._watch is not None:
            self._watch(now_s, observation, step)
        return step

    def change(self, policy: Policy[S, Obs]) -> None:
        """Replace the policy by another one, in its initial state."""
        self.policy, self.state, self.wake_s = policy, policy.initial(), -math.inf
