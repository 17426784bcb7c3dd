import math
import re
from typing import Any

import numpy as np
import pytest

from joulery.adapters.carbon.timestamps import instant_s, iso_utc
from joulery.adapters.carbon.uk import REGIONS, UkCarbon, default_service
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality
from tests.adapters.carbon.local import Answer, Local, Question, served

NOON = instant_s("2018-01-20T12:00Z")
HALF_HOUR = 1800.0


def half_hour(start_s: float, forecast: int | None, actual: int | None) -> dict[str, Any]:
    minute = [iso_utc(t)[:16] + "Z" for t in (start_s, start_s + HALF_HOUR)]
    return {
        "from": minute[0],
        "to": minute[1],
        "intensity": {"forecast": forecast, "actual": actual, "index": "moderate"},
    }


def api(question: Question) -> Answer:
    """The API as it answers: the half-hour ending at ``from`` comes first, 14 days at most, actual known to 13:00."""
    match = re.fullmatch(r"/(regional/)?intensity/([^/]+)/([^/]+)(?:/(regionid|postcode)/(\w+))?", question.path)
    if match is None:
        return Answer({"error": {"code": "404 Not Found", "message": "no such path"}}, 404)
    regional, begin, end, _, place = match.groups()
    for text in (begin, end):
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", text):
            message = "Please enter a valid start datetime in ISO8601 format YYYY-MM-DDThh:mmZ i.e. 2017-08-25T12:35Z"
            return Answer({"error": {"code": "400 Bad Request", "message": message}}, 400)
    if instant_s(end) - instant_s(begin) > 14 * 86400:
        message = "The date range is limited to a maximum of 14 days."
        return Answer({"error": {"code": "400 Bad Request", "message": message}}, 400)
    starts = np.arange(instant_s(begin) - HALF_HOUR, instant_s(end), HALF_HOUR)
    rows = [half_hour(t, 260 + int(t / HALF_HOUR) % 10, 263 if t < NOON + 3600 else None) for t in starts.tolist()]
    if not regional:
        return Answer({"data": rows})
    for row in rows:
        del row["intensity"]["actual"]
        row["generationmix"] = [{"fuel": "wind", "perc": 40}, {"fuel": "gas", "perc": 60}]
    name = {"regionid": 13, "dnoregion": "UKPN London", "shortname": "London", "postcode": place, "data": rows}
    return Answer({"data": name})


def ask(local: Local, t0_s: float, t1_s: float, zone: str = "GB", **fields: Any) -> CarbonSeries:
    return UkCarbon(zone, service=local.service("UK", now_s=NOON), **fields).history(t0_s, t1_s)


def test_history_is_the_actual_value_of_each_half_hour() -> None:
    with served(api) as local:
        series = ask(local, NOON - 600, NOON + 1900)
    assert [question.path for question in local.questions] == ["/intensity/2018-01-20T11:30Z/2018-01-20T13:00Z"]
    assert series.edges_s.tolist() == [NOON - 1800, NOON, NOON + 1800, NOON + 3600]
    assert series.g_per_kwh.tolist() == [263.0, 263.0, 263.0]
    assert (series.zone, series.signal, series.scope) == ("GB", Signal.AVERAGE, Scope.DIRECT)
    assert (series.source, series.quality, series.issued_at_s) == (
        "UK Carbon Intensity API, actual",
        Quality.MEASURED,
        None,
    )
    assert not series.estimated.any()


def test_an_actual_value_not_yet_known_is_a_gap() -> None:
    with served(api) as local:
        series = ask(local, NOON, NOON + 7200)
    assert np.isnan(series.g_per_kwh).tolist() == [False, False, True, True]


def test_the_forecast_stands_in_only_where_allowed_and_flagged() -> None:
    with served(api) as local:
        series = ask(local, NOON, NOON + 7200, forecast_as_history=True)
    assert series.estimated.tolist() == [False, False, True, True]
    assert series.g_per_kwh.tolist()[:2] == [263.0, 263.0]
    assert all(260 <= value < 270 for value in series.g_per_kwh.tolist()[2:])


def test_a_region_has_forecasts_only() -> None:
    with served(api) as local:
        refused = ask(local, NOON, NOON + 1800, "GB-13")
        allowed = ask(local, NOON, NOON + 1800, "gb-london", forecast_as_history=True)
        postcode = ask(local, NOON, NOON + 1800, "GB-rg10", forecast_as_history=True)
    assert math.isnan(refused.g_per_kwh[0])
    assert 260 <= allowed.g_per_kwh[0] < 270
    assert allowed.estimated.all() and postcode.estimated.all()
    assert [question.path.split("Z/")[2] for question in local.questions] == [
        "regionid/13",
        "regionid/13",
        "postcode/RG10",
    ]


def test_the_forecast_is_issued_now() -> None:
    with served(api) as local:
        series = UkCarbon(service=local.service("UK", now_s=NOON + 77)).forecast(NOON + 3600, NOON + 7200)
    assert series.issued_at_s == NOON + 77
    assert series.quality is Quality.MODELLED
    assert not np.isnan(series.g_per_kwh).any() and not series.estimated.any()
    assert series.source == "UK Carbon Intensity API, forecast"


def test_long_intervals_are_asked_in_pieces_of_14_days() -> None:
    with served(api) as local:
        series = ask(local, NOON - 30 * 86400, NOON)
    assert len(local.questions) == 3
    assert len(series) == 30 * 48
    assert not np.isnan(series.g_per_kwh).any()


def test_what_the_api_refuses_is_passed_on() -> None:
    refusal = {"error": {"code": "400 Bad Request", "message": "Please enter a valid start datetime"}}
    says = r"answered 400 to /intensity/.*: Please enter a valid start datetime"
    with served(lambda question: Answer(refusal, 400)) as local, pytest.raises(DataError, match=says):
        ask(local, NOON, NOON + 1800)
    broken = Answer({"error": {"code": "500", "message": "Internal Server Error"}}, 500)
    with served(lambda question: broken) as local, pytest.raises(DataError, match="Internal Server Error"):
        ask(local, NOON, NOON + 1800)


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"data": None},
        {"data": ["x"]},
        {"data": [{"from": "2018-01-20T12:00Z", "to": "2018-01-20T12:30Z"}]},
        {"data": [{"from": "2018-01-20T12:00Z", "intensity": {"actual": 1}}]},
        {"data": [{"from": "noon", "to": "2018-01-20T12:30Z", "intensity": {"actual": 1}}]},
        {"data": [{"from": 1, "to": 2, "intensity": {"actual": 1}}]},
        {"data": [{"from": "2018-01-20T12:00Z", "to": "2018-01-20T12:30Z", "intensity": {"actual": "high"}}]},
        {"data": [{"from": "2018-01-20T12:00Z", "to": "2018-01-20T12:30Z", "intensity": {"actual": True}}]},
        {"data": [{"from": "2018-01-20T12:00Z", "to": "2018-01-20T12:30Z", "intensity": {"actual": -5}}]},
        {"data": [{"from": "2018-01-20T12:30Z", "to": "2018-01-20T12:00Z", "intensity": {"actual": 5}}]},
    ],
)
def test_nonsense_is_one_error(body: Any) -> None:
    with served(lambda question: Answer(body)) as local, pytest.raises(DataError):
        ask(local, NOON, NOON + 1800)


def test_an_empty_answer_is_a_gap() -> None:
    with served(lambda question: Answer({"data": []})) as local:
        assert np.isnan(ask(local, NOON, NOON + 3600).g_per_kwh).tolist() == [True, True]
    with served(lambda question: Answer({"data": {"regionid": 1, "data": []}})) as local:
        assert np.isnan(ask(local, NOON, NOON + 3600, "GB-1").g_per_kwh).all()


@pytest.mark.parametrize("zone", ["FR", "GB-0", "GB-18", "GB-Atlantis", "GB-", "", "GB-١", "GB-RG10 9NY"])
def test_a_zone_that_does_not_exist_is_refused_at_once(zone: str) -> None:
    with pytest.raises(ConfigError, match="unknown zone of Great Britain"):
        UkCarbon(zone)


def test_there_are_17_regions_and_one_public_service() -> None:
    assert (len(REGIONS), REGIONS[12]) == (17, "London")
    assert default_service().base_url == "https://api.carbonintensity.org.uk"
