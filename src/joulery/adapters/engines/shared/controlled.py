"""Client of an engine server that gateways share: the engine of a controller.

Values that the engine's port returns at once (replicas, backlog, weights) come from a copy.
:meth:`ControlledEngine.refresh` renews it, and fetches ended requests from the ledger.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from joulery import __version__
from joulery.adapters.engines.embedded.wire import unpack_error
from joulery.adapters.engines.shared.control import Taken, Welcome
from joulery.adapters.engines.shared.messages import LENGTH
from joulery.adapters.engines.shared.server import GatewayStatus, PageAnswer
from joulery.domain.errors import ActuationError, CapabilityError
from joulery.domain.serving.dispatch import QueueLimit
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
from joulery.domain.serving.ledger import LedgerBatch, RecordMarks, Stored, advance
from joulery.domain.serving.mix import OWN, VariantMix
from joulery.domain.serving.relay import Passed, RelayedPart, RelayedRequest
from joulery.steady_time import unix_s

_CALL_S = 10.0
"""Time limit of the engine server's answer to a call that starts and ends no replica."""
_NODES_S = 120.0
"""Time limit of the answers of a cluster's nodes: the cluster may have to be joined first."""
Page = Callable[[str, str, str], Awaitable[PageAnswer]]
"""Makes a page from path, query and accepted types."""
AnswersText = Callable[[RelayedRequest, Passed], Awaitable[None]]
"""Answers a request; cancelled when its client goes away."""


class ControlLink:
    """One connection of a controller to an engine server.

    Args:
        page: Makes the pages that gateways ask for.
        lost: Called when the connection ends by itself.
        text: Answers the requests for language models that gateways pass on.
    """

    def __init__(self, page: Page, lost: Callable[[], None], text: AnswersText | None = None) -> None:
        self._page, self._lost, self._text = page, lost, text
        self._texts: dict[int, asyncio.Task[None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._pages: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """Whether the engine server is connected."""
        return self._writer is not None

    async def open(self, path: str) -> None:
        """Connect to a socket.

        Raises:
            OSError: Nothing listens.
            CapabilityError: The engine server is of another version of joulery, or has a controller.
        """
        async with asyncio.timeout(_CALL_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=1 << 26)
            try:
                version, pid, controlled = await _read(reader)
            except asyncio.IncompleteReadError as error:
                writer.close()
                raise ConnectionResetError("the engine server closed the connection") from error
        if version != __version__ or controlled:
            writer.close()
            why = "has a controller" if controlled else f"is of joulery {version}, this is {__version__}"
            raise CapabilityError(
                f"the engine server of process {pid} {why}",
                resource="engine server",
                hint=f"stop that controller, or end the process: kill {pid}",
            )
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader), name="engine server")

    async def ask(self, method: str, *arguments: Any, within_s: float | None = _CALL_S) -> Any:
        """Call a method of the engine server and wait for its answer.

        Raises:
            ActuationError: The engine server is gone, or does not answer in time.
            JouleryError: The call's own error.
        """
        answer = self._send(method, arguments)
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError as error:
            raise ActuationError(f"the engine server did not answer {method} within {within_s:g} s") from error

    def post(self, method: str, *arguments: Any) -> None:
        """Call a method and ignore its answer; do nothing where the engine server is gone."""
        with suppress(ActuationError):
            self._send(method, arguments).add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        """Close the connection to the engine server. Safe to call twice."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        writer = self._writer
        self._fail_calls()
        if writer is not None:
            with suppress(OSError):
                await writer.wait_closed()

    def _send(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        if self._writer is None:
            raise ActuationError("the engine server is gone")
        self._count += 1
        number, answer = self._count, asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        answer.add_done_callback(lambda _: self._calls.pop(number, None))
        frame = pickle.dumps((number, method, arguments), protocol=5)
        self._writer.writelines([LENGTH.pack(len(frame)), frame])
        return answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, kind, value = await _read(reader)
                if kind == "page":
                    work = asyncio.create_task(self._make_page(*value))
                    self._pages.add(work)
                    work.add_done_callback(self._pages.discard)
                    continue
                if kind == "text":
                    self._answer(*value)
                    continue
                if kind == "withdraw":
                    if (withdrawn := self._texts.get(value)) is not None:
                        withdrawn.cancel()
                    continue
                call = self._calls.get(number)
                if call is not None and not call.done():
                    _settle(call, kind, value)
        self._fail_calls()
        self._lost()

    async def _make_page(self, number: int, path: str, query: str, accept: str) -> None:
        self.post("page", number, *await self._page(path, query, accept))

    def _answer(self, number: int, request: RelayedRequest) -> None:
        """Start a task that answers a request for a language model."""

        async def answered() -> None:
            ended = False

            def passed(part: RelayedPart) -> None:
                nonlocal ended
                ended = not part.more
                self.post("part", number, part)

            try:
                if self._text is not None:
                    await self._text(request, passed)
            finally:
                if not ended:
                    self.post("part", number, RelayedPart(more=False, error="the controller gave no answer"))

        work = self._texts[number] = asyncio.create_task(answered(), name="language model request")
        work.add_done_callback(lambda _: self._texts.pop(number, None))

    def _fail_calls(self) -> None:
        writer, self._writer = self._writer, None
        for work in list(self._texts.values()):
            work.cancel()
        if writer is not None:
            writer.close()
        for call in list(self._calls.values()):
            if not call.done():
                call.set_exception(ActuationError("the engine server is gone"))


class ControlledEngine:
    """The engine of an engine server. Implements :class:`joulery.domain.ports.Engine`, ``Backlog`` and ``Admission``.

    Args:
        plan: The plan from which the engine is made; the engine server keeps an engine of an equal plan.

    Attributes:
        latest: The state at the last refresh.
        link: The connection; set by its owner, again after the engine server was lost.
        sampled: Whether to take answered requests, for shadow replays.
        prepare: Awaited before a change, and before nodes are queried: connects to the engine server.
        on_batch: Called with the ended requests of each :meth:`refresh`.
        on_samples: Called with answered requests by service.
        next: Number of the first ledger entry that was not fetched.
        target: The replicas that were applied last; None before.
        shift_s: Unix time of this process less that of the engine server.
        marks: Which records are stored: gateways keep the others, for the next engine server if this one is lost.
        entries: Ledger entries below these numbers are stored, by engine server.
    """

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.link: ControlLink | None = None
        self.latest = Taken((), (), LedgerBatch(0), {}, {}, (), {})
        self.sampled = False
        self.prepare: Callable[[], Awaitable[None]] | None = None
        self.on_batch: Callable[[LedgerBatch], None] = lambda _: None
        self.on_samples: Callable[[Mapping[str, InferRequest]], None] = lambda _: None
        self.next = 0
        self.target: tuple[ReplicaSpec, ...] | None = None
        self.shift_s = 0.0
        self.marks: RecordMarks = {}
        self.entries: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._instance = ""
        self._limits: dict[str, QueueLimit | None] = {}
        self._preferred: tuple[dict[str, int], float] | None = None
        self._taking = asyncio.Lock()

    async def take_over(self, link: ControlLink, found: Welcome) -> None:
        """Use a connected engine server from now on.

        Raises:
            JouleryError: Its engine cannot be made.
        """
        self.link, self._instance, self._taken = link, found.instance, {}
        advance(self.marks, found.marks)
        self.marks.setdefault(self._instance, {})
        self.shift_s = (unix_s() - time.monotonic()) - found.zero_s
        await link.ask("open", self.plan, within_s=None)

    async def restore(self) -> None:
        """Apply the former replicas, queue limits and node ranks to a new engine server.

        Raises:
            JouleryError: The replicas cannot be started.
        """
        if self.target is not None:
            await self._ask("apply", self.target, within_s=None)
        for service, limit in self._limits.items():
            self._post("set", "limit_queue", service, limit)
        if self._preferred is not None:
            self._post("set", "prefer_nodes", *self._preferred)

    async def refresh(self) -> None:
        """Fetch the state and newly ended requests; do nothing while the engine server is away."""
        async with self._taking:
            if self.link is None:
                return
            services = sorted({spec.service for spec in self.target or ()})
            with suppress(ActuationError):
                taken: Taken = await self._ask("take", self.next, services, self.sampled)
                self.latest = taken
                self.next = taken.batch.first + len(taken.batch.entries)
                self._taken.update((one.process, one.number) for one in taken.batch.entries if one.number)
                self.on_batch(taken.batch)
                if taken.samples:
                    self.on_samples(taken.samples)

    def stored(self) -> None:
        """Report that all fetched entries are on disk: the engine server and the gateways may drop them."""
        self._post("drop", self.next)
        self.marks, self.entries = self.once_stored()

    def once_stored(self) -> Stored:
        """The marks and entries that :meth:`stored` will set."""
        marks = {server: dict(numbers) for server, numbers in self.marks.items()}
        if not self._instance:
            return Stored(marks, self.entries)
        advance(marks, {self._instance: self._taken})
        return Stored(marks, {**self.entries, self._instance: self.next})

    @property
    def gateways(self) -> tuple[GatewayStatus, ...]:
        """The gateways at the last refresh."""
        return self.latest.gateways

    def labels(self, service: str) -> Mapping[str, tuple[int, int]]:
        """Numbers of right and of labelled answers, by variant."""
        return self.latest.labels.get(service, {})

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Every replica at the last refresh, sorted by id."""
        return self.latest.replicas

    def backlog(self) -> tuple[QueuedRequest, ...]:
        """Every request in a replica or waiting at the last refresh, by arrival."""
        shift_s = self.shift_s
        return tuple(
            one._replace(arrival_s=one.arrival_s + shift_s, start_s=one.start_s + shift_s)
            for one in self.latest.backlog
        )

    def limit_queue(self, service: str, limit: QueueLimit | None, /) -> None:
        """Set the limit past which requests for a service are refused; None for the engine's own limit."""
        if service not in self._limits or self._limits[service] != limit:
            self._limits[service] = limit
            self._post("set", "limit_queue", service, limit)

    async def nodes(self, meter: str, options: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """The answers of the meters of a cluster's nodes, by address.

        Raises:
            ActuationError: The engine server or the cluster is gone.
        """
        if self.prepare is not None:
            await self.prepare()
        found: dict[str, dict[str, Any]] = await self._ask("nodes", meter, options, within_s=_NODES_S)
        return found

    def prefer_nodes(self, ranks: Mapping[str, int], patience_s: float) -> None:
        """Give requests to nodes of lower rank first, from the next request on."""
        self._preferred = dict(ranks), patience_s
        self._post("set", "prefer_nodes", *self._preferred)

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        """Answer a request without an entry in the ledger.

        Raises:
            RequestError: The request was not answered; ``outcome`` gives the reason.
        """
        try:
            answer: InferResponse = await self._ask("infer", service, request, within_s=None)
        except ActuationError as error:
            raise RequestError(str(error), Outcome.UNAVAILABLE) from error
        return answer

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        """Make ``target`` the set of replicas; see :meth:`joulery.domain.ports.Engine.apply`."""
        if self.prepare is not None:
            await self.prepare()
        change: Transition = await self._ask("apply", tuple(target), within_s=None)
        self.target = tuple(target)
        await self.refresh()
        return change

    async def close(self) -> None:
        """Close the engine once it has finished what it accepted; nothing is left behind. Safe to call twice."""
        link = self.link
        if link is None:
            return
        with suppress(ActuationError):
            await link.ask("close", within_s=None)
        await self.refresh()
        self.link = None

    async def _ask(self, method: str, *arguments: Any, within_s: float | None = _CALL_S) -> Any:
        if self.link is None:
            raise ActuationError("the engine server is gone")
        return await self.link.ask(method, *arguments, within_s=within_s)

    def _post(self, method: str, *arguments: Any) -> None:
        if self.link is not None:
            self.link.post(method, *arguments)


class SteeredEngine(ControlledEngine):
    """A :class:`ControlledEngine` that splits requests among variants by shares; implements ``Steering``."""

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self._mixes: dict[str, VariantMix] = {}
        self._next: dict[str, VariantMix] = {}

    def set_mix(self, service: str, mix: VariantMix, /) -> None:
        """Let the variants of a mix answer from the next request on; replicas stay as they are."""
        self._mixes[service] = mix
        self._post("set", "set_mix", service, mix)

    def set_next_mixes(self, mixes: Mapping[str, VariantMix], /) -> None:
        """Set the mix of each service from the next change of replicas on, in place of those set before for it."""
        self._next = dict(mixes)
        self._post("set", "set_next_mixes", dict(mixes))

    def mix(self, service: str, /) -> VariantMix:
        """The mix in force."""
        return self._mixes.get(service, self.latest.mixes.get(service, OWN))

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        """Make ``target`` the set of replicas; the mixes set for this change are in force after it."""
        change = await super().apply(target)
        self._mixes.update(self._next)
        self._next = {}
        return change

    async def restore(self) -> None:
        """Apply the former replicas, settings and mixes to a new engine server.

        Raises:
            JouleryError: The replicas cannot be started.
        """
        await super().restore()
        for service, mix in self._mixes.items():
            self._post("set", "set_mix", service, mix)


async def _read(reader: asyncio.StreamReader) -> Any:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def _settle(call: asyncio.Future[Any], kind: str, value: Any) -> None:
    if kind == "value":
        call.set_result(value)
    elif kind == "actuation":
        call.set_exception(ActuationError(value))
    elif kind == "request":
        call.set_exception(RequestError(f"not answered: {value}", Outcome(value)))
    else:
        call.set_exception(unpack_error(value))
