"""Several gateways of ``joulery up``, used as if they were one: one engine, one ledger, one address.

The engine server, its gateways and the replicas are separate processes that outlive this one. Requests that ended while
there was no controller are counted apart, because their energy was not metered.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from joulery.adapters.engines.shared.control import Welcome
from joulery.adapters.engines.shared.controlled import ControlledEngine, ControlLink, SteeredEngine
from joulery.app.serving.gateways.engine_process import PID, EnginePlan
from joulery.app.serving.gateways.processes import EngineServerProcess, LocalGateways, gateways_folder
from joulery.app.serving.gateways.stored_records import StoredRecords
from joulery.app.serving.gateways.unmetered import UnmeteredRequests
from joulery.app.serving.service import cores_beside_upstreams
from joulery.config.serving import RayEngine
from joulery.config.site import Site
from joulery.domain.errors import ActuationError, CapabilityError, JouleryError
from joulery.domain.ports import Engine, Places
from joulery.domain.serving.engine import InferRequest, Outcome, RequestRecord
from joulery.domain.serving.ledger import LedgerBatch, Stored
from joulery.domain.serving.relay import Passed, RelayedRequest
from joulery.domain.serving.timeline import NowSnapshot, Tick
from joulery.gateway.access import site_tls, site_token
from joulery.gateway.admin import admin_app
from joulery.gateway.body import BodyReader, Limits
from joulery.gateway.joined.admin import PageAnswer, page_of
from joulery.gateway.joined.language_models import answer_relayed
from joulery.gateway.joined.metrics import SiteMetrics
from joulery.gateway.metrics import Metrics
from joulery.gateway.openai import OpenAIRoutes
from joulery.gateway.tls import TlsFiles
from joulery.runtime.serving.session import ServingSession
from joulery.steady_time import unix_s
from joulery.store.files import disk_errors
from joulery.store.run.directory import RunWriter

_REFRESH_S = 0.2
_ORPHANS_S = 1.0
"""Time within which gateways of an engine server that ended without a controller join the next one."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""First and longest pause between attempts to start an engine server; the pause doubles after each."""


class GroupServer:
    """The HTTP servers of all gateways, with the interface of one server.

    Attributes:
        url: URL for clients.
        tls: Their certificate and key; None for plain HTTP.
        beside_address: Address for gRPC; empty for HTTP only.
    """

    def __init__(self, local: LocalGateways, tls: TlsFiles | None) -> None:
        self.url, self.tls, self.beside_address = local.url, tls, local.serving.grpc or ""
        self._local = local

    async def stop(self) -> None:
        """Stop the gateways of this machine; running requests finish. Safe to call twice."""
        await self._local.stop()


class GatewayGroup:
    """The gateways of a session, with the interface of :class:`joulery.app.serving.gateway_handle.GatewayHandle`.

    Args:
        site: The site file.
        names: Names of its services.
        writer: The run folder.
        pages: Makes the dashboard's routes.
        engine_server: The engine server's process.
        local: The gateways of this machine.
        link: The connection to the engine server.
        found: State of the engine server when this controller connected.
    """

    def __init__(
        self,
        site: Site,
        names: Sequence[str],
        writer: RunWriter,
        pages: Any,
        engine_server: EngineServerProcess,
        local: LocalGateways,
        link: ControlLink,
        found: Welcome,
    ) -> None:
        self.site, self.local = site, local
        self.token, self.workers_log = site_token(site.serving), workers_log(site, writer)
        self.server = GroupServer(local, site_tls(site.serving))
        self.bodies = BodyReader(Limits.of(int(site.serving.body_bytes)))
        self.text: OpenAIRoutes | None = None
        models = [model.name for model in site.language_models]
        self.metrics = Metrics([*names, *models], self._latest, site.mode.value)
        self.metrics.registry.register(SiteMetrics(lambda: self.seen))
        self.admin = admin_app(self.metrics, pages(self._latest))
        self._names, self._writer = list(names), writer
        self._engine_server, self._link, self._found = engine_server, link, found
        self._stored_records = StoredRecords(engine_server.folder)
        self._session: ServingSession | None = None
        self._controlled: ControlledEngine | None = None
        self._unmetered = UnmeteredRequests(writer)
        self._former: Counter[tuple[str, str]] = Counter()
        self._unknown = self._former_unknown = self.restarts = 0
        self._watching: asyncio.Task[None] | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def gpus_in_use(self) -> bool:
        """Whether the engine server runs replicas of an earlier controller, possibly on the site's GPUs."""
        return self._found.plan is not None

    @property
    def seen(self) -> Sequence[Any]:
        """Latest known state of the gateways."""
        return self._found.gateways if self._controlled is None else self._controlled.gateways

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the run on this machine: the engine server and the gateways, from any controller."""
        return (self._found.pid, *(one.pid for one in self.local.gateways if one.pid))

    def labels(self, service: str) -> Mapping[str, tuple[int, int]]:
        """Numbers of correct and of labelled answers, by variant."""
        return {} if self._controlled is None else self._controlled.labels(service)

    def engine(self, site: Site, cores: tuple[int, ...], places: Places | None = None) -> Engine:
        """The engine server's engine; it is created, and its GPUs are leased, when replicas are first requested."""
        from joulery.app.serving.gateway_handle import has_upstreams

        upstreams, here = has_upstreams(site), cores_beside_upstreams(site)
        plan = EnginePlan.of(site.serving, cores, upstreams=upstreams, here=here, devices=site.fleet.devices)
        kind = ControlledEngine if isinstance(site.serving.engine, RayEngine) else SteeredEngine
        self._controlled = made = kind(plan)
        made.marks, made.entries = self._stored_records.take_over()
        made.next = max(self._found.first, made.entries.get(self._found.instance, 0))
        made.on_batch, made.prepare = self._take, self._prepare
        return made

    async def open_to(self, session: ServingSession) -> None:
        """Charge and record every request from now on."""
        controlled = self._controlled
        assert controlled is not None
        await self._prepare()  # a site of language models alone changes no replicas
        while not self.local.joined(self.seen):  # noqa: ASYNC110 - it is looked at, nothing reports it
            await asyncio.sleep(_REFRESH_S / 2)
        await controlled.refresh()
        self._session = session
        for recorder in (session.history.requests, self._unmetered.recorder):
            recorder.before_write = self._expect_rows
        await self._begin(controlled)
        session.watch(self._ticked)
        session.on_decision(self.metrics.decision)
        controlled.on_samples = self._sample
        controlled.sampled = any(one.shadow is not None for one in session.services.values())
        if self._unmetered.count:
            session.warn(
                f"{self._unmetered.count} requests ended while there was no controller: they are counted apart, "
                "and their energy was not metered"
            )

    def report(self) -> dict[str, Any]:
        """The report's entry on the gateways; writes the requests that ended without a controller as a series.

        Raises:
            CapabilityError: The file cannot be written.
        """
        return {
            "gateways": self._gateways(),
            "unknown_requests": self._unknown + self._former_unknown,
            "without_controller": self._unmetered.report(),
            "engine_server_restarts": self.restarts,
        }

    def _gateways(self) -> list[dict[str, Any]]:
        """Each gateway with its counts, those at former engine servers included."""
        gateways = []
        for one in self.seen:
            received, ended = (self._former[one.name, side] for side in ("received", "ended"))
            gateways.append(
                {
                    "gateway": one.name,
                    "url": one.url,
                    "version": one.version,
                    "received": one.received + received,
                    "ended": one.ended + ended,
                    "starts": next((mine.starts for mine in self.local.gateways if mine.name == one.name), 0),
                }
            )
        return gateways

    async def watch(self) -> None:
        """Update the state of the gateways a few times a second, and keep those of this machine running."""
        while True:
            if self._controlled is not None and self._controlled.link is not None:
                await self._controlled.refresh()
            elif self._reviving is None:
                with suppress(ActuationError):
                    self._found = await self._link.ask("look")
            for text in self.local.supervise(self.seen):
                self._say(text)
            await asyncio.sleep(_REFRESH_S)

    def start(self) -> None:
        """Start the gateways that do not run, and watch them."""
        self.local.supervise(self.seen)
        self._watching = asyncio.create_task(self.watch(), name="gateways")

    async def close(self) -> None:
        """Stop the gateways and the engine server. Safe to call twice."""
        self._closing = True
        for task in (self._watching, self._reviving):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.local.stop()
        log, self.workers_log = self.workers_log, 2
        if log != 2:
            os.close(log)
        await self._end_engine_server()

    def serve_text(self, routes: OpenAIRoutes) -> None:
        """Answer the requests for language models that gateways forward, from now on."""
        self.text = routes
        self._publish()

    async def answer(self, request: RelayedRequest, passed: Passed) -> None:
        """Answer a request for a language model that a gateway has passed on."""
        await answer_relayed(self.text, request, passed)

    async def page(self, path: str, query: str, accept: str) -> PageAnswer:
        """Render a page that a gateway's client requests."""
        return await page_of(self.admin, path, query, accept)

    def lost(self) -> None:
        """Start another engine server after this one has ended by itself."""
        if not self._closing and self._reviving is None:
            self._reviving = asyncio.create_task(self._revive(), name="engine server")

    async def _prepare(self) -> None:
        """Connect the engine, once, before the first change."""
        controlled = self._controlled
        if controlled is not None and controlled.link is None and not self._closing:
            self._publish()
            await controlled.take_over(self._link, self._found)

    async def _begin(self, controlled: ControlledEngine) -> None:
        recorded = 0 if self._session is None else self._session.history.requests.count
        if not recorded:  # rows of the session are on disk with the next tick, and reported as stored then
            self._unmetered.flush()
            controlled.stored()
        self._keep_marks(controlled)
        self._publish()
        await self._link.ask("begin", self.site.name)

    async def _revive(self) -> None:
        """Start another engine server, retrying until it works, and restore the replicas of the former one."""
        self._say("the engine server has ended, and with it the replicas: another one is started")
        self._keep_counts()
        self._store()
        self.restarts += 1
        pause_s = _FIRST_PAUSE_S
        try:
            while not await self._revived():
                await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._reviving = None

    async def _revived(self) -> bool:
        """Try once to start and restore it; return whether it succeeded. A failed attempt is cleaned up."""
        controlled, seen = self._controlled, self.seen
        if controlled is not None:
            controlled.link = None
        self._link = ControlLink(self.page, self.lost, self.answer)
        try:
            await self._engine_server.connect(self._link, fresh=True)
            self._found = await self._link.ask("look")
            if controlled is not None:
                controlled.next = self._found.first
                self._publish()
                await controlled.take_over(self._link, self._found)
                await controlled.restore()
                if self._session is not None:
                    await self._begin(controlled)
        except JouleryError as error:
            self._say(f"the engine server cannot be started, which is tried again: {error}")
            await self._end_engine_server()
        if self._link.connected:
            return True
        if self.seen is not seen:
            self._keep_counts()
        return False

    def _store(self) -> None:
        """Write the collected requests to disk, since gateways discard them when the next engine server starts."""
        if self._session is not None:
            with suppress(JouleryError):  # a full disk: the rows stay buffered, and the next tick says so
                self._session.history.requests.flush()
        if self._controlled is not None:
            self._controlled.stored()
            self._keep_marks(self._controlled)

    def _expect_rows(self) -> None:
        """Note the rows that are about to be written, so that the next controller knows which records are stored."""
        if self._controlled is not None and self._session is not None:
            recorders = (self._session.history.requests, self._unmetered.recorder)
            rows = {one.path.absolute(): one.count for one in recorders}
            with suppress(JouleryError):  # a full disk: the next controller may count some of them again
                self._stored_records.expect(rows, self._controlled.once_stored())

    def _keep_marks(self, controlled: ControlledEngine) -> None:
        """Write the marks of stored records for the next controller."""
        with suppress(JouleryError):  # a full disk: it may count some of them again
            self._stored_records.write(Stored(controlled.marks, controlled.entries))

    def _keep_counts(self) -> None:
        """Keep the counts of an engine server that has ended; gateways report uncounted requests to the next one."""
        for one in self.seen:
            self._former[one.name, "received"] += one.ended
            self._former[one.name, "ended"] += one.ended
        self._former_unknown, self._unknown = self._former_unknown + self._unknown, 0
        self._unmetered.next_server()

    async def _end_engine_server(self) -> None:
        with suppress(JouleryError):
            await self._link.ask("end")
        await self._link.close()
        await self._engine_server.ended(self.site.serving.drain_s + 5.0)

    def _publish(self) -> None:
        """Publish limits, services and charges to every gateway."""
        names = self._names if self._session is None else list(self._session.services)
        settings: dict[str, Any] = {"services": names, "body_bytes": int(self.site.serving.body_bytes)}
        if self.site.language_models:
            settings["language_models"] = self.text is not None and self.text.ready
        charges = None if self._session is None else self._session.charges(unix_s()).as_dict()
        self._link.post("publish", settings, charges, {} if self._controlled is None else self._controlled.marks)

    def _ticked(self, tick: Tick) -> None:
        """Mark the requests of a period as stored, so that the engine server can discard them."""
        if self._controlled is not None:
            with suppress(JouleryError):  # a full disk: they are stored with the next tick
                self._unmetered.flush()
                self._controlled.stored()
            self._keep_marks(self._controlled)
        self._publish()

    def _take(self, batch: LedgerBatch) -> None:
        """Record the requests of a batch that have ended, each once."""
        for _ in range(batch.unknown - self._unknown):
            self.metrics.request(_unknown_request())
        self._unknown = batch.unknown
        folded: Counter[str] = Counter()
        for _, outcome, count in batch.folded:
            folded[outcome.value] += count
        self._unmetered.count_folded(folded)
        offset_s = unix_s() - time.monotonic()
        for entry in batch.entries:
            record = entry.record
            moved = record._replace(
                arrival_s=record.arrival_s + offset_s,
                start_s=record.start_s + offset_s,
                end_s=record.end_s + offset_s,
            )
            if self._session is None or moved.end_s < self._session.started_s:
                self._unmetered.add(moved)
            else:
                self._record(self._session, moved)

    def _record(self, session: ServingSession, record: RequestRecord) -> None:
        costs = record.outcome is Outcome.OK or (record.variant and record.cpu_s > 0)
        if costs and record.service in session.services:
            share = session.attribute(record.service, record.variant, record.cpu_s, record.service_s, record.end_s)
            record = record._replace(energy=share)
        session.telemetry(record)
        self.metrics.request(record)

    def _sample(self, samples: Mapping[str, InferRequest]) -> None:
        if self._session is not None:
            for service, request in samples.items():
                self._session.sample(service, request)

    def _latest(self) -> NowSnapshot | None:
        return None if self._session is None else self._session.snapshot()

    def _say(self, text: str) -> None:
        if self._session is not None:
            self._session.warn(text)


def _unknown_request() -> RequestRecord:
    nan = float("nan")
    return RequestRecord("", "", "", nan, nan, nan, Outcome.UNKNOWN, 0.0, 0.0, 0, None)


def workers_log(site: Site, writer: RunWriter) -> int:
    """File descriptor for the output of language-model engines; that of replicas is in the engine server's log.

    Raises:
        CapabilityError: The file cannot be written.
    """
    if not site.language_models:
        return 2  # standard error
    log = writer.path / "workers.log"
    with disk_errors(log):
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


@asynccontextmanager
async def open_gateways(site: Site, names: Sequence[str], writer: RunWriter, pages: Any) -> AsyncIterator[GatewayGroup]:
    """Open the gateways on their ports; take over the engine server and the gateways that are already running.

    Raises:
        JouleryError: A port or a file of the site is not available, or another controller runs.
    """
    folder = gateways_folder(site)
    assert site.serving.gateways is not None
    join_tls = site.serving.gateways.join_tls
    if join_tls is not None:
        TlsFiles(join_tls.certificate, join_tls.key).check()
    process = EngineServerProcess(folder, site.serving.gateways, names)
    held: list[GatewayGroup] = []

    async def page(path: str, query: str, accept: str) -> PageAnswer:
        return await held[0].page(path, query, accept) if held else (503, {}, b"")

    async def answer(request: RelayedRequest, passed: Passed) -> None:
        if held:
            await held[0].answer(request, passed)

    link = ControlLink(page, lambda: held[0].lost() if held else None, answer)
    orphans = (folder / PID).exists()
    there = await process.connect(link)
    try:
        if orphans and not there:
            await asyncio.sleep(_ORPHANS_S)
        found: Welcome = await link.ask("look")
        if found.site not in ("", site.name):
            raise CapabilityError(
                f"the engine server in {folder} serves site {found.site!r}",
                resource=str(folder),
                hint=f"give this site a state folder of its own, or end that one: kill {found.pid}",
            )
        local = LocalGateways(folder, site.serving)
        local.take_over(found.gateways)
    except BaseException:
        if not link_had_engine(process):
            with suppress(JouleryError):
                await link.ask("end")
        await link.close()
        raise
    group = GatewayGroup(site, names, writer, pages, process, local, link, found)
    held.append(group)
    group.start()
    try:
        yield group
    finally:
        await group.close()


def link_had_engine(process: EngineServerProcess) -> bool:
    """Whether the engine server was there before this controller."""
    return process.process is None
