import math
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from joulery.adapters.carbon.file import FileFormat, SeriesSource, read_carbon_file
from joulery.adapters.carbon.timestamps import instant_s
from joulery.domain.energy.carbon import CarbonSeries, FillRule, Scope, Signal
from joulery.domain.errors import CapabilityError, ConfigError, DataError, StaleDataError
from joulery.domain.quality import Quality
from tests.data_folder import data_folder

HEADER = "timestamp_utc,ci_lifecycle,ci_direct,estimated"
ROWS = ["2023-01-01T00:00:00Z,200,150,0", "2023-01-01T01:00:00Z,210.5,160,1", "2023-01-01T02:00:00Z,220,170,0"]
T0 = instant_s("2023-01-01T00:00Z")


def csv(folder: Path, *lines: str, name: str = "grid.csv") -> Path:
    path = folder / name
    path.write_bytes("\n".join(lines).encode() + b"\n")
    return path


def test_the_usual_header_needs_no_options(tmp_path: Path) -> None:
    series = read_carbon_file(csv(tmp_path, HEADER, *ROWS))
    assert series.edges_s.tolist() == [T0, T0 + 3600, T0 + 7200, T0 + 10800]
    assert series.g_per_kwh.tolist() == [200.0, 210.5, 220.0]
    assert series.estimated.tolist() == [False, True, False]
    assert (series.zone, series.signal, series.scope) == ("grid", Signal.AVERAGE, Scope.LIFECYCLE)
    assert (series.source, series.quality, series.issued_at_s) == (
        "grid.csv, column ci_lifecycle",
        Quality.MEASURED,
        None,
    )


def test_columns_are_chosen_by_name_or_scope(tmp_path: Path) -> None:
    path = csv(tmp_path, HEADER, *ROWS)
    by_name = read_carbon_file(path, FileFormat(column="ci_direct", zone="GB"))
    by_scope = read_carbon_file(path, FileFormat(scope=Scope.DIRECT))
    assert by_name.g_per_kwh.tolist() == by_scope.g_per_kwh.tolist() == [150.0, 160.0, 170.0]
    assert by_name.scope is by_scope.scope is Scope.DIRECT
    assert by_name.zone == "GB"
    relabelled = read_carbon_file(path, FileFormat(column="ci_direct", scope=Scope.LIFECYCLE, signal=Signal.MARGINAL))
    assert (relabelled.scope, relabelled.signal) == (Scope.LIFECYCLE, Signal.MARGINAL)


def test_the_only_column_left_is_taken(tmp_path: Path) -> None:
    path = csv(tmp_path, "Time,mine", "2023-01-01T00:00Z,1", "2023-01-01T01:00Z,2")
    assert read_carbon_file(path).g_per_kwh.tolist() == [1.0, 2.0]
    direct = csv(tmp_path, "timestamp_utc,ci_direct", "2023-01-01T00:00,1", "2023-01-01T01:00,2")
    assert read_carbon_file(direct).scope is Scope.DIRECT
    with pytest.raises(DataError, match=r"grid\.csv:1: which column holds"):
        read_carbon_file(direct, FileFormat(scope=Scope.LIFECYCLE))


def test_ambiguous_columns_are_asked_for(tmp_path: Path) -> None:
    path = csv(tmp_path, "timestamp_utc,a,b", "2023-01-01T00:00Z,1,2", "2023-01-01T01:00Z,3,4")
    with pytest.raises(DataError, match=r"grid\.csv:1: which column holds") as caught:
        read_carbon_file(path)
    assert "--column" in caught.value.hint
    assert read_carbon_file(path, FileFormat(column="b")).g_per_kwh.tolist() == [2.0, 4.0]
    with pytest.raises(DataError, match=r"grid\.csv:1: no column c; .*timestamp_utc, a"):
        read_carbon_file(path, FileFormat(column="c"))
    with pytest.raises(DataError, match="no column when;"):
        read_carbon_file(path, FileFormat(time_column="when", column="b"))
    strange = csv(tmp_path, "when,a", "2023-01-01T00:00Z,1", "2023-01-01T01:00Z,3")
    with pytest.raises(DataError, match=r"grid\.csv:1: .*time stamps among when, a"):
        read_carbon_file(strange)
    assert len(read_carbon_file(strange, FileFormat(time_column="when"))) == 2


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_byte_order_marks_quotes_and_blank_lines(tmp_path: Path, separator: str) -> None:
    lines = ['\ufeff"timestamp_utc",ci_direct', '"2023-01-01T00:00Z", 1', "", "2023-01-01T01:00Z,2"]
    path = csv(tmp_path, *(line.replace(",", separator) for line in lines))
    assert read_carbon_file(path).g_per_kwh.tolist() == [1.0, 2.0]


def test_half_hours_are_inferred_and_a_step_may_be_stated(tmp_path: Path) -> None:
    path = csv(tmp_path, "timestamp_utc,x", "2023-01-01T00:00Z,1", "2023-01-01T00:30Z,2", "2023-01-01T01:00Z,3")
    assert np.diff(read_carbon_file(path).edges_s).tolist() == [1800.0] * 3
    seconds = csv(tmp_path, "timestamp_utc,x", "2023-01-01T00:00:00Z,1", "2023-01-01T00:00:01Z,2")
    assert read_carbon_file(seconds).end_s == T0 + 2
    alone = csv(tmp_path, "timestamp_utc,x", "2023-01-01T00:00Z,1")
    with pytest.raises(DataError, match=r"grid\.csv:2: one row .* step"):
        read_carbon_file(alone)
    assert read_carbon_file(alone, FileFormat(step_s=900.0)).end_s == T0 + 900


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["2023-01-01T00:00Z,1", "2023-01-01T01:00Z,x"], "grid.csv:3: ci_direct: 'x' is not a number"),
        (
            ["2023-01-01T00:00Z,1", "2023-01-01T01:00Z,-2"],
            "grid.csv:3: ci_direct: -2 g/kWh is not an average intensity",
        ),
        (["2023-01-01T00:00Z,inf", "2023-01-01T01:00Z,2"], "grid.csv:2: ci_direct: inf g/kWh"),
        (["2023-01-01T00:00Z,1_0", "2023-01-01T01:00Z,2"], "grid.csv:2: ci_direct: '1_0' is not a number"),
        (["2023-01-01T00:00Z,1", "yesterday,2"], "grid.csv:3: timestamp: 'yesterday' is not a time stamp"),
        (
            ["2023-01-01T00:00,1", "2023-01-01T01:00,2"],
            "grid.csv:2: timestamp: time stamp '2023-01-01T00:00' has no offset",
        ),
        (["2023-01-01T00:00Z,1", "2023-01-01T01:00Z"], "grid.csv:3: 1 cells where the header has 2"),
        (["2023-01-01T00:00Z,1", "2023-01-01T01:00Z,2,3"], "grid.csv:3: 3 cells"),
        (
            ["2023-01-01T00:00Z,1", "2023-01-01T02:00Z,3", "2023-01-01T01:00Z,2"],
            "grid.csv:4: 2023-01-01T01:00:00Z is before the row above",
        ),
        (
            ["2023-01-01T00:00Z,1", "2023-01-01T01:00Z,2", "2023-01-01T02:00+01:00,3"],
            "grid.csv:4: 2023-01-01T01:00:00Z is the same time as the row above",
        ),
        (["2023-01-01T00:00Z,1", "2023-01-01T00:00Z,1"], "grid.csv:3: 2023-01-01T00:00:00Z is the same time"),
        (["2023-01-01T01:00Z,1", "2023-01-01T00:00Z,1"], "grid.csv:3: 2023-01-01T00:00:00Z is before"),
        (
            ["2023-01-01T00:00Z,1", "2023-01-01T01:00Z,2", "2023-01-01T02:00Z,2", "2023-01-01T02:20Z,3"],
            "grid.csv:5: 2023-01-01T02:20:00Z is not a multiple of the 3600 s step",
        ),
        (
            ["2023-01-01T00:00Z,1", "2023-01-01T00:01Z,2", "2023-01-01T00:02Z,2", "2033-01-01T00:00Z,3"],
            "grid.csv:5: 2033-01-01T00:00:00Z is 3.15619e+08 s after the row above; steps are 60 s",
        ),
        ([], "grid.csv: 0 rows and 2 columns are not a series"),
        (['"2023-01-01T00:00Z,1'], "grid.csv:2: not CSV"),
    ],
)
def test_a_bad_row_is_one_error_with_its_line(tmp_path: Path, rows: list[str], says: str) -> None:
    with pytest.raises(DataError) as caught:
        read_carbon_file(csv(tmp_path, "timestamp,ci_direct", *rows))
    assert says in str(caught.value)


def test_marginal_intensity_may_be_negative(tmp_path: Path) -> None:
    path = csv(tmp_path, "timestamp_utc,moer", "2023-01-01T00:00Z,-3", "2023-01-01T01:00Z,2")
    assert read_carbon_file(path, FileFormat(signal=Signal.MARGINAL)).g_per_kwh.tolist() == [-3.0, 2.0]


GAPPY = ["2023-01-01T00:00Z,100", "2023-01-01T01:00Z,130", "2023-01-01T04:00Z,160", "2023-01-01T05:00Z,190"]


def test_a_gap_between_rows_is_refused_with_the_line_after_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_carbon_file(csv(tmp_path, "timestamp_utc,x", *GAPPY))
    assert str(caught.value).endswith(
        "grid.csv:4: grid.csv, column x: no intensity of grid from 2023-01-01T02:00:00Z to 2023-01-01T04:00:00Z"
    )
    assert "linear:3h" in caught.value.hint


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("gap", [100, 130, math.nan, math.nan, 160, 190]),
        ("previous:2h", [100, 130, 130, 130, 160, 190]),
        ("linear:2h", [100, 130, 140, 150, 160, 190]),
    ],
)
def test_a_gap_is_filled_as_asked(tmp_path: Path, rule: str, values: list[float]) -> None:
    series = read_carbon_file(csv(tmp_path, "timestamp_utc,x", *GAPPY), FileFormat(fill=FillRule.parse(rule)))
    assert np.array_equal(series.g_per_kwh, values, equal_nan=True)
    assert series.estimated.tolist() == [False, False, rule != "gap", rule != "gap", False, False]


@pytest.mark.parametrize("cell", ["", " ", "NaN", "nan", "NA", "null", "None", "-", "n/a"])
def test_a_missing_value_is_a_gap(tmp_path: Path, cell: str) -> None:
    path = csv(tmp_path, "timestamp_utc,x", "2023-01-01T00:00Z,1", f"2023-01-01T01:00Z,{cell}", "2023-01-01T02:00Z,3")
    with pytest.raises(DataError, match=r"grid\.csv:3: .*from 2023-01-01T01:00:00Z to 2023-01-01T02:00:00Z"):
        read_carbon_file(path)
    assert read_carbon_file(path, FileFormat(fill=FillRule.parse("linear:1h"))).g_per_kwh.tolist() == [1, 2, 3]


def test_values_missing_at_the_end_are_stale(tmp_path: Path) -> None:
    path = csv(tmp_path, "timestamp_utc,x", "2023-01-01T00:00Z,1", "2023-01-01T01:00Z,")
    with pytest.raises(StaleDataError, match=r"grid\.csv:3"):
        read_carbon_file(path)


@pytest.mark.parametrize(
    ("cell", "flag"),
    [
        ("1", True),
        ("0", False),
        ("yes", True),
        ("no", False),
        ("true", True),
        ("False", False),
        ("", False),
        ("1.0", True),
    ],
)
def test_flags(tmp_path: Path, cell: str, flag: bool) -> None:
    path = csv(tmp_path, "timestamp_utc,Estimated,x", f"2023-01-01T00:00Z,{cell},1", "2023-01-01T01:00Z,0,2")
    assert bool(read_carbon_file(path).estimated[0]) is flag


def test_a_flag_that_is_none(tmp_path: Path) -> None:
    path = csv(tmp_path, "timestamp_utc,estimated,x", "2023-01-01T00:00Z,maybe,1", "2023-01-01T01:00Z,0,2")
    with pytest.raises(DataError, match=r"grid\.csv:2: estimated: 'maybe'"):
        read_carbon_file(path)


def test_local_time_over_both_changes_of_the_clock(tmp_path: Path) -> None:
    """Hours of Berlin over the end of summer time 2023: 25 of them, one written twice."""
    begin = datetime(2023, 10, 28, 22, tzinfo=UTC)
    from zoneinfo import ZoneInfo

    local = [
        (begin + timedelta(hours=h)).astimezone(ZoneInfo("Europe/Berlin")).strftime("%Y-%m-%dT%H:%M") for h in range(25)
    ]
    assert len(set(local)) == 24
    path = csv(tmp_path, "timestamp,x", *(f"{stamp},{hour}" for hour, stamp in enumerate(local)))
    series = read_carbon_file(path, FileFormat(timezone="Europe/Berlin"))
    assert series.start_s == instant_s("2023-10-28T22:00Z")
    assert series.g_per_kwh.tolist() == list(range(25))
    spring = ["2023-03-26T01:00,1", "2023-03-26T03:00,2", "2023-03-26T04:00,3"]
    assert len(read_carbon_file(csv(tmp_path, "timestamp,x", *spring), FileFormat(timezone="Europe/Berlin"))) == 3
    skipped = ["2023-03-26T01:00,1", "2023-03-26T02:00,2", "2023-03-26T03:00,3"]
    with pytest.raises(DataError, match=r"grid\.csv:3: timestamp: .*'2023-03-26T02:00' does not exist"):
        read_carbon_file(csv(tmp_path, "timestamp,x", *skipped), FileFormat(timezone="Europe/Berlin"))
    with pytest.raises(ConfigError, match="unknown time zone"):
        read_carbon_file(csv(tmp_path, "timestamp,x", *spring), FileFormat(timezone="Europe/Atlantis"))


def test_an_hour_lost_in_autumn_is_a_gap_and_not_silently_closed(tmp_path: Path) -> None:
    rows = ["2023-10-29T01:00,1", "2023-10-29T02:00,2", "2023-10-29T03:00,3", "2023-10-29T04:00,4"]
    with pytest.raises(DataError, match="from 2023-10-29T01:00:00Z to 2023-10-29T02:00:00Z"):
        read_carbon_file(csv(tmp_path, "timestamp,x", *rows), FileFormat(timezone="Europe/Berlin"))


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"timestamp_utc,x\n\xff,1\n", b"PAR1nonsense", b"\x00" * 50, b"a\n1\n"]
)
def test_what_is_no_series_is_one_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "grid.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"grid\.csv"):
        read_carbon_file(path)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.csv: .*No such file"):
        read_carbon_file(tmp_path / "absent.csv")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_carbon_file(tmp_path)


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"grid\.csv:1: two columns are called x"):
        read_carbon_file(csv(tmp_path, "timestamp_utc,x,x", "2023-01-01T00:00Z,1,1"))


def parquet(folder: Path, **columns: Any) -> Path:
    path = folder / "grid.parquet"
    pq.write_table(pa.table(columns), path)
    return path


STAMPS = [datetime(2023, 1, 1, hour, tzinfo=UTC) for hour in range(3)]


@pytest.mark.parametrize(
    "stamps",
    [
        pa.array(STAMPS, pa.timestamp("us", "UTC")),
        pa.array(STAMPS, pa.timestamp("ns", "Europe/Berlin")),
        pa.array([stamp.astimezone(timezone(timedelta(hours=5))) for stamp in STAMPS], pa.timestamp("s", "+05:00")),
        pa.array([stamp.isoformat() for stamp in STAMPS]),
    ],
    ids=["utc", "zone", "offset", "text"],
)
def test_parquet_in_every_kind_of_stamp(tmp_path: Path, stamps: pa.Array) -> None:
    path = parquet(tmp_path, timestamp=stamps, ci_direct=[1.0, 2.0, 3.0], estimated=[False, True, None])
    series = read_carbon_file(path)
    assert series.edges_s.tolist() == [T0, T0 + 3600, T0 + 7200, T0 + 10800]
    assert series.g_per_kwh.tolist() == [1.0, 2.0, 3.0]
    assert series.estimated.tolist() == [False, True, False]


def test_naive_parquet_needs_a_zone(tmp_path: Path) -> None:
    naive = pa.array([stamp.replace(tzinfo=None) for stamp in STAMPS], pa.timestamp("ms"))
    with pytest.raises(DataError, match=r"grid\.parquet:1: timestamp: .*has no offset"):
        read_carbon_file(parquet(tmp_path, timestamp=naive, x=[1, 2, 3]))
    found = read_carbon_file(parquet(tmp_path, timestamp=naive, x=[1, 2, 3]), FileFormat(timezone="Europe/Berlin"))
    assert found.start_s == T0 - 3600
    assert read_carbon_file(parquet(tmp_path, timestamp_utc=naive, x=[1, 2, 3])).start_s == T0


def test_parquet_days(tmp_path: Path) -> None:
    days = pa.array([date(2023, 1, day) for day in (1, 2)])
    assert read_carbon_file(parquet(tmp_path, date=days, x=[1, 2]), FileFormat(timezone="UTC")).end_s == T0 + 2 * 86400


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"timestamp": STAMPS, "x": [1.0, None, 3.0]}, "grid.parquet:2"),
        ({"timestamp": STAMPS, "x": [True, False, True]}, "grid.parquet:1: x: 'True' is not a number"),
        ({"timestamp": STAMPS, "x": [[1], [2], [3]]}, "grid.parquet:1: x: '[1]' is not a number"),
        ({"timestamp": [1, 2, 3], "x": [1, 2, 3]}, "grid.parquet:1: timestamp: '1' is not a time stamp"),
        ({"timestamp": [None, *STAMPS[1:]], "x": [1, 2, 3]}, "grid.parquet:1: timestamp: 'None' is not a time stamp"),
    ],
)
def test_bad_parquet_rows(tmp_path: Path, columns: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        read_carbon_file(parquet(tmp_path, **columns))
    assert says in str(caught.value)


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    path = parquet(tmp_path, timestamp=STAMPS, x=[1, 2, 3])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match="not readable as Parquet"):
        read_carbon_file(path)


def test_a_forecast_is_issued_at_its_first_stamp(tmp_path: Path) -> None:
    forecast = read_carbon_file(csv(tmp_path, HEADER, *ROWS), forecast=True)
    assert forecast.issued_at_s == T0
    assert forecast.quality is Quality.MODELLED


def test_a_source_answers_from_its_series() -> None:
    actual = CarbonSeries("GB", np.arange(4) * 3600.0, [1.0, 2.0, 3.0], source="f.csv")
    source = SeriesSource(actual)
    part = source.history(3600.0, 9000.0)
    assert (part.edges_s.tolist(), part.g_per_kwh.tolist()) == ([3600.0, 7200.0, 10800.0], [2.0, 3.0])
    beyond = source.history(7200.0, 18000.0)
    assert np.array_equal(beyond.g_per_kwh, [3.0, math.nan, math.nan], equal_nan=True)
    for t0_s, t1_s in ((10800.0, 20000.0), (-10.0, 0.0)):
        with pytest.raises(DataError, match=r"f\.csv covers 1970-01-01T00:00:00Z to 1970-01-01T03:00:00Z, asked"):
            source.history(t0_s, t1_s)
    with pytest.raises(CapabilityError, match="holds no forecast"):
        source.forecast(0.0, 1.0)
    assert SeriesSource(actual, actual).forecast(0.0, 3600.0).g_per_kwh.tolist() == [1.0]


def test_every_series_of_the_data_set_is_read_whole() -> None:
    folder = data_folder("carbon")
    paths = sorted(path for path in folder.glob("*_20*.csv") if "2020" in path.name or "2021" in path.name)
    assert len(paths) >= 13
    for path in paths:
        series = read_carbon_file(path)
        assert len(series) == (8784 if "2020" in path.name else 8760)
        assert not np.isnan(series.g_per_kwh).any()
    forecast = read_carbon_file(folder / "forecast-dayahead_GB_2023.csv", FileFormat(scope=Scope.DIRECT), forecast=True)
    assert forecast.source.endswith("column ci_forecast_dayahead")
