"""Manage the nodes of a Ray cluster while a site runs: meter them, send requests to cleaner grids first, and let empty
nodes sleep."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, cast

from joulery.app.serving.ray_nodes.node_slices import nodes_of
from joulery.app.wiring.devices import open_device
from joulery.app.wiring.leases import held_leases
from joulery.config.carbon import CarbonConfig
from joulery.config.serving import RayEngine, RayNodeConfig
from joulery.config.site import Mode, Site
from joulery.domain.decisions import Decision
from joulery.domain.errors import CapabilityError, ConfigError, JouleryError
from joulery.domain.gpu.device import DeviceSpec
from joulery.domain.ports import CarbonSource
from joulery.domain.serving.engine import ReplicaSpec
from joulery.domain.serving.timeline import DecisionRecord
from joulery.policies.serving.node_order import NodeOrder
from joulery.runtime.serving.controller import PolicyControl
from joulery.runtime.serving.live_intensity import LiveIntensity
from joulery.runtime.serving.nodes.ledger import NodeLedger, PlacedNode
from joulery.runtime.serving.nodes.places import NodePlaces
from joulery.runtime.serving.nodes.sleep import SleepingNodes, SleepRule, SleepWorld
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.session import ServingSession
from joulery.runtime.session.driver import ADVISED, APPLIED
from joulery.steady_time import unix_s

METER = "joulery.app.serving.ray_nodes.meter:NodeMeter"
PREFER_NODES = "prefer_nodes"
PATIENCE_RATIO = 0.25
"""Share of the slack between the slowest answer and the SLO for which a request may wait for a cleaner node."""


class ClusterNodes(Protocol):
    """Interface of an engine on a cluster."""

    async def nodes(self, meter: str, options: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """Read the meters of the nodes, by address."""
        ...

    def prefer_nodes(self, ranks: Mapping[str, int], patience_s: float) -> None:
        """Give requests to nodes of lower rank first."""
        ...


def patience_s(one: RunningService) -> float:
    """Longest time that a request of a service may wait for a replica on a cleaner grid."""
    if one.chosen is None:
        return 0.0
    entries, quantile = one.chosen.predictor.profile.entries, one.setup.slo.quantile
    slowest_s = max(entry.loaded.quantile_s(quantile) for entry in entries)
    return max(0.0, one.setup.slo.latency_s - slowest_s) * PATIENCE_RATIO


def ledger_of(
    site: Site, session: ServingSession, open_source: Callable[[CarbonConfig], CarbonSource]
) -> NodeLedger | None:
    """Create the energy ledger of a site's Ray nodes; None where the cluster is only this machine."""
    engine, nodes = site.serving.engine, nodes_of(site)
    if not isinstance(engine, RayEngine) or (engine.address == "local" and not nodes):
        return None
    cluster = cast(ClusterNodes, session.engine)
    placed = [
        PlacedNode(node.name, node.address, LiveIntensity(node.carbon or site.carbon, open_source, unix_s))
        for node in nodes
    ]
    return NodeLedger(lambda: cluster.nodes(METER, [site.meters]), placed, site.pue, unix_s, session.warn)


async def open_places(session: ServingSession, stack: AsyncExitStack) -> NodePlaces | None:
    """Create the places on a site's Ray nodes, and wake sleeping nodes; None where the site names no nodes.

    Args:
        session: The session, before it serves.
        stack: Wakes the sleeping nodes when it unwinds.

    Raises:
        ConfigError, CapabilityError: A node cannot be sent to sleep or woken.
        ActuationError: A node does not wake up.
    """
    site, control = session.site, session.control
    nodes = nodes_of(site)
    if not nodes or not isinstance(control, PolicyControl):
        return None
    sleepers = [_sleep_rule(node) for node in nodes if node.sleep is not None] if site.mode is Mode.ACT else []
    holder = await stack.enter_async_context(held_leases(session.warn)) if sleepers else None
    cluster = cast(ClusterNodes, session.engine)

    async def present() -> list[str]:
        answers = await cluster.nodes(METER, [site.meters])
        return [address for address, answer in answers.items() if not answer.get("gone")]

    def specs() -> list[ReplicaSpec]:
        return [view.spec for view in session.engine.replicas()]

    sleep = SleepingNodes(sleepers, holder, SleepWorld(specs, present, session.history.add_decision, unix_s))
    control.places = NodePlaces([node.name for node in nodes], sleep, specs)
    await sleep.wake()
    return control.places


def _sleep_rule(node: RayNodeConfig) -> SleepRule:
    """Sleep rule of a node.

    Raises:
        ConfigError: The node is this machine.
        CapabilityError: A command of the node cannot be run.
    """
    commands = {"sleep": list(node.sleep or ()), "wake": list(node.wake or ())}
    spec = DeviceSpec("node-commands", {"node": node.name, **commands})
    device = open_device(spec)
    if _is_here(node.address):
        raise ConfigError(
            f"node {node.name} is the machine that joulery runs on",
            pointer="serving.engine.nodes.sleep",
            got=node.address,
            expected="another machine; joulery wakes it",
        )
    able = device.capability()
    if not able.settable:
        raise CapabilityError(f"node {node.name} cannot be sent to sleep: {able.detail}", resource=able.device)
    return SleepRule(node.name, node.address, node.sleep_after_s, node.wakes_in_s, device, spec)


def _is_here(address: str) -> bool:
    """Whether an address is of this machine."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


async def keep_nodes(
    session: ServingSession,
    open_source: Callable[[CarbonConfig], CarbonSource],
    places: NodePlaces | None,
    stack: AsyncExitStack,
) -> None:
    """Start to meter and order a site's Ray nodes, and to let empty ones sleep, until the stack unwinds."""
    found = ledger_of(session.site, session, open_source)
    if found is None:
        return
    session.nodes = found
    if places is not None:
        found.asleep = places.sleep.asleep
    await found.look()
    _order(session, found, places)
    for work in (_keep(session, found, places), *(() if places is None else (_settle(session, found, places),))):
        keeping = asyncio.create_task(work, name="nodes")
        stack.callback(keeping.cancel)


async def _keep(session: ServingSession, ledger: NodeLedger, places: NodePlaces | None) -> None:
    while True:
        await asyncio.sleep(session.pace.tick_s)
        if session.end_ns:
            return
        await ledger.look()
        _order(session, ledger, places)


async def _settle(session: ServingSession, ledger: NodeLedger, places: NodePlaces) -> None:
    """Let empty nodes sleep, and move replicas by the order of the nodes; a separate task, since it takes minutes."""
    control = cast(PolicyControl, session.control)
    while not session.end_ns:
        await asyncio.sleep(session.pace.tick_s)
        try:
            await control.settle()
        except JouleryError as error:
            session.warn(f"replicas could not move to another node: {error}")
        await places.sleep.step(ledger.present)


def _order(session: ServingSession, ledger: NodeLedger, places: NodePlaces | None = None) -> None:
    """Update the order in which nodes receive requests, if the order of their grids has changed."""
    if not ledger.order(NodeOrder()):
        return
    acts = session.site.mode is Mode.ACT
    ranks = ledger.ranks
    if places is not None:
        places.ranks = dict(ranks)
    known = ledger.intensities()
    text = ", ".join(f"{name} {known[name]:.0f} g/kWh" for name in sorted(ranks, key=lambda name: ranks[name]))
    if acts:
        patience = min((patience_s(one) for one in session.services.values()), default=0.0)
        cast(ClusterNodes, session.engine).prefer_nodes(ranks, patience)
    for one in session.services.values():
        decision = Decision(PREFER_NODES, one.name, dict(ranks), "node-order", f"cleaner grids first: {text}", "grid")
        session.history.add_decision(DecisionRecord(unix_s(), decision, APPLIED if acts else ADVISED))
        ledger.moves[one.name] += 1
