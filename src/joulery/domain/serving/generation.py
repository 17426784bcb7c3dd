"""Requests to language models and their answers: what a gateway, a queue and an engine exchange."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from joulery.domain.serving.engine import EnergyShare


class GenerationKind(StrEnum):
    """The endpoints of the OpenAI API that run a model; the value is the ``object`` of their answers."""

    CHAT = "chat.completion"
    """``/v1/chat/completions``: messages in, one message out."""
    COMPLETION = "text_completion"
    """``/v1/completions``: a prompt in, its continuation out."""
    RESPONSE = "response"
    """``/v1/responses``: passed through; its stream consists of typed events."""
    EMBEDDING = "list"
    """``/v1/embeddings``: passed through; vectors out, never a stream."""


class Dialect(StrEnum):
    """Priority scheme of an engine."""

    PLAIN = "plain"
    """No priorities: the engine runs requests as they arrive, so the queue is in front of it."""
    VLLM = "vllm"
    """``priority`` in the request, the smallest first (``--scheduling-policy priority``)."""
    SGLANG = "sglang"
    """``priority`` in the request, the largest first (``--enable-priority-scheduling``)."""

    @property
    def orders(self) -> bool:
        """True when the engine keeps the queue itself and takes a priority."""
        return self is not Dialect.PLAIN

    def priority(self, rank: int) -> int:
        """The priority to send for a rank; the smallest rank is served first."""
        return -rank if self is Dialect.SGLANG else rank


class GenerationRequest(NamedTuple):
    """One request to a language model.

    Attributes:
        model: The model's name at the gateway.
        kind: The endpoint.
        body: The client's JSON object.
        prompt: The text the answer's length is predicted from: the messages, last one first, or the prompt.
        stream: Whether the client wants the answer as a stream.
        wants_usage: Whether the client wants usage at the end of a stream.
        timeout_s: Seconds from arrival within which the answer must end; None for the model's own limit.
        max_tokens: Most tokens the client accepts; None where it sets no limit.
        headers: Headers to forward to the engine, such as ``traceparent``.
    """

    model: str
    kind: GenerationKind
    body: Mapping[str, Any]
    prompt: str
    stream: bool = False
    wants_usage: bool = False
    timeout_s: float | None = None
    max_tokens: int | None = None
    headers: tuple[tuple[str, str], ...] = ()


class TokenUsage(NamedTuple):
    """Tokens of one answer.

    Attributes:
        prompt, completion: Tokens read and generated.
        reported: True where the engine reported them; False where chunks were counted.
    """

    prompt: int
    completion: int
    reported: bool


class GenerationEvent(NamedTuple):
    """One message of an engine about a request.

    Attributes:
        data: The JSON object: a chunk of a stream, or the whole answer; empty while a whole answer is generated.
        tokens: Tokens generated since the event before.
        usage: The token counts, where the message reports them.
        paused: The answer was interrupted on request; it continues when the next event is read.
        more: The next event has already arrived.
    """

    data: dict[str, Any]
    tokens: int = 0
    usage: TokenUsage | None = None
    paused: bool = False
    more: bool = False


class GenerationCost(NamedTuple):
    """Cost of one answer.

    Attributes:
        variant: The model that answered.
        replica: The engine.
        arrival_s, start_s, end_s: Arrival, start in the engine (NaN when it never started) and end; Unix seconds.
        usage: Its tokens.
        energy: Its joules and grams; None where unknown.
        predicted_tokens: Its predicted length; NaN without a prediction.
        source: Source of the prediction: ``cache``, ``predictor``, ``mean`` or ``none``.
        first_token_s: First message of the engine, Unix seconds; NaN without one.
        kind: The endpoint.
    """

    variant: str
    replica: str
    arrival_s: float
    start_s: float
    end_s: float
    usage: TokenUsage
    energy: EnergyShare | None
    predicted_tokens: float
    source: str
    first_token_s: float = math.nan
    kind: GenerationKind = GenerationKind.CHAT

    @property
    def energy_per_token_j(self) -> float | None:
        """Joules per generated token; None where either is unknown."""
        if self.energy is None or self.usage.completion < 1:
            return None
        return self.energy.energy_j / self.usage.completion


class EngineLoad(NamedTuple):
    """Load as the engine itself reports it, other clients' requests included.

    Attributes:
        running, waiting: Requests in its batch and in its queue.
        kv_usage_ratio: Share of its KV cache in use; NaN where not reported.
        prompt_tokens, generated_tokens: Tokens read and generated since it started; NaN where not reported.
    """

    running: float
    waiting: float
    kv_usage_ratio: float = math.nan
    prompt_tokens: float = math.nan
    generated_tokens: float = math.nan


class LLMEngine(Protocol):
    """Runs one language model. It belongs to one asyncio event loop."""

    @property
    def name(self) -> str:
        """The engine's name or address."""
        ...

    @property
    def variant(self) -> str:
        """The model that the engine runs."""
        ...

    @property
    def dialect(self) -> Dialect:
        """The engine's priority scheme."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the engine accepts requests now."""
        ...

    async def start(self) -> None:
        """Start the engine, or check that it is running.

        Raises:
            CapabilityError, ActuationError: The engine cannot be started.
        """
        ...

    @property
    def pauses(self) -> bool:
        """Whether the engine can interrupt an answer and continue it later."""
        ...

    def generate(
        self, request: GenerationRequest, priority: int | None, pause: Callable[[], bool] | None = None, /
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The answer as it is generated: chunks of a stream, or progress and then one whole answer.

        Closing the iterator stops the generation. An engine that can pause calls ``pause`` after each event: at True
        it stops working on the request, yields an event ``paused``, and continues when the next event is read.

        Raises:
            RequestError: The request failed, or its answer broke off; ``outcome`` states why.
        """
        ...

    def cpu_s(self) -> float:
        """CPU seconds that the engine has used since it started; NaN where unknown."""
        ...

    async def load(self) -> EngineLoad | None:
        """The load that the engine reports now; None where it reports none."""
        ...

    async def close(self) -> None:
        """Close the engine and end the processes that joulery started. Safe to call twice."""
        ...
