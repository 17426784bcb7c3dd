"""Quota of ClusterQueues, counted as Kueue counts it: nominal quota, borrowing in a cohort, lending.

Quota, not nodes, limits the jobs of Kueue: a *slot* is a unit of quota of the scheduled resource, and each flavor of a
ClusterQueue is represented as a node, because one flavor must hold all of a job's units. In a hierarchy of cohorts,
only the ClusterQueue's own cohort counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from joulery.domain.errors import DataError

_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)")
_UNITS = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_KEEPS_OUT = ("NoSchedule", "NoExecute")


def resource_amount(text: object) -> float:
    """Parse a quantity of Kubernetes, such as ``2``, ``500m``, ``1.5Gi`` or ``1e3``.

    Raises:
        DataError: The text is not a quantity.
    """
    match = _QUANTITY.fullmatch(str(text).strip())
    if match is None:
        raise DataError(f"{text!r} is not a quantity of Kubernetes")
    return float(match[1] + (match[2] or "")) * _UNITS[match[3] or ""]


@dataclass(frozen=True, slots=True)
class FlavorQuota:
    """Quota of the scheduled resource in one flavor of one ClusterQueue, in units.

    Attributes:
        nominal: Its own quota.
        borrowing: Units it may borrow in addition; infinite without a limit, 0 without a cohort.
        lending: Units of its own quota that it lends.
        reserved: Units that Kueue reports as reserved.
    """

    nominal: float
    borrowing: float
    lending: float
    reserved: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterQueue:
    """A ClusterQueue with quota of the scheduled resource.

    Attributes:
        name: Its name.
        cohort: The cohort it borrows in; empty for none.
        stopped: Reason why it admits nothing now; empty where it admits jobs.
        flavors: Its quota by flavor, in the order in which Kueue tries them.
        strict: Whether a job that does not fit keeps those behind it waiting (StrictFIFO).
    """

    name: str
    cohort: str
    stopped: str
    flavors: Mapping[str, FlavorQuota]
    strict: bool = False


def parse_queue(document: Mapping[str, Any], resource: str) -> ClusterQueue | None:
    """Parse a ClusterQueue of ``kueue.x-k8s.io``; None where it has no quota of the resource.

    Raises:
        DataError: The document is not a ClusterQueue.
    """
    try:
        spec, status = document["spec"], document.get("status") or {}
        cohort = str(spec.get("cohortName") or spec.get("cohort") or "")
        reserved = {
            str(flavor["name"]): resource_amount(amount.get("total", 0))
            for flavor in status.get("flavorsReservation") or ()
            for amount in flavor.get("resources") or ()
            if amount.get("name") == resource
        }
        flavors: dict[str, FlavorQuota] = {}
        for group in spec.get("resourceGroups") or ():
            for flavor in group.get("flavors") or ():
                for quota in flavor.get("resources") or ():
                    if quota.get("name") == resource:
                        name = str(flavor["name"])
                        flavors[name] = _quota(quota, bool(cohort), reserved.get(name, 0.0))
        if not flavors:
            return None
        policy = str(spec.get("stopPolicy") or "None")
        return ClusterQueue(
            str(document["metadata"]["name"]),
            cohort,
            "" if policy == "None" else f"stopPolicy {policy}",
            flavors,
            spec.get("queueingStrategy") == "StrictFIFO",
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"a ClusterQueue is not understood: {error!r}") from error


def _quota(quota: Mapping[str, Any], in_cohort: bool, reserved: float) -> FlavorQuota:
    nominal = resource_amount(quota.get("nominalQuota", 0))
    borrowing, lending = quota.get("borrowingLimit"), quota.get("lendingLimit")
    return FlavorQuota(
        nominal,
        (math.inf if borrowing is None else resource_amount(borrowing)) if in_cohort else 0.0,
        nominal if lending is None else min(nominal, resource_amount(lending)),
        reserved,
    )


def free_units(queues: Sequence[ClusterQueue], used: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """The free units of each flavor of each ClusterQueue, by name of queue and flavor.

    They are the free part of the quota that the queue does not lend, plus the free units of its cohort, up to its
    borrowing limit. Two queues of a cohort count the same units of the cohort.

    Args:
        queues: All ClusterQueues, also those that are not scheduled: they lend and borrow.
        used: Units in use by name of queue and flavor.
    """
    pot: dict[tuple[str, str], float] = {}
    for queue in queues:
        for flavor, quota in queue.flavors.items():
            if not queue.stopped:  # Kueue borrows nothing from a queue that is stopped
                at = queue.cohort or f"\0{queue.name}", flavor
                kept = quota.nominal - quota.lending
                pot[at] = pot.get(at, 0.0) + quota.lending - max(0.0, used.get((queue.name, flavor), 0.0) - kept)
    free: dict[tuple[str, str], float] = {}
    for queue in queues:
        for flavor, quota in queue.flavors.items():
            taken = used.get((queue.name, flavor), 0.0)
            own = max(0.0, quota.nominal - quota.lending - taken)
            common = pot.get((queue.cohort or f"\0{queue.name}", flavor), 0.0)
            most = quota.nominal + quota.borrowing - taken
            free[queue.name, flavor] = 0.0 if queue.stopped else max(0.0, min(own + common, most))
    return free


@dataclass(frozen=True, slots=True)
class ResourceFlavor:
    """Properties of a flavor that decide whether a job may run on it.

    Attributes:
        name: Its name.
        labels: Labels of its nodes.
        taints: Taints of its nodes that keep jobs out, as (key, value, effect).
        tolerated: Tolerations that it adds to its jobs.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[tuple[str, str, str], ...] = ()
    tolerated: tuple[Mapping[str, Any], ...] = ()

    def suits(self, template: Mapping[str, Any], known: frozenset[str]) -> bool:
        """Whether Kueue may assign the flavor to these containers, by node selector, affinity and tolerations.

        Args:
            template: The ``spec`` of the template.
            known: Keys of the labels of all flavors: Kueue ignores other keys.
        """
        tolerations = [*(template.get("tolerations") or ()), *self.tolerated]
        if not all(any(_tolerates(one, taint) for one in tolerations) for taint in self.taints):
            return False
        selector = template.get("nodeSelector") or {}
        if any(key in known and self.labels.get(key) != value for key, value in selector.items()):
            return False
        affinity = (template.get("affinity") or {}).get("nodeAffinity") or {}
        terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
        wanted = [[rule for rule in term.get("matchExpressions") or () if rule.get("key") in known] for term in terms]
        return not wanted or any(all(_matches(rule, self.labels) for rule in rules) for rules in wanted)


def parse_flavor(document: Mapping[str, Any]) -> ResourceFlavor:
    """Parse a ResourceFlavor of ``kueue.x-k8s.io``.

    Raises:
        DataError: The document is not a ResourceFlavor.
    """
    try:
        spec = document.get("spec") or {}
        taints = (
            (str(taint["key"]), str(taint.get("value") or ""), str(taint["effect"]))
            for taint in spec.get("nodeTaints") or ()
            if taint.get("effect") in _KEEPS_OUT
        )
        labels = {str(key): str(value) for key, value in (spec.get("nodeLabels") or {}).items()}
        tolerated = tuple(spec.get("tolerations") or ())
        return ResourceFlavor(str(document["metadata"]["name"]), labels, tuple(taints), tolerated)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"a ResourceFlavor is not understood: {error!r}") from error


def label_keys(flavors: Iterable[ResourceFlavor]) -> frozenset[str]:
    """The keys of the labels of these flavors."""
    return frozenset(key for flavor in flavors for key in flavor.labels)


def _tolerates(toleration: Mapping[str, Any], taint: tuple[str, str, str]) -> bool:
    key, value, effect = taint
    if toleration.get("effect") not in (None, "", effect) or toleration.get("key") not in (None, "", key):
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == value


def _matches(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether labels match one expression of a node selector; an unknown operator matches: Kueue decides."""
    found, values = labels.get(str(rule.get("key"))), [str(value) for value in rule.get("values") or ()]
    operator = rule.get("operator")
    if operator == "In":
        return found in values
    if operator == "NotIn":
        return found not in values
    if operator == "Exists":
        return found is not None
    return found is None if operator == "DoesNotExist" else True
