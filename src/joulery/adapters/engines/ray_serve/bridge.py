"""The connection to Ray in a process of its own, so that the gateway outlives Ray's head.

A process that is connected to Ray is ended by Ray when the head stays away (``gcs_rpc_server_reconnect_timeout_s``).
:class:`RayBridge` has the methods of :class:`~joulery.adapters.engines.ray_serve.cluster.RayCluster` and hands each
call to a child process that is connected (:mod:`~joulery.adapters.engines.ray_serve.bridge_worker`). When the child
ends, running calls fail, ``lost`` gives the reason, and ``open`` starts another child.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from joulery.adapters.engines.embedded.wire import unpack_error
from joulery.adapters.engines.ray_serve.cluster import RayCluster, RayPlace, ReplicaGoneError
from joulery.domain.errors import ActuationError, CapabilityError
from joulery.domain.serving.engine import InferRequest

LENGTH = struct.Struct("!Q")
ANSWER = struct.Struct("!QQ")
"""Length of an answer and number of its call: the call is known even if the answer cannot be read."""
CLUSTER = "joulery.adapters.engines.ray_serve.cluster:RayCluster"
_CLOSE_S = 30.0
"""Time limit for leaving a cluster."""
STARTS = 3
"""Attempts to start a local cluster: Ray gives its node half a minute, too little on a busy machine."""


class RayBridge:
    """A connection to Ray in a child process. Opens nothing before :meth:`open`.

    Args:
        place: Where Ray runs.
        cluster: Class of the connection in the child, ``module:class``; replaced in tests.

    Attributes:
        lost: Why the child ended; empty before the first child, and while one runs.
    """

    def __init__(self, place: RayPlace, cluster: str = CLUSTER) -> None:
        self.place, self.lost = place, ""
        self._cluster, self._environ = cluster, RayCluster(place).environ
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._count = 0

    async def open(self) -> None:
        """Start the child and have it start or join the cluster, unless it already has.

        Raises:
            CapabilityError, ConfigError: The cluster cannot be started or joined.
            ActuationError: The child ended meanwhile.
        """
        if self._writer is not None:
            return
        for left in reversed(range(STARTS if self.place.local else 1)):
            try:
                await self._open()
            except CapabilityError as error:
                if error.grant or not left:  # a package that is missing is not a matter of time
                    raise
            else:
                return

    async def _open(self) -> None:
        """Make one attempt in a child of its own: whatever a failed attempt has started ends with its child."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs.fileno(), self._cluster)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader, self._process), name="ray bridge")
        try:
            await self._ask("open", self.place)
        except BaseException:
            await self._end()
            raise
        self.lost = ""

    async def declare(self, applications: Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`RayCluster.declare`."""
        await self._ask("declare", list(applications))

    async def applications(self) -> dict[str, Any]:
        """See :meth:`RayCluster.applications`."""
        found: dict[str, Any] = await self._ask("applications")
        return found

    async def scale(self, application: str, deployment: str, replicas: int) -> None:
        """See :meth:`RayCluster.scale`."""
        await self._ask("scale", application, deployment, replicas)

    async def describe(self, application: str) -> list[dict[str, Any]] | None:
        """See :meth:`RayCluster.describe`; None where the child is gone."""
        try:
            found: list[dict[str, Any]] | None = await self._ask("describe", application)
        except ActuationError:
            return None
        return found

    async def infer(self, application: str, replica: str, request: InferRequest, call: str = "") -> dict[str, Any]:
        """See :meth:`RayCluster.infer`.

        Raises:
            ReplicaGoneError: The replica ended, or Ray is gone.
        """
        try:
            answer: dict[str, Any] = await self._ask("infer", application, replica, request, call)
        except ActuationError as error:
            raise ReplicaGoneError(str(error)) from error
        return answer

    async def nodes(self, meter: str, options: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """See :meth:`RayCluster.nodes`."""
        found: dict[str, dict[str, Any]] = await self._ask("nodes", meter, list(options))
        return found

    async def close(self) -> None:
        """Disconnect from the cluster; a local one ends. Safe to call twice."""
        if self._writer is None:
            return
        with suppress(ActuationError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._ask("close")
        await self._end()

    def environ(self) -> dict[str, str]:
        """Environment variables of the replicas; in a local cluster these import what this process can import."""
        return self._environ()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        if self._writer is None:
            raise ActuationError(self.lost or "the Ray cluster was left")
        self._count += 1
        number, answer = self._count, asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        frame = pickle.dumps((number, method, arguments), protocol=5)
        self._writer.writelines([LENGTH.pack(len(frame)), frame])
        try:
            return await answer
        finally:
            self._calls.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader, process: subprocess.Popen[bytes]) -> None:
        """Receive answers until the child ends."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length, number = ANSWER.unpack(await reader.readexactly(ANSWER.size))
                kind, value = _answer_in(await reader.readexactly(length))
                call = self._calls.get(number)
                if call is not None and not call.done():
                    _settle(call, kind, value)
        with suppress(ProcessLookupError):
            process.kill()
        status = await asyncio.to_thread(process.wait)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        self._fail_calls(f"Ray is gone: the process that is connected to it {how}")

    def _fail_calls(self, reason: str) -> None:
        writer, self._writer, self.lost = self._writer, None, reason
        if writer is not None:
            writer.close()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(ActuationError(reason))

    async def _end(self) -> None:
        """Kill the child and wait for its end."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
        if self._reading is not None:
            await asyncio.wait([self._reading])
        self.lost = ""


def _spawn(pipe: int, cluster: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        (
            sys.executable,
            "-m",
            "joulery.adapters.engines.ray_serve.bridge_worker",
            str(pipe),
            str(os.getpid()),
            cluster,
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(pipe,),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        process_group=0,
    )


def _answer_in(frame: bytes) -> tuple[str, Any]:
    """Kind and value of an answer; one that cannot be read fails its own call, and no other."""
    try:
        kind, value = pickle.loads(frame)
    except Exception as error:  # noqa: BLE001 - what a pickle raises is up to the classes in it
        return "actuation", f"an answer cannot be read: {error!r}"
    return kind, value


def _settle(call: asyncio.Future[Any], kind: str, value: Any) -> None:
    """Set the result or the error of a call from the child's answer."""
    if kind == "value":
        call.set_result(value)
    elif kind == "gone":
        call.set_exception(ReplicaGoneError(value))
    elif kind == "actuation":
        call.set_exception(ActuationError(value))
    else:
        call.set_exception(unpack_error(value))
