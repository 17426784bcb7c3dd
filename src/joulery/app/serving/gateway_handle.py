"""The gateway of ``joulery up``: it listens from the start, and answers once replicas are ready."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.routing import BaseRoute

from joulery.app.serving.service import cores_beside_upstreams
from joulery.app.wiring.engine import site_engine
from joulery.app.wiring.grpc import grpc_server
from joulery.config.serving import RayEngine
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.ports import Engine, Places
from joulery.domain.serving.timeline import NowSnapshot
from joulery.gateway.access import site_tls, site_token
from joulery.gateway.admin import admin_app
from joulery.gateway.app import Gateway
from joulery.gateway.body import BodyReader, Limits
from joulery.gateway.metrics import Metrics
from joulery.gateway.openai import OpenAIRoutes
from joulery.gateway.server import GatewayServer, ServerLimits
from joulery.runtime.serving.session import ServingSession
from joulery.store.files import disk_errors
from joulery.store.run.directory import RunWriter

if TYPE_CHECKING:
    from joulery.app.serving.gateways.handle import GatewayGroup

Pages = Callable[[Callable[[], NowSnapshot | None]], Sequence[BaseRoute]]
"""Creates the routes of the dashboard, which shows the latest snapshot."""


def no_routes(latest: Callable[[], NowSnapshot | None]) -> Sequence[BaseRoute]:
    """Return no routes."""
    return ()


class GatewayHandle:
    """A session's gateway in this process.

    Args:
        site: The site file.
        names: Names of its services.
        workers_log: File descriptor for the output of replicas.
        pages: Makes the dashboard's routes.
    """

    def __init__(self, site: Site, names: Sequence[str], workers_log: int, pages: Pages = no_routes) -> None:
        self._session: ServingSession | None = None
        self.workers_log = workers_log
        self.token = site_token(site.serving)
        self.metrics = Metrics([*names, *(model.name for model in site.language_models)], self._latest, site.mode.value)
        self.gateway = Gateway(
            self.engine(site, ()),
            limits=Limits.of(int(site.serving.body_bytes)),
            token=self.token,
            open_monitoring=site.serving.open_monitoring,
            admin=admin_app(self.metrics, pages(self._latest)),
        )
        serving = site.serving
        self.server = GatewayServer(
            self.gateway,
            serving.host,
            serving.port,
            limits=ServerLimits(drain_s=serving.drain_s),
            protected=self.token is not None,
            tls=site_tls(serving),
            beside=grpc_server(
                self.gateway, serving.grpc, token=self.token, tls=site_tls(serving), drain_s=serving.drain_s
            ),
        )

    def engine(self, site: Site, cores: tuple[int, ...], places: Places | None = None) -> Engine:
        """Create the engine that the site file names, on these cores, and on GPUs where it names some."""
        upstreams = has_upstreams(site)
        return site_engine(
            site.serving,
            cores=cores,
            stderr=self.workers_log,
            places=places,
            upstreams=upstreams,
            here=cores_beside_upstreams(site),
        )

    @property
    def labels(self) -> Callable[[str], Mapping[str, tuple[int, int]]]:
        """Function that counts the correct and the labelled answers of a service, by variant."""
        return self.gateway.feedback.tally

    @property
    def bodies(self) -> BodyReader:
        """Reads requests within the gateway's limits."""
        return self.gateway.bodies

    def serve_text(self, routes: OpenAIRoutes) -> None:
        """Answer under ``/v1`` from now on."""
        self.gateway.text = routes

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the run other than this one and its children: none."""
        return ()

    @property
    def gpus_in_use(self) -> bool:
        """Whether replicas of an earlier controller run on the site's GPUs: never, since they ended with it."""
        return False

    def report(self) -> dict[str, Any]:
        """The report's entry on several gateways: empty."""
        return {}

    async def open_to(self, session: ServingSession) -> None:
        """Answer with a session's engine from now on; charge and record every request."""
        self._session = session
        self.gateway.engine = session.engine
        self.gateway.attribute = session.attribute
        self.gateway.telemetry = (session.telemetry, self.metrics.request)
        self.gateway.sample = session.sample
        session.on_decision(self.metrics.decision)

    def _latest(self) -> NowSnapshot | None:
        return None if self._session is None else self._session.snapshot()


AnyGateway: TypeAlias = "GatewayHandle | GatewayGroup"
"""One gateway in this process, or several in processes of their own."""


def has_upstreams(site: Site) -> bool:
    """Whether a site's services are on other servers, some of their variants at least.

    Raises:
        ConfigError: Some services are, and some run on this machine; or a service has variants on both sides, and the
            site names GPUs or a cluster for those here.
    """
    mixed = [one.name for one in site.services if one.family_config is not None and one.family_config.is_mixed]
    if mixed and (site.fleet.devices or isinstance(site.serving.engine, RayEngine)):
        raise ConfigError(
            f"{mixed[0]} has variants on other servers and others here, which run on CPU cores of this machine alone",
            pointer="fleet.devices" if site.fleet.devices else "serving.engine",
            hint="leave it out; or serve the models here from Triton or Ray Serve, and list them as upstreams too",
        )
    found = {one.name: one.family_config is not None and one.family_config.is_upstream for one in site.services}
    if len(set(found.values())) > 1:
        raise ConfigError(
            "services of this machine and services on other servers cannot share a gateway yet",
            pointer="services",
            got=", ".join(name for name, upstream in found.items() if upstream) + " on other servers",
            hint="give each kind a site file of its own",
        )
    return True in found.values()


@asynccontextmanager
async def open_gateway(
    site: Site, names: Sequence[str], writer: RunWriter, pages: Pages = no_routes
) -> AsyncIterator[AnyGateway]:
    """Open the gateway on its port first, so that a port in use is an error before models are profiled."""
    if site.serving.gateways is not None:
        from joulery.app.serving.gateways.handle import open_gateways

        async with open_gateways(site, names, writer, pages) as group:
            yield group
        return
    log = writer.path / "workers.log"
    with disk_errors(log):
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        made = GatewayHandle(site, names, descriptor, pages)
        await made.server.start()
        try:
            yield made
        finally:
            await made.server.stop()
    finally:
        os.close(descriptor)
