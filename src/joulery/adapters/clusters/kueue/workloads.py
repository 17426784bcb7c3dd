"""Conversion of Kueue's Workloads into training jobs.

A Workload represents a Job, a JobSet, a RayJob, a PyTorchJob or anything else that Kueue admits. Its templates contain
the annotations of the owner's templates, so only Workloads are read:

- ``joulery/no-stop: "true"``: once admitted, the job is not stopped;
- ``joulery/by: "2026-11-27T18:00:00Z"``: the deadline of the job.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from joulery.adapters.clusters.kueue.quotas import resource_amount
from joulery.domain.cluster import ClusterJob, JobState
from joulery.domain.errors import DataError

HELD = "joulery/held"
"""Label of the workloads that joulery holds."""
STOPS = "joulery/stops"
"""Annotation: how often joulery stopped this one."""
NO_STOP, BY = "joulery/no-stop", "joulery/by"
JOB_UID = "kueue.x-k8s.io/job-uid"
_UID = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_LACKS = re.compile(r"(?:insufficient unused quota (?:in cohort )?|borrowing limit )for (\S+) in flavor")
_WAITS_FOR_QUOTA = "WaitingForQuota"
_PREEMPTS = "pending the preemption"


@dataclass(frozen=True, slots=True)
class KueueWorkload:
    """A Workload as the API server returns it.

    Attributes:
        document: The object.
    """

    document: Mapping[str, Any]

    def _part(self, *keys: str) -> Mapping[str, Any]:
        found: Any = self.document
        for key in keys:
            found = found.get(key) or {}
        if not isinstance(found, dict):
            raise DataError(f"a Workload is not understood: {'.'.join(keys)} is {found!r}")
        return found

    @property
    def name(self) -> str:
        """Its name."""
        return str(self._part("metadata").get("name") or "")

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return str(self._part("metadata").get("namespace") or "")

    @property
    def owner(self) -> Mapping[str, Any]:
        """The Job or other object that it represents; empty where it has none."""
        owners = self._part("metadata").get("ownerReferences") or ()
        return next((one for one in owners if one.get("controller")), owners[0] if owners else {})

    @property
    def uid(self) -> str:
        """The UID of the object that it represents: a Workload may be created again, while its Job remains."""
        labels = self._part("metadata", "labels")
        return str(labels.get(JOB_UID) or self.owner.get("uid") or self._part("metadata").get("uid") or "")

    @property
    def number(self) -> int:
        """The job's number: the first 48 bits of the UID, which are random."""
        match = _UID.fullmatch(self.uid)
        digits = match[1] + match[2] if match else hashlib.blake2b(self.uid.encode(), digest_size=6).hexdigest()
        return int(digits, 16)

    @property
    def version(self) -> str:
        """Its ``resourceVersion``."""
        return str(self._part("metadata").get("resourceVersion") or "")

    @property
    def active(self) -> bool:
        """Whether Kueue may admit it."""
        return self._part("spec").get("active") is not False

    @property
    def held(self) -> bool:
        """Whether it has joulery's mark."""
        return HELD in self._part("metadata", "labels")

    @property
    def deleted(self) -> bool:
        """Whether it is being deleted."""
        return bool(self._part("metadata").get("deletionTimestamp"))

    @property
    def stops(self) -> int:
        """Number of times that joulery stopped it."""
        text = str(self._part("metadata", "annotations").get(STOPS, "0"))
        return int(text) if text.isdecimal() else 0

    @property
    def queue(self) -> str:
        """Its LocalQueue."""
        return str(self._part("spec").get("queueName") or "")

    @property
    def reserved(self) -> bool:
        """Whether it holds quota."""
        return self.is_true("QuotaReserved")

    @property
    def over(self) -> bool:
        """Whether it ended."""
        return self.is_true("Finished")

    def condition(self, kind: str) -> Mapping[str, Any]:
        """A condition; empty where it has none of this kind."""
        conditions = self._part("status").get("conditions") or ()
        return next((one for one in conditions if one.get("type") == kind), {})

    def is_true(self, kind: str) -> bool:
        """Whether a condition holds."""
        return self.condition(kind).get("status") == "True"

    def since_s(self, kind: str) -> float:
        """The time of a condition's last change, Unix seconds; NaN where unknown."""
        return time_of(self.condition(kind).get("lastTransitionTime"))

    @property
    def templates(self) -> tuple[Mapping[str, Any], ...]:
        """The templates of its containers, one for each set."""
        return tuple(one.get("template") or {} for one in self._part("spec").get("podSets") or ())

    def annotation(self, name: str) -> str:
        """An annotation of the workload itself, else of a template; empty where there is none."""
        places = (self._part("metadata"), *(one.get("metadata") or {} for one in self.templates))
        return next((str(at["annotations"][name]) for at in places if name in (at.get("annotations") or {})), "")

    def wanted(self, resource: str) -> int:
        """Units of the resource that it requests."""
        sets = self._part("spec").get("podSets") or ()
        total = sum(int(one.get("count", 1)) * _requested(one.get("template") or {}, resource) for one in sets)
        return math.ceil(total - 1e-9)

    def holding(self, resource: str) -> dict[str, float]:
        """Units of the resource that Kueue has reserved for it, by flavor."""
        found: dict[str, float] = {}
        for one in self._part("status", "admission").get("podSetAssignments") or ():
            flavor = (one.get("flavors") or {}).get(resource)
            if flavor is not None:
                units = resource_amount((one.get("resourceUsage") or {}).get(resource, 0))
                found[str(flavor)] = found.get(str(flavor), 0.0) + units
        return found

    @property
    def admitted_to(self) -> str:
        """The ClusterQueue whose quota it holds; empty where it holds none."""
        return str(self._part("status", "admission").get("clusterQueue") or "")


def parse_workload(document: Mapping[str, Any]) -> KueueWorkload:
    """Parse a Workload.

    Raises:
        DataError: It has no name, no namespace or no UID.
    """
    workload = KueueWorkload(document)
    try:
        if not (workload.name and workload.namespace and workload.uid):
            raise DataError("a Workload is not understood: it has no name, namespace or UID")
    except (AttributeError, TypeError, IndexError) as error:
        raise DataError(f"a Workload is not understood: {error!r}") from error
    return workload


def state_of(workload: KueueWorkload) -> JobState:
    """The state of a workload."""
    if workload.over:
        reason = workload.condition("Finished")
        failed = "fail" in f"{reason.get('reason', '')} {reason.get('message', '')}".lower()
        rejected = reason.get("reason") in ("AdmissionChecksRejected", "OutOfSync")
        return JobState.FAILED if failed or rejected else JobState.DONE
    if not workload.reserved:
        return JobState.WAITING
    stops = workload.is_true("Evicted") or not workload.active or workload.deleted
    return JobState.STOPPING if stops else JobState.RUNNING


def verdict(workload: KueueWorkload, resource: str) -> tuple[str, bool]:
    """Kueue's reason not to admit a waiting workload even on free units, and whether it named only missing units.

    A verdict from before the last change of the workload is ignored.
    """
    if not workload.active or workload.reserved:
        return "", False
    condition = workload.condition("QuotaReserved")
    seen, now = condition.get("observedGeneration"), workload.document["metadata"].get("generation")
    if not condition or (seen and now and int(seen) < int(now)):
        return "", False
    message = " ".join(str(condition.get("message") or "").split())
    if _PREEMPTS in message.lower():  # Kueue makes room by itself
        return "", False
    lacks = set(_LACKS.findall(message))
    if lacks == {resource} or (not lacks and condition.get("reason") == _WAITS_FOR_QUOTA):
        return "", True
    return (message or str(condition.get("reason") or ""))[:200], False


def to_job(workload: KueueWorkload, resource: str, pool: str, runs_on: frozenset[str] | None) -> ClusterJob | None:
    """Convert a workload into a job; None where it requests and holds none of the resource.

    Args:
        workload: The workload.
        resource: The resource of which a unit is a slot.
        pool: Its ClusterQueue; empty where its LocalQueue is not known.
        runs_on: Nodes (flavors) that suit it; None for all.

    Raises:
        DataError: A value in the workload is invalid.
    """
    try:
        wanted = workload.wanted(resource)
        holding = workload.holding(resource)
        if wanted < 1 and not any(holding.values()):
            return None
        return _job(workload, resource, max(1, wanted), holding, pool, runs_on)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"workload {workload.namespace}/{workload.name} is not understood: {error!r}") from error


def _job(
    workload: KueueWorkload,
    resource: str,
    wanted: int,
    holding: Mapping[str, float],
    pool: str,
    runs_on: frozenset[str] | None,
) -> ClusterJob:
    state = state_of(workload)
    busy = state in (JobState.RUNNING, JobState.STOPPING)
    admitted = workload.is_true("Admitted")
    blocked, judged = verdict(workload, resource)
    spec, metadata = workload.document["spec"], workload.document["metadata"]
    longest = spec.get("maximumExecutionTimeSeconds")
    requeue = (workload.document.get("status") or {}).get("requeueState") or {}
    foreign = not workload.active and not workload.held and not state.over
    return ClusterJob(
        id=workload.number,
        name=str(workload.owner.get("name") or workload.name),
        owner=workload.namespace,
        account=pool,
        partition=workload.queue,
        submit_s=time_of(metadata.get("creationTimestamp"), 0.0),
        state=state,
        slots=round(sum(holding.values())) if busy else 0,
        shape=wanted,
        min_slots=wanted,
        max_slots=wanted,
        held_by_us=workload.held and not workload.active and not state.over,
        marked=workload.held and not state.over,
        exempt="deactivated by its owner, an administrator or Kueue" if foreign else "",
        restarts=workload.stops,
        pool=pool,
        nodes=tuple(f"{workload.admitted_to}/{flavor}" for flavor in sorted(holding)) if busy else (),
        spread=False,
        start_s=workload.since_s("Admitted") if state is JobState.RUNNING and admitted else math.nan,
        eligible_s=time_of(requeue.get("requeueAt"), 0.0),
        priority=float(spec.get("priority") or 0),
        blocked=blocked,
        judged=judged,
        # Between the reservation and the admission Kueue waits for checks, such as that of nodes being added.
        stoppable=workload.annotation(NO_STOP).lower() != "true" and admitted,
        runs_on=runs_on,
        deadline_s=time_of(workload.annotation(BY), math.inf),
        limit_s=math.nan if longest is None else float(longest),
    )


def time_of(text: object, otherwise: float = math.nan) -> float:
    """Parse a time such as ``2026-11-23T14:00:00Z``, Unix seconds; ``otherwise`` where the text is not a time."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return otherwise


def _requested(template: Mapping[str, Any], resource: str) -> float:
    """The units that one copy of a template requests: the sum of its containers, or its largest init container."""

    def of(container: Mapping[str, Any]) -> float:
        resources = container.get("resources") or {}
        found = (resources.get("requests") or {}).get(resource, (resources.get("limits") or {}).get(resource, 0))
        return resource_amount(found)

    spec = template.get("spec") or {}
    first = [of(one) for one in spec.get("initContainers") or ()]
    return max([sum(of(one) for one in spec.get("containers") or ()), *first])
