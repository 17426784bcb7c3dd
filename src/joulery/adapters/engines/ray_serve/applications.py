"""Replicas as Ray Serve applications: one per service and slice size, each with a plan of variants by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from joulery.adapters.engines.ray_serve.cluster import OURS
from joulery.adapters.engines.ray_serve.replica import DEPLOYMENT, ONGOING
from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.device import DEVICE
from joulery.domain.serving.engine import NODE, ReplicaSpec
from joulery.domain.serving.service import Slice, SliceKind

_OF_A_NODE = 0.001
"""Amount that a replica claims of a node's own resource (``node:ADDRESS``, one unit), to be placed there."""
_HERE = "joulery.adapters.engines.ray_serve"
_LEAVE_S = 10.0
"""Time beyond the longest request that a replica gets when Ray ends it."""


@dataclass(frozen=True, slots=True)
class RayApp:
    """One application: a deployment with all replicas on slices of one size.

    Attributes:
        service: The service they answer for.
        slice: What each runs on.
        plan: What each rank runs.
        node: The node that all of them are on, by its name; empty where Ray places them.
    """

    service: str
    slice: Slice
    plan: tuple[ReplicaSpec, ...]
    node: str = ""

    @property
    def name(self) -> str:
        """Its name: ``joulery.photos.cpu-1``; on a node that is named ``joulery.photos.cpu-1.NODE``."""
        place = f".{self.node}" if self.node else ""
        return f"{OURS}{self.service}.{str(self.slice).replace(':', '-').replace('@', '-')}{place}"

    def spec(self, entry: Mapping[str, Any], rank: int) -> ReplicaSpec | None:
        """The specification of a replica, by what it runs and its rank; None where the plan has no such entry."""
        mine = self.plan[rank : rank + 1]
        return next((spec for spec in (*mine, *self.plan) if entry_of(spec) == entry), None)

    def config(
        self,
        environ: Mapping[str, str],
        claim_ratio: float,
        nodes: Mapping[str, str] = MappingProxyType({}),
        listens: str = "",
        deadline_s: float = 30.0,
    ) -> dict[str, Any]:
        """The application in the form of Ray's REST API.

        Args:
            environ: Variables of the replicas.
            claim_ratio: CPUs that a replica claims from Ray for each core: old and new replicas run side by side.
            nodes: Address of each node, by its name.
            listens: Where replicas listen for requests; see :attr:`RaySettings.listens`.
            deadline_s: How long a request may take: Ray lets a replica that it ends answer the requests it holds.
        """
        claims = _claims(self.slice, claim_ratio)
        if self.node:
            claims["resources"] = {**claims.get("resources", {}), f"node:{nodes[self.node]}": _OF_A_NODE}
        return {
            "name": self.name,
            "import_path": f"{_HERE}.replica:app",
            "route_prefix": None,
            "args": {},
            "runtime_env": {"env_vars": {**environ, **({} if self.slice.kind is SliceKind.CPU else {DEVICE: "cuda"})}},
            "external_scaler_enabled": True,
            "deployments": [
                {
                    "name": DEPLOYMENT,
                    "num_replicas": len(self.plan),
                    "max_ongoing_requests": ONGOING,
                    "user_config": {"plan": [entry_of(spec) for spec in self.plan], "direct": listens},
                    "ray_actor_options": claims,
                    "request_router_config": {"request_router_class": f"{_HERE}.router:ToReplica"},
                    "graceful_shutdown_wait_loop_s": 0.1,
                    "graceful_shutdown_timeout_s": deadline_s + _LEAVE_S,
                    "health_check_period_s": 1.0,
                    "health_check_timeout_s": 10.0,
                }
            ],
        }


def node_of(spec: ReplicaSpec) -> str:
    """The node that a replica is to be on, by its name; empty where Ray places it."""
    return spec.device.removeprefix(NODE)


def entry_of(spec: ReplicaSpec) -> dict[str, Any]:
    """A replica's entry in the plan: the parameters with which it loads its model."""
    model = spec.model
    return {
        "variant": spec.variant,
        "kind": model.kind.value,
        "location": model.location,
        "options": model.options,
        "threads": spec.threads or max(1, spec.slice.cores),
    }


def apps_of(target: Sequence[ReplicaSpec], before: Mapping[str, RayApp]) -> dict[str, RayApp]:
    """The applications of a set of replicas, by name; as many ranks as possible keep what they run.

    Args:
        target: The replicas.
        before: The present applications.

    Raises:
        CapabilityError: A replica stands by or is bound to cores, which this engine does not do.
    """
    groups: dict[tuple[str, Slice, str], list[ReplicaSpec]] = {}
    for spec in target:
        if spec.standby or spec.cores:
            raise CapabilityError(
                f"{spec}: replicas on Ray Serve serve at once and are bound to no core", hint="use the embedded engine"
            )
        groups.setdefault((spec.service, spec.slice, spec.device), []).append(spec)
    found = {}
    for (service, piece, _), specs in groups.items():
        node = node_of(specs[0])
        name = RayApp(service, piece, (), node).name
        old = before[name].plan if name in before else ()
        found[name] = RayApp(service, piece, aligned(old, specs), node)
    return found


def drifted(apps: Mapping[str, RayApp], states: Mapping[str, Any]) -> dict[str, int]:
    """Ray's target number of replicas of each application where it differs from the plan, by name.

    Args:
        apps: The applications as planned.
        states: Ray's report on each application.
    """
    found = {}
    for name, app in apps.items():
        deployment = states.get(name, {}).get("deployments", {}).get(DEPLOYMENT, {})
        count = deployment.get("target_num_replicas")
        if isinstance(count, int) and count != len(app.plan):
            found[name] = count
    return found


def status_message(application: Mapping[str, Any]) -> str:
    """Ray's message about an application that does not start."""
    deployments = application.get("deployments", {}).values()
    return "; ".join(text for text in (d.get("message", "") for d in deployments) if text) or "it gives no reason"


def aligned(old: Sequence[ReplicaSpec], wanted: Sequence[ReplicaSpec]) -> tuple[ReplicaSpec, ...]:
    """The wanted replicas in an order that leaves each rank what it runs, where that is still wanted.

    Where there are fewer than before, the plan is shortened: Ray numbers those that stay from 0 again.
    """
    left = Counter(wanted)
    plan: list[ReplicaSpec | None] = []
    for spec in old[: len(wanted)]:
        keep = left[spec] > 0
        left[spec] -= keep
        plan.append(spec if keep else None)
    plan += [None] * (len(wanted) - len(plan))
    rest = iter(sorted(left.elements()))
    return tuple(next(rest) if spec is None else spec for spec in plan)


def _claims(piece: Slice, claim_ratio: float) -> dict[str, Any]:
    """Resources that a replica claims of a Ray node."""
    if piece.kind is SliceKind.CPU:
        return {"num_cpus": piece.cores * piece.share_ratio * claim_ratio}
    if piece.kind is SliceKind.MIG:
        return {"num_cpus": 0, "resources": {f"mig-{piece.profile}": 1}}
    return {"num_cpus": 0, "num_gpus": piece.share_ratio}
