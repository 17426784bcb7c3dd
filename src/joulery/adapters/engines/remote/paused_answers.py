"""Answers that are interrupted and continued: the text so far goes back to the server as the beginning of the answer.

llama.cpp continues a chat whose last message is the assistant's, and a completion continues its prompt; the states of
interrupted prompts stay in its cache (``cache_prompt``, ``cache_ram_mib``), so it reads next to nothing again. Clients
see one answer: one ``id``, one role, one count of tokens. With temperature 0 it is the answer without interruption, as
long as the text is split into the tokens that it was made of; else it is drawn from the same distribution.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from joulery.adapters.engines.remote.openai_answers import AnswerAssembler
from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.generation import GenerationEvent, GenerationKind, GenerationRequest, TokenUsage

_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
_BOUND_KEYS = (
    *("tools", "functions", "response_format", "grammar", "json_schema", "logprobs", "top_logprobs", "n_probs"),
    *("seed", "echo", "suffix", "best_of", "audio", "modalities", "prompt_logprobs", "use_beam_search", "mirostat"),
)
"""A request with one of these is never interrupted: its answer has a form, or a state, that the text does not hold."""
_LAST_TOKENS = 4
"""An answer with at most this many tokens left to its limit is not interrupted."""


def interruptible(request: GenerationRequest) -> bool:
    """Whether the answer to a request can be continued from its text."""
    body = request.body
    if any(body.get(key) for key in _BOUND_KEYS) or body.get("seed") is not None or body.get("n") not in (None, 1):
        return False
    if request.kind is GenerationKind.COMPLETION:
        return isinstance(body.get("prompt"), str)
    messages = body.get("messages")
    if request.kind is not GenerationKind.CHAT or not isinstance(messages, list) or not messages:
        return False
    return isinstance(messages[-1], dict) and messages[-1].get("role") != "assistant"


async def interruptible_answer(
    request: GenerationRequest,
    generate: Callable[[GenerationRequest], AsyncGenerator[GenerationEvent, None]],
    pause: Callable[[], bool],
) -> AsyncGenerator[GenerationEvent, None]:
    """The answer to an interruptible request; an event ``paused`` wherever ``pause`` returned true.

    Args:
        request: The request.
        generate: Streams the answer to a request, from its beginning.
        pause: Called between events; returns whether to interrupt the answer.

    Raises:
        RequestError: The request failed, or its answer broke off or was empty.
    """
    answer, assembler = _Answer(request), AnswerAssembler(request.kind)
    while True:
        paused = False
        async with aclosing(generate(answer.request())) as events:
            async for event in events:
                if _is_whole(event):
                    yield event
                    return
                if (stitched := answer.stitch(event)) is None:
                    continue
                if request.stream:
                    yield stitched
                else:
                    assembler.add(stitched.data)
                    if stitched.tokens:
                        yield GenerationEvent({}, stitched.tokens)
                if answer.may_pause and pause():
                    paused = True
                    break
        if not paused:
            break
        answer.interrupted()
        yield GenerationEvent({}, paused=True)
    if not request.stream:
        whole = assembler.answer()
        if not whole["choices"]:
            raise RequestError("the engine sent an answer without choices", Outcome.CRASHED)
        yield GenerationEvent(whole, 0, answer.usage)


def _is_whole(event: GenerationEvent) -> bool:
    """Whether a message is a whole chat answer, from a server that does not stream."""
    choices = event.data.get("choices")
    return isinstance(choices, list) and bool(choices) and isinstance(choices[0], dict) and "message" in choices[0]


class _Answer:
    """The state of one answer across its interruptions."""

    def __init__(self, request: GenerationRequest) -> None:
        self._asked = request
        self._text, self._role_sent = "", False
        self._counted = self._before = 0
        self._head: dict[str, Any] = {}
        self._bound = self._finished = False
        self.usage: TokenUsage | None = None
        limits = [request.body[key] for key in _LIMITS if isinstance(request.body.get(key), int)]
        self._limit = min([limit for limit in limits if limit > 0], default=None)

    @property
    def may_pause(self) -> bool:
        """Whether its text contains the whole answer so far, and enough tokens are left to its limit."""
        if self._bound or self._finished:
            return False
        return self._limit is None or self._limit - self._counted > _LAST_TOKENS

    def interrupted(self) -> None:
        """Record that the present part was interrupted."""
        self._before = self._counted

    def request(self) -> GenerationRequest:
        """The request for the next part."""
        body = {**self._asked.body}
        if self._counted:
            for key in _LIMITS:
                if isinstance(body.get(key), int) and body[key] > 0:
                    body[key] -= self._counted
        if self._text and self._asked.kind is GenerationKind.CHAT:
            body["messages"] = [*body["messages"], {"role": "assistant", "content": self._text}]
        elif self._text:
            body["prompt"] += self._text
        return self._asked._replace(body=body, stream=True)

    def stitch(self, event: GenerationEvent) -> GenerationEvent | None:
        """An event of the present part as one of the whole answer; None where it contains nothing new."""
        data, before = {**event.data}, self._before
        self._head = self._head or {key: data[key] for key in ("id", "created") if key in data}
        data.update({key: value for key, value in self._head.items() if key in data})
        choices = data.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            data["choices"] = [self._choice({**choices[0]}), *choices[1:]]
            if data["choices"][0] == {} and event.usage is None:
                return None
        self._counted += event.tokens
        usage = event.usage
        if usage is not None and before:
            usage = TokenUsage(max(usage.prompt - before, 0), usage.completion + before, usage.reported)
            if isinstance(data.get("usage"), dict):
                shown = {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
                data["usage"] = {**data["usage"], **shown, "total_tokens": usage.prompt + usage.completion}
        self.usage = usage or self.usage
        return GenerationEvent(data, event.tokens, usage)

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A choice without a repeated role; empty where nothing is left of it."""
        self._finished = self._finished or choice.get("finish_reason") is not None
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            self._text += choice.get("text") or ""
            return choice
        self._text += delta.get("content") or ""
        self._bound = self._bound or any(value for key, value in delta.items() if key not in ("role", "content"))
        if "role" in delta:
            if self._role_sent:
                delta = {key: value for key, value in delta.items() if key != "role"}
            self._role_sent = True
        if not any(delta.values()) and self._before and choice.get("finish_reason") is None:
            return {}
        return {**choice, "delta": delta}
