"""The OpenAI API in front of language models: ``/v1/models``, ``/v1/chat/completions``, ``/v1/completions``,
``/v1/responses`` and ``/v1/embeddings``.

A stream begins when its engine does, so that a failure before that has its own status. Its last chunk contains the
cost. A client that disconnects ends its request, in the queue or in the engine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import orjson

from joulery.domain.serving.engine import EnergyShare, Outcome, RequestError, RequestRecord, Telemetry
from joulery.domain.serving.generation import GenerationCost, GenerationEvent, GenerationKind, GenerationRequest
from joulery.gateway.app import STATUS, Exchange, Headers, only, reply, seconds_of
from joulery.gateway.body import BodyReader, RefusedError
from joulery.gateway.openai_protocol import (
    error_document,
    model_document,
    models_document,
    parse_request,
    share_headers,
    usage_chunk,
    with_cost,
)
from joulery.runtime.llm.family import LanguageFamily, family_of
from joulery.runtime.llm.service import GenerationTask, LLMService
from joulery.steady_time import unix_s

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

PATHS = {
    "/v1/chat/completions": GenerationKind.CHAT,
    "/v1/completions": GenerationKind.COMPLETION,
    "/v1/responses": GenerationKind.RESPONSE,
    "/v1/embeddings": GenerationKind.EMBEDDING,
}
_ELSEWHERE = frozenset({Outcome.OVERLOADED, Outcome.UNAVAILABLE, Outcome.CRASHED})
"""Outcomes after which another model of a family may answer, if the client got nothing yet."""
_JSON = (b"content-type", b"application/json")
_EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class OpenAIRoutes:
    """The routes under ``/v1``.

    Args:
        llms: The models, by name.
        bodies: Reads requests within the gateway's limits.
        telemetry: Called with the record of every request that ended.
        watches: Called with the name of the model and the cost of each answer.
        aliases: Names of models by alias.
        families: Names that stand for several models, of which one is chosen for each request.
    """

    def __init__(
        self,
        llms: Mapping[str, LLMService],
        bodies: BodyReader,
        telemetry: Sequence[Telemetry] = (),
        watches: Sequence[Callable[[str, RequestRecord, GenerationCost], None]] = (),
        aliases: Mapping[str, str] | None = None,
        families: Sequence[LanguageFamily] = (),
    ) -> None:
        self.llms, self.telemetry, self.aliases = llms, tuple(telemetry), dict(aliases or {})
        self.bodies, self._watches, self.families = bodies, tuple(watches), tuple(families)
        self._created_s = round(time.time())

    async def __call__(self, scope: Scope, exchange: Exchange | None, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path: str = scope["path"]
        kind = PATHS.get(path)
        try:
            if kind is not None:
                only(scope, "POST")
                await _Conversation(self, kind, exchange, send).run(scope, receive)
                return
            document = self._describe(path)
            only(scope, "GET", "HEAD")
            await reply(send, exchange, 200, orjson.dumps(document), [_JSON])
        except RefusedError as error:
            body = orjson.dumps(error_document(error))
            await reply(send, exchange, error.status, body, [_JSON, *error.headers], last=True)

    @property
    def ready(self) -> bool:
        """Whether the engine of every model accepts requests."""
        return all(llm.engine.ready for llm in self.llms.values())

    def candidates(self, model: str) -> list[LLMService]:
        """The services that may answer a request for a model, the first choice first.

        Raises:
            RequestError: There is no such model, or no model of a family may take it now.
        """
        if (family := family_of(self.families, model)) is not None:
            return [self.llms[name] for name in family.choose()]
        llm = self.llms.get(self.aliases.get(model, model))
        if llm is None:
            names = ", ".join(sorted((*self.llms, *self.aliases, *(one.name for one in self.families))))
            raise RequestError(f"no model {model[:100]!r}; available: {names}", Outcome.UNKNOWN)
        return [llm]

    def ended(self, model: str, record: RequestRecord, cost: GenerationCost | None) -> None:
        """Report a request that has ended to telemetry and watches."""
        for sink in self.telemetry:
            sink(record)
        if cost is not None:
            for watch in self._watches:
                watch(model, record, cost)

    def _describe(self, path: str) -> dict[str, Any]:
        owners = {name: llm.owner for name, llm in self.llms.items()}
        owners |= {alias: owners[name] for alias, name in self.aliases.items()}
        owners |= {one.name: one.owner for one in self.families}
        if path == "/v1/models":
            return models_document(self._created_s, owners)
        name = unquote(path.removeprefix("/v1/models/"))
        if path.startswith("/v1/models/") and name in owners:
            return model_document(self._created_s, name, owners[name])
        where = "" if path.startswith("/v1/") else "; the OpenAI API is under /v1: end base_url with it"
        raise RefusedError(404, f"no endpoint {path[:200]}{where}", outcome=Outcome.UNKNOWN)


class _Conversation:
    """Handles one request, from its first byte to its record."""

    def __init__(self, routes: OpenAIRoutes, kind: GenerationKind, exchange: Exchange | None, send: Send) -> None:
        self._routes, self._kind, self._exchange, self._send = routes, kind, exchange, send
        self._arrival_s = unix_s()
        self._job: GenerationTask | None = None
        self._model = ""
        self._begun = False
        self._held = b""
        self._family: LanguageFamily | None = None
        self._request_id = b""

    async def run(self, scope: Scope, receive: Receive) -> None:
        """Answer the request."""
        if self._exchange is not None:
            self._exchange.begin()
        body = b""
        try:
            headers = dict(scope["headers"])
            timeout_s = seconds_of(headers.get(b"x-joulery-timeout-s"))
            body = await self._routes.bodies.read(headers, receive)
            request = parse_request(self._kind, body, timeout_s=timeout_s, headers=headers)
            self._request_id = headers.get(b"x-request-id", b"")
            self._family = family_of(self._routes.families, request.model)
            if self._family is not None:
                self._model = self._family.policy.best  # a request that no model takes is counted there
            llms = self._routes.candidates(request.model)
            for index, llm in enumerate(llms):
                try:
                    await self._answer(llm, request)
                    break
                except RequestError as error:
                    if self._begun or index == len(llms) - 1 or error.outcome not in _ELSEWHERE:
                        raise
                    self._try_next_model(llm, error)
            self._record(Outcome.OK)
        except RequestError as error:
            await self._fail(error)
        except asyncio.CancelledError:
            if self._exchange is not None and self._exchange.lost:
                self._record(Outcome.CANCELLED)
            else:
                await self._fail(RequestError("the gateway is closing", Outcome.UNAVAILABLE))
        finally:
            # What the engine is sent is made from it, however long the request waits: it counts as held until now.
            self._routes.bodies.give_back(body)
            if self._exchange is not None:
                self._exchange.end()

    def _try_next_model(self, llm: LLMService, error: RequestError) -> None:
        """Prepare for another model of the family: record this one's cost, and report its failure to the family."""
        if self._family is not None and error.outcome is not Outcome.OVERLOADED:
            self._family.failed(llm.name)
        if self._job is not None and self._job.cost is not None and self._job.attempts:
            self._record(error.outcome)

    async def _answer(self, llm: LLMService, request: GenerationRequest) -> None:
        """Answer with one model."""
        self._model, self._job, self._held = llm.name, None, b""
        self._job = llm.accept(request)
        if request.stream:
            await self._stream(self._job, request)
        else:
            await self._send_whole(self._job)

    async def _send_whole(self, job: GenerationTask) -> None:
        answer: GenerationEvent | None = None
        async with aclosing(job.events()) as events:
            async for event in events:
                answer = event
        if answer is None or job.cost is None:
            raise RequestError("the engine sent no answer", Outcome.CRASHED)
        headers = [_JSON, *self._headers(job), *share_headers(job.cost.energy, job.cost.usage.completion)]
        body = orjson.dumps(with_cost(answer.data, self._model, job.cost))
        await reply(self._send, self._exchange, 200, body, headers)

    async def _stream(self, job: GenerationTask, request: GenerationRequest) -> None:
        last: dict[str, Any] = {}
        usage: dict[str, Any] | None = None
        async with aclosing(job.events()) as events:
            async for event in events:
                last = event.data
                chunk = self._kind is not GenerationKind.RESPONSE
                if chunk and event.usage is not None and not event.data.get("choices"):
                    usage = event.data  # held back until its cost is known
                    continue
                await self._chunk(self._renamed(event.data), hold=event.more)
        if job.cost is None:
            raise RequestError("the engine sent no answer", Outcome.CRASHED)
        if self._kind is GenerationKind.RESPONSE:
            await self._write(_comment(job.cost), more=False)
            return
        if request.wants_usage:
            whole = with_cost(usage, self._model, job.cost) if usage is not None else None
            await self._chunk(whole or usage_chunk(self._kind, self._model, last, job.cost))
        await self._write(_comment(job.cost) + b"data: [DONE]\n\n", more=False)

    def _renamed(self, data: dict[str, Any]) -> dict[str, Any]:
        """A chunk with the gateway's name for the model."""
        if self._kind is not GenerationKind.RESPONSE:
            return {**data, "model": self._model, **_without_usage(data)}
        response = data.get("response")
        return {**data, "response": {**response, "model": self._model}} if isinstance(response, dict) else data

    async def _chunk(self, data: dict[str, Any], *, hold: bool = False) -> None:
        kind = data.get("type") if self._kind is GenerationKind.RESPONSE else None
        event = b"event: %b\n" % str(kind).encode() if kind else b""
        piece = event + b"data: " + orjson.dumps(data) + b"\n\n"
        if hold:  # what arrived together is sent together: a system call costs more than the rest of a token
            self._held += piece
        else:
            await self._write(piece)

    async def _write(self, piece: bytes, *, more: bool = True) -> None:
        if not self._begun:
            assert self._job is not None
            headers = [*_EVENTS, *self._headers(self._job)]
            self._begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        piece, self._held = self._held + piece, b""
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    def _headers(self, job: GenerationTask) -> Headers:
        return [
            (b"x-joulery-variant", quote(self._routes.llms[self._model].engine.variant).encode()),
            (b"x-joulery-predicted-tokens", b"%d" % round(job.forecast.tokens)),
            *([(b"x-request-id", self._request_id)] if self._request_id else []),
        ]

    async def _fail(self, error: RequestError) -> None:
        code = "model_not_found" if error.outcome is Outcome.UNKNOWN else None
        body = orjson.dumps(error_document(error, code=code))
        if self._begun:
            # The status is out: the stream says what became of it and ends without its last word.
            await self._write(b"data: " + body + b"\n\n", more=False)
            self._record(error.outcome)
            return
        headers: Headers = [_JSON]
        if error.retry_after_s is not None or error.outcome is Outcome.UNAVAILABLE:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s or 1))))
        status, last = STATUS[error.outcome], False
        if isinstance(error, RefusedError):
            status, headers, last = error.status, headers + error.headers, True
        await reply(self._send, self._exchange, status, body, headers, last=last)
        self._record(error.outcome)

    def _record(self, outcome: Outcome) -> None:
        job, cost = self._job, None if self._job is None else self._job.cost
        share: EnergyShare | None = None if cost is None else cost.energy
        record = RequestRecord(
            service=self._model,
            variant="" if cost is None else cost.variant,
            replica="" if cost is None or math.isnan(cost.start_s) else cost.replica,
            arrival_s=self._arrival_s,
            start_s=math.nan if cost is None else cost.start_s,
            end_s=unix_s(),
            outcome=outcome,
            service_s=0.0 if cost is None or math.isnan(cost.start_s) else cost.end_s - cost.start_s,
            cpu_s=0.0,
            attempts=0 if job is None else job.attempts,
            energy=share,
        )
        if self._family is not None:
            self._family.ended(record, math.nan if cost is None else cost.first_token_s)
        self._routes.ended(self._model, record, cost)


def _without_usage(data: dict[str, Any]) -> dict[str, Any]:
    """Entry that hides the usage which the gateway requested; a chunk with choices has none."""
    return {"usage": None} if data.get("usage") is not None else {}


def _comment(cost: GenerationCost) -> bytes:
    """A comment of the event stream with the cost, which clients ignore and people can read."""
    if cost.energy is None:
        return b""
    text = b": joulery energy_j=%.6g quality=%b" % (cost.energy.energy_j, cost.energy.quality.value.encode())
    if cost.energy.carbon_g is not None:
        text += b" carbon_g=%.6g" % cost.energy.carbon_g
    return text + b"\n\n"
