"""A run directory: the results of one run, readable while it runs, after it, and after a kill.

::

    RUN/manifest.json   schema "joulery.run/1": command, time, owner, machine; state "running" until it is closed
    RUN/log.jsonl       one JSON object a line: observations, decisions, notes; {"t_s": ..., "kind": ..., ...}
    RUN/NAME.parquet    a series, written at close; NAME.npz without pyarrow
    RUN/report.json     the summary that a report prints
    RUN/samples/        files of the sampler, until they are converted to series (joulery.store.run.samples)

``manifest.json``, ``report.json`` and the series are replaced whole; the log only grows and a torn last line is left
out on reading. Write with :func:`create_run`, read with :func:`open_run`.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import orjson

from joulery import __version__
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.store.files import disk_errors, json_bytes, read_json, write_atomically
from joulery.store.run.samples import SAMPLES as SAMPLES

if TYPE_CHECKING:
    import numpy.typing as npt

SCHEMA = "joulery.run/1"
_RUNS_ARE_IN = "runs are kept in runs/ of the folder in which joulery ran (ls runs), or where its --out said"
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def new_run_id(now_s: float) -> str:
    """A name that sorts by time and does not collide: ``20261120T051200Z-3fa9``."""
    return f"{datetime.fromtimestamp(now_s, UTC):%Y%m%dT%H%M%SZ}-{os.urandom(2).hex()}"


def create_run(
    path: str | Path,
    *,
    kind: str,
    argv: Sequence[str] = (),
    zone: str | None = None,
    owner: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> RunWriter:
    """Make a run directory (its parents too) with its manifest.

    Args:
        path: The folder; it may exist, but must not hold a run.
        kind: ``measure``, ``up``, ``simulate`` ...
        argv: The command line of the run.
        zone: Carbon zone, where one was named.
        owner: Owner that the run is charged to; None without one.
        details: Further keys of the manifest, JSON-ready.

    Raises:
        ConfigError: The folder holds a run already.
        CapabilityError: It cannot be written.
    """
    folder = Path(path)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "manifest.json").exists():
            raise ConfigError(
                "the folder already holds a run", file=str(folder), hint="name another folder, or delete this one"
            )
    now_s = time.time()
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "id": new_run_id(now_s),
        "kind": kind,
        "state": "running",
        "created": datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds"),
        "created_s": now_s,
        "argv": list(argv),
        "zone": zone,
        "owner": owner,
        "host": platform.node(),
        "versions": {"joulery": __version__, "python": platform.python_version(), "kernel": platform.release()},
        **(details or {}),
    }
    return RunWriter(folder, manifest)


class RunWriter:
    """Writer of a run directory, as a context manager: leaving it closes the run.

    Every method raises ``CapabilityError`` when the disk refuses; what was written before stays readable.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self._manifest = dict(manifest)
        self._write_json("manifest.json", self._manifest)
        with disk_errors(path / "log.jsonl"):
            self._log_fd = os.open(path / "log.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    @property
    def manifest(self) -> dict[str, Any]:
        """A copy of the current manifest."""
        return dict(self._manifest)

    def describe(self, **details: Any) -> None:
        """Add or replace keys of the manifest."""
        self._manifest.update(details)
        self._write_json("manifest.json", self._manifest)

    def log(self, kind: str, *, t_s: float | None = None, **fields: Any) -> None:
        """Append one object to the log.

        Args:
            kind: Kind of the object.
            t_s: Unix seconds; now, unless given.
            fields: Anything JSON-ready, numpy included; NaN becomes null.
        """
        line = json_bytes({"t_s": time.time() if t_s is None else t_s, "kind": kind, **fields}, _OPTIONS)
        with disk_errors(self.path / "log.jsonl"):
            _append(self._log_fd, line + b"\n")

    def write_series(self, name: str, columns: Mapping[str, Any]) -> None:
        """Write the series ``NAME`` from equally long columns; replaces an older one."""
        from joulery.store.run.series import write_series  # here, for a run begins without numpy

        write_series(self.path, name, columns)

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Write ``report.json``; replaces an older one."""
        self._write_json("report.json", report)

    def close(self, state: str = "closed") -> None:
        """End the run: state and time of ending go to the manifest. Safe to call twice."""
        if self._log_fd < 0:
            return
        os.close(self._log_fd)
        self._log_fd = -1
        self.describe(state=state, ended_s=time.time())

    def discard(self) -> None:
        """Delete the run's files, and its folder unless it contains other files."""
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1
        named = [self.path / name for name in ("manifest.json", "report.json", "log.jsonl")]
        with disk_errors(self.path):
            for file in (*named, *self.path.glob("*.parquet")):
                file.unlink(missing_ok=True)
        shutil.rmtree(self.path / SAMPLES, ignore_errors=True)
        with suppress(OSError):  # it holds other files
            self.path.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close("closed")
            return
        with suppress(CapabilityError):  # what ended the run is said, not that its end cannot be written
            self.close("failed")

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        text = json_bytes(value, _OPTIONS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        write_atomically(self.path / name, lambda file: file.write(text))


def open_run(path: str | Path) -> Run:
    """Read a run directory: finished, still running, or killed.

    Raises:
        DataError: There is no run here, its manifest is damaged, or a newer joulery wrote it.
    """
    folder = Path(path)
    file = folder / "manifest.json"
    try:
        manifest = read_json(file)
    except FileNotFoundError as error:
        lacks = "it is a file" if folder.is_file() else "there is no such folder"
        lacks = "it has no manifest.json" if folder.is_dir() else lacks
        raise DataError(f"{folder} holds no run: {lacks}", hint=_RUNS_ARE_IN) from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise DataError(
            f"schema is {schema!r}, this joulery ({__version__}) reads {SCHEMA!r}",
            file=str(file),
            hint="read the run with the joulery that wrote it, or a newer one",
        )
    return Run(folder, manifest)


class Run:
    """Reader of a run directory.

    Attributes:
        path: The folder.
        manifest: Content of ``manifest.json``.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def closed(self) -> bool:
        """False while it runs, or when its writer was killed."""
        return self.manifest.get("state") != "running"

    @property
    def report(self) -> dict[str, Any] | None:
        """The summary; None when none was written (the run still runs, or was killed).

        Raises:
            DataError: ``report.json`` is damaged.
        """
        file = self.path / "report.json"
        try:
            report = read_json(file)
        except FileNotFoundError:
            return None
        if not isinstance(report, dict):
            raise DataError("a report is one JSON object", file=str(file))
        return report

    def log(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """The log in order, optionally of one kind; a torn last line is left out.

        Raises:
            DataError: A line other than the last is not a JSON object.
        """
        file = self.path / "log.jsonl"
        if not file.exists():
            return
        with file.open("rb") as lines:
            for row, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    entry = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise DataError(f"not JSON: {error}", file=str(file), row=row) from error
                if not isinstance(entry, dict):
                    raise DataError("a line of a log is one JSON object", file=str(file), row=row)
                if kind is None or entry.get("kind") == kind:
                    yield entry

    @property
    def series_names(self) -> tuple[str, ...]:
        """Names of the run's series, sorted."""
        from joulery.store.run.series import series_names

        return series_names(self.path)

    def series(self, name: str, columns: Sequence[str] | None = None) -> dict[str, npt.NDArray[Any]]:
        """The columns of one series, all or those named.

        Raises:
            DataError: There is no such series, or it is damaged.
        """
        from joulery.store.run.series import read_series, series_file

        return read_series(series_file(self.path, name), columns)


def _append(fd: int, data: bytes) -> None:
    """Append all of ``data`` or, when the disk refuses, nothing: the next line must not continue half a line."""
    length = os.fstat(fd).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        os.ftruncate(fd, length)
        raise
