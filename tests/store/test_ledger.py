import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.errors import CapabilityError, ConfigError, DataError, JouleryError
from joulery.domain.quality import Quality
from joulery.store import database
from joulery.store import ledger as module
from joulery.store.ledger import MIGRATIONS, Budget, CarbonEntry, EnergyEntry, Ledger, RunEntry

RUN = RunEntry("run-1", "measure", "/runs/1", "nlp", "host", 100.0, 200.0, "closed")
HOUR = 3600


def joules(energy_j=5.0, **changes):
    return replace(EnergyEntry("nlp", "train", "cpu:0", HOUR, "charged", Quality.MEASURED, energy_j), **changes)


def grams(carbon_g=1.0, **changes):
    return replace(CarbonEntry("nlp", "train", HOUR, Signal.AVERAGE, Scope.LIFECYCLE, carbon_g), **changes)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.db") as one:
        yield one


def test_what_is_recorded_comes_back(ledger):
    ledger.record(RUN, [joules()], [grams()])
    assert ledger.runs() == (RUN,)
    (row,) = ledger.rows("owner")
    assert (row.key, row.energy_j, row.carbon_g, row.quality) == ("nlp", 5.0, 1.0, Quality.MEASURED)


def test_recording_again_replaces_and_never_counts_twice(ledger):
    ledger.record(RUN, [joules(5.0), joules(7.0, device="gpu:0")], [grams(3.0)])
    ledger.record(replace(RUN, state="failed"), [joules(6.0)], [grams(1.0)])
    assert [run.state for run in ledger.runs()] == ["failed"]
    (row,) = ledger.rows("run")
    assert (row.energy_j, row.carbon_g) == (6.0, 1.0)


def test_equal_entries_of_one_run_add_up(ledger):
    ledger.record(RUN, [joules(5.0), joules(2.0)], [grams(1.0), grams(0.5)])
    (row,) = ledger.rows("workload")
    assert (row.energy_j, row.carbon_g) == (7.0, 1.5)


def test_every_key_sums_the_same_joules(ledger):
    ledger.record(RUN, [joules(5.0), joules(1.0, device="", role="idle"), joules(2.0, hour_s=2 * HOUR)], [grams()])
    ledger.record(replace(RUN, id="run-2"), [joules(4.0, owner="vision", workload="photos", device="gpu:0")])
    for by in ("owner", "workload", "run", "device", "hour"):
        assert math.fsum(row.energy_j for row in ledger.rows(by)) == 12.0, by
    assert [row.key for row in ledger.rows("hour")] == ["3600", "7200"]
    assert [row.key for row in ledger.rows("device")] == ["", "cpu:0", "gpu:0"]


def test_unknown_grams_are_not_zero(ledger):
    ledger.record(RUN, [joules()])
    assert math.isnan(ledger.rows("owner")[0].carbon_g)
    ledger.record(RUN, [joules()], [grams()])
    assert math.isnan(ledger.rows("device")[0].carbon_g), "grams are not known by device"


def test_the_weakest_quality_shows(ledger):
    ledger.record(RUN, [joules(), joules(quality=Quality.ASSUMED), joules(quality=Quality.MODELLED)])
    assert ledger.rows("owner")[0].quality is Quality.ASSUMED


def test_rows_can_be_narrowed(ledger):
    ledger.record(RUN, [joules(1.0), joules(2.0, hour_s=2 * HOUR), joules(4.0, owner="vision", hour_s=2 * HOUR)])
    assert [row.energy_j for row in ledger.rows("hour", owner="nlp")] == [1.0, 2.0]
    assert [row.energy_j for row in ledger.rows("hour", start_s=2 * HOUR)] == [6.0]
    assert [row.energy_j for row in ledger.rows("hour", end_s=2 * HOUR)] == [1.0]
    assert ledger.rows("hour", owner="absent") == ()


def test_sums_by_something_else_are_refused(ledger):
    with pytest.raises(ConfigError, match="cannot group by this"):
        ledger.rows("quality; DROP TABLE runs")


def test_grams_of_different_meaning_are_never_added(ledger):
    ledger.record(RUN, [joules()], [grams()])
    ledger.record(replace(RUN, id="run-2"), [joules()], [grams(signal=Signal.MARGINAL)])
    with pytest.raises(DataError, match="average lifecycle and marginal lifecycle"):
        ledger.rows("owner")
    assert ledger.rows("device")[0].energy_j == 10.0


def test_budgets_know_what_is_left(ledger):
    ledger.record(RUN, [joules()], [grams(3.0), grams(2.0, hour_s=5 * HOUR), grams(9.0, owner="vision")])
    ledger.set_budget(Budget("nlp", 0.0, 3 * HOUR, 10.0))
    assert ledger.budgets(HOUR) == ((Budget("nlp", 0.0, 3 * HOUR, 10.0), 7.0),)
    ledger.set_budget(Budget("nlp", 0.0, 6 * HOUR, 4.0))
    assert ledger.budgets(HOUR) == ((Budget("nlp", 0.0, 6 * HOUR, 4.0), -1.0),), "replaced, and overspent"
    assert ledger.budgets(6 * HOUR) == ledger.budgets(-1.0) == ()


@pytest.mark.parametrize("wrong", [Budget("a", 0.0, 1.0, 0.0), Budget("a", 1.0, 1.0, 5.0), Budget("a", 0.0, 1.0, -1.0)])
def test_a_budget_without_sense_is_refused(ledger, wrong):
    with pytest.raises(ConfigError, match="a budget needs"):
        ledger.set_budget(wrong)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.floats(0, 1e9)), max_size=12))
def test_nothing_is_lost_whatever_the_entries(tmp_path_factory, entries):
    with Ledger(tmp_path_factory.mktemp("ledger") / "l.db") as ledger:
        ledger.record(RUN, [joules(j, owner=owner, hour_s=hour * HOUR) for owner, hour, j in entries])
        for by in ("owner", "hour"):
            spent = math.fsum(row.energy_j for row in ledger.rows(by))
            assert spent == pytest.approx(math.fsum(j for *_, j in entries), rel=1e-12)


def old_ledger(path, version):
    """A ledger as an older joulery left it, with one run in it."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE schema_version (version INTEGER PRIMARY KEY, applied_s REAL NOT NULL) STRICT")
    for number, statements in enumerate(MIGRATIONS[:version], 1):
        for statement in statements:
            connection.execute(statement)
        connection.execute("INSERT INTO schema_version VALUES (?, 0)", (number,))
    connection.execute("INSERT INTO runs VALUES ('run-1', 'measure', '/runs/1', 'nlp', 'host', 100, 200, 'closed')")
    connection.execute("INSERT INTO energy VALUES ('run-1', 'nlp', 'train', 'cpu:0', 3600, 'charged', 'measured', 5)")
    connection.execute("INSERT INTO carbon VALUES ('run-1', 'nlp', 'train', 3600, 'average', 'lifecycle', 1)")
    connection.commit()
    connection.close()


def shape(path):
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name")
    rows = found.fetchall()
    connection.close()
    return rows


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_every_older_version_is_brought_up_to_date_with_its_data(tmp_path, version):
    old_ledger(tmp_path / "old.db", version)
    with Ledger(tmp_path / "old.db") as ledger:
        assert ledger.version == len(MIGRATIONS)
        assert ledger.runs() == (RUN,)
        assert (ledger.rows("owner")[0].energy_j, ledger.rows("owner")[0].carbon_g) == (5.0, 1.0)
        ledger.set_budget(Budget("nlp", 0.0, 1e6, 10.0))
        assert ledger.budgets(1.0)[0][1] == 9.0
    Ledger(tmp_path / "new.db").close()
    assert shape(tmp_path / "old.db") == shape(tmp_path / "new.db")


def test_a_released_migration_is_never_edited():
    """Hashes of what is out there. A new migration adds a line; an old line never changes."""
    import hashlib

    digests = [hashlib.sha256("\n".join(one).encode()).hexdigest()[:12] for one in MIGRATIONS]
    assert digests == RELEASED


RELEASED = ["29086254d6ef", "0a461e02096a"]


def test_a_migration_that_fails_leaves_the_old_version(tmp_path, monkeypatch):
    old_ledger(tmp_path / "old.db", 1)
    before = shape(tmp_path / "old.db")
    broken = (*MIGRATIONS[:1], ("CREATE TABLE half (x)", "NONSENSE"))
    monkeypatch.setattr(module, "_LEDGER", replace(module._LEDGER, migrations=broken))
    with pytest.raises(DataError, match="not a usable ledger"):
        Ledger(tmp_path / "old.db")
    assert shape(tmp_path / "old.db") == before


def test_processes_that_migrate_at_once_migrate_once(tmp_path):
    old_ledger(tmp_path / "old.db", 1)
    failures = []

    def open_it():
        try:
            Ledger(tmp_path / "old.db").close()
        except (JouleryError, sqlite3.Error) as error:
            failures.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with Ledger(tmp_path / "old.db") as ledger:
        assert ledger.version == len(MIGRATIONS)


def test_a_newer_ledger_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "l.db"
    Ledger(path).close()
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO schema_version VALUES (99, 0)")
    connection.commit()
    connection.close()
    with pytest.raises(DataError, match=r"version 99, .*up to 2"):
        Ledger(path)


def test_many_writers_at_once_lose_nothing(tmp_path):
    path = tmp_path / "l.db"
    Ledger(path).close()
    failures = []

    def write(number):
        try:
            with Ledger(path) as ledger:
                for i in range(25):
                    ledger.record(
                        replace(RUN, id=f"{number}-{i}"), [joules(1.0), joules(1.0, device="gpu:0")], [grams()]
                    )
                    ledger.rows("owner")
        except (JouleryError, sqlite3.Error) as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with Ledger(path, read_only=True) as ledger:
        assert len(ledger.runs()) == 100
        assert (ledger.rows("owner")[0].energy_j, ledger.rows("owner")[0].carbon_g) == (200.0, 100.0)


def test_a_writer_killed_in_the_middle_leaves_the_ledger_as_it_was(tmp_path):
    path = tmp_path / "l.db"
    with Ledger(path) as ledger:
        ledger.record(RUN, [joules()], [grams()])
    code = (
        "import sys\nfrom joulery.store.ledger import Ledger\nledger = Ledger(sys.argv[1])\n"
        "with ledger.transaction() as execute:\n"
        "    execute('DELETE FROM runs')\n"
        "    print('inside', flush=True)\n    sys.stdin.read()\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert writer.stdout.readline() == b"inside\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    with Ledger(path) as ledger:
        assert ledger.runs() == (RUN,)
        assert ledger.rows("owner")[0].energy_j == 5.0


def test_a_ledger_locked_for_too_long_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    path = tmp_path / "l.db"
    with Ledger(path) as holder, Ledger(path) as other, holder.transaction():
        assert other.rows("owner") == (), "readers are not kept waiting"
        with pytest.raises(CapabilityError, match="was locked by another process"):
            other.record(RUN, [joules()])


def test_a_full_disk_is_one_clear_error_and_loses_nothing(ledger):
    ledger.record(RUN, [joules()])
    pages = ledger.query("PRAGMA page_count")[0][0]
    ledger.query(f"PRAGMA max_page_count = {pages}")
    many = [joules(1.0, device=f"gpu:{i}" * 20) for i in range(2000)]
    with pytest.raises(CapabilityError, match="the disk is full") as caught:
        ledger.record(replace(RUN, id="run-2"), many)
    assert "free some space" in (caught.value.hint or "")
    assert ledger.runs() == (RUN,)
    assert ledger.rows("owner")[0].energy_j == 5.0


def test_a_read_only_ledger_can_be_read_and_not_written(tmp_path):
    path = tmp_path / "l.db"
    with Ledger(path) as ledger:
        ledger.record(RUN, [joules()])
    with Ledger(path, read_only=True) as ledger:
        assert ledger.runs() == (RUN,)
        with pytest.raises(CapabilityError, match="it is read-only"):
            ledger.record(RUN, [joules()])


def test_reading_what_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match="there is no ledger"):
        Ledger(tmp_path / "none.db", read_only=True)
    old_ledger(tmp_path / "old.db", 1)
    with pytest.raises(DataError, match="version 1, expected 2"):
        Ledger(tmp_path / "old.db", read_only=True)


def test_a_place_that_cannot_hold_a_ledger_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CapabilityError, match="cannot open"):
        Ledger(tmp_path / "file" / "l.db")
    with pytest.raises(CapabilityError, match="cannot open"):
        Ledger(tmp_path)


@pytest.mark.parametrize("content", [b"not a database, but long enough to look like a header of one" * 4, b"x"])
def test_a_file_that_is_no_database_is_one_clear_error_and_stays(tmp_path, content):
    path = tmp_path / "l.db"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a ledger: ") as caught:
        Ledger(path)
    assert caught.value.file == str(path)
    assert "move it away" in caught.value.hint
    assert path.read_bytes() == content


def test_an_empty_file_becomes_a_ledger(tmp_path):
    (tmp_path / "l.db").write_bytes(b"")
    with Ledger(tmp_path / "l.db") as ledger:
        ledger.record(RUN, [joules()])
        assert ledger.version == len(MIGRATIONS)


def test_a_damaged_ledger_is_one_clear_error(tmp_path):
    path = tmp_path / "l.db"
    with Ledger(path) as ledger:
        ledger.record(RUN, [joules(1.0, device=f"gpu:{i}") for i in range(3000)])
    content = bytearray(path.read_bytes())
    content[8192:-4096] = os.urandom(len(content) - 8192 - 4096)
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a usable ledger"), Ledger(path) as ledger:
        ledger.rows("device")


def test_another_programs_database_is_left_alone(tmp_path):
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    with pytest.raises(DataError, match="another program's database"):
        Ledger(path)
    assert [name for name, _ in shape(path)] == ["theirs"]


def test_negative_joules_are_refused(ledger):
    with pytest.raises(DataError, match="CHECK constraint failed"):
        ledger.record(RUN, [joules(-1.0)])
    assert ledger.runs() == ()


def test_names_with_signs_of_their_own_are_only_names(tmp_path):
    path = tmp_path / "a?b#c %41.db"
    with Ledger(path) as ledger:
        ledger.record(replace(RUN, id="'; DROP TABLE runs; --"), [joules(owner='"x"')])
        assert ledger.rows("owner", owner='"x"')[0].energy_j == 5.0
    assert path.is_file()
