"""An error of a worker on its way to the engine that started it: packed there, raised here as it was."""

from __future__ import annotations

from typing import Any

from joulery.domain.errors import CapabilityError, ConfigError, DataError, JouleryError

_ERRORS: dict[str, type[JouleryError]] = {kind.__name__: kind for kind in (CapabilityError, ConfigError, DataError)}


def packed(error: JouleryError) -> dict[str, Any]:
    """The kind and the fields of an error, JSON-ready."""
    fields = {key: value for key, value in vars(error).items() if value is not None}
    return {"type": type(error).__name__, "arguments": fields}


def rebuilt(error: dict[str, Any]) -> JouleryError:
    """The error that was packed."""
    fields = dict(error["arguments"])
    return _ERRORS[error["type"]](fields.pop("message"), **fields)
