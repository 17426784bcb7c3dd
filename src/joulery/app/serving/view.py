"""Interface to show the progress of ``joulery up``: implemented by a screen, and by a silent view for ``--json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from joulery.app.doctor import Check
from joulery.app.profiling.service_profile import Obtained
from joulery.domain.serving.timeline import DecisionRecord, ServiceLabel, Tick
from joulery.policies.placement.joint.following.drift import PlanDrift
from joulery.policies.placement.standby import StandbyPolicy
from joulery.policies.serving.observation import SET_LAYOUT, SET_WEIGHTS
from joulery.policies.serving.search.trial_search import TrialSearch
from joulery.policies.serving.variants.language_family import SET_SHARES
from joulery.runtime.serving.nodes.sleep import SLEEP_NODE, WAKE_NODE
from joulery.runtime.serving.plans.plan_in_force import PlanInForce as PlanInForce
from joulery.runtime.serving.plans.planned import RUN_PLAN
from joulery.runtime.serving.running_service import ServiceSetup as ServiceSetup
from joulery.runtime.serving.session import ServingSession as ServingSession
from joulery.runtime.session.driver import APPLIED as APPLIED


def announced(record: DecisionRecord) -> bool:
    """Whether a screen shows a decision: it changes what runs, protects the SLO, tries a layout, or concerns a standby.

    Nodes that sleep or wake are shown too. Layouts kept without a trial are only listed in the report.
    """
    decision = record.decision
    if decision.kind in (SET_SHARES, SLEEP_NODE, WAKE_NODE):
        return True
    if decision.kind == SET_WEIGHTS:
        return decision.cause in ("threat", "split")
    changed = decision.kind in (SET_LAYOUT, RUN_PLAN) and decision.cause != "start"
    return changed or decision.policy in (TrialSearch.name, StandbyPolicy.name, PlanDrift.name)


class ServeView(Protocol):
    """Shows a run as it goes."""

    def machine(self, machine: Mapping[str, str], checks: Sequence[Check]) -> None:
        """Show the machine and its meters, as ``joulery doctor`` found them."""
        ...

    def service(self, setup: ServiceSetup) -> None:
        """Show a service on this machine."""
        ...

    def profile(self, obtained: Obtained, setup: ServiceSetup) -> None:
        """Show the profile of a service."""
        ...

    def fact(self, name: str, text: str) -> None:
        """Show a fact as text."""
        ...

    def plan(self, plan: PlanInForce) -> None:
        """Show the plan that is to run."""
        ...

    def serving(self, session: ServingSession, url: str, grpc: str = "") -> None:
        """Show that requests are answered at ``url`` from now on."""
        ...

    def progress(self, done: int, of: int, what: str) -> None:
        """Show the progress of a profile."""
        ...

    def begin(self, services: Sequence[ServiceLabel], duration_s: float | None) -> None:
        """Show that the load starts; ``duration_s`` is None where the run has no planned end."""
        ...

    def relabel(self, services: Sequence[ServiceLabel]) -> None:
        """Replace the labels of the services, whose SLOs or variants have changed."""
        ...

    def tick(self, tick: Tick, now_s: float) -> None:
        """Show a period that has ended, ``now_s`` seconds after the start."""
        ...

    def decision(self, record: DecisionRecord) -> None:
        """Show a decision and its outcome."""
        ...

    def warn(self, text: str) -> None:
        """Show a warning."""
        ...
