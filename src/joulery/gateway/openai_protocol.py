"""Request and answer bodies of the OpenAI API; answers contain their cost.

Pure functions that convert bytes to domain objects and back. Source: OpenAI API reference, chat completions and
completions; an answer's ``usage`` has one more object, ``joulery``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from joulery.domain.serving.engine import EnergyShare, Outcome, RequestError
from joulery.domain.serving.generation import GenerationCost, GenerationKind, GenerationRequest

ERROR_TYPES = {
    Outcome.INVALID: "invalid_request_error",
    Outcome.UNKNOWN: "invalid_request_error",
    Outcome.OVERLOADED: "rate_limit_error",
    Outcome.DEADLINE: "timeout_error",
    Outcome.UNAVAILABLE: "service_unavailable_error",
}
"""OpenAI's error type of an outcome; ``server_error`` for all others."""
_CODES = {401: "invalid_api_key", 404: "unknown_url", 405: "method_not_supported", 413: "request_too_large"}
FORWARDED_HEADERS = (b"traceparent", b"tracestate", b"x-request-id")


class ParameterError(RequestError):
    """A request whose parameter is wrong.

    Args:
        message: What is wrong and what was expected.
        param: The parameter, such as ``max_tokens``.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, Outcome.INVALID)
        self.param = param


def parse_request(
    kind: GenerationKind,
    body: bytes,
    *,
    timeout_s: float | None = None,
    headers: Mapping[bytes, bytes] | None = None,
) -> GenerationRequest:
    """Parse the request in ``body``.

    Args:
        kind: The endpoint.
        body: JSON.
        timeout_s: Seconds within which the client wants the answer.
        headers: Headers of the request; those of :data:`FORWARDED_HEADERS` are forwarded to the engine.

    Raises:
        ParameterError: The body is not such a request.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _wrong(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise _wrong("the body must be a JSON object")
    model = data.get("model")
    if not isinstance(model, str) or not model:
        raise _wrong("model must be the name of a model", "model")
    options = data.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _wrong("stream_options must be an object", "stream_options")
    prompt = _PROMPTS[kind](data)
    known = headers or {}
    forwarded = tuple((name.decode(), known[name].decode("latin-1")) for name in FORWARDED_HEADERS if name in known)
    return GenerationRequest(
        model=model,
        kind=kind,
        body=data,
        prompt=prompt,
        stream=_flag(data, "stream"),
        wants_usage=_flag(options or {}, "include_usage"),
        timeout_s=timeout_s,
        max_tokens=0 if kind is GenerationKind.EMBEDDING else _max_tokens(data),
        headers=forwarded,
    )


def models_document(created_s: int, names: Mapping[str, str]) -> dict[str, Any]:
    """The answer to ``/v1/models``: models by name, each with its owner."""
    return {"object": "list", "data": [model_document(created_s, *each) for each in names.items()]}


def model_document(created_s: int, name: str, owner: str) -> dict[str, Any]:
    """One model of ``/v1/models``."""
    return {"id": name, "object": "model", "created": created_s, "owned_by": owner}


def error_document(error: RequestError, *, code: str | None = None) -> dict[str, Any]:
    """An error in the form of the OpenAI API."""
    status = getattr(error, "status", None)
    kind = "invalid_request_error" if status in _CODES else ERROR_TYPES.get(error.outcome, "server_error")
    code = code or _CODES.get(status or 0, error.outcome.value)
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "param", None), "code": code}}


def cost_document(cost: GenerationCost) -> dict[str, Any]:
    """The cost of an answer, for its ``usage``; unknown figures are left out."""
    document: dict[str, Any] = {"predicted_tokens": round(cost.predicted_tokens), "predicted_by": cost.source}
    share = cost.energy
    if share is None:
        return document
    document |= {"energy_j": _short(share.energy_j), "quality": share.quality.value}
    if cost.energy_per_token_j is not None:
        document["energy_per_token_j"] = _short(cost.energy_per_token_j)
    if share.carbon_g is not None:
        document["carbon_g"] = _short(share.carbon_g)
        if cost.usage.completion:
            document["carbon_per_token_g"] = _short(share.carbon_g / cost.usage.completion)
    return document


def with_cost(data: dict[str, Any], model: str, cost: GenerationCost) -> dict[str, Any]:
    """Add the service's name and the cost to an answer, or to the last chunk of a stream."""
    usage = data.get("usage")
    counted = {
        "prompt_tokens": cost.usage.prompt,
        "completion_tokens": cost.usage.completion,
        "total_tokens": cost.usage.prompt + cost.usage.completion,
    }
    known: dict[str, Any] = dict(usage) if isinstance(usage, dict) else dict(counted)
    if not cost.usage.reported:
        known["counted_by"] = "joulery"
    return {**data, "model": model, "usage": {**known, "joulery": cost_document(cost)}}


def usage_chunk(kind: GenerationKind, model: str, data: Mapping[str, Any], cost: GenerationCost) -> dict[str, Any]:
    """The last chunk of a stream whose engine sent none: no choices, only usage and cost."""
    name = "chat.completion.chunk" if kind is GenerationKind.CHAT else "text_completion"
    base = {"id": data.get("id", ""), "object": name, "created": data.get("created", round(cost.end_s)), "choices": []}
    return with_cost(base, model, cost)


def _messages(data: Mapping[str, Any]) -> str:
    """The text of a conversation, the last message first, since it best predicts the answer's length."""
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages must be a list of at least one message", "messages")
    texts = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _wrong(f"messages[{index}] must be an object with a role", f"messages[{index}]")
        texts.append(_content(message.get("content"), index))
    return "\n".join(text for text in reversed(texts) if text)


def _content(content: Any, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _wrong(f"messages[{index}].content must be text or a list of parts", f"messages[{index}].content")
    parts = [part.get("text", "") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if not all(isinstance(part, dict) for part in content) or not all(isinstance(part, str) for part in parts):
        raise _wrong(f"messages[{index}].content must hold parts with text", f"messages[{index}].content")
    return "\n".join(parts)


def _prompt(data: Mapping[str, Any]) -> str:
    prompt = data.get("prompt", "")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(each, str) for each in prompt):
        return "\n".join(prompt)
    if isinstance(prompt, list) and all(_is_tokens(each) for each in prompt):
        return ""  # numbers of tokens: only the engine knows their text
    raise _wrong("prompt must be text, a list of texts, or numbers of tokens", "prompt")


def _input(data: Mapping[str, Any]) -> str:
    """The text of ``input`` of ``/v1/responses`` and ``/v1/embeddings``; engines check its form."""
    given = data.get("input")
    if given is None or given == [] or given == "":
        raise _wrong("input must be text or a list", "input")
    if isinstance(given, str):
        return given
    items = given if isinstance(given, list) else []
    texts = [item if isinstance(item, str) else _item_text(item) for item in reversed(items)]
    return "\n".join(text for text in texts if text)


def _item_text(item: Any) -> str:
    content = item.get("content") if isinstance(item, dict) else None
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


_PROMPTS: Mapping[GenerationKind, Callable[[Mapping[str, Any]], str]] = {
    GenerationKind.CHAT: _messages,
    GenerationKind.COMPLETION: _prompt,
    GenerationKind.RESPONSE: _input,
    GenerationKind.EMBEDDING: _input,
}


def _is_tokens(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, list) and all(isinstance(each, int) for each in value))


def _max_tokens(data: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _wrong(f"{name} must be a number of tokens", name)
        return value
    return None


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(f"{name} must be true or false", name)
    return bool(value)


def _short(value: float) -> float:
    """Round to six digits; further ones are noise of the meter."""
    return float(f"{value:.6g}")


def _wrong(message: str, param: str | None = None) -> ParameterError:
    return ParameterError(message, param)


def share_headers(share: EnergyShare | None, tokens: int) -> list[tuple[bytes, bytes]]:
    """Headers with an answer's joules and grams, as for inference, and per token."""
    if share is None:
        return []
    headers = [(b"x-joulery-energy-j", b"%.6g" % share.energy_j), (b"x-joulery-quality", share.quality.value.encode())]
    if tokens:
        headers.append((b"x-joulery-energy-per-token-j", b"%.6g" % (share.energy_j / tokens)))
    if share.carbon_g is not None:
        headers.append((b"x-joulery-carbon-g", b"%.6g" % share.carbon_g))
        if tokens:
            headers.append((b"x-joulery-carbon-per-token-g", b"%.6g" % (share.carbon_g / tokens)))
    return headers
