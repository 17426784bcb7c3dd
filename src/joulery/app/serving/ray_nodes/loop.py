"""The nodes of a Ray cluster while a site runs: metered each second, and given requests in the order of their grids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, cast

from joulery.app.serving.ray_nodes.slices import nodes_of
from joulery.config.carbon import CarbonConfig
from joulery.config.serving import RayEngine
from joulery.config.site import Mode, Site
from joulery.domain.decisions import Decision
from joulery.domain.ports import CarbonSource
from joulery.domain.serving.timeline import DecisionRecord
from joulery.policies.node_order import NodeOrder
from joulery.runtime.serving.driver import ADVISED, APPLIED
from joulery.runtime.serving.intensity import LiveIntensity
from joulery.runtime.serving.nodes import NodeLedger, PlacedNode
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.session import ServingSession
from joulery.steady_time import unix_s

METER = "joulery.app.serving.ray_nodes.meter:NodeMeter"
PREFER_NODES = "prefer_nodes"
PATIENCE_RATIO = 0.25
"""Share of the time that the SLO leaves beside the slowest answer in which a request may wait for a cleaner node."""


class ClusterNodes(Protocol):
    """An engine on a cluster."""

    async def nodes(self, meter: str, options: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """What the meters of its nodes answer, by address."""
        ...

    def prefer_nodes(self, ranks: Mapping[str, int], patience_s: float) -> None:
        """Give requests to nodes of lower rank first."""
        ...


def patience_s(one: RunningService) -> float:
    """How long a request of a service may wait for a replica on a cleaner grid."""
    if one.chosen is None:
        return 0.0
    entries, quantile = one.chosen.predictor.profile.entries, one.setup.slo.quantile
    slowest_s = max(entry.loaded.quantile_s(quantile) for entry in entries)
    return max(0.0, one.setup.slo.latency_s - slowest_s) * PATIENCE_RATIO


def ledger_of(
    site: Site, session: ServingSession, open_source: Callable[[CarbonConfig], CarbonSource]
) -> NodeLedger | None:
    """The ledger of a site's Ray nodes; None where the cluster is this machine alone."""
    engine, nodes = site.serving.engine, nodes_of(site)
    if not isinstance(engine, RayEngine) or (engine.address == "local" and not nodes):
        return None
    cluster = cast(ClusterNodes, session.engine)
    placed = [
        PlacedNode(node.name, node.address, LiveIntensity(node.carbon or site.carbon, open_source, unix_s))
        for node in nodes
    ]
    return NodeLedger(lambda: cluster.nodes(METER, [site.meters]), placed, site.pue, unix_s, session.warn)


async def keep_nodes(
    session: ServingSession, open_source: Callable[[CarbonConfig], CarbonSource], stack: AsyncExitStack
) -> None:
    """Meter and order a site's Ray nodes from now on; ends with the stack."""
    found = ledger_of(session.site, session, open_source)
    if found is None:
        return
    session.nodes = found
    await found.look()
    _order(session, found)
    keeping = asyncio.create_task(_keep(session, found), name="nodes")
    stack.callback(keeping.cancel)


async def _keep(session: ServingSession, ledger: NodeLedger) -> None:
    while True:
        await asyncio.sleep(session.pace.tick_s)
        if session.end_ns:
            return
        await ledger.look()
        _order(session, ledger)


def _order(session: ServingSession, ledger: NodeLedger) -> None:
    """Give requests to nodes in the order of their grids, where that has changed."""
    if not ledger.order(NodeOrder()):
        return
    acts = session.site.mode is Mode.ACT
    ranks = ledger.ranks
    known = ledger.intensities()
    words = ", ".join(f"{name} {known[name]:.0f} g/kWh" for name in sorted(ranks, key=lambda name: ranks[name]))
    if acts:
        patience = min((patience_s(one) for one in session.services.values()), default=0.0)
        cast(ClusterNodes, session.engine).prefer_nodes(ranks, patience)
    for one in session.services.values():
        decision = Decision(PREFER_NODES, one.name, dict(ranks), "node-order", f"cleaner grids first: {words}", "grid")
        session.history.add_decision(DecisionRecord(unix_s(), decision, APPLIED if acts else ADVISED))
        ledger.moves[one.name] += 1
