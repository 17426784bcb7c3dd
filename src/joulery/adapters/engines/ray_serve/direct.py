"""Requests to replicas on Ray over joulery's own connections, as the embedded engine sends them to its workers.

Ray's handle takes milliseconds of CPU time a request. A replica that is allowed to listens at a port of its node, and
reports the port. It answers only connections that present its token, which only Ray passes on. A replica that does not
listen, or cannot be reached, gets its requests through Ray.

No model runs twice for a request unless a replica dies while it holds the request. Each request has a number, which the
replica keeps with its newest answer. When a connection breaks during a request, the request is sent to the same replica
through Ray under the same number: a living replica returns the answer that it has or is computing. The request goes to
another replica only where Ray reports the end of this one, or cannot reach it. A replica that Ray ends reports that
first: it answers the requests it holds, and gets no more.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from joulery.adapters.engines.embedded.wire import encode
from joulery.adapters.engines.ray_serve.cluster import ReplicaGoneError
from joulery.adapters.engines.ray_serve.connection import ReplicaConnection
from joulery.adapters.engines.ray_serve.listener import LOOPBACK, this_machine
from joulery.domain.errors import DataError
from joulery.domain.serving.engine import InferRequest, Outcome

RETRY_S = 30.0
"""Seconds between two attempts to reach a replica at its port."""
_CONNECT_S = 2.0
_VERDICT_S = 10.0
"""Time limit for an answer through Ray after a connection broke; the replica is then given up."""


class Asked(Protocol):
    """Sends requests to replicas through Ray."""

    async def infer(self, application: str, replica: str, request: InferRequest, call: str) -> dict[str, Any]:
        """See :meth:`.cluster.RayCluster.infer`."""
        ...


class DirectLines:
    """The connections to replicas.

    Args:
        cluster: Sends requests through Ray, to replicas that cannot be reached otherwise.
        leaving: Called with the id of a replica that takes no more requests.
        lost: Called with the id of a replica whose connection broke while it held no request.
        now_s: The clock, seconds; for attempts to connect.

    Attributes:
        direct, through_ray: Requests sent each way.
    """

    def __init__(
        self,
        cluster: Asked,
        leaving: Callable[[str], None] = lambda _: None,
        lost: Callable[[str], None] = lambda _: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._now_s = cluster, now_s
        self._leaving_called, self._lost_called = leaving, lost
        self._lines: dict[str, ReplicaConnection] = {}
        self._due_s: dict[str, float] = {}
        self._refusals: dict[str, str] = {}
        self._left: set[str] = set()
        self._caller, self._count = secrets.token_hex(8), 0
        self.direct = self.through_ray = 0

    def up(self, replica: str) -> bool:
        """Whether there is a connection to a replica, which is then alive."""
        return replica in self._lines

    def remarks(self) -> tuple[str, ...]:
        """Reasons why requests go through Ray, each once."""
        return tuple(sorted(set(self._refusals.values())))

    async def reach(self, infos: Iterable[Mapping[str, Any]]) -> None:
        """Connect to the replicas without a connection, unless that was tried within :data:`RETRY_S`.

        Args:
            infos: The descriptions of every replica there is; all others are forgotten.
        """
        present = {str(info["id"]): info for info in infos}
        self._left &= present.keys()
        for known in (self._due_s, self._refusals):
            for replica in known.keys() - present.keys():
                del known[replica]
        now_s = self._now_s()
        due = [name for name in present.keys() - self._lines.keys() if self._due_s.get(name, -math.inf) <= now_s]
        await asyncio.gather(*(self._connect(name, present[name]) for name in due))

    async def infer(self, application: str, info: Mapping[str, Any], request: InferRequest) -> dict[str, Any]:
        """The answer of one replica; see :meth:`.replica.Instances.infer`.

        Args:
            application: Its application.
            info: Its description.
            request: The request.

        Raises:
            ReplicaGoneError: The replica ended.
        """
        replica = str(info["id"])
        if replica in self._left:
            return {"moved": True, "id": ""}
        if replica not in self._due_s:
            await self._connect(replica, info)
        self._count += 1
        call, line = f"{self._caller}/{self._count}", self._lines.get(replica)
        if line is not None:
            self.direct += 1
            try:
                return await _asked(line, replica, request, call)
            except ConnectionError as error:
                return await self._again(application, replica, request, call, error)
        self.through_ray += 1
        try:
            return await self._cluster.infer(application, replica, request, call)
        except ReplicaGoneError as error:
            # What is connected to Ray may have ended, and not the replica.
            found = self._lines.get(replica)
            if found is None:
                raise
            try:
                return await _asked(found, replica, request, call)
            except ConnectionError:
                raise error from None

    async def _again(
        self, application: str, replica: str, request: InferRequest, call: str, cause: ConnectionError
    ) -> dict[str, Any]:
        """Send a request whose connection broke to the same replica again, through Ray; return its answer."""
        gone = ReplicaGoneError(str(cause) or type(cause).__name__)
        try:
            async with asyncio.timeout(_VERDICT_S):
                answer = await self._cluster.infer(application, replica, request, call)
        except (ReplicaGoneError, TimeoutError):
            raise gone from cause
        if answer.get("moved") and answer.get("id") != replica:
            raise gone from cause  # Ray has no such replica any more, and asked another
        return answer

    async def _connect(self, replica: str, info: Mapping[str, Any]) -> None:
        """Connect to a replica, or note why that is not possible."""
        self._due_s[replica] = self._now_s() + RETRY_S
        place = info.get("direct")
        if place is None:
            if info.get("direct_refused"):
                self._refused(replica, info, f"they cannot listen there: {info['direct_refused']}")
            return
        host, port, token, machine = place
        if host == LOOPBACK and machine != this_machine():
            why = "they are on another machine, and nothing listens beyond loopback unasked"
            self._refused(replica, info, f"{why}; serving.engine.direct: true has them listen at their node's address")
            return
        made = ReplicaConnection(lambda: self._replica_leaves(replica), lambda held: self._closed(replica, made, held))
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                await loop.create_connection(lambda: made, str(host), int(port))
            made.write(encode({"token": token}, {}))
        except OSError as error:
            why = f"their ports do not answer ({os.strerror(error.errno) if error.errno else type(error).__name__})"
            self._refused(replica, info, f"{why}; open them between the machines, joulery tries every {RETRY_S:g} s")
            return
        self._refusals.pop(replica, None)
        if replica in self._lines:
            made.hang_up()  # two looks at once
        else:
            self._lines[replica] = made

    def _refused(self, replica: str, info: Mapping[str, Any], why: str) -> None:
        self._refusals[replica] = (
            f"replicas on Ray at {info.get('node') or 'a node'} are asked through Ray's handle, which takes "
            f"milliseconds of CPU time a request: {why}"
        )

    def _replica_leaves(self, replica: str) -> None:
        self._left.add(replica)
        self._leaving_called(replica)

    def _closed(self, replica: str, line: ReplicaConnection, held: bool) -> None:
        """Handle the end of a connection; ``held`` states whether a request was on it."""
        if self._lines.get(replica) is not line:
            return
        del self._lines[replica]
        if not held and replica not in self._left:
            self._due_s[replica] = self._now_s()
            self._lost_called(replica)

    def drop(self, replica: str) -> None:
        """Close the connection to one replica."""
        line = self._lines.pop(replica, None)
        if line is not None:
            line.hang_up()

    def close(self) -> None:
        """Close all connections."""
        for replica in tuple(self._lines):
            self.drop(replica)


async def _asked(line: ReplicaConnection, replica: str, request: InferRequest, call: str) -> dict[str, Any]:
    """Send a request over a replica's connection and return the answer.

    Raises:
        ConnectionError: The connection broke.
    """
    header = {"v": request.variant, "w": request.outputs, "id": replica, "n": call}
    try:
        frame = await line.ask(call, encode(header, request.inputs))
    except DataError as error:
        return {"variant": request.variant, "s": 0.0, "c": 0.0, "e": str(error), "o": Outcome.INVALID.value}
    answer = frame.header
    return answer if "e" in answer or "moved" in answer else {**answer, "y": frame.tensors}
