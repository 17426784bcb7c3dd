"""The ledger: energy and carbon of runs by owner, workload, device and hour, in one SQLite file that outlives them.

Energy is kept by device and role (charged, idle, unattributed), grams by signal and scope: neither is invented where
the other is known. Recording a run again replaces its entries, so nothing is counted twice. Many processes
may write at once (WAL, a busy timeout, short transactions); a killed one leaves the ledger as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.energy.footprint import Row
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.format import moment
from joulery.domain.quality import Quality, weakest
from joulery.store.database import Database, DatabaseKind

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
_LEDGER = DatabaseKind(
    noun="ledger",
    migrations=MIGRATIONS,
    absent_hint="record a run first: joulery ledger add RUN",
    outdated_hint="record a run once to bring it up to date",
    damaged_hint="move it away to start a new one, or restore a copy; the runs themselves are in their folders",
)
_KEYS = {"owner": "owner", "workload": "workload", "run": "run", "device": "device", "hour": "hour_s"}


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run in the ledger; ``ended_s`` is None while it runs."""

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


class Ledger(Database):
    """An open ledger, as a context manager. Use one instance per thread.

    Raises:
        CapabilityError: The file cannot be opened or written: permission, read-only, full disk, locked for too long.
        DataError: It is not a ledger, is damaged, or was written by a newer joulery.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        super().__init__(path, _LEDGER, read_only=read_only)

    def record(self, run: RunEntry, energy: Sequence[EnergyEntry], carbon: Sequence[CarbonEntry] = ()) -> None:
        """Record a run with its energy and carbon; its earlier entries are replaced."""
        with self.transaction() as execute:
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

    def runs(self) -> tuple[RunEntry, ...]:
        """All runs, oldest first."""
        return tuple(RunEntry(*row) for row in self.query("SELECT * FROM runs ORDER BY started_s, id"))

    def rows(
        self, by: str, *, owner: str | None = None, start_s: float | None = None, end_s: float | None = None
    ) -> tuple[Row, ...]:
        """Spending by ``owner``, ``workload``, ``run``, ``device`` or ``hour`` (its start in Unix seconds).

        Args:
            by: The key of the rows.
            owner: Only what is charged to this owner.
            start_s, end_s: Only hours that begin in ``[start_s, end_s)``.

        Raises:
            ConfigError: ``by`` is not one of these keys.
            DataError: The grams have different signals or scopes.
        """
        if by not in _KEYS:
            raise ConfigError("cannot group by this", got=by, expected=", ".join(_KEYS))
        where, values = _where(owner, start_s, end_s)
        key = _KEYS[by]
        joules = self.query(f"SELECT {key}, quality, SUM(energy_j) FROM energy{where} GROUP BY 1, 2 ORDER BY 1", values)
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
            start, end = (moment(t_s) for t_s in (budget.start_s, budget.end_s))
            raise ConfigError(
                "a budget needs grams above 0 and an end after its start",
                got=f"{budget.carbon_g:g} g from {start} to {end}",
            )
        with self.transaction() as execute:
            execute("INSERT OR REPLACE INTO budgets VALUES (?, ?, ?, ?)", astuple(budget))

    def budgets(self, now_s: float) -> tuple[tuple[Budget, float], ...]:
        """The budgets in force at ``now_s`` and what is left of each in grams, negative when overspent.

        Raises:
            DataError: The grams of an owner have different signals or scopes.
        """
        found = self.query("SELECT * FROM budgets WHERE start_s <= ?1 AND ?1 < end_s ORDER BY owner, start_s", (now_s,))
        budgets = [Budget(*row) for row in found]
        return tuple((one, one.carbon_g - self._spent(one)) for one in budgets)

    def _spent(self, budget: Budget) -> float:
        where, values = _where(budget.owner, budget.start_s, budget.end_s)
        return math.fsum(self._grams("owner", where, values).values())

    def _grams(self, key: str, where: str, values: Sequence[Any]) -> dict[str, float]:
        kinds = self.query(f"SELECT DISTINCT signal, scope FROM carbon{where}", values)
        if len(kinds) > 1:
            names = " and ".join(sorted(f"{signal} {scope}" for signal, scope in kinds))
            raise DataError(f"cannot add grams of {names}", file=str(self.path), hint="narrow the owner or the time")
        rows = self.query(f"SELECT {key}, SUM(carbon_g) FROM carbon{where} GROUP BY 1", values)
        return {str(name): carbon_g for name, carbon_g in rows}


def _where(owner: str | None, start_s: float | None, end_s: float | None) -> tuple[str, list[Any]]:
    terms = (("owner = ?", owner), ("hour_s >= ?", start_s), ("hour_s < ?", end_s))
    used = [(term, value) for term, value in terms if value is not None]
    clause = " WHERE " + " AND ".join(term for term, _ in used) if used else ""
    return clause, [value for _, value in used]
