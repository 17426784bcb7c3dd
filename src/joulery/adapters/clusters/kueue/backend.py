"""Cluster backend for Kueue, which admits the jobs and whose state of them is authoritative.

``spec.active: false`` in a Workload keeps a waiting job from starting, and stops a running one: Kueue suspends it, its
containers get SIGTERM and their grace period, and it waits under the same number. The mark that joulery holds a
workload and the hold itself are one change, so neither exists without the other. Every change states the version of the
object on which it is based: if Kueue changed the object since, the change is decided again on the new version.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from joulery.adapters.clusters.kueue.access import find_access
from joulery.adapters.clusters.kueue.api import KubernetesApi
from joulery.adapters.clusters.kueue.quotas import (
    ClusterQueue,
    ResourceFlavor,
    free_units,
    label_keys,
    parse_flavor,
    parse_queue,
)
from joulery.adapters.clusters.kueue.workloads import BY, HELD, STOPS, KueueWorkload, parse_workload, time_of, to_job
from joulery.adapters.clusters.progress import read_progress
from joulery.domain.cluster import (
    ClusterAction,
    ClusterJob,
    ClusterNode,
    ClusterSnapshot,
    Hold,
    Order,
    Release,
    Split,
    Start,
    Stop,
)
from joulery.domain.errors import ActuationError, CapabilityError, DataError

GROUP = "/apis/kueue.x-k8s.io"
_VERSIONS = ("v1beta2", "v1beta1", "v1")
"""Versions of the interface that are known here, the one to take first."""
_TRIES = 4
_KEPT_S = 86400.0
"""Time for which a job that ended is listed."""


@dataclass(frozen=True, slots=True)
class KueueScope:
    """Selection of the workloads that the backend schedules.

    Attributes:
        resource: The resource of which a unit is a slot.
        queues: ClusterQueues to schedule; all when empty.
        progress: Folder where jobs report their progress, each in a file named by the UID of its Job; None for none.
    """

    resource: str = "nvidia.com/gpu"
    queues: tuple[str, ...] = ()
    progress: Path | None = None


class KueueBackend:
    """Cluster backend for the jobs of a cluster with Kueue.

    Args:
        api: Client of its API server.
        scope: Selection of the workloads.
        now_s: A clock, Unix seconds.
    """

    def __init__(self, api: KubernetesApi, scope: KueueScope, now_s: Callable[[], float] = time.time) -> None:
        self._api, self._scope, self._now_s = api, scope, now_s
        self._root = ""
        self._seen: dict[int, KueueWorkload] = {}

    def snapshot(self) -> ClusterSnapshot:
        """Every workload that requests the resource, and the quota of each flavor of each ClusterQueue."""
        root = self._version()
        workloads = _newest(map(parse_workload, self._api.objects(f"{root}/workloads")))
        queues = [
            queue
            for queue in (parse_queue(one, self._scope.resource) for one in self._api.objects(f"{root}/clusterqueues"))
            if queue is not None
        ]
        names = _cluster_queues(self._api.objects(f"{root}/localqueues"))
        flavors = {flavor.name: flavor for flavor in map(parse_flavor, self._api.objects(f"{root}/resourceflavors"))}
        self._seen = {workload.number: workload for workload in workloads}
        reach = _QueueReach(queues, flavors)
        jobs = [self._job(workload, names, reach) for workload in workloads]
        nodes = self._nodes(queues, workloads)
        return ClusterSnapshot(
            sum(node.slots for node in nodes),
            tuple(sorted((job for job in jobs if job is not None), key=lambda job: job.id)),
            (*(f"ClusterQueue {queue.name} admits nothing: {queue.stopped}" for queue in queues if queue.stopped),
             *_unread_deadlines(workloads)),
            nodes=nodes,
            overtaking=not any(queue.strict for queue in queues),
        )  # fmt: skip

    def apply(self, action: ClusterAction, /) -> str:
        """Apply one change; it is safe to repeat."""
        if isinstance(action, Order):
            return "not ranked: Kueue admits released jobs by priority and age"
        if isinstance(action, Split):
            raise ActuationError(f"job {action.job} has no tasks to separate: Kueue admits it as a whole")
        if isinstance(action, Hold):
            return self._change(action.job, _held)
        if isinstance(action, Stop):
            return self._change(action.job, _stopped)
        if isinstance(action, Release):
            return self._change(action.job, _released)
        return self._change(action.job, lambda workload: self._started(workload, action))

    def close(self) -> None:
        """Close the connections to the API server."""
        self._api.close()

    def _started(self, workload: KueueWorkload, start: Start) -> tuple[Mapping[str, Any] | None, str]:
        wanted = workload.wanted(self._scope.resource)
        if workload.over:
            raise ActuationError(f"job {start.job} cannot start: it is over")
        if start.slots != wanted:
            raise ActuationError(f"job {start.job} cannot start on {start.slots}: a job of Kueue keeps its {wanted}")
        if workload.reserved and not workload.active:
            raise ActuationError(f"job {start.job} cannot start: it is stopping")
        if workload.reserved:
            return None, "it runs already"
        return _released(workload)

    def _change(self, job: int, decide: Callable[[KueueWorkload], tuple[Mapping[str, Any] | None, str]]) -> str:
        """Apply a change that is decided on the newest version of the object."""
        workload = self._seen.get(job)
        if workload is None:
            raise ActuationError(f"Kueue knows no job {job}: it ended meanwhile")
        path = f"{self._version()}/namespaces/{workload.namespace}/workloads/{workload.name}"
        for _ in range(_TRIES):
            change, remark = decide(workload)
            if change is None:
                return remark
            metadata = {**change.get("metadata", {}), "resourceVersion": workload.version}
            answer = self._api.patch(path, {**change, "metadata": metadata})
            if answer.ok:
                self._seen[job] = parse_workload(answer.document)
                return remark
            if answer.status == HTTPStatus.NOT_FOUND:
                raise ActuationError(f"Kueue knows no job {job} ({workload.name}): it ended meanwhile")
            if answer.status != HTTPStatus.CONFLICT:
                raise ActuationError(f"Kubernetes refuses to change job {job} ({workload.name}): {answer.message}")
            workload = self._read(path, job)
        raise ActuationError(f"job {job} ({workload.name}) was changed {_TRIES} times in a row by others")

    def _read(self, path: str, job: int) -> KueueWorkload:
        answer = self._api.get(path)
        if not answer.ok:
            raise ActuationError(f"Kueue knows no job {job}: it ended meanwhile")
        workload = parse_workload(answer.document)
        if workload.number != job:  # deleted and made again under the same name
            raise ActuationError(f"Kueue knows no job {job}: another has its name {workload.name}")
        self._seen[job] = workload
        return workload

    def _version(self) -> str:
        """The API path of the preferred version that both the cluster and this adapter support."""
        if not self._root:
            answer = self._api.get(GROUP)
            if answer.status == HTTPStatus.NOT_FOUND:
                raise CapabilityError(
                    "this cluster has no Kueue: kueue.x-k8s.io is not served",
                    resource="kueue.x-k8s.io",
                    hint="install Kueue: https://kueue.sigs.k8s.io/docs/installation",
                )
            if not answer.ok:
                raise CapabilityError(f"kueue.x-k8s.io cannot be read: {answer.message}", resource="kueue.x-k8s.io")
            served = [str(one.get("version")) for one in answer.document.get("versions") or ()]
            known = next((version for version in _VERSIONS if version in served), None)
            if known is None:
                raise DataError(f"Kueue serves {', '.join(served) or 'nothing'}; known here are {', '.join(_VERSIONS)}")
            self._root = f"{GROUP}/{known}"
        return self._root

    def _job(
        self, workload: KueueWorkload, names: Mapping[tuple[str, str], str], reach: _QueueReach
    ) -> ClusterJob | None:
        """Convert a workload into a job; None where it requests no slot, ended long ago or is being deleted."""
        if workload.over and self._now_s() - workload.since_s("Finished") > _KEPT_S:
            return None
        if workload.deleted and not workload.reserved:
            return None
        pool = workload.admitted_to or names.get((workload.namespace, workload.queue), "")
        job = to_job(workload, self._scope.resource, pool, reach.of(pool, workload))
        if job is None:
            return None
        exempt = job.exempt
        if not pool:
            exempt = exempt or f"LocalQueue {workload.queue or '(none)'} is not known"
        elif self._scope.queues and pool not in self._scope.queues:
            exempt = exempt or f"ClusterQueue {pool} is not scheduled"
        cohort = reach.cohort(pool)
        folder = self._scope.progress
        return replace(
            job,
            exempt=exempt,
            limits=frozenset({f"cohort {cohort}"} if cohort else ()),
            progress_ratio=math.nan if folder is None else read_progress(folder / workload.uid),
        )

    def _nodes(self, queues: Sequence[ClusterQueue], workloads: Sequence[KueueWorkload]) -> tuple[ClusterNode, ...]:
        """Each flavor of each scheduled ClusterQueue as a node: the units it uses, and those it could still get."""
        used: dict[tuple[str, str], float] = {}
        for workload in workloads:
            for flavor, units in workload.holding(self._scope.resource).items() if workload.reserved else ():
                at = workload.admitted_to, flavor
                used[at] = used.get(at, 0.0) + units
        for queue in queues:  # Kueue counts a little later than it admits, and a little later than it lets go
            for flavor, quota in queue.flavors.items():
                used[queue.name, flavor] = max(used.get((queue.name, flavor), 0.0), quota.reserved)
        free = free_units(queues, used)
        return tuple(
            ClusterNode(
                f"{queue.name}/{flavor}",
                math.floor(used[queue.name, flavor] + free[queue.name, flavor] + 1e-9),
                math.floor(free[queue.name, flavor] + 1e-9),
                queue.name,
            )
            for queue in queues
            for flavor in queue.flavors
            if not self._scope.queues or queue.name in self._scope.queues
        )


class _QueueReach:
    """Map of the flavors of each ClusterQueue that suit a workload."""

    def __init__(self, queues: Sequence[ClusterQueue], flavors: Mapping[str, ResourceFlavor]) -> None:
        self._queues, self._flavors = {queue.name: queue for queue in queues}, flavors

    def cohort(self, pool: str) -> str:
        return self._queues[pool].cohort if pool in self._queues else ""

    def of(self, pool: str, workload: KueueWorkload) -> frozenset[str] | None:
        """The nodes of a pool on which a workload may run; None for all."""
        if pool not in self._queues:
            return None
        names = list(self._queues[pool].flavors)
        found = [self._flavors[name] for name in names if name in self._flavors]
        known = label_keys(found)
        specs = [template.get("spec") or {} for template in workload.templates]
        suited = {flavor.name for flavor in found if all(flavor.suits(spec, known) for spec in specs)}
        return None if suited >= set(names) else frozenset(f"{pool}/{name}" for name in suited)


def _held(workload: KueueWorkload) -> tuple[Mapping[str, Any] | None, str]:
    """The change that deactivates a waiting workload; once it is admitted, the same change would stop it."""
    if workload.over:
        raise ActuationError(f"job {workload.number} is over")
    if not workload.active:
        if not workload.held:
            raise ActuationError(f"job {workload.number} is deactivated by another")
        return None, "held"
    if workload.reserved:
        raise ActuationError(f"job {workload.number} started meanwhile: it is not held")
    return {"metadata": {"labels": {HELD: "true"}}, "spec": {"active": False}}, "held"


def _stopped(workload: KueueWorkload) -> tuple[Mapping[str, Any] | None, str]:
    if workload.over:
        raise ActuationError(f"job {workload.number} is over")
    if not workload.active:
        return None, "it stops already"
    stops = str(workload.stops + (1 if workload.reserved else 0))
    metadata = {"labels": {HELD: "true"}, "annotations": {STOPS: stops}}
    return {"metadata": metadata, "spec": {"active": False}}, "SIGTERM, its grace period, and back in the queue, held"


def _released(workload: KueueWorkload) -> tuple[Mapping[str, Any] | None, str]:
    if not workload.held:
        if not workload.active and not workload.over:
            raise ActuationError(f"job {workload.number} is deactivated by another")
        return None, "as it is"
    change: dict[str, Any] = {"metadata": {"labels": {HELD: None}}}
    return (change if workload.over else {**change, "spec": {"active": True}}), "released"


def _newest(workloads: Iterable[KueueWorkload]) -> list[KueueWorkload]:
    """One workload for each job: the newest that is not being deleted."""
    found: dict[int, KueueWorkload] = {}
    for workload in workloads:
        other = found.get(workload.number)
        if other is None or _age(workload) > _age(other):
            found[workload.number] = workload
    return list(found.values())


def _age(workload: KueueWorkload) -> tuple[bool, bool, str, str]:
    created = str(workload.document["metadata"].get("creationTimestamp") or "")
    return workload.reserved, not workload.deleted, created, workload.name


def _cluster_queues(documents: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """The ClusterQueue of each LocalQueue, by namespace and name."""
    try:
        return {
            (str(one["metadata"]["namespace"]), str(one["metadata"]["name"])): str(one["spec"]["clusterQueue"])
            for one in documents
        }
    except (KeyError, TypeError) as error:
        raise DataError(f"a LocalQueue is not understood: {error!r}") from error


def _unread_deadlines(workloads: Iterable[KueueWorkload]) -> list[str]:
    """A note on each deadline that is not a valid time."""
    return [
        f"{BY} of {workload.namespace}/{workload.name} is no time: {workload.annotation(BY)!r}"
        for workload in workloads
        if not workload.over and workload.annotation(BY) and math.isnan(time_of(workload.annotation(BY)))
    ]


def open_kueue(
    scope: KueueScope, *, kubeconfig: Path | None = None, context: str | None = None, timeout_s: float = 30.0
) -> KueueBackend:
    """Open the cluster that the kubeconfig or this container's service account names.

    Raises:
        CapabilityError: The cluster does not answer, has no Kueue, or refuses access.
        ConfigError: The kubeconfig is invalid.
    """
    backend = KueueBackend(KubernetesApi(find_access(kubeconfig, context), timeout_s), scope)
    try:
        backend.snapshot()
    except BaseException:
        backend.close()
        raise
    return backend
