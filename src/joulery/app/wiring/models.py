"""Model files on this machine: the built-in families, built once and kept."""

from __future__ import annotations

import os
from pathlib import Path

from joulery.adapters.models import efficientnet_lite
from joulery.domain.errors import CapabilityError
from joulery.store.files import disk_errors, write_atomically
from joulery.user import cache_home


def cache_folder() -> Path:
    """Cache folder of joulery: ``JOULERY_CACHE``, else ``joulery`` in the user's cache folder."""
    named = os.environ.get("JOULERY_CACHE")
    if named:
        return Path(named)
    return cache_home() / "joulery"


def lite_file(name: str, cache: Path) -> Path:
    """The ONNX file of an EfficientNet-Lite, built into ``cache/models`` the first time and reused after that.

    Args:
        name: ``lite0``, ``lite1`` or ``lite2``.
        cache: See :func:`cache_folder`.

    Raises:
        CapabilityError: A package is missing, or the cache cannot be written.
        DataError: The weights are damaged.
        KeyError: No such variant.
    """
    target = cache / "models" / efficientnet_lite.graph_file_name(name)
    if target.exists():
        return target
    graph = efficientnet_lite.published_graph(name)
    try:
        with disk_errors(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, lambda file: file.write(graph))
    except CapabilityError as error:
        raise CapabilityError(
            error.message,
            resource=error.resource,
            hint="free some space, or name another folder for what joulery keeps: JOULERY_CACHE=FOLDER",
        ) from error
    return target
