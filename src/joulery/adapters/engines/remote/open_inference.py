"""Engine for servers of the Open Inference Protocol (Triton, KServe, another joulery).

The server has its own queue and batcher; nothing is queued here a second time. A request goes to the replica with the
fewest running. A server that was not reached gets none until it reports that it is ready again (it is probed with
growing pauses), unless no other is left. Models are identified by address, ``http://HOST:PORT/MODEL`` or
``http://HOST:PORT/MODEL/VERSION``. A model that is not loaded is loaded through the server's repository API; only such
models are unloaded at the end.

The cost of a request on the server is not known here: its CPU seconds are NaN, never 0.

Source: KServe, Open Inference Protocol (V2), REST; Triton's extensions for binary tensors, model repositories and
request parameters (``timeout``, in microseconds).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from joulery.adapters.engines.remote.open_inference_bodies import decoded, encoded, specs
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError, DataError, JouleryError
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    Outcome,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestError,
    Transition,
)
from joulery.domain.serving.tensors import TensorSpec
from joulery.steady_time import unix_s

_OUTCOMES: Final = {
    400: Outcome.INVALID,
    404: Outcome.UNKNOWN,
    408: Outcome.DEADLINE,
    429: Outcome.OVERLOADED,
    499: Outcome.DEADLINE,
    503: Outcome.UNAVAILABLE,
    504: Outcome.DEADLINE,
}
"""Outcome by HTTP status; any other status means that the model failed."""
_TIMEOUT_S = 1e6


@dataclass(frozen=True, slots=True)
class OpenInferenceSettings:
    """Limits of the engine.

    Attributes:
        queue: Requests that may run for one service.
        deadline_s: A request that names no shorter limit is answered within this.
        drain_s: How long ``close`` waits for running requests.
        load_s: How long a model may take to load.
        probe_s: Pause before a server that was not reached is probed for readiness; doubles up to ``probe_max_s``.
        probe_max_s: The longest pause.
        token: Bearer token of the servers; None for none.
        absent_ok: Whether a model that is not reached at first is waited for, as long as another of its service is
            there; else it is an error.
    """

    queue: int = 1024
    deadline_s: float = 30.0
    drain_s: float = 10.0
    load_s: float = 120.0
    probe_s: float = 0.2
    probe_max_s: float = 5.0
    token: str | None = None
    absent_ok: bool = False


class Place(NamedTuple):
    """Location of a served model.

    Attributes:
        server: ``http://HOST:PORT``.
        path: Its path in the protocol, such as ``/v2/models/resnet/versions/1``.
        model: Its name.
    """

    server: str
    path: str
    model: str


def place_of(location: str) -> Place:
    """Parse the address of a served model.

    Raises:
        ConfigError: The text is not such an address.
    """
    parts = urlsplit(location)
    names = [name for name in parts.path.split("/") if name]
    if parts.scheme not in ("http", "https") or not parts.netloc or len(names) not in (1, 2) or parts.query:
        raise ConfigError("not a served model", got=location, expected="http://HOST:PORT/MODEL, or .../MODEL/VERSION")
    version = f"/versions/{names[1]}" if len(names) == 2 else ""
    return Place(f"{parts.scheme}://{parts.netloc}", f"/v2/models/{names[0]}{version}", names[0])


class _Remote:
    """One model on one server."""

    def __init__(self, name: str, spec: ReplicaSpec) -> None:
        self.name, self.spec, self.place = name, spec, place_of(spec.model.location)
        self.state = ReplicaState.STARTING
        self.busy = self.served = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.loaded_here = self.described = False
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.platform = self.last_error = ""
        self.probing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Count a request as running."""
        self.busy += 1
        self.idle.clear()

    def end(self) -> None:
        """Count a request as ended."""
        self.busy -= 1
        if not self.busy:
            self.idle.set()

    def view(self) -> ReplicaView:
        """The public view of this model."""
        return ReplicaView(
            id=self.name,
            spec=self.spec,
            state=self.state,
            busy=self.busy > 0,
            served=self.served,
            inputs=self.inputs,
            outputs=self.outputs,
            platform=self.platform,
            last_error=self.last_error,
        )


class OpenInferenceEngine:
    """Engine with models on other servers. Implements :class:`joulery.domain.ports.Engine`.

    Args:
        settings: Its limits.
        transport: Replaces the connection to the servers in tests.

    Attributes:
        served_elsewhere: Services that another engine runs models of: all of their models here may be absent at first.
    """

    def __init__(
        self,
        settings: OpenInferenceSettings = OpenInferenceSettings(),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.settings = settings
        headers = {} if settings.token is None else {"authorization": f"Bearer {settings.token}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._client = httpx.AsyncClient(
            headers=headers, transport=transport, limits=limits, timeout=settings.deadline_s, trust_env=False
        )
        self._remotes: list[_Remote] = []
        self._changing = asyncio.Lock()
        self._started = 0
        self._closed = False
        self.served_elsewhere: frozenset[str] = frozenset()

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Every served model now, in the order of addition."""
        return tuple(remote.view() for remote in self._remotes)

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        """The answer of the replica with the fewest running requests; another is tried where that one is not reached.

        Raises:
            RequestError: The request was not answered; ``outcome`` gives the reason.
        """
        arrival_s = unix_s()
        body, headers = encoded(request)
        patience_s = min(self.settings.deadline_s, request.timeout_s or _TIMEOUT_S)
        tried: set[str] = set()
        while True:
            remote = self._choose(service, request.variant, tried)
            try:
                async with asyncio.timeout(patience_s - (unix_s() - arrival_s)):
                    return await self._ask(remote, body, headers, arrival_s, len(tried) + 1)
            except TimeoutError as error:
                message = f"{remote.place.server} did not answer within {patience_s:g} s"
                variant = remote.spec.variant
                raise RequestError(message, Outcome.DEADLINE, variant=variant, attempts=len(tried) + 1) from error
            except httpx.TransportError as error:
                self._lost(remote, error)
                tried.add(remote.name)

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        """Make ``target`` the set of replicas; see :meth:`joulery.domain.ports.Engine.apply`."""
        async with self._changing:
            start_s, start = unix_s(), time.monotonic()
            missing = Counter(target)
            kept: list[_Remote] = []
            surplus: list[_Remote] = []
            for remote in self._remotes:
                (kept if missing[remote.spec] > 0 else surplus).append(remote)
                missing[remote.spec] -= missing[remote.spec] > 0
            fresh = [self._made(spec) for spec in missing.elements()]
            try:
                await asyncio.gather(*map(self._reach_or_wait, fresh))
                self._require_one_each(fresh, {remote.spec.service for remote in kept})
            except BaseException:
                for remote in fresh:
                    if remote.probing is not None:
                        remote.probing.cancel()
                await asyncio.gather(*map(self._unload, fresh), return_exceptions=True)
                raise
            self._remotes = [*kept, *fresh]
            ready_s = time.monotonic() - start
            await asyncio.gather(*map(self._leave, surplus))
            return Transition(
                started=tuple(sorted(remote.spec for remote in fresh)),
                stopped=tuple(sorted(remote.spec for remote in surplus)),
                kept=tuple(sorted(remote.spec for remote in kept)),
                start_s=start_s,
                ready_s=ready_s,
                duration_s=time.monotonic() - start,
                startup_cpu_s=math.nan,
            )

    async def close(self) -> None:
        """Let running requests finish within ``drain_s``; unload the models that were loaded for this engine."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*map(self._leave, self._remotes))
        await self._client.aclose()

    def _made(self, spec: ReplicaSpec) -> _Remote:
        self._started += 1
        return _Remote(f"o{self._started - 1}", spec)

    def _choose(self, service: str, variant: str, tried: set[str]) -> _Remote:
        """The replica that gets the next request.

        Raises:
            RequestError: No replica can take it.
        """
        if self._closed:
            raise RequestError("the engine is closing", Outcome.UNAVAILABLE)
        mine = [remote for remote in self._remotes if remote.spec.service == service]
        if not mine:
            raise RequestError(f"there is no service {service!r}", Outcome.UNKNOWN)
        if variant and variant not in {remote.spec.variant for remote in mine}:
            raise RequestError(f"{service} runs no variant {variant!r} now", Outcome.UNKNOWN)
        under_way = sum(remote.busy for remote in mine)
        if under_way >= self.settings.queue:
            raise RequestError(f"{service} has {under_way} running requests, its limit", Outcome.OVERLOADED)
        free = [
            remote
            for remote in mine
            if variant in ("", remote.spec.variant) and not remote.spec.standby and remote.name not in tried
        ]
        if not free:
            last = next((remote.last_error for remote in mine if remote.last_error), "every replica stands by")
            raise RequestError(f"no replica of {service} is reached: {last}", Outcome.UNAVAILABLE, attempts=len(tried))
        return min(free, key=lambda remote: (remote.state is not ReplicaState.READY, remote.busy))

    async def _ask(
        self, remote: _Remote, body: bytes, headers: dict[str, str], arrival_s: float, attempts: int
    ) -> InferResponse:
        remote.begin()
        start_s = unix_s()
        try:
            reply = await self._client.post(
                f"{remote.place.server}{remote.place.path}/infer", content=body, headers=headers
            )
        finally:
            remote.end()
        end_s = unix_s()
        remote.state = ReplicaState.READY
        variant = remote.spec.variant
        if reply.status_code != 200:
            outcome = _OUTCOMES.get(reply.status_code, Outcome.FAILED)
            raise RequestError(
                _error_message(reply), outcome, variant=variant, service_s=end_s - start_s, attempts=attempts
            )
        try:
            outputs = decoded(reply.headers, reply.content)
        except (DataError, ValueError, KeyError, TypeError) as error:
            message = f"{remote.place.server} sent an invalid answer: {error}"
            raise RequestError(message, Outcome.FAILED, variant=variant, attempts=attempts) from error
        remote.served += 1
        return InferResponse(
            outputs, variant, remote.name, arrival_s, start_s, end_s, end_s - start_s, math.nan, attempts
        )

    def avoid_variant(self, service: str, variant: str, why: str) -> None:
        """Avoid the servers of a variant until they report that they are ready again."""
        for remote in self._remotes:
            if (remote.spec.service, remote.spec.variant) == (service, variant):
                self._wait_for(remote, why)

    def _lost(self, remote: _Remote, error: httpx.TransportError) -> None:
        self._wait_for(remote, str(error) or type(error).__name__)

    def _wait_for(self, remote: _Remote, why: str) -> None:
        """Avoid a server until it reports that it is ready again."""
        remote.state, remote.last_error = ReplicaState.RESTARTING, why
        if remote.probing is None or remote.probing.done():
            remote.probing = asyncio.get_running_loop().create_task(self._probe(remote), name=f"probe {remote.name}")

    async def _probe(self, remote: _Remote) -> None:
        """Probe a server that was not reached, with growing pauses, until its model is ready."""
        pause_s = self.settings.probe_s
        while remote.state is ReplicaState.RESTARTING:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self.settings.probe_max_s)
            try:
                reply = await self._client.get(f"{remote.place.server}{remote.place.path}/ready")
                if reply.status_code == 200 and not remote.described:
                    await self._describe(remote)
            except (httpx.HTTPError, JouleryError) as error:
                remote.last_error = str(error) or type(error).__name__
                continue
            if reply.status_code == 200:
                remote.state = ReplicaState.READY

    async def _reach_or_wait(self, remote: _Remote) -> None:
        """Make a model ready; where it may be absent, wait for it.

        Raises:
            CapabilityError, ActuationError: As :meth:`_reach`.
        """
        try:
            await self._reach(remote)
        except JouleryError as error:
            if not self.settings.absent_ok:
                raise
            self._wait_for(remote, str(error))

    def _require_one_each(self, fresh: Sequence[_Remote], served: set[str]) -> None:
        """Raise unless every service has a model that is reached, or was served before.

        Raises:
            CapabilityError: A service has no such model.
        """
        ready = {remote.spec.service for remote in fresh if remote.state is ReplicaState.READY}
        ready |= served | self.served_elsewhere
        for remote in fresh:
            if remote.spec.service not in ready:
                raise CapabilityError(
                    f"no upstream of {remote.spec.service} is reached: {remote.last_error}",
                    resource=remote.place.server,
                    hint="start the server, or name the address it listens on",
                )

    async def _reach(self, remote: _Remote) -> None:
        """Make a model ready, and read its inputs and outputs.

        Raises:
            CapabilityError: Its server is not reached.
            ActuationError: The model cannot be loaded.
        """
        place = remote.place
        try:
            ready = await self._client.get(f"{place.server}{place.path}/ready")
            if ready.status_code != 200:
                await self._load(remote)
            await self._describe(remote)
        except httpx.HTTPError as error:
            raise CapabilityError(
                f"{place.server} is not reached: {str(error) or type(error).__name__}",
                resource=place.server,
                hint="start the server, or name the address it listens on",
            ) from error
        remote.state = ReplicaState.READY

    async def _describe(self, remote: _Remote) -> None:
        """Read a model's inputs, outputs and platform.

        Raises:
            httpx.HTTPError: Its server is not reached.
            ActuationError: The server does not describe the model.
        """
        place = remote.place
        described = await self._client.get(f"{place.server}{place.path}")
        if described.status_code != 200:
            raise ActuationError(f"{place.server} does not describe {place.model}: {_error_message(described)}")
        try:
            content = described.json()
            remote.inputs, remote.outputs = specs(content.get("inputs", ())), specs(content.get("outputs", ()))
            remote.platform = str(content.get("platform", ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ActuationError(f"{place.server} sent an invalid description of {place.model}: {error}") from error
        remote.described = True

    async def _load(self, remote: _Remote) -> None:
        place = remote.place
        loaded = await self._client.post(
            f"{place.server}/v2/repository/models/{place.model}/load", timeout=self.settings.load_s
        )
        if loaded.status_code != 200:
            raise ActuationError(
                f"{place.server} does not serve {place.model} and does not load it: {_error_message(loaded)}",
                hint="start it with the model, or with --model-control-mode=explicit",
            )
        remote.loaded_here = True

    async def _leave(self, remote: _Remote) -> None:
        """Let running requests finish within ``drain_s``, then unload the model."""
        if remote.probing is not None:
            remote.probing.cancel()
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await remote.idle.wait()
        except TimeoutError:
            remote.last_error = f"requests ran for more than {self.settings.drain_s:g} s at the end"
        await self._unload(remote)

    async def _unload(self, remote: _Remote) -> None:
        """Unload a model that was loaded for this engine; an unreachable server is ignored."""
        if not remote.loaded_here:
            return
        remote.loaded_here = False
        place = remote.place
        try:
            await self._client.post(f"{place.server}/v2/repository/models/{place.model}/unload")
        except httpx.HTTPError as error:
            remote.last_error = str(error)


def _error_message(reply: httpx.Response) -> str:
    """A server's message about its refusal, in one line."""
    try:
        return str(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {reply.status_code} {reply.text[:200]}".rstrip()
