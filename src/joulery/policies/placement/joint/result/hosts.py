"""Hosts of a joint plan's GPUs, where no two replicas of a service may share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from joulery.domain.gpu.provisioning import PlannedGpu, ProvisionPlan
from joulery.policies.placement.joint.problem import JointRequest
from joulery.policies.placement.provisioning.gpu_shares import on_hosts, shared_domains_of
from joulery.policies.placement.provisioning.options import FailureDomain


def on_hosts_of(request: JointRequest, plan: ProvisionPlan) -> ProvisionPlan:
    """The plan with its GPUs on hosts, as preset ``best`` puts them there; unchanged where hosts do not matter.

    Hosts, or GPUs, that replicas would have to share are violations of the plan.
    """
    if not request.rules.apart:
        return plan
    types = [each.gpu_type for each in request.fleet]
    gpus: Sequence[PlannedGpu] = plan.gpus
    if request.rules.domain is FailureDomain.HOST:
        gpus = on_hosts(gpus, types)
    kept = tuple(each for each in plan.violations if each.what not in ("gpu", "host"))
    return replace(plan, gpus=tuple(gpus), violations=(*kept, *shared_domains_of(gpus, types)))
