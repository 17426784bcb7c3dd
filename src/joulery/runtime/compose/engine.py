"""Engines, made from plain settings."""

from __future__ import annotations

from joulery.adapters.engines.local import LocalEngine, LocalSettings
from joulery.domain.ports import Engine, Places


def local_engine(
    *,
    cores: tuple[int, ...] = (),
    queue: int = 1024,
    deadline_s: float = 30.0,
    drain_s: float = 10.0,
    stderr: int | None = None,
    places: Places | None = None,
) -> Engine:
    """The embedded engine; see :class:`joulery.adapters.engines.local.LocalSettings`.

    Args:
        places: Hands out parts of GPUs; None to run on the CPU alone.
    """
    settings = LocalSettings(cores=cores, queue=queue, deadline_s=deadline_s, drain_s=drain_s, stderr=stderr)
    return LocalEngine(settings, places=places)
