"""Parsing of OpenAI-compatible answers: server-sent events, token counts, and chunks joined into one answer.

Sources: OpenAI API reference (chat completion chunk object, completion object); vLLM sends reasoning as
``delta.reasoning`` and ``delta.reasoning_content``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from joulery.domain.serving.generation import GenerationKind, TokenUsage

MAX_LINE_BYTES = 8 << 20
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal", "audio")
_JOINED_KEYS = ("content", "reasoning_content", "reasoning", "refusal")


class StreamError(Exception):
    """The stream violates the format; the message states how."""


async def sse_messages(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, bool]]:
    """The data of each server-sent event, and whether another event arrived with it. Comments are skipped.

    Raises:
        StreamError: A line is longer than 8 MiB.
    """
    rest = b""
    data: list[bytes] = []
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise StreamError(f"sent a line of more than {MAX_LINE_BYTES} bytes")
        messages = []
        for line in lines:
            field = line.rstrip(b"\r")
            if field.startswith(b"data:"):
                data.append(field[5:].strip())
            elif not field and data:
                messages.append(b"\n".join(data))
                data = []
        for at, message in enumerate(messages, 1):
            yield message, at < len(messages)
    if data:
        yield b"\n".join(data), False


def usage_in(data: dict[str, Any]) -> TokenUsage | None:
    """The token counts a message reports; None where it reports none."""
    response = data.get("response")
    usage = response.get("usage") if isinstance(response, dict) else data.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    completion = usage.get("completion_tokens", usage.get("output_tokens", 0))
    if not (isinstance(prompt, int) and isinstance(completion, int)):
        return None
    return TokenUsage(max(0, prompt), max(0, completion), reported=True)


class TokenCount:
    """Counts the generated tokens of one stream, chunk by chunk.

    A chunk that reports usage so far (vLLM's ``continuous_usage_stats``) counts exactly; without it, every choice of a
    chunk that holds text, reasoning or tool calls counts as one token.

    Attributes:
        counted: Tokens counted so far.
    """

    __slots__ = ("counted",)

    def __init__(self) -> None:
        self.counted = 0

    def add(self, data: dict[str, Any], usage: TokenUsage | None) -> int:
        """Tokens that a chunk adds."""
        if usage is not None:
            new = max(0, usage.completion - self.counted)
        else:
            new = 1 if str(data.get("type", "")).endswith(".delta") else _choices_with_text(data)
        self.counted += new
        return new


def _choices_with_text(data: dict[str, Any]) -> int:
    choices = data.get("choices")
    if not isinstance(choices, list):
        return 0
    return sum(_has_text(choice) for choice in choices if isinstance(choice, dict))


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text"))
    return any(delta.get(key) for key in _TEXT_KEYS)


class AnswerAssembler:
    """Puts the chunks of a stream together into the answer that a request without ``stream`` gets.

    Args:
        kind: Chat, completion or response, whose events contain the whole response, the last one its final state.
    """

    def __init__(self, kind: GenerationKind) -> None:
        self._kind = kind
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: Any = None

    def add(self, data: dict[str, Any]) -> None:
        """Add one chunk."""
        if self._kind is GenerationKind.RESPONSE:
            self._head = data.get("response") or self._head
            return
        self._head.update(
            {
                key: value
                for key, value in data.items()
                if key not in ("choices", "usage", "object") and value is not None
            }
        )
        if data.get("usage") is not None:
            self._usage = data["usage"]
        for place, choice in enumerate(data.get("choices") or ()):
            if isinstance(choice, dict):
                index = choice.get("index", place)
                self._add_choice(self._choices.setdefault(index, {"index": index}), choice)

    def answer(self) -> dict[str, Any]:
        """The whole answer; ``choices`` is empty where no chunk held one."""
        if self._kind is GenerationKind.RESPONSE:
            return self._head
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            choice.setdefault("finish_reason", None)
        found = {**self._head, "object": str(self._kind), "choices": choices}
        return found if self._usage is None else {**found, "usage": self._usage}

    def _add_choice(self, kept: dict[str, Any], choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        if self._kind is GenerationKind.CHAT:
            message = kept.setdefault("message", {"role": "assistant", "content": None})
            if isinstance(delta, dict):
                _merge_delta(message, delta)
        else:
            kept["text"] = kept.get("text", "") + (choice.get("text") or "")
        if isinstance(choice.get("logprobs"), dict):
            _merge_lists(kept.setdefault("logprobs", {}), choice["logprobs"])
        own = ("index", "delta", "text", "logprobs")
        kept.update({key: value for key, value in choice.items() if key not in own and value is not None})


def _merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if value is None:
            continue
        if key in _JOINED_KEYS:
            message[key] = (message.get(key) or "") + value
        elif key == "tool_calls":
            _merge_tool_calls(message.setdefault("tool_calls", []), value)
        else:
            message[key] = value


def _merge_tool_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    """Merge pieces of tool calls: arguments arrive in pieces, and an index names the call of each piece."""
    for delta in deltas:
        index = delta.get("index", len(calls))
        while len(calls) <= index:
            calls.append({})
        call = calls[index]
        function = delta.get("function") or {}
        call.update(
            {key: value for key, value in delta.items() if key not in ("index", "function") and value is not None}
        )
        kept = call.setdefault("function", {"name": "", "arguments": ""})
        kept["name"] = function.get("name") or kept["name"]
        kept["arguments"] += function.get("arguments") or ""


def _merge_lists(kept: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, list):
            kept[key] = [*(kept.get(key) or []), *value]
        else:
            kept.setdefault(key, value)
