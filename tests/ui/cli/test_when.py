"""``joulery when``, as a user calls it."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from joulery.domain.errors import ConfigError, DataError
from joulery.ui.cli.when import command

CARBON = """\
timestamp_utc,g_per_kwh
2026-11-23T00:00:00Z,300
2026-11-23T06:00:00Z,100
2026-11-23T12:00:00Z,200
"""


@pytest.fixture
def carbon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TZ", "UTC")
    file = tmp_path / "carbon.csv"
    file.write_text(CARBON)
    return str(file)


def when(carbon: str, *arguments: str) -> str:
    words = ["--carbon", carbon, "--at", "2026-11-23T02:00:00Z", *arguments]
    return CliRunner().invoke(command, words, catch_exceptions=False).output


def test_the_start_what_it_saves_and_the_flag_of_sbatch(carbon: str) -> None:
    out = when(carbon, "--duration", "2 h", "--within", "10 h", "--power", "500 W")
    assert "start 2026-11-23 06:00 UTC, in 4 h" in out
    assert "100 g/kWh over 2 h; now 300, at worst 300" in out
    assert re.search(r"saves 66\.7 % .* 200 g of a job of 500 W \(assumed constant\)", out)
    assert "sbatch --begin=2026-11-23T06:00:00 ..." in out
    assert "average lifecycle intensity of" in out
    assert "not judged" not in out


def test_json_has_the_same_figures(carbon: str) -> None:
    found = json.loads(when(carbon, "--duration", "2 h", "--within", "10 h", "--power", "500 W", "--json"))
    assert found["schema"] == "joulery.when/1"
    assert (found["start"], found["wait_s"]) == ("2026-11-23T06:00:00+00:00", 4 * 3600.0)
    assert (found["g_per_kwh"], found["now_g_per_kwh"]) == (100.0, 300.0)
    assert (found["carbon_g"], found["now_carbon_g"]) == (100.0, 300.0)
    assert (found["signal"], found["scope"]) == ("average", "lifecycle")


def test_where_now_is_best_nothing_waits() -> None:
    out = CliRunner().invoke(command, ["--carbon", "250 g/kWh", "--duration", "1 h"], catch_exceptions=False).output
    assert "now is best" in out
    assert "--begin=now" in out
    assert "saves" not in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--duration", "11 h", "--within", "10 h"),
        ("--duration", "0 s"),
        ("--duration", "4"),
        ("--duration", "soon"),
        ("--duration", "1 h", "--within", "31 d"),
        ("--duration", "1 h", "--power", "-1 W"),
    ],
)
def test_what_makes_no_sense_is_refused(carbon: str, arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        when(carbon, *arguments)


def test_without_a_source_the_flags_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(command, ["--duration", "4 h"], catch_exceptions=False)
    assert caught.value.pointer == "--zone" and "--carbon" in caught.value.expected
    assert "--zone GB" in caught.value.hint and "--carbon FILE" in caught.value.hint


def test_a_source_that_does_not_cover_the_job_is_refused(carbon: str) -> None:
    with pytest.raises(DataError):
        CliRunner().invoke(
            command, ["--carbon", carbon, "--at", "2030-01-01", "--duration", "1 h"], catch_exceptions=False
        )
    with pytest.raises(ConfigError):
        CliRunner().invoke(command, ["--duration", "1 h"], catch_exceptions=False)
