"""A carbon file that cannot be used stops ``measure`` before the command starts: one message, exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from joulery.ui.cli import main

GOOD = ["2023-01-01T00:00Z,100", "2023-01-01T01:00Z,110", "2023-01-01T02:00Z,120"]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)

    def measure(*flags: str, rows: list[str] | None = None) -> str:
        if rows is not None:
            (tmp_path / "grid.csv").write_text("\n".join(["timestamp_utc,ci_direct", *rows]) + "\n")
        code = main(["measure", *flags, "--", "touch", "started"])
        assert code == 2
        assert not (tmp_path / "started").exists(), "the command must not have run"
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err
        return err

    return measure


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [GOOD[0], GOOD[2], "2023-01-01T03:00Z,1", "2023-01-01T04:00Z,1"],
            "grid.csv:3: grid.csv, column ci_direct: no intensity",
        ),
        ([GOOD[0], "2023-01-01T01:00Z,nan", GOOD[2]], "grid.csv:3: grid.csv, column ci_direct: no intensity"),
        ([GOOD[1], GOOD[0], GOOD[2]], "grid.csv:3: 2023-01-01T00:00:00Z is before the row above"),
        ([GOOD[0], GOOD[1], GOOD[1]], "grid.csv:4: 2023-01-01T01:00:00Z is the same time as the row above"),
        ([GOOD[0], "2023-01-01T01:00Z,-4"], "grid.csv:3: ci_direct: -4 g/kWh"),
        ([GOOD[0], "2023-01-01T01:00Z,much"], "grid.csv:3: ci_direct: 'much' is not a number"),
        ([], "grid.csv: 0 rows"),
    ],
)
def test_a_bad_file(measured, rows: list[str], says: str) -> None:
    err = measured("--carbon", "grid.csv", rows=rows)
    assert says in err
    assert 1 <= len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--carbon", "absent.csv"], "joulery: --carbon no such file (got absent.csv)"),
        (["--carbon", "2023.csv"], "joulery: --carbon no such file (got 2023.csv)"),
        (["--carbon", "250"], "joulery: --carbon a carbon intensity needs a unit (got 250, expected"),
        (["--carbon", "250 g/MJ"], "joulery: --carbon unknown unit 'g/MJ' (got 250 g/MJ, expected"),
        (["--carbon", "250,5 g/kWh"], "joulery: --carbon has a comma in its number (got 250,5 g/kWh, expected"),
        (["--zone", "typical:XX"], "joulery: --zone is unknown to this source (got XX, expected 'GB', 'FR' or 'DE')"),
        (["--carbon", "grid.csv", "--column", "x"], "no column x; there are timestamp_utc, ci_direct"),
        (["--carbon", "grid.csv", "--time-column", "x"], "no column x; there are timestamp_utc, ci_direct"),
        (["--zone", "GB", "--time-column", "x"], "--time-column does not apply to this source"),
        (["--carbon", "grid.csv", "--scope", "lifecycle"], "which column holds the lifecycle intensity"),
        (["--carbon", "grid.csv", "--timezone", "Mars/Olympus"], "unknown time zone (got Mars/Olympus"),
        (["--carbon", "grid.csv", "--fill", "zero"], "--fill not a rule for gaps"),
        (["--carbon", "grid.csv", "--zone", "GB"], "--zone and --carbon both name"),
        (["--zone", "DE"], "unknown grid zone (got DE"),
        (["--zone", "GB-99"], "unknown zone of Great Britain (got GB-99"),
        (["--zone", "electricity-maps:DE"], "Electricity Maps needs a token"),
        (["--zone", "watttime:CAISO_NORTH"], "WattTime needs an account"),
        (["--fill", "gap"], "--fill without a source of carbon intensity"),
    ],
)
def test_bad_flags(measured, monkeypatch: pytest.MonkeyPatch, flags: list[str], says: str) -> None:
    for name in ("ELECTRICITYMAPS_TOKEN", "WATTTIME_USER", "WATTTIME_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    assert says in measured(*flags, rows=GOOD)


@pytest.mark.parametrize("zone", ["XX", "DE", "grid:XX"])
def test_an_unknown_zone_names_its_flag_and_what_to_do(measured, zone: str) -> None:
    error = json.loads(measured("--json", "--zone", zone))["error"]
    assert (error["pointer"], error["got"]) == ("--zone", zone)
    assert "--carbon" in error["hint"]
    assert (f"electricity-maps:{zone}" in error["hint"]) is (":" not in zone)
    assert ("typical:DE" in error["hint"]) is (zone == "DE")


def test_the_error_as_json(measured) -> None:
    error = json.loads(measured("--json", "--carbon", "grid.csv", rows=[GOOD[0], GOOD[0]]))["error"]
    assert (error["kind"], error["file"], error["row"]) == ("data", "grid.csv", 3)
    assert error["hint"]


def test_a_file_with_columns_of_any_name_is_read_once_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "grid.csv").write_text("\n".join(["when,grid,rain", *(f"{row},3" for row in GOOD)]) + "\n")

    def measured(*flags: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "joulery", "measure", "--json", "--meter", "fake:20", "--carbon", "grid.csv"]
        line += ["--column", "grid", *flags, "--carbon-at", "2023-01-01T01:10Z", "--", "true"]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)

    refused = measured()
    assert refused.returncode == 2 and "--time-column" in refused.stderr
    done = measured("--time-column", "when", "--fill", "previous:3h")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stderr)
    assert found["carbon_g"] == pytest.approx(found["energy_j"] / 3.6e6 * 110, rel=1e-6)
