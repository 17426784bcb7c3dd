"""Results of a policy step: a new state and decisions, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Decision:
    """One action that a policy decided on, with its reason. Logged next to the observation that led to it.

    Attributes:
        kind: What to do (``set_mix``, ``preempt``, ``set_clock`` ...).
        target: What it is done to (a service, a job, a device).
        value: The new value, JSON-ready.
        policy: Name of the policy that decided.
        reason: One sentence a person understands.
        cause: Identifier of the observation or decision that caused it; empty when nothing did.
    """

    kind: str
    target: str
    value: Any
    policy: str
    reason: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Step(Generic[S]):
    """The outcome of one policy step.

    Attributes:
        state: The policy's next state; opaque to all other components.
        decisions: What to do, in order.
        wake_s: Unix seconds before which the policy has nothing to do unless something changes; None for its period.
    """

    state: S
    decisions: tuple[Decision, ...] = ()
    wake_s: float | None = None
