"""The slices of a service: on the nodes that the site names, and as many as it may have replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from joulery.config.services import ServiceConfig
from joulery.config.serving import RayEngine, RayNodeConfig
from joulery.config.site import Site
from joulery.domain.errors import CapabilityError, InfeasibleError
from joulery.domain.serving.service import Slice
from joulery.policies.placement.pools.gpu_groups import SliceAssignment, split
from joulery.policies.serving.layout_space import core_partitions, cpu_slices
from joulery.runtime.serving.running_service import ServiceSetup


def nodes_of(site: Site) -> tuple[RayNodeConfig, ...]:
    """The nodes of a Ray cluster that the site places replicas on; none where it names none."""
    return site.serving.engine.nodes if isinstance(site.serving.engine, RayEngine) else ()


def node_slices(nodes: Sequence[RayNodeConfig]) -> SliceAssignment:
    """The ways to cut the cores of all nodes, each node's by themselves, and which node has which slice then."""
    return split({f"node:{node.name}": [cpu_slices(cut) for cut in core_partitions(node.cores)] for node in nodes})


def profiled_setup(site: Site, setup: ServiceSetup) -> ServiceSetup:
    """The service as it is profiled on this machine: with the slices of one node at a time where it is on nodes.

    Raises:
        CapabilityError: A node has more cores than this machine.
    """
    nodes = nodes_of(site)
    if not nodes:
        return setup
    largest = max(nodes, key=lambda node: node.cores)
    if largest.cores > len(setup.cores):
        raise CapabilityError(
            f"node {largest.name} has {largest.cores} cores, and this machine, where {setup.name} would be profiled, "
            f"has {len(setup.cores)}",
            resource="CPU cores",
            hint="run joulery profile on a machine like the nodes, and name its file under the service's profile",
        )
    sizes = sorted({node.cores for node in nodes}, reverse=True)
    cuts = dict.fromkeys(cpu_slices(cut) for cores in sizes for cut in core_partitions(cores))
    return replace(setup, partitions=tuple(cuts), slice_assignment={})


def within_bounds(partitions: tuple[tuple[Slice, ...], ...], config: ServiceConfig) -> tuple[tuple[Slice, ...], ...]:
    """The partitions with as many slices as the service may have replicas.

    Raises:
        InfeasibleError: There is none.
    """
    least, most = config.minimum_replicas, config.maximum_replicas
    kept = tuple(cut for cut in partitions if least <= len(cut) and (most is None or len(cut) <= most))
    if not kept:
        sizes = sorted({len(cut) for cut in partitions})
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise InfeasibleError(
            f"{config.name} is to have {bounds} replicas, and its cores or GPUs can be cut into "
            f"{' or '.join(map(str, sizes))} slices only",
            binding="number of replicas",
            hint="change minimum_replicas or maximum_replicas, or give the service other cores or GPUs",
        )
    return kept
