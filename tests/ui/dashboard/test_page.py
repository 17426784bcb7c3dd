"""The screen "Now" in a real browser, against a real server."""

import math
from dataclasses import replace

import pytest

from joulery.domain.decisions import Decision
from joulery.domain.serving.timeline import DecisionRecord, ServiceLabel, ServiceTick
from tests.ui.demo import SITE, snapshot, ticks
from tests.ui.live_site import live_site

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("browser")]


@pytest.fixture
def site():
    with live_site() as served:
        yield served


def show(browser, site, **window):
    browser.open(site.url + "/dashboard", **window)
    browser.wait("document.getElementById('contact').textContent !== 'connecting'")


def value(browser, name):
    return browser.text(f"[data-value='{name}']")


def test_the_first_screen_says_what_is_now(browser, site):
    site.snapshot = snapshot(60)
    show(browser, site)
    tick = site.snapshot.ticks[-1]
    assert browser.complaints() == []
    assert browser.text("header h1") == "joulery quickstart"
    assert browser.text("#contact") == "live"
    assert "act: changes what runs" in browser.text("#labels")
    assert "carbon replayed 960×" in browser.text("#labels")
    assert value(browser, "power") == f"{tick.power_w:.1f} W"
    assert browser.text("[data-note='power']") == f"modelled ± {tick.power_band_w:.1f} W"
    assert value(browser, "intensity") == f"{tick.g_per_kwh:.0f} g/kWh"
    assert value(browser, "rate") == f"{tick.power_w * tick.g_per_kwh / 1000:.1f} g/h"
    assert value(browser, "total") == f"{tick.carbon_g * 1000:.0f} mg"
    assert browser.text("[data-note='total']") == f"{tick.energy_j / 1000:.2f} kJ in 1 min 0 s"
    assert value(browser, "latency-0") == f"{tick.services[0].latency_s * 1000:.1f} ms"
    assert value(browser, "attainment-0") == "99.9 %"
    assert value(browser, "accuracy-0") == f"{tick.services[0].accuracy_ratio * 100:.1f} %"
    assert value(browser, "rate-0") == "40 /s"
    assert browser.evaluate("document.querySelectorAll('canvas').length") == 5
    assert browser.text("#decisions tr td.reason").startswith("the intensity moved to")
    rows = browser.evaluate("document.querySelectorAll('#decisions tr').length")
    assert rows == len(site.snapshot.decisions)


def test_the_mix_bar_is_as_wide_as_the_shares(browser, site):
    site.snapshot = snapshot(20)
    show(browser, site)
    widths = browser.evaluate("[...document.querySelectorAll('[data-mix] rect')].map(r => +r.getAttribute('width'))")
    assert widths == pytest.approx([1000 * share for _, share in site.snapshot.ticks[-1].services[0].mix])
    assert browser.evaluate("document.querySelector('[data-mix]').getAttribute('aria-label')").startswith("lite0 ")


def test_it_lives(browser, site):
    site.snapshot = snapshot(10)
    show(browser, site)
    before = value(browser, "total")
    site.snapshot = snapshot(40)
    browser.wait(f"document.querySelector(\"[data-value='total']\").textContent !== '{before}'")
    assert value(browser, "power") == f"{ticks()[39].power_w:.1f} W"
    assert browser.evaluate("document.querySelectorAll('#decisions tr').length") == len(site.snapshot.decisions)
    asked = [url for url in browser.requested() if "/api/now?since=" in url]
    assert asked, "only what is new is asked for"
    assert browser.complaints() == []


def test_another_run_starts_afresh(browser, site):
    site.snapshot = snapshot(40)
    show(browser, site)
    other = replace(SITE, name="another", mode="advise")
    later = tuple(replace(tick, t_s=tick.t_s + 1000) for tick in ticks()[:2])
    site.snapshot = replace(snapshot(2, decisions=()), site=other, started_s=snapshot(1).started_s + 1000, ticks=later)
    browser.wait("document.getElementById('site').textContent === 'another'")
    browser.wait("document.querySelector(\"[data-note='total']\").textContent.endsWith('in 2 s')")
    assert browser.evaluate("document.querySelectorAll('#decisions tr').length") == 0
    assert "advise: reports its decisions" in browser.text("#labels")
    assert browser.complaints() == []


def test_an_slo_violation_is_shown(browser, site):
    tick = ticks()[0]
    late = replace(tick.services[0], latency_s=0.3, attainment_ratio=0.5, failed=3, accuracy_ratio=0.7)
    site.snapshot = snapshot(1, ticks=(replace(tick, services=(late,)),), warnings=("nvml gpu:1 is silent",))
    show(browser, site)
    for name in ("latency-0", "attainment-0", "accuracy-0", "rate-0"):
        assert "bad-text" in browser.evaluate(f"document.querySelector(\"[data-value='{name}']\").className"), name
    assert browser.text("[data-note='rate-0']") == "3 failed"
    assert browser.text("#problem") == "nvml gpu:1 is silent"


def test_what_is_unknown_is_a_dash_never_a_zero(browser, site):
    nan = math.nan
    tick = replace(ticks()[0], power_w=nan, g_per_kwh=nan, energy_j=nan, carbon_g=nan, services=())
    site.snapshot = snapshot(1, site=replace(SITE, carbon=None), ticks=(tick,), decisions=())
    show(browser, site)
    for name in ("power", "intensity", "rate", "total", "latency-0", "attainment-0", "accuracy-0"):
        assert value(browser, name) == "–", name
    assert browser.text("[data-note='intensity']") == "no carbon source"
    assert browser.text("#no-decisions") == "None yet."
    assert browser.complaints() == []


def test_old_readings_are_not_called_live(browser, site):
    site.snapshot = replace(snapshot(5), now_s=snapshot(5).now_s + 42)
    show(browser, site)
    assert browser.text("#contact") == "last reading 42 s ago"


def test_before_the_first_reading_it_waits_and_then_shows(browser, site):
    show(browser, site)
    assert browser.text("#problem") == "The site is starting: no reading yet."
    site.snapshot = snapshot(0, decisions=())
    browser.wait("document.querySelectorAll('[data-chart]').length === 5")
    assert browser.text("#contact") == "waiting"
    site.snapshot = snapshot(3)
    browser.wait("document.getElementById('contact').textContent === 'live'")
    assert browser.evaluate("document.getElementById('problem').hidden")


def test_a_locked_gateway_asks_for_its_token(browser, site):
    site.token, site.snapshot = "open-sesame", snapshot(5)
    show(browser, site)
    assert browser.text("#contact") == "locked"
    assert browser.evaluate("document.getElementById('screen').innerHTML") == ""
    for token in ("wrong", "open-sesame"):
        browser.evaluate(f"document.getElementById('token').value = '{token}'")
        browser.evaluate("document.querySelector('#sign-in button').click()")
        if token == "wrong":
            browser.wait("document.getElementById('problem').textContent === 'The gateway does not know this token.'")
    browser.wait("document.getElementById('contact').textContent === 'live'")
    assert browser.evaluate("document.getElementById('sign-in').hidden")
    assert not any("open-sesame" in url for url in browser.requested()), "the token is in no address"


def test_a_gateway_that_stops_is_noticed(browser):
    with live_site() as site:
        site.snapshot = snapshot(5)
        show(browser, site)
    browser.wait("document.getElementById('contact').textContent === 'no contact'")
    assert browser.text("#problem").startswith("No contact with the gateway")


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone(browser, site, dark):
    site.snapshot = snapshot(60)
    show(browser, site, width=390, height=844, dark=dark)
    browser.wait("document.querySelector('canvas') !== null")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    fits = "[...document.querySelectorAll('canvas')].every(c => c.getBoundingClientRect().right <= innerWidth)"
    assert browser.evaluate(fits)


def test_names_and_reasons_from_outside_stay_text(browser, site):
    evil = "<img src=x onerror=\"document.title='owned'\">"
    decision = DecisionRecord(snapshot(1).now_s, Decision(evil, evil, {evil: evil}, evil, evil), evil, evil)
    named = replace(SITE, name=evil, services=(ServiceLabel(evil, 0.08, 0.95, ((evil, 0.5),)),))
    site.snapshot = snapshot(1, site=named, decisions=(decision,), warnings=(evil,))
    show(browser, site)
    browser.wait("document.querySelectorAll('#decisions tr').length === 1")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert "owned" not in browser.evaluate("document.title").replace(evil, "")


def test_a_site_that_serves_nothing_has_a_screen(browser, site):
    site.snapshot = snapshot(5, site=replace(SITE, services=()))
    show(browser, site)
    assert browser.text("#contact") == "live"
    assert browser.complaints() == []


def test_a_site_of_language_models_alone_shows_tokens_and_their_energy(browser, site):
    label = ServiceLabel("writer", 10.0, 0.95, (("small", math.nan),), language_model=True)
    answers = [
        ServiceTick(
            "writer",
            1,
            0,
            2.0 + i % 3,
            1.0,
            mix=(("small", 1.0),),
            tokens=40,
            first_token_s=0.5,
            energy_per_token_j=0.03,
        )
        if i % 2
        else ServiceTick("writer", 0)
        for i in range(20)
    ]
    shown = tuple(replace(tick, services=(one,)) for tick, one in zip(ticks(20), answers, strict=True))
    site.snapshot = replace(snapshot(20), site=replace(SITE, services=(label,)), ticks=shown, decisions=())
    show(browser, site)
    assert browser.complaints() == []
    values = {
        name: value(browser, f"{name}-0") for name in ("tokens", "first-token", "token-energy", "latency", "rate")
    }
    assert values == {
        "tokens": "20 /s",
        "first-token": "500 ms",
        "token-energy": "30 mJ",
        "latency": "3 s",
        "rate": "0.5 /s",
    }
    assert browser.evaluate("document.querySelectorAll('canvas').length") == 5
