import math
from typing import Any

import numpy as np
import pytest

from joulery.adapters.carbon.electricity_maps import ElectricityMaps, default_service
from joulery.adapters.carbon.timestamps import instant_s, iso_utc
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.quality import Quality
from tests.adapters.carbon.local import Answer, Local, Question, served

NOW = instant_s("2024-03-10T12:30Z")
HOUR = 3600.0


def hour(start_s: float, value: float | None, scope: str = "lifecycle", estimated: bool = False) -> dict[str, Any]:
    stamp = iso_utc(start_s)[:19] + ".000Z"
    return {
        "zone": "DE",
        "carbonIntensity": value,
        "datetime": stamp,
        "updatedAt": "2024-03-10T12:20:00.000Z",
        "createdAt": "2024-03-07T12:20:00.000Z",
        "emissionFactorType": scope,
        "isEstimated": estimated,
        "estimationMethod": "TIME_SLICER_AVERAGE" if estimated else None,
    }


def api(question: Question) -> Answer:
    """Electricity Maps v3: its three questions, its limit of 240 hours, and the errors of a wrong token or zone."""
    if question.headers.get("auth-token") != "secret":
        return Answer({"error": "Invalid auth-token"}, 401)
    if question.path == "/zones":
        return Answer(
            {zone: {"zoneName": zone, "access": ["carbon-intensity/latest"]} for zone in ("DE", "FR", "SE-SE3")}
        )
    if question.params["zone"] != "DE":
        return Answer({"error": "Zone XX does not exist"}, 404)
    scope = question.params["emissionFactorType"]
    this_hour = NOW // HOUR * HOUR
    if question.path == "/carbon-intensity/history":
        starts = [this_hour - (23 - step) * HOUR for step in range(24)]
        return Answer({"zone": "DE", "history": [hour(t, 300, scope, t == this_hour) for t in starts]})
    if question.path == "/carbon-intensity/past-range":
        begin, end = instant_s(question.params["start"]), instant_s(question.params["end"])
        if end - begin > 240 * HOUR:
            return Answer({"error": "Time range is limited to 240 hours"}, 400)
        return Answer({"zone": "DE", "data": [hour(t, 400, scope) for t in np.arange(begin, end, HOUR).tolist()]})
    if question.path == "/carbon-intensity/forecast":
        ahead = range(int(question.params["horizonHours"]))
        rows = [{"carbonIntensity": 200 + h, "datetime": iso_utc(this_hour + (h + 1) * HOUR)} for h in ahead]
        return Answer({"zone": "DE", "forecast": rows, "updatedAt": "2024-03-10T12:07:00.000Z"})
    return Answer({"error": "Not found"}, 404)


def source(local: Local, zone: str = "DE", token: str = "secret", **fields: Any) -> ElectricityMaps:
    return ElectricityMaps(zone, token, service=local.service("EM", now_s=NOW), **fields)


def test_the_last_hours_come_from_the_free_history() -> None:
    with served(api) as local:
        series = source(local).history(NOW - 7200, NOW)
    (question,) = local.questions
    assert question.path == "/carbon-intensity/history"
    assert question.params == {"zone": "DE", "emissionFactorType": "lifecycle", "temporalGranularity": "hourly"}
    assert series.g_per_kwh.tolist() == [300.0] * 3
    assert series.estimated.tolist() == [False, False, True]
    assert series.end_s == NOW // HOUR * HOUR + HOUR
    assert (series.zone, series.signal, series.scope) == ("DE", Signal.AVERAGE, Scope.LIFECYCLE)
    assert (series.source, series.quality) == ("Electricity Maps, history", Quality.MEASURED)


def test_older_time_comes_from_past_range_ten_days_at_once() -> None:
    with served(api) as local:
        series = source(local, scope=Scope.DIRECT).history(NOW - 25 * 86400, NOW - 86400)
    assert [question.path for question in local.questions] == ["/carbon-intensity/past-range"] * 3
    assert local.questions[0].params["start"] == "2024-02-14T12:00:00Z"
    assert local.questions[-1].params["end"] == "2024-03-09T13:00:00Z"
    assert len(series) == 24 * 24 + 1
    assert series.scope is Scope.DIRECT and set(series.g_per_kwh.tolist()) == {400.0}


def test_the_margin_of_the_free_history() -> None:
    with served(api) as local:
        source(local).history(NOW - 23 * HOUR, NOW - 22 * HOUR)
        source(local).history(NOW - 23 * HOUR - 1, NOW - 22 * HOUR)
    assert [question.path.rpartition("/")[2] for question in local.questions] == ["history", "past-range"]


def test_hours_not_yet_published_are_gaps() -> None:
    with served(
        lambda question: Answer({"zone": "DE", "history": [hour(NOW - 5400, None), hour(NOW - 1800, 7)]})
    ) as local:
        series = source(local).history(NOW - 5400, NOW + 5400)
    assert np.array_equal(series.g_per_kwh, [math.nan, 7.0, math.nan], equal_nan=True)


def test_estimates_can_be_refused() -> None:
    with served(api) as local:
        series = source(local, estimates=False).history(NOW - 3600, NOW)
    assert local.questions[0].params["disableEstimations"] == "true"
    assert np.array_equal(series.g_per_kwh, [300.0, math.nan], equal_nan=True)


@pytest.mark.parametrize(("ahead_h", "asked"), [(1, "6"), (6, "6"), (6.1, "24"), (48, "48"), (72, "72"), (500, "72")])
def test_the_forecast_asks_for_the_horizon_it_needs(ahead_h: float, asked: str) -> None:
    with served(api) as local:
        series = source(local).forecast(NOW, NOW + ahead_h * HOUR)
    assert local.questions[0].params["horizonHours"] == asked
    assert series.issued_at_s == instant_s("2024-03-10T12:07Z")
    assert series.quality is Quality.MODELLED
    assert math.isnan(series.g_per_kwh[0])
    assert series.g_per_kwh[1] == 200.0
    assert series.end_s >= NOW + ahead_h * HOUR


def test_a_wrong_token_and_a_wrong_zone() -> None:
    with served(api) as local:
        with pytest.raises(CapabilityError, match=r"Invalid auth-token"):
            source(local, token="wrong").history(NOW - 3600, NOW)
        with pytest.raises(DataError, match=r"no zone SE3: .*Zone XX does") as near:
            source(local, "SE3").forecast(NOW, NOW + 3600)
        with pytest.raises(DataError, match="knows no zone XX:") as far:
            source(local, "XX").history(NOW - 3600, NOW)
        with pytest.raises(DataError, match="answered 404") as known:
            source(local, "FR").history(NOW - 3600, NOW)
    assert near.value.hint == "did you mean SE-SE3?"
    assert far.value.hint == "the token knows 3 zones"
    assert "knows no zone" not in known.value.message


def test_zones_that_are_no_zones() -> None:
    with served(lambda question: Answer([])) as local, pytest.raises(DataError, match="no zones"):
        source(local).zones()


def test_a_rate_limit_is_waited_out() -> None:
    def limited(question: Question) -> Answer:
        limit = Answer({"message": "API rate limit exceeded"}, 429, {"retry-after": "3"})
        return limit if len(local.questions) == 1 else api(question)

    with served(limited) as local:
        assert len(source(local).history(NOW - 3600, NOW)) == 2
    assert local.slept == [3.0]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"history": {}},
        {"history": [{"carbonIntensity": 1}]},
        {"history": [hour(NOW - 1800, -4)]},
        {"history": [{**hour(NOW - 1800, 4), "carbonIntensity": "4"}]},
        {"history": [hour(NOW - 1800, 4, "direct")]},
    ],
)
def test_nonsense_is_one_error(body: Any) -> None:
    with served(lambda question: Answer(body)) as local, pytest.raises(DataError):
        source(local).history(NOW - 3600, NOW)


def test_a_forecast_without_its_time_of_issue_is_nonsense() -> None:
    with served(lambda question: Answer({"forecast": []})) as local, pytest.raises(DataError, match="updatedAt"):
        source(local).forecast(NOW, NOW + 3600)


def test_the_token_is_needed_and_never_shown() -> None:
    with pytest.raises(CapabilityError, match="needs a token"):
        ElectricityMaps("DE", "")
    assert "secret" not in repr(ElectricityMaps("DE", "secret"))
    assert default_service().base_url == "https://api.electricitymaps.com/v3"
