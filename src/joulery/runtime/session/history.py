"""History of a session: requests on disk, the latest decisions and warnings in memory, all of it logged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from joulery.domain.decisions import Step
from joulery.domain.serving.timeline import DecisionRecord, Tick
from joulery.runtime.session.driver import FAILED
from joulery.runtime.session.requests import RequestRecorder
from joulery.store.run.directory import RunWriter
from joulery.store.run.timeline import log_decision, log_tick

POLICY, STEP = "policy", "step"
"""Kinds of log entries: everything needed to recreate a policy, and one step of it."""
REQUESTS = "requests.rows"
"""File of the run folder that holds the requests until the report is written."""
_SETTINGS = ("set_clock", "set_power_limit", "prefer_nodes", "sleep_node", "wake_node")
"""Decisions that set a device, a node or the order of nodes, and plan nothing."""
DECISIONS_KEPT = 200
WARNINGS_KEPT = 200


def policy_entry(policy: Any) -> dict[str, Any]:
    """The log entry of a policy: everything needed to recreate it."""
    return {"name": policy.name, "service": policy.service, "policy": policy.as_dict()}


def step_entry(service: str, observation: Any, step: Step[Any]) -> dict[str, Any]:
    """The log entry of one step."""
    decisions = [asdict(decision) for decision in step.decisions]
    return {"service": service, "observation": observation.as_dict(), "decisions": decisions}


class SessionHistory:
    """Records a session in its run folder; what stays in memory is bounded.

    Args:
        writer: The run folder.

    Attributes:
        requests: Every request that ended, on disk.
        decisions: The latest decisions with their outcomes, oldest first.
        plan_count: Number of decisions so far, without those that only set a device, a node or the order of nodes.
        warnings: Warnings of the session, each once.
        latest: The latest tick; None before the first.
    """

    def __init__(self, writer: RunWriter) -> None:
        self.writer = writer
        self.requests = RequestRecorder(writer.path / REQUESTS)
        self.decisions: deque[DecisionRecord] = deque(maxlen=DECISIONS_KEPT)
        self.plan_count = 0
        self.warnings: list[str] = []
        self.latest: Tick | None = None
        self._listeners: list[Callable[[DecisionRecord], None]] = []
        self._warned: list[Callable[[str], None]] = []

    def on_decision(self, listener: Callable[[DecisionRecord], None]) -> None:
        """Call a function with every decision and its outcome."""
        self._listeners.append(listener)

    def on_warning(self, listener: Callable[[str], None]) -> None:
        """Call a function with every new warning but those of failed decisions, which :meth:`on_decision` shows."""
        self._warned.append(listener)

    def warn(self, text: str) -> None:
        """Keep and log a warning, once."""
        if self._keep(text):
            for listener in self._warned:
                listener(text)

    def _keep(self, text: str) -> bool:
        """Keep and log a warning; whether it is new."""
        if text in self.warnings:
            return False
        if len(self.warnings) < WARNINGS_KEPT:
            self.warnings.append(text)
        self.writer.log("warning", text=text)
        return True

    def add_policy(self, policy: Any) -> None:
        """Log everything needed to recreate a policy."""
        self.writer.log(POLICY, **policy_entry(policy))

    def add_step(self, service: str, observation: Any, step: Step[Any]) -> None:
        """Log one step of a policy."""
        self.writer.log(STEP, t_s=observation.now_s, **step_entry(service, observation, step))

    def add_decision(self, record: DecisionRecord) -> None:
        """Keep and log a decision; a failed one is a warning too."""
        self.decisions.append(record)
        self.plan_count += record.decision.kind not in _SETTINGS
        log_decision(self.writer, record)
        if record.outcome == FAILED:
            self._keep(f"{record.decision.kind}: {record.detail}")
        for listener in self._listeners:
            listener(record)

    def add_tick(self, tick: Tick) -> None:
        """Log a tick, and write the requests of its period to disk.

        Raises:
            CapabilityError: The disk refuses.
        """
        self.latest = tick
        log_tick(self.writer, tick)
        self.requests.flush()
