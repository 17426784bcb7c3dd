"""Text that is asked for and written: what a gateway, a queue and an engine of language models say to one another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from joulery.domain.serving.engine import EnergyShare


class GenerationKind(StrEnum):
    """Which of OpenAI's two ways of asking it is."""

    CHAT = "chat.completion"
    """``/v1/chat/completions``: messages in, one message out."""
    COMPLETION = "text_completion"
    """``/v1/completions``: a text in, its continuation out."""


class Dialect(StrEnum):
    """How an engine is told in which order to work."""

    PLAIN = "plain"
    """Not at all: it works on what it is given, so the queue is in front of it."""
    VLLM = "vllm"
    """``priority`` in the request, the smallest first (``--scheduling-policy priority``)."""
    SGLANG = "sglang"
    """``priority`` in the request, the largest first (``--enable-priority-scheduling``)."""

    @property
    def orders(self) -> bool:
        """True when the engine keeps the queue itself and takes a priority."""
        return self is not Dialect.PLAIN

    def priority(self, rank: int) -> int:
        """What to send for a rank, of which the smallest is to be served first."""
        return -rank if self is Dialect.SGLANG else rank


class GenerationRequest(NamedTuple):
    """One request for text.

    Attributes:
        model: The service it is for.
        kind: Which way of asking.
        body: The client's JSON object, as it came.
        prompt: The text that its length is predicted from: the messages' texts, or the prompt.
        stream: Whether the client wants pieces as they are written.
        wants_usage: Whether it asked for usage at the end of a stream.
        timeout_s: Seconds from arrival in which it must be answered; None for the service's own limit.
        max_tokens: Tokens it wants at most; None where it does not say.
    """

    model: str
    kind: GenerationKind
    body: Mapping[str, Any]
    prompt: str
    stream: bool = False
    wants_usage: bool = False
    timeout_s: float | None = None
    max_tokens: int | None = None


class TokenUsage(NamedTuple):
    """Tokens of one answer.

    Attributes:
        prompt, completion: Tokens read and written.
        reported: True when the engine said so; False when pieces were counted.
    """

    prompt: int
    completion: int
    reported: bool


class GenerationEvent(NamedTuple):
    """One message of an engine about a request.

    Attributes:
        data: The JSON object, as the engine sent it: a chunk of a stream, or the whole answer.
        tokens: Tokens it brings, as far as can be told before usage is known.
        usage: The count, where this message holds it.
    """

    data: dict[str, Any]
    tokens: int = 0
    usage: TokenUsage | None = None


class GenerationCost(NamedTuple):
    """What one answer took.

    Attributes:
        variant: Which model wrote it.
        replica: Which engine.
        arrival_s, start_s, end_s: Asked for, taken by the engine (NaN when never), done; Unix seconds.
        usage: Its tokens.
        energy: Its joules and grams; None where unknown.
        predicted_tokens: What its length was guessed to be; NaN when it was not.
        source: Where the guess came from: ``cache``, ``predictor``, ``mean`` or ``none``.
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

    @property
    def energy_per_token_j(self) -> float | None:
        """Joules a token written; None where either is unknown."""
        if self.energy is None or self.usage.completion < 1:
            return None
        return self.energy.energy_j / self.usage.completion


class LLMEngine(Protocol):
    """Writes text for one model. Lives on one asyncio event loop."""

    @property
    def name(self) -> str:
        """What it is, in a word or an address."""
        ...

    @property
    def variant(self) -> str:
        """The model it runs."""
        ...

    @property
    def dialect(self) -> Dialect:
        """How it is told in which order to work."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it can take a request now."""
        ...

    async def start(self) -> None:
        """Bring it up, or check that it is there.

        Raises:
            CapabilityError, ActuationError: It is not to be had.
        """
        ...

    def write(self, request: GenerationRequest, priority: int | None, /) -> AsyncGenerator[GenerationEvent, None]:
        """The answer as it comes: chunks of a stream, or one whole answer. Closing the iterator stops the engine.

        Raises:
            RequestError: It was not answered, or not to the end; ``outcome`` says why.
        """
        ...

    def cpu_s(self) -> float:
        """CPU seconds it has used since it started; NaN where unknown."""
        ...

    async def close(self) -> None:
        """Let go of it; what joulery started ends. Safe to call twice."""
        ...
