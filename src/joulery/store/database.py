"""SQLite files with a versioned schema: opened, migrated, or refused with an error that states what to do.

Migrations are an ordered tuple: version ``n`` is the first ``n`` of them applied. A released one is never edited. Many
processes may write at once (WAL, a busy timeout, short transactions); a killed one leaves the file as it was.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from joulery.domain.errors import CapabilityError, DataError, JouleryError

BUSY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DatabaseKind:
    """Kind of a database file, and hints for one that cannot be used.

    Attributes:
        noun: Its name, such as ``ledger``.
        migrations: Statements of each version.
        absent_hint: How to create one.
        outdated_hint: How to bring an old one up to date.
        damaged_hint: What to do with a damaged one.
    """

    noun: str
    migrations: tuple[tuple[str, ...], ...]
    absent_hint: str
    outdated_hint: str
    damaged_hint: str


class Database:
    """An open SQLite file of one kind, as a context manager. Use one instance per thread.

    Raises:
        CapabilityError: The file cannot be opened or written: permission, read-only, full disk, locked for too long.
        DataError: It holds something else, is damaged, or was written by a newer joulery.
    """

    def __init__(self, path: str | Path, kind: DatabaseKind, *, read_only: bool = False) -> None:
        self.path, self.kind = Path(path), kind
        self._connection = self._open(read_only)
        try:
            self._prepare(read_only)
        except BaseException:
            self._connection.close()
            raise

    @property
    def version(self) -> int:
        """The version of the schema in the file; 0 for none."""
        with self._errors():
            return _version(self._connection)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, read_only: bool) -> sqlite3.Connection:
        if read_only and not self.path.is_file():
            raise DataError(f"there is no {self.kind.noun}", file=str(self.path), hint=self.kind.absent_hint)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            foreign = self.path.is_file() and self.path.stat().st_size > 0 and not _is_sqlite(self.path)
        except OSError as error:
            text = f"cannot open {self.path}: {error.strerror}"
            raise CapabilityError(text, resource=str(self.path), hint=self._write_hint) from error
        if foreign:  # SQLite itself would take a short one for empty, and write over it
            raise DataError(
                f"not a {self.kind.noun}: file is not a database", file=str(self.path), hint=self.kind.damaged_hint
            )
        with self._errors():
            uri = f"{self.path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
            return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)

    def _prepare(self, read_only: bool) -> None:
        """Apply the connection's settings, then migrate the schema to this joulery's version."""
        with self._errors():
            if not read_only:
                self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            version = _version(self._connection)
        if version > len(self.kind.migrations):
            raise DataError(
                f"the {self.kind.noun} has version {version}, this joulery reads up to {len(self.kind.migrations)}",
                file=str(self.path),
                hint="use the joulery that wrote it, or a newer one",
            )
        if version < len(self.kind.migrations):
            if read_only:
                raise DataError(
                    f"the {self.kind.noun} has version {version}, expected {len(self.kind.migrations)}",
                    file=str(self.path),
                    hint=self.kind.outdated_hint,
                )
            self._migrate()

    def _migrate(self) -> None:
        with self.transaction() as execute:
            # Read again: another process may have migrated while this one waited for the lock.
            version = _version(self._connection)
            if version == 0:
                if execute("SELECT 1 FROM sqlite_master").fetchone():
                    raise DataError("another program's database", file=str(self.path), hint=self._write_hint)
                execute("CREATE TABLE schema_version (version INTEGER PRIMARY KEY, applied_s REAL NOT NULL) STRICT")
            for number, statements in enumerate(self.kind.migrations[version:], version + 1):
                for statement in statements:
                    execute(statement)
                execute("INSERT INTO schema_version VALUES (?, ?)", (number, time.time()))

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run an SQL query and return its rows."""
        with self._errors():
            return self._connection.execute(sql, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """Run the block as one transaction, all or nothing; yields the connection's ``execute``."""
        with self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection.execute
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._explain(error) from error

    @property
    def _write_hint(self) -> str:
        return _WRITE_HINT.format(noun=self.kind.noun)

    def _explain(self, error: sqlite3.Error) -> JouleryError:
        """Turn an SQLite error into an error with a hint for the user."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _REFUSALS:
            message, hint = _REFUSALS[code]
            text = message.format(path=self.path, error=error, timeout=BUSY_TIMEOUT_S)
            return CapabilityError(text, resource=str(self.path), hint=hint.format(noun=self.kind.noun))
        hint = self.kind.damaged_hint
        return DataError(f"not a usable {self.kind.noun}: {error}", file=str(self.path), hint=hint)


_WRITE_HINT = "name another {noun}, in a folder you may write to"
_REFUSALS = {
    sqlite3.SQLITE_FULL: ("cannot write {path}: the disk is full", "free some space; what was recorded before is kept"),
    sqlite3.SQLITE_READONLY: ("cannot write {path}: it is read-only", _WRITE_HINT),
    sqlite3.SQLITE_CANTOPEN: ("cannot open {path}: {error}", _WRITE_HINT),
    sqlite3.SQLITE_PERM: ("cannot open {path}: {error}", _WRITE_HINT),
    sqlite3.SQLITE_IOERR: ("cannot write {path}: {error}", "check the disk, its space and its quota"),
    sqlite3.SQLITE_BUSY: (
        "{path} was locked by another process for more than {timeout:g} s",
        "end the process that holds it, or try again",
    ),
}


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def _version(connection: sqlite3.Connection) -> int:
    found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'schema_version'").fetchone()
    if found is None:
        return 0
    return int(connection.execute("SELECT COALESCE(MAX(version), 0) FROM schema_version").fetchone()[0])
