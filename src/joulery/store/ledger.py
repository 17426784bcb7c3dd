"""The ledger: what every run cost, by owner, workload, device and hour, in one SQLite file that outlives the runs.

Energy is kept by device and role (charged, idle, unattributed), grams by signal and scope: neither is invented where
the other is known. Recording a run again replaces what was recorded of it, so nothing is counted twice. Many processes
may write at once (WAL, a busy timeout, short transactions); a killed one leaves the ledger as it was.

Migrations are an ordered tuple: version ``n`` is the first ``n`` of them applied. A released one is never edited.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from joulery.domain.carbon import Scope, Signal
from joulery.domain.errors import CapabilityError, ConfigError, DataError, JouleryError
from joulery.domain.quality import Quality, weakest
from joulery.domain.rollup import Row

BUSY_TIMEOUT_S = 10.0
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE runs (
            id TEXT PRIMARY KEY, kind TEXT NOT NULL, path TEXT NOT NULL, owner TEXT NOT NULL, host TEXT NOT NULL,
            started_s REAL NOT NULL, ended_s REAL, state TEXT NOT NULL) STRICT""",
        """CREATE TABLE energy (
            run TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, owner TEXT NOT NULL, workload TEXT NOT NULL,
            device TEXT NOT NULL, hour_s INTEGER NOT NULL, role TEXT NOT NULL, quality TEXT NOT NULL,
            energy_j REAL NOT NULL CHECK (energy_j >= 0),
            PRIMARY KEY (run, owner, workload, device, hour_s, role, quality)) STRICT, WITHOUT ROWID""",
        """CREATE TABLE carbon (
            run TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, owner TEXT NOT NULL, workload TEXT NOT NULL,
            hour_s INTEGER NOT NULL, signal TEXT NOT NULL, scope TEXT NOT NULL, carbon_g REAL NOT NULL,
            PRIMARY KEY (run, owner, workload, hour_s, signal, scope)) STRICT, WITHOUT ROWID""",
    ),
    (
        "CREATE INDEX energy_by_owner_and_hour ON energy (owner, hour_s)",
        "CREATE INDEX carbon_by_owner_and_hour ON carbon (owner, hour_s)",
        """CREATE TABLE budgets (
            owner TEXT NOT NULL, start_s REAL NOT NULL, end_s REAL NOT NULL CHECK (end_s > start_s),
            carbon_g REAL NOT NULL CHECK (carbon_g > 0), PRIMARY KEY (owner, start_s)) STRICT, WITHOUT ROWID""",
    ),
)
_KEYS = {"owner": "owner", "workload": "workload", "run": "run", "device": "device", "hour": "hour_s"}


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run as the ledger knows it; ``ended_s`` is None while it runs."""

    id: str
    kind: str
    path: str
    owner: str
    host: str
    started_s: float
    ended_s: float | None
    state: str


@dataclass(frozen=True, slots=True)
class EnergyEntry:
    """Joules of one device in one hour. ``role`` is charged, idle or unattributed; ``hour_s`` the hour's start."""

    owner: str
    workload: str
    device: str
    hour_s: int
    role: str
    quality: Quality
    energy_j: float


@dataclass(frozen=True, slots=True)
class CarbonEntry:
    """Grams of one workload in one hour."""

    owner: str
    workload: str
    hour_s: int
    signal: Signal
    scope: Scope
    carbon_g: float


@dataclass(frozen=True, slots=True)
class Budget:
    """Grams that an owner may spend in ``[start_s, end_s)``."""

    owner: str
    start_s: float
    end_s: float
    carbon_g: float


class Ledger:
    """An open ledger. A context manager. Use one instance a thread.

    Raises:
        CapabilityError: The file cannot be opened or written: permission, read-only, full disk, locked for too long.
        DataError: It is no ledger, damaged, or written by a newer joulery.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
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

    def record(self, run: RunEntry, energy: Sequence[EnergyEntry], carbon: Sequence[CarbonEntry] = ()) -> None:
        """Write all that is known of a run; what was recorded of it before is replaced."""
        with self._transaction() as execute:
            execute("DELETE FROM runs WHERE id = ?", (run.id,))
            execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", astuple(run))
            for joules in energy:
                execute(
                    "INSERT INTO energy VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)"
                    " ON CONFLICT DO UPDATE SET energy_j = energy_j + excluded.energy_j",
                    (run.id, *astuple(joules)),
                )
            for grams in carbon:
                execute(
                    "INSERT INTO carbon VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)"
                    " ON CONFLICT DO UPDATE SET carbon_g = carbon_g + excluded.carbon_g",
                    (run.id, *astuple(grams)),
                )

    def forget(self, run_id: str) -> bool:
        """Remove a run and all that it cost; False when there was none."""
        with self._transaction() as execute:
            return bool(execute("DELETE FROM runs WHERE id = ?", (run_id,)).rowcount)

    def runs(self) -> tuple[RunEntry, ...]:
        """All runs, oldest first."""
        return tuple(RunEntry(*row) for row in self._query("SELECT * FROM runs ORDER BY started_s, id"))

    def rows(
        self, by: str, *, owner: str | None = None, start_s: float | None = None, end_s: float | None = None
    ) -> tuple[Row, ...]:
        """What was spent, by ``owner``, ``workload``, ``run``, ``device`` or ``hour`` (its start in Unix seconds).

        Args:
            by: What the rows are about.
            owner: Only what is charged to this owner.
            start_s, end_s: Only hours that begin in ``[start_s, end_s)``.

        Raises:
            ConfigError: ``by`` is none of the above.
            DataError: The grams in question count different things.
        """
        if by not in _KEYS:
            raise ConfigError("cannot sum by that", got=by, expected=", ".join(_KEYS))
        where, values = _where(owner, start_s, end_s)
        key = _KEYS[by]
        joules = self._query(
            f"SELECT {key}, quality, SUM(energy_j) FROM energy{where} GROUP BY 1, 2 ORDER BY 1", values
        )
        grams = {} if by == "device" else self._grams(key, where, values)
        sums: dict[str, list[tuple[Quality, float]]] = {}
        for name, quality, energy_j in joules:
            sums.setdefault(str(name), []).append((Quality(quality), energy_j))
        return tuple(
            Row(name, math.fsum(j for _, j in parts), grams.get(name, math.nan), weakest(q for q, _ in parts))
            for name, parts in sums.items()
        )

    def set_budget(self, budget: Budget) -> None:
        """Grant an owner a budget; one that starts at the same time is replaced.

        Raises:
            ConfigError: It is not positive, or ends before it starts.
        """
        if not (budget.carbon_g > 0 and budget.end_s > budget.start_s):
            raise ConfigError("a budget needs grams above 0 and an end after its start", got=str(budget))
        with self._transaction() as execute:
            execute("INSERT OR REPLACE INTO budgets VALUES (?, ?, ?, ?)", astuple(budget))

    def budgets(self, now_s: float) -> tuple[tuple[Budget, float], ...]:
        """The budgets in force at ``now_s`` and what is left of each in grams, negative when overspent.

        Raises:
            DataError: The grams of an owner count different things.
        """
        found = self._query(
            "SELECT * FROM budgets WHERE start_s <= ?1 AND ?1 < end_s ORDER BY owner, start_s", (now_s,)
        )
        budgets = [Budget(*row) for row in found]
        return tuple((one, one.carbon_g - self._spent(one)) for one in budgets)

    def _spent(self, budget: Budget) -> float:
        where, values = _where(budget.owner, budget.start_s, budget.end_s)
        return math.fsum(self._grams("owner", where, values).values())

    def _grams(self, key: str, where: str, values: Sequence[Any]) -> dict[str, float]:
        kinds = self._query(f"SELECT DISTINCT signal, scope FROM carbon{where}", values)
        if len(kinds) > 1:
            words = " and ".join(sorted(f"{signal} {scope}" for signal, scope in kinds))
            raise DataError(f"cannot add grams of {words}", file=str(self.path), hint="narrow the owner or the time")
        rows = self._query(f"SELECT {key}, SUM(carbon_g) FROM carbon{where} GROUP BY 1", values)
        return {str(name): carbon_g for name, carbon_g in rows}

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
            raise DataError("there is no ledger", file=str(self.path), hint="record a run first")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            foreign = self.path.is_file() and self.path.stat().st_size > 0 and not _is_sqlite(self.path)
        except OSError as error:
            text = f"cannot open {self.path}: {error.strerror}"
            raise CapabilityError(text, resource=str(self.path), hint=_WRITE_HINT) from error
        if foreign:  # SQLite itself would take a short one for empty, and write over it
            raise DataError("not a ledger: file is not a database", file=str(self.path), hint=_MOVE_HINT)
        with self._errors():
            uri = f"{self.path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
            return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)

    def _prepare(self, read_only: bool) -> None:
        """Settings, then migrations up to this joulery's version."""
        with self._errors():
            if not read_only:
                self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            version = _version(self._connection)
        if version > len(MIGRATIONS):
            raise DataError(
                f"the ledger has version {version}, this joulery reads up to {len(MIGRATIONS)}",
                file=str(self.path),
                hint="use the joulery that wrote it, or a newer one",
            )
        if version < len(MIGRATIONS):
            if read_only:
                raise DataError(
                    f"the ledger has version {version}, expected {len(MIGRATIONS)}",
                    file=str(self.path),
                    hint="record a run once to bring it up to date",
                )
            self._migrate()

    def _migrate(self) -> None:
        with self._transaction() as execute:
            # Read again: another process may have migrated while this one waited for the lock.
            version = _version(self._connection)
            if version == 0:
                if execute("SELECT 1 FROM sqlite_master").fetchone():
                    raise DataError("another program's database", file=str(self.path), hint=_WRITE_HINT)
                execute("CREATE TABLE schema_version (version INTEGER PRIMARY KEY, applied_s REAL NOT NULL) STRICT")
            for number, statements in enumerate(MIGRATIONS[version:], version + 1):
                for statement in statements:
                    execute(statement)
                execute("INSERT INTO schema_version VALUES (?, ?)", (number, time.time()))

    def _query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._connection.execute(sql, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """All of the block, or nothing of it; yields the connection's ``execute``."""
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
            raise _explain(error, self.path) from error


_WRITE_HINT = "name another ledger, in a folder you may write to"
_MOVE_HINT = "move it away to start a new one, or restore a copy; the runs themselves are in their folders"
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


def _explain(error: sqlite3.Error, path: Path) -> JouleryError:
    """SQLite's refusal as an error a person can act on."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _REFUSALS:
        message, hint = _REFUSALS[code]
        text = message.format(path=path, error=error, timeout=BUSY_TIMEOUT_S)
        return CapabilityError(text, resource=str(path), hint=hint)
    return DataError(f"not a usable ledger: {error}", file=str(path), hint=_MOVE_HINT)


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def _version(connection: sqlite3.Connection) -> int:
    found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'schema_version'").fetchone()
    if found is None:
        return 0
    return int(connection.execute("SELECT COALESCE(MAX(version), 0) FROM schema_version").fetchone()[0])


def _where(owner: str | None, start_s: float | None, end_s: float | None) -> tuple[str, list[Any]]:
    terms = (("owner = ?", owner), ("hour_s >= ?", start_s), ("hour_s < ?", end_s))
    used = [(term, value) for term, value in terms if value is not None]
    clause = " WHERE " + " AND ".join(term for term, _ in used) if used else ""
    return clause, [value for _, value in used]
