"""Which tracer records which framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from joulery.domain.errors import ConfigError

if TYPE_CHECKING:
    from joulery.domain.ports import Tracer

FRAMEWORKS = ("torch",)


def open_tracer(framework: str) -> Tracer:
    """The tracer of a framework.

    Raises:
        ConfigError: There is none.
    """
    if framework != "torch":
        raise ConfigError("no tracer", pointer="trace", got=framework, expected=" | ".join(FRAMEWORKS))
    from joulery.adapters.tracers.torch import TorchTracer

    return TorchTracer()
