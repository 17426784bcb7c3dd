import asyncio
import math
from dataclasses import replace

import httpx
import pytest
from starlette.applications import Starlette

from joulery.domain.decisions import Decision
from joulery.domain.serving.timeline import CarbonBasis, DecisionRecord, ServiceLabel
from joulery.ui.dashboard import dashboard_routes
from joulery.ui.dashboard.screen import labels, screen
from joulery.ui.kit.html import static_text
from tests.ui.demo import SITE, START_S, snapshot


class Client:
    """Asks an application without a server."""

    def __init__(self, latest):
        self._app = Starlette(routes=dashboard_routes(lambda: latest))

    def get(self, path, *, follow_redirects=True, **more):
        async def ask():
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://joulery") as asking:
                return await asking.get(path, follow_redirects=follow_redirects, **more)

        return asyncio.run(ask())


def client(latest):
    return Client(latest)


def test_now_is_the_snapshot():
    answer = client(snapshot(3)).get("/api/now")
    body = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    assert body["site"]["mode"] == "act"
    assert body["site"]["carbon"]["basis"] == "replayed"
    assert [tick["t_s"] - START_S for tick in body["ticks"]] == [1.0, 2.0, 3.0]
    assert body["ticks"][0]["services"][0]["mix"][0][0] == "lite0"
    assert body["ticks"][0]["baseline_g"] is None, "NaN is null"
    assert body["meters"][0]["quality"] == "modelled"


def test_since_leaves_out_what_the_caller_has():
    browser = client(snapshot(60))
    last = browser.get("/api/now").json()["ticks"][-1]["t_s"]
    assert browser.get(f"/api/now?since={last}").json()["ticks"] == []
    assert len(browser.get(f"/api/now?since={last - 2.5}").json()["ticks"]) == 3
    decisions = browser.get("/api/decisions").json()["decisions"]
    assert decisions[0]["decision"]["reason"].startswith("the intensity moved")
    assert len(browser.get(f"/api/decisions?since={decisions[-2]['t_s']}").json()["decisions"]) == 1


@pytest.mark.parametrize("since", ["x", "", "nan"])
@pytest.mark.parametrize("path", ["/api/now", "/api/decisions"])
def test_a_since_that_is_no_time_is_refused(path, since):
    answer = client(snapshot(1)).get(path, params={"since": since})
    assert answer.status_code == 400
    assert "expected Unix seconds" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/api/now", "/api/decisions", "/api/screen"])
def test_before_the_first_snapshot_the_answer_is_try_again(path):
    answer = client(None).get(path)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["kind"] == "starting"


def test_infinite_ages_and_unusual_values_are_json():
    meter = replace(snapshot(1).meters[0], age_s=math.inf)
    decision = DecisionRecord(START_S, Decision("set", "x", {1: math.nan, "y": (1, 2)}, "p", "r"), "advised")
    odd = client(snapshot(1, meters=(meter,), decisions=(decision,)))
    assert odd.get("/api/now").json()["meters"][0]["age_s"] is None
    assert odd.get("/api/decisions").json()["decisions"][0]["decision"]["value"] == {"1": None, "y": [1, 2]}


def test_home_leads_to_the_dashboard():
    answer = client(None).get("/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/dashboard")


@pytest.mark.parametrize("path", ["/dashboard", "/static/dashboard.js", "/api/now", "/api/screen", "/static/no", "/"])
def test_every_answer_carries_a_strict_policy(path):
    headers = client(snapshot(1)).get(path, follow_redirects=False).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_and_the_files_hold_no_data():
    browser = client(snapshot(60))
    for path in ("/dashboard", "/static/dashboard.js", "/static/charts.js"):
        text = browser.get(path).text
        assert "quickstart" not in text
        assert "lite0" not in text
    assert "<script>" not in browser.get("/dashboard").text, "the policy runs no inline script"


def test_static_files_are_asked_for_anew_but_sent_once():
    browser = client(None)
    first = browser.get("/static/joulery.css")
    assert first.headers["content-type"].startswith("text/css")
    assert first.text == static_text("joulery.css")
    again = browser.get("/static/joulery.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert browser.get("/static/charts.js").headers["etag"] != first.headers["etag"]


@pytest.mark.parametrize("name", ["nothing.js", "uplot.LICENSE", "..%2fhtml.py", "%2e%2e/html.py", "dashboard.html"])
def test_only_listed_files_are_served(name):
    assert client(None).get(f"/static/{name}").status_code == 404


def test_the_frame_says_what_is_not_live_and_real():
    assert labels(replace(SITE, carbon=replace(SITE.carbon, basis=CarbonBasis.LIVE))) == labels(
        replace(SITE, carbon=None)
    )
    words = "".join(labels(replace(SITE, mode="advise", simulated=True)))
    assert "advise: reports its decisions, changes nothing" in words
    assert "simulated" in words
    assert "carbon replayed 960×" in words
    assert "assumed" in "".join(labels(replace(SITE, carbon=replace(SITE.carbon, basis=CarbonBasis.ASSUMED))))


def test_names_from_outside_cannot_become_markup():
    evil = "<img src=x onerror=alert(1)>"
    service = ServiceLabel(evil, 0.1, 0.95, ((evil, 0.5),))
    assert "<img" not in screen(replace(SITE, mode=evil, services=(service,)))
