"""The engine server's side of the controller's connection: pickled calls over a socket that only its user can reach.

There is one controller at a time. Calls are ``(number, method, arguments)``, answers ``(number, kind, value)``;
the server's own requests to the controller are answers of number 0.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from joulery import __version__
from joulery.adapters.engines.embedded.wire import pack_error
from joulery.adapters.engines.shared.messages import LENGTH
from joulery.adapters.engines.shared.server import EngineServer, GatewayStatus, PageAnswer
from joulery.domain.errors import ActuationError, JouleryError
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import InferRequest, QueuedRequest, ReplicaSpec, ReplicaView, RequestError
from joulery.domain.serving.ledger import LedgerBatch, RecordMarks, advance
from joulery.domain.serving.mix import OWN, VariantMix
from joulery.domain.serving.relay import Passed, RelayedPart, RelayedRequest
from joulery.steady_time import unix_s


@dataclass(frozen=True, slots=True)
class Welcome:
    """State of the engine server that a controller receives when it connects.

    Attributes:
        pid: The engine server's process.
        site: The site it serves; empty before a controller has opened it.
        plan: The plan from which its engine was made.
        zero_s: Unix seconds at 0 of the monotonic clock, by the engine server's clocks.
        first: Number of the first entry of the ledger that no controller has certainly stored.
        since_s: When the last controller left, or the server started before the first one; Unix seconds.
        gateways: The gateways.
        instance: Identifies the engine server.
        marks: Which records a controller has stored.
    """

    pid: int
    site: str
    plan: Any
    zero_s: float
    first: int
    since_s: float
    gateways: tuple[GatewayStatus, ...]
    instance: str
    marks: RecordMarks


@dataclass(frozen=True, slots=True)
class Taken:
    """State that a controller fetches a few times a second.

    Attributes:
        replicas: The replicas.
        backlog: Requests without an answer.
        batch: Ended requests.
        mixes: The weights in force, by service.
        labels: Numbers of right and of labelled answers, by service and variant.
        gateways: The gateways.
        samples: An answered request of each service.
    """

    replicas: tuple[ReplicaView, ...]
    backlog: tuple[QueuedRequest, ...]
    batch: LedgerBatch
    mixes: Mapping[str, VariantMix]
    labels: Mapping[str, Mapping[str, tuple[int, int]]]
    gateways: tuple[GatewayStatus, ...]
    samples: Mapping[str, InferRequest]


class ControlServer:
    """Server of controllers, one at a time.

    Args:
        server: The engine server.
        make: Makes the engine from the controller's plan.
        ended: Called when a controller requests the end of the process.
    """

    def __init__(
        self, server: EngineServer, make: Callable[[Any], Awaitable[Engine]], ended: Callable[[], None]
    ) -> None:
        self.server = server
        self._make, self._ended = make, ended
        self._site, self._plan = "", None
        self._left_s, self._away_s = unix_s(), time.monotonic()
        self._writer: asyncio.StreamWriter | None = None
        self._pages: dict[int, asyncio.Future[PageAnswer]] = {}
        self._texts: dict[int, Passed] = {}
        self._page = 0
        self._calls: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()

    @property
    def controlled(self) -> bool:
        """Whether a controller is connected."""
        return self._writer is not None

    @property
    def away_s(self) -> float:
        """Seconds without a controller; 0 while one is connected."""
        return 0.0 if self.controlled else time.monotonic() - self._away_s

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a controller that has connected, until it disconnects."""
        greeting = pickle.dumps((__version__, os.getpid(), self.controlled), protocol=4)
        writer.writelines([LENGTH.pack(len(greeting)), greeting])
        if self.controlled:
            writer.close()
            return
        self._writer = writer
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                number, method, arguments = pickle.loads(await reader.readexactly(length))
                call = asyncio.create_task(self._call(writer, number, method, arguments))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the controller has gone, or this process ends
        finally:
            self._leave()
            writer.close()

    def _leave(self) -> None:
        self._writer = None
        self._left_s, self._away_s = unix_s(), time.monotonic()
        state = self.server.state
        state.controller, state.left_s = False, time.monotonic()
        self.server.ask_page = self.server.ask_text = None
        texts, self._texts = self._texts, {}
        for passed in texts.values():
            passed(RelayedPart(more=False, error="the controller was lost, and with it the language models"))
        for page in self._pages.values():
            page.cancel()
        self._pages.clear()
        self.server.tell()

    async def _call(self, writer: asyncio.StreamWriter, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        kind, value = "value", None
        try:
            value = getattr(self, f"do_{method}")(*arguments)
            if asyncio.iscoroutine(value):
                value = await value
        except RequestError as error:
            kind, value = "request", error.outcome.value
        except ActuationError as error:
            kind, value = "actuation", str(error)
        except JouleryError as error:
            kind, value = "error", pack_error(error)
        except Exception as error:  # noqa: BLE001 - a defect here is an error of the call, and not the end of all requests
            kind, value = "actuation", f"{type(error).__name__}: {error}"
        if writer is self._writer:
            try:
                frame = pickle.dumps((number, kind, value), protocol=5)
            except Exception as error:  # noqa: BLE001 - what cannot be sent is an error of its call
                frame = pickle.dumps((number, "actuation", f"an answer cannot be sent: {error!r}"), protocol=5)
            writer.writelines([LENGTH.pack(len(frame)), frame])

    def _ask_text(self, request: RelayedRequest, passed: Passed) -> Callable[[], None]:
        self._page += 1
        number = self._page
        self._texts[number] = passed
        self._post("text", (number, request))

        def withdraw() -> None:
            if self._texts.pop(number, None) is not None:
                self._post("withdraw", number)

        return withdraw

    def _post(self, kind: str, value: Any) -> None:
        """Send a request to the controller; do nothing where it is gone."""
        if self._writer is not None:
            frame = pickle.dumps((0, kind, value), protocol=5)
            self._writer.writelines([LENGTH.pack(len(frame)), frame])

    def _ask_page(self, path: str, query: str, accept: str) -> asyncio.Future[PageAnswer]:
        self._page += 1
        page = self._pages[self._page] = asyncio.get_running_loop().create_future()
        self._post("page", (self._page, path, query, accept))
        return page

    def do_look(self) -> Welcome:
        """The present state of the engine server."""
        return Welcome(
            os.getpid(),
            self._site,
            self._plan,
            unix_s() - time.monotonic(),
            self.server.ledger.first,
            self._left_s,
            tuple(self.server.statuses()),
            self.server.instance,
            self.server.state.marks or {},
        )

    def do_begin(self, site: str) -> None:
        """Give the controller control, for a site."""
        self._site = site
        state = self.server.state
        state.controller = True
        self.server.ask_page, self.server.ask_text = self._ask_page, self._ask_text

    async def do_open(self, plan: Any) -> bool:
        """Make the engine, unless there is one of the same plan; return whether it is new."""
        async with self._opening:
            if self.server.engine is not None and plan == self._plan:
                return False
            former, self.server.engine = self.server.engine, None
            if former is not None:
                await former.close()
            self.server.engine, self._plan = await self._make(plan), plan
            return True

    async def do_apply(self, target: Sequence[ReplicaSpec]) -> Any:
        """See :meth:`joulery.domain.ports.Engine.apply`."""
        change = await self._engine.apply(target)
        self.server.tell()
        return change

    async def do_infer(self, service: str, request: InferRequest) -> Any:
        """Answer a request without an entry in the ledger, such as a replay."""
        return await self._engine.infer(service, request)

    async def do_nodes(self, meter: str, options: Sequence[Any]) -> Any:
        """The answers of the meters of a cluster's nodes."""
        return await cast(Any, self._engine).nodes(meter, options)

    def do_set(self, method: str, *arguments: Any) -> None:
        """Call ``set_mix``, ``set_next_mixes``, ``limit_queue`` or ``prefer_nodes`` of the engine."""
        if method not in ("set_mix", "set_next_mixes", "limit_queue", "prefer_nodes"):
            raise ActuationError(f"there is no setting {method}")
        getattr(self._engine, method)(*arguments)

    def do_publish(self, settings: dict[str, Any], charges: dict[str, Any], marks: RecordMarks) -> None:
        """Publish settings, charges and marks to the gateways."""
        state = self.server.state
        state.settings, state.charges, state.marks = settings, charges, state.marks or {}
        advance(state.marks, marks)
        self.server.tell()

    def do_drop(self, before: int) -> None:
        """Drop the ledger entries below a number, which the controller has stored."""
        self.server.ledger.drop(before)

    def do_take(self, first: int, services: Sequence[str], sampled: bool) -> Taken:
        """The present state, and the entries of the ledger from a number on."""
        ledger, engine = self.server.ledger, self.server.engine
        mixes = {} if engine is None else {name: getattr(engine, "mix", lambda _: OWN)(name) for name in services}
        samples: dict[str, InferRequest] = {}
        if sampled:
            samples, self.server.latest = self.server.latest, {}
        return Taken(
            () if engine is None else engine.replicas(),
            () if engine is None or not hasattr(engine, "backlog") else engine.backlog(),
            ledger.take(first),
            mixes,
            {name: self.server.labels.tally(name) for name in services},
            tuple(self.server.statuses()),
            samples,
        )

    def do_page(self, number: int, status: int, headers: dict[str, str], content: bytes) -> None:
        """Receive a page that was requested from the controller."""
        page = self._pages.pop(number, None)
        if page is not None and not page.done():
            page.set_result((status, headers, content))

    def do_part(self, number: int, part: RelayedPart) -> None:
        """Receive a part of the controller's answer to a request."""
        passed = self._texts.get(number) if part.more else self._texts.pop(number, None)
        if passed is not None:
            passed(part)

    async def do_close(self) -> None:
        """Close the engine, if there is one."""
        if self.server.engine is not None:
            await self.server.engine.close()

    def do_end(self) -> None:
        """End the process, after this call is answered."""
        asyncio.get_running_loop().call_soon(self._ended)

    @property
    def _engine(self) -> Engine:
        if self.server.engine is None:
            raise ActuationError("the engine server has no engine yet")
        return self.server.engine
