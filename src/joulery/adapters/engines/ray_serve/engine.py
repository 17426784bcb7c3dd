"""Ray Serve as an engine: replicas on a Ray cluster, joulery's queue and gateway in front.

Free replicas pull from one queue per service, as in the embedded engine (:mod:`joulery.domain.serving.dispatch`);
Ray starts, watches and ends the replicas. A changed mix on slices of one size is a changed plan: processes stay and
load their new variant beside the old one. Other sizes are other deployments, which start before the old ones end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from joulery.adapters.engines.embedded.batches import kind_of
from joulery.adapters.engines.embedded.service import check_inputs
from joulery.adapters.engines.embedded.wire import unpack_error
from joulery.adapters.engines.ray_serve.applications import RayApp, apps_of, entry_of, node_of, status_message
from joulery.adapters.engines.ray_serve.bridge import RayBridge
from joulery.adapters.engines.ray_serve.calls import (
    RayCall,
    RayReplica,
    RayService,
    answers_of,
    fail,
    out_of_time,
    queued,
    request_of,
    response,
    runs,
    served_out,
    until,
    views,
)
from joulery.adapters.engines.ray_serve.cluster import ReplicaGoneError
from joulery.adapters.engines.ray_serve.counts import ReplicaCounts
from joulery.adapters.engines.ray_serve.direct import DirectLines
from joulery.adapters.engines.ray_serve.replica import DEPLOYMENT
from joulery.adapters.engines.ray_serve.settings import RaySettings
from joulery.domain.errors import ActuationError, DataError, JouleryError
from joulery.domain.serving.dispatch import Dispatcher, QueueLimit, QueueLimits, Server, Ticket
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    Outcome,
    QueuedRequest,
    ReplicaSpec,
    ReplicaView,
    RequestError,
    Transition,
)
from joulery.steady_time import unix_s

_LOOK_S = 0.2
"""Seconds between two checks of replicas that are changing."""
_LOOKS = 150
"""Number of checks that wait for an undeclared application to disappear; after them Ray still ends it."""
_PATIENCE = 20
"""Number of checks in which a replica with a request may be missing before it is given up."""
_WATCH_S = 1.0
"""Seconds between two checks of replicas that are not changing."""
_RETRY_LOST_S = 5.0
"""Seconds between two attempts to reach a cluster that is gone."""
_NONE_RUNS = "no replica of the service runs now; Ray starts them again"
"""This is known as soon as connections break; the loss of the cluster only at the next check."""
_RETRY_AFTER_S = 1.0
"""Seconds that a refused client is asked to wait; service times, for a better estimate, are not kept."""


class RayServeEngine:
    """Engine with replicas on Ray Serve. Implements :class:`joulery.domain.ports.Engine`.

    Args:
        settings: Its limits.
        cluster: The connection; made from the settings when None.
    """

    def __init__(self, settings: RaySettings, cluster: RayBridge | None = None) -> None:
        self.settings = settings
        self._cluster = RayBridge(settings.place) if cluster is None else cluster
        self._lines = DirectLines(self._cluster, self._leaves, self._line_lost)
        self._counts = ReplicaCounts(self._cluster)
        self._apps: dict[str, RayApp] = {}
        self._found: dict[str, RayReplica] = {}
        self._restarts: Counter[tuple[str, int]] = Counter()
        self._served: Counter[tuple[str, int]] = Counter()
        self._services: dict[str, RayService] = {}
        self._changing, self._looking = asyncio.Lock(), asyncio.Lock()
        self._sending: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._limits = QueueLimits(settings.queue)
        self._closed, self._away = False, ""
        self._gone_s: dict[str, float] = {}
        self._ranks: dict[str, int] = {}

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Every replica now, sorted by id; one that Ray starts again is shown as restarting."""
        plans = {name: app.plan for name, app in self._apps.items()}
        return views(plans, self._found.values(), self._served, self._restarts)

    def backlog(self) -> tuple[QueuedRequest, ...]:
        """Every request in a replica or waiting, by arrival."""
        return queued(self._services, unix_s() - time.monotonic())

    def limit_queue(self, service: str, limit: QueueLimit | None, /) -> None:
        """Set the limit past which requests for a service are refused; None for the engine's own limit."""
        found = self._services.get(service)
        self._limits.change(service, limit, found.queue if found else None)

    def remarks(self) -> tuple[str, ...]:
        """Remarks about the cluster for the operator."""
        return (*self._counts.remarks.values(), *self._lines.remarks())

    async def nodes(self, meter: str, options: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """The answers of the meters of the cluster's nodes; see :meth:`.cluster.RayCluster.nodes`.

        Raises:
            JouleryError: The cluster cannot be joined, or is gone.
        """
        if not self._apps and not self._cluster.lost:
            await self._cluster.open()
        return await self._cluster.nodes(meter, options)

    def prefer_nodes(self, ranks: Mapping[str, int], patience_s: float) -> None:
        """Let free replicas on nodes of lower rank take requests first; see :meth:`Dispatcher.prefer`."""
        self._ranks = dict(ranks)
        for replica in self._found.values():
            replica.server.rank = self._ranks.get(node_of(replica.spec), 0)
        for entry in self._services.values():
            entry.queue.prefer(patience_s)
            self._pump(entry)

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        """The answer of the next free replica.

        Raises:
            RequestError: The request was not answered; ``outcome`` gives the reason.
        """
        arrival_s = unix_s()
        entry, kind = self._admit(service, request)
        call = RayCall(request, asyncio.get_running_loop().create_future())
        patience_s = self.settings.deadline_s
        if request.timeout_s is not None:
            patience_s = min(patience_s, request.timeout_s)
        now_s = time.monotonic()
        ticket = Ticket(call, now_s + patience_s, request.variant, kind=kind, since_s=now_s)
        if not entry.queue.offer(ticket):
            message = f"{service} has {entry.queue.waiting} requests waiting, its limit"
            raise RequestError(message, Outcome.OVERLOADED, retry_after_s=_RETRY_AFTER_S)
        self._pump(entry)
        try:
            async with asyncio.timeout(patience_s):
                replica, answer, start_s, batch = await call.answer
        except TimeoutError as error:
            entry.queue.withdraw(ticket)
            running = any(replica.spec.service == service for replica in self._found.values())
            raise out_of_time(ticket, self._away or ("" if running else _NONE_RUNS), _RETRY_LOST_S) from error
        except asyncio.CancelledError:
            entry.queue.withdraw(ticket)
            self._pump(entry)
            raise
        return response(replica, answer, arrival_s, start_s, ticket.attempts, batch)

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        """Make ``target`` the set of replicas; see :meth:`joulery.domain.ports.Engine.apply`."""
        async with self._changing:
            start_s, start, known = unix_s(), time.monotonic(), set(self._found)
            before, wanted = dict(self._apps), apps_of(target, self._apps)
            self._forget_lost()
            await self._cluster.open()
            old, new = (Counter(spec for app in apps.values() for spec in app.plan) for apps in (before, wanted))
            try:
                await self._declare({**before, **wanted})
                await self._until_ready(wanted)
            except JouleryError:
                await self._declare(before)
                self._apps = before
                await self._look()
                raise
            self._apps, self._away = wanted, ""
            for name in {spec.service for spec in target} | set(self._services):
                limit = self._limits.of(name)
                entry = self._services.setdefault(name, RayService(Dispatcher(limit.waiting, limit.wait_s)))
                entry.variants = frozenset(spec.variant for spec in target if spec.service == name)
                for ticket in entry.queue.drop_waiting(entry.variants) if entry.variants else ():
                    gone = f"{name} does not run the requested variant any more"
                    fail(ticket, RequestError(gone, Outcome.UNAVAILABLE))
            self._take_over(wanted)
            ready_s = time.monotonic() - start
            await self._end(before.keys() - wanted.keys(), wanted)
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch(), name="ray replicas")
            fresh = {one for one in self._found.values() if one.id not in known or new[one.spec] > old[one.spec]}
            return Transition(
                started=tuple(sorted((new - old).elements())),
                stopped=tuple(sorted((old - new).elements())),
                kept=tuple(sorted((new & old).elements())),
                start_s=start_s,
                ready_s=ready_s,
                duration_s=time.monotonic() - start,
                startup_cpu_s=sum(float(replica.info["startup_cpu_s"]) for replica in fresh),
            )

    async def close(self) -> None:
        """Let running requests finish within ``drain_s``, fail waiting ones, and end all replicas."""
        self._closed = True
        for entry in self._services.values():
            for ticket in entry.queue.drop_waiting():
                fail(ticket, RequestError("the engine is closing", Outcome.UNAVAILABLE))
        if self._sending:
            await asyncio.wait(self._sending, timeout=self.settings.drain_s)
        for task in (*self._sending, *([self._watching] if self._watching is not None else [])):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._watching = None
        async with self._changing:
            if self._apps and not self.settings.place.local:
                with suppress(ActuationError):  # a head that is gone keeps nothing
                    await self._cluster.declare([])
            self._apps, self._found = {}, {}
            self._lines.close()
            await self._cluster.close()

    def _admit(self, service: str, request: InferRequest) -> tuple[RayService, Hashable]:
        """The service of a request, and the kind of requests it can be joined with; None for no other.

        Raises:
            RequestError: The request cannot be answered here.
        """
        entry = self._services.get(service)
        if self._closed:
            raise RequestError("the engine is closing", Outcome.UNAVAILABLE)
        if entry is None or not entry.variants:
            raise RequestError(f"there is no service {service!r}", Outcome.UNKNOWN)
        if request.variant and request.variant not in entry.variants:
            raise RequestError(f"{service} runs no variant {request.variant!r} now", Outcome.UNKNOWN)
        mine = [replica for replica in self._found.values() if replica.spec.service == service]
        declared = {replica.inputs for replica in mine}
        inputs = declared.pop() if len(declared) == 1 else ()
        if inputs:
            check_inputs(request, inputs)
        return entry, kind_of(request, inputs) if any(replica.spec.batch > 1 for replica in mine) else None

    def _pump(self, entry: RayService) -> None:
        """Give waiting requests to free replicas."""
        now_s = time.monotonic()
        for late in entry.queue.overdue(now_s):
            message = "it could not be answered within its SLO"
            fail(late, RequestError(message, Outcome.OVERLOADED, retry_after_s=_RETRY_AFTER_S))
        while (pair := entry.queue.pull(now_s)) is not None:
            self._beside(self._send(entry, pair[1]))
        if entry.ripe is not None:
            entry.ripe.cancel()
        wait_s = entry.queue.ripe_s - now_s
        later = asyncio.get_running_loop().call_later
        entry.ripe = later(wait_s, self._pump, entry) if wait_s < math.inf else None

    async def _send(self, entry: RayService, server: Server[RayCall, RayReplica]) -> None:
        """Send a replica the request or batch that it took, and handle the answer."""
        replica, start_s, tickets = server.payload, unix_s(), list(server.held)
        calls = [ticket.payload for ticket in tickets]
        for call in calls:
            call.start_s = start_s
        try:
            answer = await self._lines.infer(replica.app, replica.info, request_of(calls))
        except ReplicaGoneError as error:
            self._gone_s[replica.id] = time.monotonic()
            if self._cluster.lost:
                self._forget_lost()
                if server not in entry.queue.servers:
                    return
            self._lost(entry, replica, f"two replicas died under this request; the last: {error}")
            return
        if answer.get("moved"):
            # Another replica took the call, because this one is gone, or it runs another variant by now: no replica has
            # tried the request yet. Outside a change Ray ends none that lives.
            for ticket in tickets:
                ticket.attempts -= 1
            self._lost(entry, replica, self._ended)
            self._beside(self._look())
            return
        try:
            parts = answers_of(answer, calls)
        except DataError:
            # One request may be at fault, or the model answers no batches: each goes alone now.
            if server in entry.queue.servers:
                entry.queue.split(server)
            self._pump(entry)
            return
        self._served[replica.app, replica.rank] += len(calls)
        if server in entry.queue.servers:
            entry.queue.finish_all(server)
        else:
            for ticket in tickets:
                entry.queue.withdraw(ticket)  # it was given up for lost, and answered after all
        self._pump(entry)
        for call, part in zip(calls, parts, strict=True):
            if not call.answer.done():
                call.answer.set_result((replica, part, start_s, len(calls)))

    @property
    def _ended(self) -> str:
        """Reason why Ray ended a replica; empty during a change, which ends replicas itself: that is not a restart."""
        return "" if self._changing.locked() else "Ray ended it"

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _lost(self, entry: RayService | None, replica: RayReplica, reason: str) -> None:
        """Remove a replica from the queue as lost; the next check adds it again if it still exists."""
        if entry is not None and replica.server in entry.queue.servers:
            for ticket in entry.queue.lose(replica.server):
                fail(ticket, RequestError(reason, Outcome.CRASHED, variant=replica.spec.variant, attempts=2))
        if self._found.get(replica.id) is replica:
            del self._found[replica.id]
            self._restarts[replica.app, replica.rank] += bool(reason)
        if entry is not None:
            self._pump(entry)

    def _leaves(self, replica_id: str) -> None:
        """Handle a report that Ray ends a replica: it answers the requests it holds, and gets no more."""
        self._gone_s[replica_id] = math.inf
        replica = self._found.get(replica_id)
        if replica is not None and replica.server.held:
            replica.server.leaving = True
        elif replica is not None:
            self._lost(self._services.get(replica.spec.service), replica, self._ended)

    def _line_lost(self, replica_id: str) -> None:
        """Handle a broken connection to a replica; if it holds a request, that request detects the loss."""
        self._gone_s[replica_id] = time.monotonic()
        replica = self._found.get(replica_id)
        if replica is not None and not replica.server.held:
            self._lost(self._services.get(replica.spec.service), replica, "its connection was closed")
            self._away = self._away or ("" if self._found else self._cluster.lost)

    async def _declare(self, apps: Mapping[str, RayApp]) -> None:
        environ, settings = self._cluster.environ(), self.settings
        common = (environ, settings.claim_ratio, settings.nodes, settings.listens, settings.deadline_s)
        await self._cluster.declare([app.config(*common) for app in apps.values()])
        for app in apps.values():
            before = self._apps.get(app.name)
            if before is not None and len(before.plan) != len(app.plan):
                await self._cluster.scale(app.name, DEPLOYMENT, len(app.plan))

    async def _until_ready(self, wanted: Mapping[str, RayApp]) -> None:
        """Wait until Ray runs all of these applications.

        Raises:
            ConfigError, DataError, CapabilityError: A model cannot be loaded.
            ActuationError: Ray cannot start a replica, or it takes too long.
        """
        end_s = time.monotonic() + self.settings.launch_s
        while True:
            await self._look(wanted)
            states = await self._cluster.applications()
            missing = [app for app in wanted.values() if not runs(app.name, app.plan, self._found.values())]
            if not missing:
                return
            for app in missing:
                found = states.get(app.name, {})
                if found.get("status") == "DEPLOY_FAILED":
                    raise ActuationError(f"Ray cannot run {app.name}: {status_message(found)}")
            if time.monotonic() > end_s:
                names = ", ".join(app.name for app in missing)
                raise ActuationError(f"Ray did not bring up {names} within {self.settings.launch_s:g} s")
            await asyncio.sleep(_LOOK_S)

    async def _look(self, wanted: Mapping[str, RayApp] | None = None) -> None:
        """Update, from Ray, which replicas exist and what each runs.

        Args:
            wanted: The applications that are starting, where they differ from those that serve; their errors raise.
        """
        async with self._looking:
            apps = {**self._apps, **(wanted or {})}
            seen, described = set[str](), set[str]()
            for app in apps.values():
                looked_s = time.monotonic()
                infos = await self._cluster.describe(app.name)
                if infos is None:
                    continue
                described.add(app.name)
                for info in infos:
                    if info["failed"] and wanted and info["failed"]["entry"] in map(entry_of, app.plan):
                        raise unpack_error(info["failed"]["error"])
                    seen.add(info["id"])
                    if self._gone_s.get(info["id"], -math.inf) < looked_s:  # or the description is of before its end
                        self._met(app, info)
            gone = [each for each in self._found.values() if each.app in described and each.id not in seen]
            for replica in gone:
                if replica.server.held and (self._lines.up(replica.id) or replica.unseen < _PATIENCE):
                    # Ray lets one that it ends answer what it holds; one that died makes its call fail.
                    replica.unseen += 1
                    replica.server.leaving = True
                    continue
                self._lines.drop(replica.id)
                self._lost(self._services.get(replica.spec.service), replica, self._ended)
            if len(described) == len(apps):
                self._gone_s = {name: at_s for name, at_s in self._gone_s.items() if name in {*seen, *self._found}}
            await self._lines.reach([replica.info for replica in self._found.values()])
            if wanted is None:
                self._take_over(self._apps)

    def _met(self, app: RayApp, info: Mapping[str, Any]) -> None:
        spec, there = app.spec(info["entry"], int(info["rank"])), self._found.get(info["id"])
        if spec is None:
            return
        if there is None:
            self._found[info["id"]] = RayReplica(app.name, int(info["rank"]), spec, info)
            return
        if there.unseen:
            there.unseen, there.server.leaving = 0, False
        if (there.spec, there.rank) != (spec, info["rank"]):
            there.become(int(info["rank"]), spec, info)

    def _take_over(self, apps: Mapping[str, RayApp]) -> None:
        """Let the replicas of these applications take requests."""
        for replica in self._found.values():
            entry = self._services.get(replica.spec.service)
            ends = self._gone_s.get(replica.id, -math.inf) == math.inf
            if replica.app in apps and entry is not None and replica.server not in entry.queue.servers and not ends:
                replica.server = replica.new_server()
                replica.server.rank = self._ranks.get(node_of(replica.spec), 0)
                entry.queue.join(replica.server)
        for entry in self._services.values():
            self._pump(entry)

    async def _end(self, leaving: set[str], wanted: Mapping[str, RayApp]) -> None:
        """End old applications after they have answered what they hold, and ending services what they accepted."""
        if not leaving:
            return
        going = [replica for replica in self._found.values() if replica.app in leaving]
        for entry in self._services.values():
            await until(partial(served_out, entry))
        for replica in going:
            queue = self._services[replica.spec.service].queue
            if replica.server in queue.servers and not replica.server.leaving:
                queue.retire(replica.server)
        await until(lambda: all(replica.server.ticket is None for replica in going))
        await self._declare(wanted)
        for replica in going:
            self._found.pop(replica.id, None)
        for _ in range(_LOOKS):
            if not leaving & (await self._cluster.applications()).keys():
                return
            await asyncio.sleep(_LOOK_S)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._changing.locked():
                continue
            if not self._cluster.lost:
                await self._look()
                await self._counts.set_back(self._apps)
            elif not await self._returned():
                await asyncio.sleep(_RETRY_LOST_S)

    async def _returned(self) -> bool:
        """Try to reconnect to Ray and restore its replicas; return whether it succeeded. Requests wait meanwhile."""
        async with self._changing:
            self._forget_lost()
            try:
                await self._cluster.open()
                await self._declare(self._apps)
                await self._until_ready(self._apps)
            except JouleryError as error:
                await self._cluster.close()
                self._cluster.lost = f"Ray is gone, and is not back: {error}"
                return False
            self._away = ""
            self._take_over(self._apps)
        return True

    def _forget_lost(self) -> None:
        """Remove the replicas of a cluster that is gone; the requests they held wait for others, once.

        Replicas whose connections are up continue to serve for as long as these are up.
        """
        if not self._cluster.lost:
            return
        gone = [replica for replica in self._found.values() if not self._lines.up(replica.id)]
        self._found = {replica.id: replica for replica in self._found.values() if replica not in gone}
        if not self._found:
            self._away = self._cluster.lost
        for replica in gone:
            entry = self._services.get(replica.spec.service)
            self._restarts[replica.app, replica.rank] += 1
            if entry is not None and replica.server in entry.queue.servers:
                for ticket in entry.queue.lose(replica.server):
                    fail(ticket, RequestError(self._cluster.lost, Outcome.UNAVAILABLE, retry_after_s=_RETRY_LOST_S))
        for entry in self._services.values():
            self._pump(entry)
