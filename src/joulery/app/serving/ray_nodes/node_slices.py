"""Slices of a service on the nodes that the site names, within its bounds on replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from joulery.config.services import ServiceConfig
from joulery.config.serving import RayEngine, RayNodeConfig
from joulery.config.site import Site
from joulery.domain.errors import CapabilityError, InfeasibleError
from joulery.domain.gpu.layout import SliceAssignment
from joulery.domain.serving.engine import NODE
from joulery.domain.serving.service import Slice, SliceKind
from joulery.policies.placement.pools.gpu_groups import first_alone, split
from joulery.policies.serving.search.layout_space import core_partitions, cpu_slices
from joulery.runtime.serving.running_service import ServiceSetup


def nodes_of(site: Site) -> tuple[RayNodeConfig, ...]:
    """The nodes of a Ray cluster that the site places replicas on; none where it names none."""
    return site.serving.engine.nodes if isinstance(site.serving.engine, RayEngine) else ()


def shares_of_nodes(site: Site) -> dict[str, tuple[RayNodeConfig, ...]]:
    """The nodes of each service, with its cores or GPUs on each; nodes where it has none are left out.

    Services share the cores or GPUs of each node equally; the remainder goes to the services with the fewest so far.

    Raises:
        InfeasibleError: There are more services than cores or GPUs.
    """
    names = [service.name for service in site.services]
    held = dict.fromkeys(names, 0)
    found: dict[str, list[RayNodeConfig]] = {name: [] for name in names}
    for node in nodes_of(site):
        each, over = divmod(node.units, len(names))
        kind = "cores" if node.gpus is None else "gpus"
        first = sorted(names, key=lambda name: (held[name], names.index(name)))[:over]
        for name in names:
            mine = each + (name in first)
            held[name] += mine
            if mine:
                found[name].append(node.model_copy(update={kind: mine}))
    if nodes_of(site) and (without := [name for name in names if not held[name]]):
        raise InfeasibleError(
            f"the nodes have fewer cores or GPUs than there are services: {', '.join(without)} would have none",
            binding="serving.engine.nodes",
            hint="list more nodes, cores or GPUs, or give some services a site file of their own",
        )
    return {name: tuple(nodes) for name, nodes in found.items()}


def cuts_of(node: RayNodeConfig) -> list[tuple[Slice, ...]]:
    """The partitions of a node: all partitions of its cores, or its whole GPUs."""
    if node.cores is None:
        return [(Slice(SliceKind.WHOLE),) * node.units]
    return [cpu_slices(partition) for partition in core_partitions(node.cores)]


def node_slices(nodes: Sequence[RayNodeConfig]) -> SliceAssignment:
    """The partitions of all nodes, each divided by itself, with the node of each slice."""
    return split({f"{NODE}{node.name}": cuts_of(node) for node in nodes})


def first_nodes(nodes: Sequence[RayNodeConfig]) -> SliceAssignment:
    """The partitions of the first of several nodes while the others are left empty."""
    return first_alone({f"{NODE}{node.name}": cuts_of(node) for node in nodes})


def profiled_setup(site: Site, setup: ServiceSetup) -> ServiceSetup:
    """The service as profiled on this machine: if it runs on nodes, with the partitions of one node at a time.

    Raises:
        CapabilityError: A node has more cores than this machine.
    """
    if not nodes_of(site):
        return setup
    nodes = shares_of_nodes(site)[setup.name]
    largest = max(nodes, key=lambda node: node.units)
    if largest.units > len(setup.cores):
        raise CapabilityError(
            f"node {largest.name} has {largest.units} cores, and this machine, where {setup.name} would be profiled, "
            f"has {len(setup.cores)}",
            resource="CPU cores",
            hint="run joulery profile on a machine like the nodes, and name its file under the service's profile",
        )
    sizes = sorted({node.units for node in nodes}, reverse=True)
    partitions = dict.fromkeys(cpu_slices(partition) for cores in sizes for partition in core_partitions(cores))
    return replace(setup, partitions=tuple(partitions), slice_assignment={})


def within_bounds(partitions: tuple[tuple[Slice, ...], ...], config: ServiceConfig) -> tuple[tuple[Slice, ...], ...]:
    """Keep the partitions whose number of slices is within the service's bounds on replicas.

    Raises:
        InfeasibleError: There is no such partition.
    """
    least, most = config.minimum_replicas, config.maximum_replicas
    kept = tuple(
        partition for partition in partitions if least <= len(partition) and (most is None or len(partition) <= most)
    )
    if not kept:
        sizes = sorted({len(partition) for partition in partitions})
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise InfeasibleError(
            f"{config.name} is to have {bounds} replicas, and its cores or GPUs can be partitioned into "
            f"{' or '.join(map(str, sizes))} slices only",
            binding="number of replicas",
            hint="change minimum_replicas or maximum_replicas, or give the service other cores or GPUs",
        )
    return kept
