"""Checks of this user's rights in Kubernetes by the API server (SelfSubjectAccessReview): nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from joulery.adapters.clusters.kueue.api import GRANT, KubernetesApi
from joulery.domain.errors import CapabilityError

_REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
NEEDED = (
    ("list", "workloads", "the jobs"),
    ("get", "workloads", "a job that changed meanwhile"),
    ("patch", "workloads", "hold, release and stop jobs (spec.active)"),
    ("list", "clusterqueues", "quota"),
    ("list", "localqueues", "which queue a job is in"),
    ("list", "resourceflavors", "which flavors suit a job"),
)
"""Verb, resource of kueue.x-k8s.io, and what for: all rights that the scheduler uses."""


@dataclass(frozen=True, slots=True)
class KueueRight:
    """Result of the check of one right.

    Attributes:
        name: Verb and resource.
        granted: Whether Kubernetes allows it in all namespaces.
        detail: Purpose of the right, and the reason where it is denied.
        grant: The command that grants it; empty where it is granted.
    """

    name: str
    granted: bool
    detail: str
    grant: str = ""


def kueue_rights(api: KubernetesApi) -> Iterator[KueueRight]:
    """Check every right that the scheduler uses.

    Raises:
        CapabilityError: The API server does not answer, or does not accept this user.
    """
    for verb, resource, purpose in NEEDED:
        wanted = {"group": "kueue.x-k8s.io", "resource": resource, "verb": verb}
        answer = api.create(
            _REVIEW,
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": wanted},
            },
        )
        if not answer.ok:
            raise CapabilityError(f"rights cannot be asked for: {answer.message}", resource="Kubernetes")
        status = answer.document.get("status") or {}
        allowed = bool(status.get("allowed"))
        detail = purpose if allowed else f"{purpose}: {status.get('reason') or 'not allowed'}"
        yield KueueRight(f"{verb} {resource}", allowed, detail, "" if allowed else GRANT)
