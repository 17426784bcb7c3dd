import sqlite3

import numpy as np
import pytest

from joulery.domain.errors import DataError
from joulery.domain.gpu.clock_profile import ClockProfile, ScoredOperator
from joulery.domain.quality import Quality
from joulery.domain.trace.operators import OperationCost
from joulery.store.scores import MIGRATIONS, ScoreDatabase, ScoreEntry

CLOCKS = np.array([500.0, 1000.0])


def profile(model: str = "net", quality: Quality = Quality.MODELLED, score: float = 1.0) -> ClockProfile:
    operators = tuple(
        ScoredOperator(OperationCost(name, 1.0, 2.0, type="dot", phase="prefill"), score, 0.5) for name in ("a", "b")
    )
    return ClockProfile(model, "V100", quality, "a test", operators, CLOCKS, [1.5, 1.0], [90.0, float("nan")], [1, 2])


def test_what_is_kept_comes_back(tmp_path) -> None:
    with ScoreDatabase(tmp_path / "s.db") as database:
        database.keep(profile())
        database.keep(profile("other"))
    with ScoreDatabase(tmp_path / "s.db", read_only=True) as database:
        assert database.profile("net", "V100").as_dict() == profile().as_dict()
        assert database.entries() == (
            ScoreEntry("net", "V100", Quality.MODELLED, 1.0, 2),
            ScoreEntry("other", "V100", Quality.MODELLED, 1.0, 2),
        )


def test_measured_goes_before_modelled_and_neither_replaces_the_other(tmp_path) -> None:
    with ScoreDatabase(tmp_path / "s.db") as database:
        database.keep(profile(quality=Quality.ASSUMED, score=0.1))
        database.keep(profile(quality=Quality.MODELLED, score=0.2))
        assert database.profile("net", "V100").quality is Quality.MODELLED
        database.keep(profile(quality=Quality.MEASURED, score=0.3))
        assert database.profile("net", "V100").quality is Quality.MEASURED
        assert len(database.entries()) == 3
        database.keep(profile(quality=Quality.MODELLED, score=0.9))
        assert [entry.score for entry in database.entries() if entry.quality is Quality.MODELLED] == [0.9]
        assert database.query("SELECT COUNT(*) FROM operators") == [(6,)]
        assert database.query("SELECT COUNT(*), COUNT(power_w) FROM curves") == [(6, 3)]


def test_missing_scores_say_how_to_get_them(tmp_path) -> None:
    with ScoreDatabase(tmp_path / "s.db") as database:
        database.keep(profile())
        with pytest.raises(DataError, match=r"no clock scores .*GPT on V100") as caught:
            database.profile("GPT", "V100")
        assert "profile GPT --clocks --gpu V100" in caught.value.hint
        with pytest.raises(DataError, match=r"no clock scores .*net on H100"):
            database.profile("net", "H100")


def test_an_older_file_is_brought_up_to_date(tmp_path) -> None:
    import json

    file = tmp_path / "s.db"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE schema_version (version INTEGER PRIMARY KEY, applied_s REAL NOT NULL) STRICT")
    for statement in MIGRATIONS[0]:
        connection.execute(statement)
    connection.execute("INSERT INTO schema_version VALUES (1, 0)")
    values = ("net", "V100", "modelled", 0.0, 1.0, json.dumps(profile().as_dict()))
    connection.execute(
        "INSERT INTO profiles (model, device, quality, created_s, score, document) VALUES (?, ?, ?, ?, ?, ?)", values
    )
    connection.commit()
    connection.close()
    with pytest.raises(DataError, match="has version 1, expected 2"):
        ScoreDatabase(file, read_only=True)
    with ScoreDatabase(file) as database:
        assert database.version == len(MIGRATIONS)
        rows = database.query("SELECT clock_mhz, latency_s, power_w FROM curves ORDER BY clock_mhz")
        assert rows == [(500.0, 1.5, 90.0), (1000.0, 1.0, None)]
        assert database.profile("net", "V100").model == "net"


def test_what_is_no_database_of_scores(tmp_path) -> None:
    with pytest.raises(DataError, match="no database of clock scores"):
        ScoreDatabase(tmp_path / "none.db", read_only=True)
    (tmp_path / "text.db").write_text("this is text, and long enough to be looked at by SQLite" * 20)
    with pytest.raises(DataError, match="not a database of clock scores"):
        ScoreDatabase(tmp_path / "text.db")
