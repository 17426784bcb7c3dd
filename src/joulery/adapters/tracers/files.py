"""Reader of recorded traces in any known format, recognised by the file's content."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from joulery.adapters.tracers.chrome import open_stream
from joulery.domain.errors import DataError
from joulery.domain.trace.events import EventTrace

FORMATS = ("kineto", "tf1", "jax", "xplane", "csv")
_LOOK_BYTES = 1 << 20
_SIGNS = (
    ("tf1", re.compile(rb'device:(CPU|GPU):\d+(/[\w:.-]+)? Compute"')),
    ("jax", re.compile(rb'"hlo_op"\s*:')),
    (
        "kineto",
        re.compile(
            rb'"cat"\s*:\s*"(cpu_op|user_annotation|cuda_runtime|kernel|Operator|Kernel|mtia_\w+)"|"deviceProperties"|"schemaVersion"'
        ),
    ),
)


def read_events(path: Path, form: str | None = None, hlo: Sequence[Path] = ()) -> EventTrace:
    """The named events of a trace file.

    Args:
        path: Kineto JSON, TensorFlow 1 timeline, JAX trace, XLA profile (``.xplane.pb``) or CSV, plain or gzipped.
        form: One of :data:`FORMATS`; recognised by the content when not given.
        hlo: For JAX traces, files with the compiled programs.

    Raises:
        DataError: The file cannot be read, ends early, or has none of these formats.
    """
    form = form or recognised(path)
    return _readers(hlo)[form](path)


def recognised(path: Path) -> str:
    """The format of a trace, one of :data:`FORMATS`, by its content.

    Raises:
        DataError: The format is unknown, or the file cannot be read.
    """
    try:
        with open_stream(path) as stream:
            head = stream.read(_LOOK_BYTES)
            start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
            if start in (b"{", b"["):
                return _json_form(head, stream.read, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"the gzip stream is damaged or ends early: {error}", file=str(path), hint="record or copy it again"
        ) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", file=str(path)) from error
    if not head.strip():
        raise DataError("the file is empty", file=str(path))
    if ".pb" in path.suffixes or (head[:1] == b"\n" and b"\x12" in head[:64]):
        return "xplane"
    if b"start_ns" in head.replace(b"\0", b"").split(b"\n", 1)[0]:  # UTF-16 has zeros between ASCII letters
        return "csv"
    raise DataError(
        "no trace that is known",
        file=str(path),
        hint=f"name it with --format {'|'.join(FORMATS)}; a CSV begins with op,start_ns,dur_ns,device,lane,phase",
    )


def _json_form(head: bytes, more: Callable[[int], bytes], path: Path) -> str:
    """The format of a JSON trace, by the first characteristic text found."""
    while head:
        found = {name: match.start() for name, sign in _SIGNS if (match := sign.search(head))}
        # Kineto's header keys come first in a file, so a sign that only the others have decides.
        for name in ("tf1", "jax", "kineto"):
            if name in found:
                return name
        head = head[-64:] + chunk if (chunk := more(_LOOK_BYTES)) else b""
    raise DataError(
        "JSON, but no trace of PyTorch, TensorFlow or JAX",
        file=str(path),
        hint="expected a PyTorch profiler export, a TensorFlow 1 timeline or a JAX trace.json.gz",
    )


def _readers(hlo: Sequence[Path]) -> dict[str, Callable[[Path], EventTrace]]:
    from joulery.adapters.tracers.kineto.names import read_kineto
    from joulery.adapters.tracers.tables import read_event_table
    from joulery.adapters.tracers.tf1 import read_tf1
    from joulery.adapters.tracers.xla.tracer import read_jax
    from joulery.adapters.tracers.xla.xplane import read_xplane

    return {
        "kineto": read_kineto,
        "tf1": read_tf1,
        "jax": lambda path: read_jax(path, hlo),
        "xplane": read_xplane,
        "csv": read_event_table,
    }
