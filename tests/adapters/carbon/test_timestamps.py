from datetime import UTC, datetime

import pytest

from joulery.adapters.carbon.timestamps import StampReader, instant_s, iso_utc, time_zone, unix_s
from joulery.domain.errors import ConfigError, DataError

BERLIN = time_zone("Europe/Berlin")
LONDON = time_zone("Europe/London")


@pytest.mark.parametrize(
    ("text", "t_s"),
    [
        ("1970-01-01T00:00:00Z", 0.0),
        ("2018-01-20T12:00Z", 1516449600.0),
        ("2019-05-21T00:00:00.000Z", 1558396800.0),
        ("2022-07-15T00:00:00+00:00", 1657843200.0),
        ("2022-07-15 02:00:00+02:00", 1657843200.0),
        ("  2022-07-15T00:00:00.5Z ", 1657843200.5),
    ],
)
def test_an_instant_is_read(text: str, t_s: float) -> None:
    assert instant_s(text) == t_s


@pytest.mark.parametrize("text", ["", "yesterday", "2022-13-01T00:00Z", "2022-02-30T00:00Z", "1657843200", "25:00"])
def test_nonsense_is_no_time_stamp(text: str) -> None:
    with pytest.raises(DataError, match="not a time stamp"):
        instant_s(text)


def test_an_instant_needs_an_offset() -> None:
    with pytest.raises(DataError, match="has no offset"):
        instant_s("2022-07-15T00:00")


def test_instants_are_written_in_utc() -> None:
    assert iso_utc(1657843200.9) == "2022-07-15T00:00:00Z"
    assert iso_utc(-1.0) == "1969-12-31T23:59:59Z"
    with pytest.raises(DataError, match="not a time on the calendar"):
        iso_utc(1e15)
    assert unix_s(datetime(2022, 7, 15, tzinfo=UTC)) == 1657843200.0


@pytest.mark.parametrize("name", ["Europe/Atlantis", "", "../etc/passwd", "Europe"])
def test_an_unknown_time_zone_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown time zone"):
        time_zone(name)


def test_local_time_is_located() -> None:
    reader = StampReader(BERLIN)
    assert reader.read("2023-01-15T12:00") == instant_s("2023-01-15T11:00Z")
    assert reader.read("2023-07-15T12:00") == instant_s("2023-07-15T10:00Z")
    assert reader.read("2023-07-15T12:00-05:00") == instant_s("2023-07-15T17:00Z")
    naive = datetime(2023, 8, 1, 2, tzinfo=UTC).replace(tzinfo=None)
    assert reader.read(naive) == instant_s("2023-08-01T00:00Z")


def test_without_a_zone_local_time_could_be_any_hour() -> None:
    with pytest.raises(DataError, match="could be any hour") as caught:
        StampReader(None).read("2023-01-15T12:00")
    assert "timezone" in caught.value.hint


def test_the_repeated_hour_is_read_twice() -> None:
    """Clocks in Berlin go back from 03:00 to 02:00 on 29 October 2023 (01:00 UTC)."""
    reader = StampReader(BERLIN)
    hours = ["2023-10-29T01:00", "2023-10-29T02:00", "2023-10-29T02:00", "2023-10-29T03:00"]
    found = [reader.read(hour) for hour in hours]
    assert found == [
        instant_s(f"2023-10-{day}T{hour}:00Z") for day, hour in (("28", 23), ("29", "00"), ("29", "01"), ("29", "02"))
    ]


def test_the_repeated_hour_in_quarters() -> None:
    reader = StampReader(LONDON)
    quarters = [f"2023-10-29T01:{minute:02}" for minute in (0, 15, 30, 45)] * 2
    found = [reader.read(quarter) for quarter in quarters]
    assert found == [instant_s("2023-10-29T00:00Z") + 900 * step for step in range(8)]


def test_the_repeated_hour_written_once_is_the_first() -> None:
    reader = StampReader(BERLIN)
    assert reader.read("2023-10-29T02:00") == instant_s("2023-10-29T00:00Z")
    assert reader.read("2023-10-29T03:00") == instant_s("2023-10-29T02:00Z")


@pytest.mark.parametrize("text", ["2023-03-26T02:00", "2023-03-26T02:59:59"])
def test_the_skipped_hour_does_not_exist(text: str) -> None:
    with pytest.raises(DataError, match="does not exist in Europe/Berlin"):
        StampReader(BERLIN).read(text)
    assert StampReader(BERLIN).read("2023-03-26T03:00") == instant_s("2023-03-26T01:00Z")
