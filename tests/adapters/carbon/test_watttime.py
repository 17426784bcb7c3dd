import base64
import math
from typing import Any

import numpy as np
import pytest

from joulery.adapters.carbon.timestamps import instant_s, iso_utc
from joulery.adapters.carbon.watttime import WattTime, default_service
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.quality import Quality
from tests.adapters.carbon.local import Answer, Local, Question, served

NOW = instant_s("2022-07-15T00:02Z")
LOGIN = "Basic " + base64.b64encode(b"ada:lovelace").decode()


def meta(**changes: Any) -> dict[str, Any]:
    return {
        "data_point_period_seconds": 300,
        "region": "CAISO_NORTH",
        "warnings": [{"type": "EXAMPLE_WARNING", "message": "This is just an example"}],
        "signal_type": "co2_moer",
        "model": {"date": "2023-03-01", "type": "binned_regression"},
        "units": "lbs_co2_per_mwh",
        **changes,
    }


class Api:
    """WattTime v3: tokens that expire, both ends of an interval included, 32 days at most, one free region."""

    def __init__(self, tokens_live: int = 100) -> None:
        self.logins = 0
        self.uses = 0
        self.tokens_live = tokens_live

    def __call__(self, question: Question) -> Answer:
        if question.path == "/login":
            if question.headers.get("authorization") != LOGIN:
                return Answer({"error": "Invalid username or password"}, 401)
            self.logins, self.uses = self.logins + 1, 0
            return Answer({"token": f"token-{self.logins}"})
        self.uses += 1
        if question.headers.get("authorization") != f"Bearer token-{self.logins}" or self.uses > self.tokens_live:
            return Answer({"error": "Authorization token has expired"}, 401)
        if question.params["region"] != "CAISO_NORTH":
            message = "You do not have permission to access this resource: region PJM is not in your plan"
            return Answer({"error": "invalid_scope", "message": message}, 403)
        if question.path == "/v3/forecast":
            points = range(int(question.params["horizon_hours"]) * 12 + 1)
            start = NOW // 300 * 300
            rows = [{"point_time": iso_utc(start + 300 * n), "value": 870.0 + n} for n in points]
            return Answer({"data": rows, "meta": meta(generated_at=iso_utc(start), generated_at_period_seconds=300)})
        begin, end = instant_s(question.params["start"]), instant_s(question.params["end"])
        if end - begin > 32 * 86400:
            return Answer({"error": "Query exceeds 32 days"}, 400)
        stamps = np.arange(begin, min(end, NOW // 300 * 300) + 1, 300).tolist()
        rows = [
            {"point_time": iso_utc(t)[:19] + "+00:00", "value": 1000, "imputed_data_used": t % 3600 == 0}
            for t in stamps
        ]
        return Answer({"data": rows, "meta": meta()})


def source(local: Local, zone: str = "CAISO_NORTH", password: str = "lovelace", **fields: Any) -> WattTime:
    return WattTime(zone, "ada", password, service=local.service("WT", now_s=NOW), **fields)


def test_pounds_per_megawatt_hour_become_grams_per_kilowatt_hour() -> None:
    with served(Api()) as local:
        series = source(local).history(NOW - 700, NOW - 100)
    login, question = local.questions
    assert login.path == "/login"
    assert (question.path, question.params) == (
        "/v3/historical",
        {
            "region": "CAISO_NORTH",
            "signal_type": "co2_moer",
            "start": "2022-07-14T23:50:00Z",
            "end": "2022-07-15T00:05:00Z",
        },
    )
    assert np.diff(series.edges_s).tolist() == [300.0] * 3
    assert series.g_per_kwh.tolist() == [453.59237] * 3
    assert (series.signal, series.scope) == (Signal.MARGINAL, Scope.DIRECT)
    assert (series.source, series.quality) == ("WattTime, history", Quality.MEASURED)


def test_points_with_imputed_data_are_flagged_or_left_out() -> None:
    with served(Api()) as local:
        flagged = source(local).history(NOW - 3720, NOW - 3120)
        left_out = source(local, estimates=False).history(NOW - 3720, NOW - 3120)
    assert flagged.estimated.tolist() == [True, False]
    assert not np.isnan(flagged.g_per_kwh).any()
    assert np.isnan(left_out.g_per_kwh).tolist() == [True, False]


def test_long_intervals_are_asked_in_pieces_of_32_days_and_repeated_ends_count_once() -> None:
    with served(Api()) as local:
        series = source(local).history(NOW - 70 * 86400, NOW - 86400)
    assert [question.path for question in local.questions] == ["/login", *["/v3/historical"] * 3]
    assert len(series) == 69 * 288 + 1
    assert not np.isnan(series.g_per_kwh).any()


def test_one_login_serves_until_the_token_expires() -> None:
    api = Api(tokens_live=2)
    with served(api) as local:
        wt = source(local)
        for _ in range(3):
            wt.history(NOW - 600, NOW - 300)
    assert api.logins == 2
    assert [question.path.rpartition("/")[2] for question in local.questions] == [
        "login",
        "historical",
        "historical",
        "historical",
        "login",
        "historical",
    ]


def test_a_token_that_never_works_is_an_error_and_not_a_loop() -> None:
    with served(Api(tokens_live=0)) as local:
        with pytest.raises(CapabilityError, match="token has expired"):
            source(local).history(NOW - 600, NOW)
        assert len(local.questions) == 2


def test_the_forecast() -> None:
    with served(Api()) as local:
        series = source(local).forecast(NOW, NOW + 3600)
    assert local.questions[-1].params["horizon_hours"] == "1"
    assert series.issued_at_s == NOW // 300 * 300
    assert series.quality is Quality.MODELLED
    assert series.g_per_kwh[0] == pytest.approx(870 * 0.45359237)
    assert not np.isnan(series.g_per_kwh).any()


@pytest.mark.parametrize(("ahead_s", "asked"), [(0, "0"), (-7200, "0"), (3601, "2"), (100 * 3600, "72")])
def test_the_forecast_asks_for_whole_hours_up_to_72(ahead_s: float, asked: str) -> None:
    with served(Api()) as local:
        source(local).forecast(NOW + min(ahead_s, 0), NOW + ahead_s)
    assert local.questions[-1].params["horizon_hours"] == asked


def test_refusals() -> None:
    with served(Api()) as local:
        with pytest.raises(CapabilityError, match=r"refused \(401\): Invalid username or password"):
            source(local, password="byron").history(NOW - 600, NOW)
        wt = source(local, zone="PJM")
        for _ in range(2):
            with pytest.raises(CapabilityError, match=r"refused \(403\)"):
                wt.history(NOW - 600, NOW)
    assert [question.path for question in local.questions].count("/login") == 2


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"data": []},
        {"data": [], "meta": meta(units="percentile")},
        {"data": [], "meta": meta(signal_type="health_damage")},
        {"data": [], "meta": meta(region="PJM")},
        {"data": [], "meta": meta(data_point_period_seconds=0)},
        {"data": [], "meta": meta(data_point_period_seconds=None)},
        {"data": [{"value": 5}], "meta": meta()},
        {"data": [{"point_time": "2022-07-15T00:00:00Z", "value": "5"}], "meta": meta()},
        {"meta": meta()},
    ],
)
def test_nonsense_is_one_error(body: Any) -> None:
    def strange(question: Question) -> Answer:
        return Answer({"token": "t"} if question.path == "/login" else body)

    with served(strange) as local, pytest.raises(DataError):
        source(local).history(NOW - 600, NOW)


@pytest.mark.parametrize("body", [[], {}, {"token": 5}])
def test_a_login_without_a_token_is_nonsense(body: Any) -> None:
    with served(lambda question: Answer(body)) as local, pytest.raises(DataError, match="token"):
        source(local).history(NOW - 600, NOW)


def test_no_points_are_gaps() -> None:
    empty = {"data": [], "meta": meta()}
    with served(lambda question: Answer({"token": "t"} if question.path == "/login" else empty)) as local:
        series = source(local).history(NOW - 500, NOW)
    assert np.isnan(series.g_per_kwh).all()
    assert math.isclose(series.end_s, NOW)


def test_the_account_is_needed_and_never_shown() -> None:
    for user, password in (("", "x"), ("x", "")):
        with pytest.raises(CapabilityError, match="needs an account"):
            WattTime("CAISO_NORTH", user, password)
    assert "lovelace" not in repr(WattTime("CAISO_NORTH", "ada", "lovelace"))
    assert default_service().base_url == "https://api.watttime.org"
