"""Open the tracer of a framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from joulery.domain.errors import ConfigError

if TYPE_CHECKING:
    from joulery.domain.ports import Tracer

FRAMEWORKS = ("torch", "jax", "tensorflow")


def open_tracer(framework: str) -> Tracer:
    """Open the tracer of a framework.

    Raises:
        ConfigError: There is no tracer of this name.
    """
    if framework == "torch":
        from joulery.adapters.tracers.torch import TorchTracer

        return TorchTracer()
    if framework in ("jax", "tensorflow"):
        from joulery.adapters.tracers.xla.tracer import XlaTracer

        return XlaTracer("jax" if framework == "jax" else "tensorflow")
    raise ConfigError("not a tracer", pointer="trace", got=framework, expected=" | ".join(FRAMEWORKS))
