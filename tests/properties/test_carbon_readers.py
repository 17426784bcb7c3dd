"""Whatever a carbon file holds: the series it describes, or one JouleryError. Never anything else."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joulery.adapters.carbon.cache import Cached
from joulery.adapters.carbon.electricity_maps import ElectricityMaps
from joulery.adapters.carbon.file import FileFormat, read_carbon_file
from joulery.adapters.carbon.http import CarbonService
from joulery.adapters.carbon.uk import UkCarbon
from joulery.adapters.carbon.watttime import WattTime
from joulery.domain.energy.carbon import CarbonSeries, FillRule, Signal
from joulery.domain.errors import JouleryError
from tests.fakes.carbon import Scripted

RULES = ("error", "gap", "previous:2h", "linear:90min")
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)

cell = st.one_of(
    st.text(max_size=12),
    st.floats().map(str),
    st.integers().map(str),
    st.datetimes(timezones=st.none() | st.just(UTC)).map(lambda stamp: stamp.isoformat()),
    st.sampled_from(
        ["", "nan", "2023-01-01T00:00Z", "2023-01-01T01:00Z", "2023-10-29T02:00", "2023-03-26T02:30", "1e999"]
    ),
)
line = st.lists(cell, max_size=4).map(",".join)
formats = st.builds(
    FileFormat,
    column=st.sampled_from(["", "x", "ci_direct"]),
    timezone=st.sampled_from(["", "Europe/Berlin", "UTC"]),
    signal=st.sampled_from(list(Signal)),
    step_s=st.sampled_from([0.0, 1800.0, 3600.0]),
    fill=st.sampled_from(RULES).map(FillRule.parse),
)


def read(path: Path, how: FileFormat) -> CarbonSeries | None:
    try:
        return read_carbon_file(path, how)
    except JouleryError as error:
        assert str(error) and "Traceback" not in str(error)
        return None


def checked(series: CarbonSeries | None, how: FileFormat) -> None:
    """A file that is read has a step, and no hole unless holes are asked for."""
    assert series is None or len(series) >= 1
    assert series is None or how.fill.kind == "gap" or not np.isnan(series.g_per_kwh).any()


@quick
@given(st.binary(max_size=200), st.sampled_from([b"", b"PAR1", b"timestamp_utc,x\n"]), formats)
def test_any_bytes(tmp_path: Path, content: bytes, prefix: bytes, how: FileFormat) -> None:
    path = tmp_path / "f"
    path.write_bytes(prefix + content)
    checked(read(path, how), how)


@pytest.mark.slow
@quick
@given(
    st.sampled_from(["timestamp_utc,x", "timestamp,ci_direct,estimated", "time,x,y", "x"]),
    st.lists(line, max_size=8),
    formats,
)
def test_any_rows(tmp_path: Path, header: str, lines: list[str], how: FileFormat) -> None:
    path = tmp_path / "f.csv"
    path.write_text("\n".join([header, *lines]), encoding="utf-8", errors="surrogatepass")
    checked(read(path, how), how)


parquet_columns: list[Any] = [
    st.lists(st.datetimes(timezones=st.none()), min_size=3, max_size=3).map(lambda v: pa.array(v, pa.timestamp("us"))),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3).map(
        lambda v: pa.array(v, pa.timestamp("ns", "UTC"))
    ),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3).map(
        lambda v: pa.array(v, pa.timestamp("ms", "UTC"))
    ),
    st.lists(st.none() | st.floats(), min_size=3, max_size=3).map(lambda v: pa.array(v, pa.float64())),
    st.lists(st.none() | st.text(max_size=5), min_size=3, max_size=3).map(lambda v: pa.array(v, pa.string())),
    st.lists(st.none() | st.binary(max_size=5), min_size=3, max_size=3).map(lambda v: pa.array(v, pa.binary())),
]


@quick
@given(st.one_of(parquet_columns), st.one_of(parquet_columns), formats)
def test_any_parquet(tmp_path: Path, stamps: Any, values: Any, how: FileFormat) -> None:
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"timestamp": stamps, "x": values}), path)
    checked(read(path, how), how)


@st.composite
def regular(draw: st.DrawFn) -> tuple[datetime, int, list[float]]:
    begin = draw(st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1))).replace(microsecond=0)  # noqa: DTZ001
    step_s = draw(st.sampled_from([300, 900, 1800, 3600, 86400]))
    return begin.replace(tzinfo=UTC), step_s, draw(st.lists(st.floats(0, 2000), min_size=2, max_size=30))


@quick
@given(regular(), st.sampled_from(["csv", "parquet"]))
def test_a_good_file_is_read_back_exactly(tmp_path: Path, good: tuple[datetime, int, list[float]], kind: str) -> None:
    begin, step_s, values = good
    stamps = [begin + timedelta(seconds=step_s * number) for number in range(len(values))]
    path = tmp_path / f"f.{kind}"
    if kind == "csv":
        rows = [f"{stamp.isoformat()},{value!r}" for stamp, value in zip(stamps, values, strict=True)]
        path.write_text("\n".join(["timestamp_utc,ci_direct", *rows]))
    else:
        pq.write_table(pa.table({"timestamp_utc": stamps, "ci_direct": values}), path)
    series = read_carbon_file(path)
    assert series.g_per_kwh.tolist() == values
    assert series.edges_s.tolist() == [begin.timestamp() + step_s * number for number in range(len(values) + 1)]


@quick
@given(
    st.datetimes(datetime(2020, 1, 1), datetime(2025, 1, 1)),  # noqa: DTZ001
    st.sampled_from(["Europe/Berlin", "Europe/London", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"]),
)
def test_local_time_means_the_same_as_utc(tmp_path: Path, begin: datetime, name: str) -> None:
    """Sixty half-hours of local time, over whatever the clocks do meanwhile, begun outside a repetition."""
    start = begin.replace(minute=0, second=0, microsecond=0, tzinfo=UTC)
    local = [(start + timedelta(minutes=30 * number)).astimezone(ZoneInfo(name)) for number in range(60)]
    if local[0].fold:
        return
    path = tmp_path / "f.csv"
    rows = [f"{stamp.replace(tzinfo=None).isoformat()},{number}" for number, stamp in enumerate(local)]
    path.write_text("\n".join(["timestamp,x", *rows]))
    series = read_carbon_file(path, FileFormat(timezone=name))
    assert series.start_s == start.timestamp()
    assert series.g_per_kwh.tolist() == list(range(60))


KEYS = (
    *("data", "history", "forecast", "meta", "from", "to", "intensity", "actual", "datetime", "carbonIntensity"),
    *("updatedAt", "point_time", "value", "units", "region", "signal_type", "token", "generated_at"),
)
json_value = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20) | st.just("2023-01-01T00:00Z"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("number", range(3))
@given(answer=json_value)
def test_any_json_from_a_service(number: int, answer: Any) -> None:
    class Parrot(CarbonService):
        def get(self, path: str, **question: Any) -> Any:
            return {"token": "t"} if path == "/login" else answer

    service = Parrot("Parrot", "http://nowhere", now_s=lambda: 1672531200.0)
    sources: Any = (
        UkCarbon(service=service),
        ElectricityMaps("DE", "t", service=service),
        WattTime("R", "u", "p", service=service),
    )
    for ask in (sources[number].history, sources[number].forecast):
        try:
            series = ask(1672531200.0, 1672534800.0)
        except JouleryError:
            continue
        assert isinstance(series, CarbonSeries)


@quick
@given(st.one_of(st.binary(max_size=80), json_value.map(lambda value: repr(value).encode())))
def test_any_cache_entry(tmp_path: Path, content: bytes) -> None:
    for name in ("1970-01-02.json", "forecast.json"):
        (tmp_path / name).write_bytes(content)
    source = Cached(Scripted([[1.0, 2.0]]), tmp_path, 3600.0, now_s=lambda: 1e6)
    assert source.history(86400.0, 93600.0).g_per_kwh.tolist() == [1.0, 2.0]
    assert source.forecast(86400.0, 93600.0).g_per_kwh.tolist() == [1.0, 2.0]
