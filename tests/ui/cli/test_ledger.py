import json
import time
from datetime import UTC, datetime, timedelta

import pytest

from joulery.ui.cli import main
from joulery.ui.cli.ledger import BY
from tests.ui.demo import demo_run, footprint


@pytest.fixture
def ledger(tmp_path, capsys):
    def run(*arguments, code=0):
        verb, *rest = map(str, arguments)
        assert main(["ledger", verb, "--ledger", str(tmp_path / "l.db"), *rest]) == code
        return capsys.readouterr()

    return run


def test_runs_are_added_once_and_shown(tmp_path, ledger):
    runs = [demo_run(tmp_path / "a", owner="vision"), demo_run(tmp_path / "b", owner="speech")]
    ledger("add", *runs)
    added = json.loads(ledger("add", runs[0], "--json").out)
    assert len(added["recorded"]) == 1
    lines = ledger("show").out.splitlines()
    assert lines[0].split() == ["owner", "energy", "carbon", "quality"]
    assert [line.split()[0] for line in lines[1:]] == ["speech", "vision"]
    assert "5.02 kJ" in lines[1]
    rows = json.loads(ledger("show", "--json").out)["rows"]
    assert rows[0]["energy_j"] == pytest.approx(footprint().energy_j)


@pytest.mark.parametrize("by", BY)
def test_every_key_can_be_shown(tmp_path, ledger, by):
    ledger("add", demo_run(tmp_path / "a"))
    answer = json.loads(ledger("show", "--by", by, "--json").out)
    assert answer["by"] == by
    assert sum(row["energy_j"] for row in answer["rows"]) == pytest.approx(footprint().energy_j)
    if by == "hour":
        assert answer["rows"][0]["hour"] == "2026-09-21T14:00Z"


def test_time_narrows(tmp_path, ledger):
    ledger("add", demo_run(tmp_path / "a"))
    assert json.loads(ledger("show", "--since", "2026-09-21T15:00", "--json").out)["rows"] == []
    assert len(json.loads(ledger("show", "--until", "2026-09-21T16:00+01:00", "--json").out)["rows"]) == 1
    assert ledger("show", "--owner", "absent").out == "nothing yet\n"
    assert "--since: not a time (got soon" in ledger("show", "--since", "soon", code=2).err


def test_budgets(tmp_path, ledger):
    ledger("add", demo_run(tmp_path / "a"))
    today = datetime.now(UTC)
    period = ("--from", "2026-01-01", "--to", (today + timedelta(days=400)).date().isoformat())
    assert "vision" in ledger("budget", "vision", "5 kg", *period).out
    (one,) = json.loads(ledger("budget", "--json").out)["budgets"]
    assert one["carbon_g"] == 5000.0
    assert one["left_g"] == pytest.approx(5000.0 - footprint().carbon_g)
    assert one["start_s"] <= time.time() < one["end_s"]


def test_half_a_budget_is_reported(ledger):
    assert "a budget needs an owner, an amount, --from and --to" in ledger("budget", "nlp", "5 kg", code=2).err


@pytest.mark.parametrize(
    ("amount", "message"),
    [
        ("5", "AMOUNT: a mass needs a unit (got '5', expected a mass such as 5 kg)"),
        ("-5 kg", "AMOUNT: must be above 0 g"),
        ("5 W", "AMOUNT: is a power, not a mass"),
    ],
)
def test_invalid_budgets_are_refused(ledger, amount, message):
    said = ledger("budget", "--from", "2026-01-01", "--to", "2027-01-01", "--", "nlp", amount, code=2)
    assert message in said.err


def test_a_budget_that_ends_before_it_starts_is_refused_in_plain_words(ledger):
    said = ledger("budget", "nlp", "5 kg", "--from", "2026-12-01", "--to", "2026-11-01", code=2).err
    assert said == (
        "joulery: a budget needs grams above 0 and an end after its start "
        "(got 5000 g from 2026-12-01 00:00:00 UTC to 2026-11-01 00:00:00 UTC)\n"
    )
