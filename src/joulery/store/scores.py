"""The database of clock scores: every profile of a model on a device, in one SQLite file.

A profile replaces an earlier one of the same model, device and quality; measured and modelled profiles never replace
each other. A look-up returns the profile of the best quality.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from joulery.domain.errors import DataError
from joulery.domain.gpu.clock_profile import ClockProfile
from joulery.domain.quality import Quality
from joulery.store.database import Database, DatabaseKind

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE profiles (
            id INTEGER PRIMARY KEY, model TEXT NOT NULL, device TEXT NOT NULL, quality TEXT NOT NULL,
            created_s REAL NOT NULL, score REAL NOT NULL, document TEXT NOT NULL,
            UNIQUE (model, device, quality)) STRICT""",
        """CREATE TABLE operators (
            profile INTEGER NOT NULL REFERENCES profiles (id) ON DELETE CASCADE, position INTEGER NOT NULL,
            name TEXT NOT NULL, type TEXT NOT NULL, phase TEXT NOT NULL, score REAL NOT NULL CHECK (score >= 0),
            time_s REAL NOT NULL CHECK (time_s > 0), PRIMARY KEY (profile, position)) STRICT, WITHOUT ROWID""",
    ),
    (
        "CREATE INDEX operators_by_type ON operators (type, score)",
        """CREATE TABLE curves (
            profile INTEGER NOT NULL REFERENCES profiles (id) ON DELETE CASCADE, clock_mhz REAL NOT NULL,
            latency_s REAL NOT NULL CHECK (latency_s > 0), power_w REAL, PRIMARY KEY (profile, clock_mhz))
            STRICT, WITHOUT ROWID""",
        """INSERT INTO curves SELECT profiles.id, clock.value,
            json_extract(document, '$.curve.latency_s[' || clock.key || ']'),
            json_extract(document, '$.curve.power_w[' || clock.key || ']')
            FROM profiles, json_each(document, '$.curve.clock_mhz') AS clock""",
    ),
)
_SCORES = DatabaseKind(
    noun="database of clock scores",
    migrations=MIGRATIONS,
    absent_hint="make one with: joulery profile MODEL --clocks --scores FILE",
    outdated_hint="write to it once to bring it up to date: joulery profile MODEL --clocks --scores FILE",
    damaged_hint="move it away and profile again: joulery profile MODEL --clocks --scores FILE",
)
_BEST_FIRST = (Quality.MEASURED, Quality.MODELLED, Quality.ASSUMED)


@dataclass(frozen=True, slots=True)
class ScoreEntry:
    """One profile in a database."""

    model: str
    device: str
    quality: Quality
    score: float
    operators: int


class ScoreDatabase(Database):
    """An open database of scores, as a context manager. Use one instance per thread.

    Raises:
        CapabilityError: The file cannot be opened or written.
        DataError: It holds something else, is damaged, or was written by a newer joulery.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        super().__init__(path, _SCORES, read_only=read_only)

    def keep(self, profile: ClockProfile) -> None:
        """Write a profile; one of the same model, device and quality is replaced."""
        document = json.dumps(profile.as_dict())
        key = (profile.model, profile.device, profile.quality.value)
        with self.transaction() as execute:
            execute("DELETE FROM profiles WHERE model = ? AND device = ? AND quality = ?", key)
            row = execute(
                "INSERT INTO profiles (model, device, quality, created_s, score, document) VALUES (?, ?, ?, ?, ?, ?)"
                " RETURNING id",
                (*key, time.time(), profile.score, document),
            ).fetchone()
            for position, each in enumerate(profile.operators):
                values = (each.cost.name, each.cost.type, each.cost.phase, each.score, each.time_s)
                execute("INSERT INTO operators VALUES (?, ?, ?, ?, ?, ?, ?)", (row[0], position, *values))
            for clock, latency, power in zip(profile.clocks_mhz, profile.latency_s, profile.power_w, strict=True):
                known = float(power) if power == power else None
                execute("INSERT INTO curves VALUES (?, ?, ?, ?)", (row[0], float(clock), float(latency), known))

    def profile(self, model: str, device: str) -> ClockProfile:
        """The best known profile of a model on a device.

        Raises:
            DataError: There is none.
        """
        rows = self.query("SELECT quality, document FROM profiles WHERE model = ? AND device = ?", (model, device))
        documents = {Quality(quality): document for quality, document in rows}
        for quality in _BEST_FIRST:
            if quality in documents:
                return ClockProfile.from_dict(json.loads(documents[quality]))
        raise DataError(
            f"no clock scores of {model} on {device}",
            file=str(self.path),
            hint=f"run: joulery profile {model} --clocks --gpu {device} --scores {self.path}",
        )

    def entries(self) -> tuple[ScoreEntry, ...]:
        """Known scores, by model and device."""
        rows = self.query(
            "SELECT model, device, quality, score, (SELECT COUNT(*) FROM operators WHERE profile = profiles.id)"
            " FROM profiles ORDER BY model, device, quality"
        )
        return tuple(
            ScoreEntry(model, device, Quality(quality), score, count) for model, device, quality, score, count in rows
        )
