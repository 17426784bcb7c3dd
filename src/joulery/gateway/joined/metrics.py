"""Metrics of gateways that share an engine: each gateway exports its own, the controller those of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from joulery.domain.serving.engine import RequestRecord
from joulery.gateway.families import Bounded, Family, family_metric

OWN_METRICS = (
    Family(
        "joulery_gateway_requests_total",
        "counter",
        ("gateway", "outcome"),
        "Requests that ended at this gateway since it started, by how they ended.",
    ),
    Family(
        "joulery_gateway_engine_connected",
        "gauge",
        ("gateway",),
        "1 while this gateway reaches the engine server; 0 while it answers 503.",
    ),
    Family(
        "joulery_gateway_controller_connected",
        "gauge",
        ("gateway",),
        "1 while a controller steers the engine; 0 while the last layout, weights and limits stay in force.",
    ),
    Family(
        "joulery_gateway_controller_away_seconds",
        "gauge",
        ("gateway",),
        "Time since the controller was lost; 0 while there is one.",
    ),
)
SITE_METRICS = (
    Family(
        "joulery_gateway_joined",
        "gauge",
        ("gateway", "version"),
        "1 while a gateway is joined to the engine server, as the controller sees it; 0 after it was lost.",
    ),
    Family(
        "joulery_gateway_received_requests_total",
        "counter",
        ("gateway",),
        "Requests received through a gateway, as the ledger has them; they equal the ended and the open ones.",
    ),
    Family(
        "joulery_gateway_ended_requests_total",
        "counter",
        ("gateway",),
        "Requests of a gateway that ended, as the ledger has them.",
    ),
    Family(
        "joulery_gateway_connections",
        "gauge",
        ("gateway",),
        "Clients connected to a gateway.",
    ),
)
GATEWAY_METRICS = (*OWN_METRICS, *SITE_METRICS)
_BY_NAME = {family.name: family for family in GATEWAY_METRICS}


class Joined(Protocol):
    """A gateway's view of the engine server."""

    @property
    def joined(self) -> bool:
        """Whether the gateway is connected to the engine server."""
        ...

    @property
    def controller_away_s(self) -> float | None:
        """Seconds since the engine server lost its controller; None while it has one."""
        ...


class SeenGateway(Protocol):
    """A gateway as the controller sees it."""

    name: str
    version: str
    received: int
    ended: int
    connected: bool
    connections: int


class OwnMetrics(Collector):
    """A gateway's own metrics.

    Args:
        gateway: Name of the gateway.
        engine: Its view of the engine server.
    """

    def __init__(self, gateway: str, engine: Joined) -> None:
        self._gateway, self._engine = gateway, engine
        self._outcomes: Counter[str] = Counter()

    def count(self, record: RequestRecord) -> None:
        """Count a request that ended."""
        self._outcomes[record.outcome.value] += 1

    def describe(self) -> Iterator[Metric]:
        """The families without values."""
        return (family_metric(family) for family in OWN_METRICS)

    def collect(self) -> Iterator[Metric]:
        """The families with their present values."""
        requests, engine, controller, away = (family_metric(family) for family in OWN_METRICS)
        for outcome, count in sorted(self._outcomes.items()):
            requests.add_metric((self._gateway, outcome), count)
        away_s = self._engine.controller_away_s
        engine.add_metric((self._gateway,), float(self._engine.joined))
        controller.add_metric((self._gateway,), float(self._engine.joined and away_s is None))
        away.add_metric((self._gateway,), away_s or 0.0)
        yield from (requests, engine, controller, away)


class SiteMetrics(Collector):
    """Metrics of all gateways, as the controller sees them.

    Args:
        gateways: Returns the gateways.
    """

    def __init__(self, gateways: Callable[[], Sequence[SeenGateway]]) -> None:
        self._gateways, self._names = gateways, Bounded()

    def describe(self) -> Iterator[Metric]:
        """The families without values."""
        return (family_metric(family) for family in SITE_METRICS)

    def collect(self) -> Iterator[Metric]:
        """The families with their present values."""
        joined, received, ended, connections = (family_metric(family) for family in SITE_METRICS)
        for one in self._gateways():
            name = self._names(one.name)
            joined.add_metric((name, one.version), float(one.connected))
            received.add_metric((name,), one.received)
            ended.add_metric((name,), one.ended)
            connections.add_metric((name,), one.connections if one.connected else 0)
        yield from (joined, received, ended, connections)
