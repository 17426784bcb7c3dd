"""An API server of Kubernetes with Kueue, in memory: versions, conflicts, pages, rights, and Kueue's own rules.

``handle`` answers one request. ``transport`` gives it to httpx without a socket, ``serve`` over HTTP. ``pass_time``
does what Kueue's controllers do: admit by priority and age within quota, evict what is deactivated (its containers get
their grace period, then the quota comes back), finish what has computed long enough. As in Kueue every condition names
the generation that it is about, and a change of ``spec`` makes a new generation.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx

from joulery.adapters.clusters.kueue.access import KubernetesAccess
from joulery.adapters.clusters.kueue.api import ApiAnswer, KubernetesApi, raise_if_unusable

GPU = "nvidia.com/gpu"
ROOT = "/apis/kueue.x-k8s.io"
REFUSED = " ".join(("couldn't assign flavors to", "pod", "set main"))
"""How Kueue's refusals begin."""
ALL_RIGHTS = frozenset(
    {("list", kind) for kind in ("workloads", "clusterqueues", "localqueues", "resourceflavors")}
    | {("get", "workloads"), ("patch", "workloads")}
)


def status(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "status": "Failure", "message": message, "code": code}


@dataclass
class FakeKueue:
    """The objects of a cluster, by kind and then by namespace and name."""

    now_s: float = 1.7e9
    grace_s: float = 1.0
    rate: float = 0.01
    """Share of its work that a job does each second."""
    tokens: set[str] = field(default_factory=lambda: {"token"})
    rights: set[tuple[str, str]] = field(default_factory=lambda: set(ALL_RIGHTS))
    versions: tuple[str, ...] = ("v1beta1",)
    page: int = 0
    """Most objects of a page; what the client asks for when 0."""
    failures: list[int] = field(default_factory=list)
    """HTTP statuses of the next answers."""
    meddle: int = 0
    """Before so many of the next changes another client changes the object."""
    expired: int = 0
    """So many next pages after the first are gone: the list is too old."""
    objects: dict[str, dict[tuple[str, str], dict[str, Any]]] = field(default_factory=dict)
    containers: dict[str, int] = field(default_factory=dict)
    """Running containers by UID of the Job; those of a suspended Job are deleted."""
    done: dict[str, float] = field(default_factory=dict)
    stopping_s: dict[str, float] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    busy_gpu_s: float = 0.0
    _version: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # what a test sets up

    def flavor(self, name: str, labels: Mapping[str, str] | None = None, taints: Any = ()) -> None:
        spec = {"nodeLabels": dict(labels or {}), "nodeTaints": list(taints)}
        self._put("resourceflavors", "", name, {"spec": spec})

    def queue(self, name: str, flavors: Mapping[str, Mapping[str, Any]], cohort: str = "", **spec: Any) -> None:
        """A ClusterQueue, and a LocalQueue of its name in the namespace ``team``."""
        named = [
            {"name": flavor, "resources": [{"name": GPU, **{k: str(v) for k, v in quota.items()}}]}
            for flavor, quota in flavors.items()
        ]
        key = "cohort" if "v1beta1" in self.versions[:1] else "cohortName"
        groups = [{"coveredResources": [GPU], "flavors": named}]
        self._put("clusterqueues", "", name, {"spec": {"resourceGroups": groups, key: cohort, **spec}})
        self._put("localqueues", "team", name, {"spec": {"clusterQueue": name}})

    def submit(
        self,
        number: int,
        gpus: int = 1,
        queue: str = "q",
        *,
        priority: int = 0,
        namespace: str = "team",
        annotations: Mapping[str, str] | None = None,
        resource: str = GPU,
        **template: Any,
    ) -> dict[str, Any]:
        """A Job of one container, suspended, with the Workload that Kueue makes of it; ``number`` is its number."""
        uid = f"{number:012x}"
        uid = f"{uid[:8]}-{uid[8:]}-4000-8000-000000000000"
        container = {"name": "train", "resources": {"requests": {resource: str(gpus)}}}
        spec = {"metadata": {"annotations": dict(annotations or {})}, "spec": {"containers": [container], **template}}
        document = {
            "metadata": {
                "labels": {"kueue.x-k8s.io/job-uid": uid},
                "ownerReferences": [{"kind": "Job", "name": f"train-{number}", "uid": uid, "controller": True}],
                "creationTimestamp": self._time(),
            },
            "spec": {
                "active": True, "queueName": queue, "priority": priority,
                "podSets": [{"name": "main", "count": 1, "template": spec}],
            },
            "status": {},
        }  # fmt: skip
        return self._put("workloads", namespace, f"job-train-{number}", document)

    def workload(self, number: int, namespace: str = "team") -> dict[str, Any]:
        return self.objects["workloads"][namespace, f"job-train-{number}"]

    def condition(self, workload: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        conditions = workload.get("status", {}).get("conditions", ())
        return next((one for one in conditions if one["type"] == kind), {})

    def holds(self, workload: Mapping[str, Any], kind: str) -> bool:
        return self.condition(workload, kind).get("status") == "True"

    # the API server

    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, bytes]:
        """The status and the document of an answer."""
        with self._lock:
            code, document = self._handle(method, target, headers, body)
            return code, json.dumps(document).encode()

    def _handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        parts = urlsplit(target)
        path, query = parts.path, dict(parse_qsl(parts.query))
        self.requests.append((method, path))
        if self.failures:
            code = self.failures.pop(0)
            return status(code, f"made to fail with {code}")
        if headers.get("authorization", "").removeprefix("Bearer ") not in self.tokens:
            return status(401, "Unauthorized")
        if path.endswith("/selfsubjectaccessreviews") and method == "POST":
            wanted = json.loads(body)["spec"]["resourceAttributes"]
            return 201, {"status": {"allowed": (wanted["verb"], wanted["resource"]) in self.rights}}
        if path == ROOT and self.versions:
            return 200, {"kind": "APIGroup", "versions": [{"version": name} for name in self.versions]}
        words = path.removeprefix(f"{ROOT}/").split("/")
        if not path.startswith(f"{ROOT}/") or words[0] not in self.versions:
            return status(404, "the server could not find the requested resource")
        if len(words) == 2:
            return self._list(words[1], query)
        return self._one(method, words[3], (words[2], words[4]), headers, body)

    def _refused(self, verb: str, kind: str) -> tuple[int, dict[str, Any]] | None:
        if (verb, kind) in self.rights:
            return None
        return status(403, f'{kind} is forbidden: User "system:serviceaccount:joulery:joulery" cannot {verb} it')

    def _list(self, kind: str, query: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        if refused := self._refused("list", kind):
            return refused
        items = [one for _, one in sorted(self.objects.get(kind, {}).items())]
        begin = int(query.get("continue", "0"))
        if begin and self.expired:
            self.expired -= 1
            return status(410, "The provided continue parameter is too old")
        end = begin + (self.page or int(query.get("limit", "0")) or len(items))
        more = {"continue": str(end)} if end < len(items) else {}
        return 200, {
            "kind": "List",
            "metadata": {"resourceVersion": str(self._version), **more},
            "items": items[begin:end],
        }

    def _one(
        self, method: str, kind: str, key: tuple[str, str], headers: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, Any]]:
        verb = method.lower()
        if refused := self._refused(verb, kind):
            return refused
        found = self.objects.get(kind, {}).get(key)
        if found is None:
            return status(404, f'{kind} "{key[1]}" not found')
        if verb == "get":
            return 200, found
        if headers.get("content-type") != "application/merge-patch+json":
            return status(415, "the body of the request was in an unknown format")
        if self.meddle:
            self.meddle -= 1
            found["metadata"].setdefault("annotations", {})["seen"] = str(self._version)
            self._touch(found)
        change = json.loads(body)
        wanted = change.get("metadata", {}).pop("resourceVersion", None)
        if wanted is not None and wanted != found["metadata"]["resourceVersion"]:
            return status(409, "the object has been modified; please apply your changes to the latest version")
        before = deepcopy(found["spec"])
        _merge(found, change)
        self._touch(found, spec=found["spec"] != before)
        return 200, found

    def _put(self, kind: str, namespace: str, name: str, document: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            metadata = document.setdefault("metadata", {})
            metadata |= {"name": name, "generation": 1, "uid": metadata.get("uid", f"{kind}-{name}")}
            metadata |= {"namespace": namespace} if namespace else {}
            self.objects.setdefault(kind, {})[namespace, name] = document
            self._touch(document)
            return document

    def _touch(self, document: dict[str, Any], *, spec: bool = False) -> None:
        self._version += 1
        document["metadata"]["resourceVersion"] = str(self._version)
        document["metadata"]["generation"] += spec

    def _time(self) -> str:
        return datetime.fromtimestamp(self.now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    # Kueue

    def pass_time(self, seconds: float) -> None:
        """Let Kueue act once, and jobs compute."""
        with self._lock:
            self.now_s += seconds
            for workload in list(self.objects.get("workloads", {}).values()):
                self._compute(workload, seconds)
                self._evict(workload, seconds)
            self._admit()
            used = sum(self._used(workload) for workload in self.objects.get("workloads", {}).values())
            self.busy_gpu_s += seconds * used

    def running(self) -> dict[int, int]:
        """GPUs of each admitted job, by number."""
        return {
            int(workload["metadata"]["name"].rpartition("-")[2]): self._used(workload)
            for workload in self.objects.get("workloads", {}).values()
            if self.holds(workload, "Admitted")
        }

    def _set(self, workload: dict[str, Any], kind: str, value: bool, reason: str, message: str = "") -> None:
        conditions = workload["status"].setdefault("conditions", [])
        old = self.condition(workload, kind)
        new = {
            "type": kind, "status": str(value), "reason": reason, "message": message,
            "observedGeneration": workload["metadata"]["generation"],
            "lastTransitionTime": self._time() if old.get("status") != str(value) else old["lastTransitionTime"],
        }  # fmt: skip
        if new != old:
            workload["status"]["conditions"] = [one for one in conditions if one is not old] + [new]
            self._touch(workload)

    def _uid(self, workload: Mapping[str, Any]) -> str:
        return str(workload["metadata"]["ownerReferences"][0]["uid"])

    def _compute(self, workload: dict[str, Any], seconds: float) -> None:
        uid = self._uid(workload)
        if not self.holds(workload, "Admitted") or uid in self.stopping_s or self.holds(workload, "Finished"):
            return
        self.done[uid] = self.done.get(uid, 0.0) + self.rate * seconds
        if self.done[uid] >= 1.0:
            self._set(workload, "Finished", True, "Succeeded", "Job finished successfully")
            self._let_go(workload, "Finished", "the job is over")

    def _evict(self, workload: dict[str, Any], seconds: float) -> None:
        uid = self._uid(workload)
        if self.holds(workload, "Finished"):
            return
        if workload["spec"].get("active", True):
            if self.condition(workload, "Requeued").get("reason") == "Deactivated" and uid not in self.stopping_s:
                self._set(workload, "Requeued", True, "Reactivated", "The workload was reactivated")
        elif not self.holds(workload, "Evicted"):
            self._set(workload, "Evicted", True, "Deactivated", "The workload is deactivated")
            self._set(workload, "Requeued", False, "Deactivated", "The workload is deactivated")
        if self.holds(workload, "Evicted") and self.holds(workload, "QuotaReserved"):
            self.stopping_s.setdefault(uid, self.grace_s)
            self.stopping_s[uid] -= seconds
            if self.stopping_s[uid] <= 0:
                del self.stopping_s[uid]
                self._let_go(workload, "Pending", "The workload is deactivated")

    def _let_go(self, workload: dict[str, Any], reason: str, message: str) -> None:
        """The Job is suspended or over: its containers are gone and its quota is free."""
        self.containers.pop(self._uid(workload), None)
        workload["status"].pop("admission", None)
        self._set(workload, "QuotaReserved", False, reason, message)
        self._set(workload, "Admitted", False, "NoReservation", "The workload has no reservation")

    def _used(self, workload: Mapping[str, Any], queue: str = "", flavor: str = "") -> int:
        admission = workload["status"].get("admission") or {}
        if queue and admission.get("clusterQueue") != queue:
            return 0
        return sum(
            int(one["resourceUsage"][GPU])
            for one in admission.get("podSetAssignments", ())
            if flavor in ("", one["flavors"][GPU])
        )

    def _total(self, queue: str, flavor: str) -> int:
        return sum(self._used(workload, queue, flavor) for workload in self.objects.get("workloads", {}).values())

    def available(self, queue: str, flavor: str) -> float:
        """As Kueue: own quota, then what the cohort has left, up to the borrowing limit."""
        queues = {name: one["spec"] for (_, name), one in self.objects["clusterqueues"].items()}
        cohort = queues[queue].get("cohort") or queues[queue].get("cohortName")
        members = [
            name for name in queues if cohort and cohort in (queues[name].get("cohort"), queues[name].get("cohortName"))
        ]
        quotas = {name: self._quota(queues[name], flavor) for name in members or [queue]}
        left = sum(int(quota["nominalQuota"]) for quota in quotas.values() if quota)
        left -= sum(self._total(name, flavor) for name in quotas)
        own = quotas[queue]
        if own.get("borrowingLimit") is not None:
            left = min(left, int(own["nominalQuota"]) + int(own["borrowingLimit"]) - self._total(queue, flavor))
        return left

    def _quota(self, spec: Mapping[str, Any], flavor: str) -> dict[str, Any]:
        for one in spec["resourceGroups"][0]["flavors"]:
            if one["name"] == flavor:
                return dict(one["resources"][0])
        return {}

    def _admit(self) -> None:
        pending = [
            workload
            for workload in self.objects.get("workloads", {}).values()
            if workload["spec"].get("active", True)
            and not self.holds(workload, "QuotaReserved")
            and not self.holds(workload, "Finished")
        ]
        blocked: set[str] = set()
        for workload in sorted(
            pending, key=lambda one: (-one["spec"]["priority"], one["metadata"]["creationTimestamp"], self._uid(one))
        ):
            queue = self._queue_of(workload)
            if queue is None:
                self._set(
                    workload,
                    "QuotaReserved",
                    False,
                    "Inadmissible",
                    f"LocalQueue {workload['spec']['queueName']} doesn't exist",
                )
            elif self.objects["clusterqueues"]["", queue]["spec"].get("stopPolicy", "None") != "None":
                self._set(workload, "QuotaReserved", False, "Inadmissible", f"ClusterQueue {queue} is inactive")
            elif queue not in blocked and not self._reserve(workload, queue) and self._strict(queue):
                blocked.add(queue)

    def _strict(self, queue: str) -> bool:
        return self.objects["clusterqueues"]["", queue]["spec"].get("queueingStrategy") == "StrictFIFO"

    def _queue_of(self, workload: Mapping[str, Any]) -> str | None:
        key = workload["metadata"]["namespace"], workload["spec"]["queueName"]
        local = self.objects.get("localqueues", {}).get(key)
        return None if local is None else str(local["spec"]["clusterQueue"])

    def gpus_of(self, workload: Mapping[str, Any]) -> int:
        container = workload["spec"]["podSets"][0]["template"]["spec"]["containers"][0]
        return int(container["resources"]["requests"].get(GPU, 0))

    def _reserve(self, workload: dict[str, Any], queue: str) -> bool:
        template = workload["spec"]["podSets"][0]["template"]["spec"]
        gpus, said = self.gpus_of(workload), []
        for one in self.objects["clusterqueues"]["", queue]["spec"]["resourceGroups"][0]["flavors"]:
            labels = self.objects["resourceflavors"]["", one["name"]]["spec"]["nodeLabels"]
            if any(key in labels and labels[key] != value for key, value in template.get("nodeSelector", {}).items()):
                said.append(f"flavor {one['name']} doesn't match node affinity")
                continue
            lacking = gpus - self.available(queue, one["name"])
            if lacking <= 0:
                assignment = {
                    "name": "main",
                    "flavors": {GPU: one["name"]},
                    "resourceUsage": {GPU: str(gpus)},
                    "count": 1,
                }
                workload["status"]["admission"] = {"clusterQueue": queue, "podSetAssignments": [assignment]}
                self._set(workload, "QuotaReserved", True, "QuotaReserved", f"Quota reserved in ClusterQueue {queue}")
                self._set(workload, "Admitted", True, "Admitted", "The workload is admitted")
                if self.holds(workload, "Evicted"):
                    self._set(workload, "Evicted", False, "QuotaReserved", "Previously: the workload is deactivated")
                self.containers[self._uid(workload)] = 1
                return True
            said.append(f"insufficient unused quota for {GPU} in flavor {one['name']}, {int(lacking)} more needed")
        message = f"{REFUSED}: {', '.join(said)}"
        self._set(workload, "QuotaReserved", False, "Pending", message)
        return False

    # the ways in

    def api(self) -> KubernetesApi:
        """The API server without HTTP: a simulated day has thousands of answers."""
        return _InMemoryApi(self)

    def transport(self) -> httpx.MockTransport:
        def answer(request: httpx.Request) -> httpx.Response:
            code, text = self.handle(request.method, str(request.url), request.headers, request.content)
            return httpx.Response(code, content=text)

        return httpx.MockTransport(answer)

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Listen on a free port of this machine; gives the address."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", "0")))
                headers = {name.lower(): value for name, value in self.headers.items()}
                code, text = fake.handle(self.command, self.path, headers, body)
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_PATCH = do_POST = _answer  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _InMemoryApi(KubernetesApi):
    """Asks a fake directly; answers are JSON as over HTTP."""

    def __init__(self, fake: FakeKueue) -> None:
        super().__init__(KubernetesAccess("http://k8s", lambda: "token", None))
        self._fake = fake

    def get(self, path: str, **parameters: str) -> ApiAnswer:
        return self._asked("GET", f"{path}?{urlencode(parameters)}")

    def patch(self, path: str, change: Mapping[str, Any]) -> ApiAnswer:
        return self._asked("PATCH", path, change, "application/merge-patch+json")

    def create(self, path: str, document: Mapping[str, Any]) -> ApiAnswer:
        return self._asked("POST", path, document, "application/json")

    def _asked(
        self, method: str, target: str, body: Mapping[str, Any] | None = None, content_type: str = ""
    ) -> ApiAnswer:
        headers = {"authorization": f"Bearer {self._access.token()}", "content-type": content_type}
        code, text = self._fake.handle(method, target, headers, b"" if body is None else json.dumps(body).encode())
        raise_if_unusable(code, text.decode(), method, target, self._access)
        return ApiAnswer(code, json.loads(text))


def _merge(target: dict[str, Any], change: Mapping[str, Any]) -> None:
    """RFC 7386: null deletes a key."""
    for key, value in change.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            inner = target.setdefault(key, {})
            _merge(inner, value)
        else:
            target[key] = value
