"""Services with models on other servers: joules as stated, and none of them from this machine's meters."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.quality import Quality
from joulery.domain.serving.engine import ModelKind, ModelRef, Outcome
from joulery.runtime.results.pricing import NOTHING, prices_of
from joulery.runtime.results.summary import compared, summarise_run
from joulery.runtime.session.requests import RequestColumns
from tests.app.serving.test_service import profile
from tests.runtime.results.test_summary import HALF, PREDICTOR, cost, record, served

HERE = ModelRef(ModelKind.PYTHON, "m:f")
THERE = ModelRef(ModelKind.REMOTE, "http://a:8000/net", '{"power_w": 90.0}')


def mixed(watts: float = 90.0, **changes):
    entries = tuple(
        replace(entry, active_w=watts, quality=Quality.ASSUMED)
        if entry.variant == "large"
        else replace(entry, active_w=10.0, quality=Quality.MODELLED)
        for entry in profile().entries
    )
    known = replace(profile(), entries=entries, quality=Quality.ASSUMED)
    prices = prices_of({"large": THERE, "small": HERE}, known)
    predictor = replace(PREDICTOR, profile=known)
    columns = prices.columns(RequestColumns.of(HALF))
    return served(requests=columns, predictor=prices.predictor(predictor), prices=prices, **changes)


def test_only_the_models_here_are_charged_from_the_meters_here():
    run = mixed()
    figures = summarise_run([run], cost(), [compared(run)])
    here_s = math.fsum(one.cpu_s for one in HALF if one.variant == "small")
    there_s = math.fsum(one.cpu_s for one in HALF if one.variant == "large")
    assert figures["requests_cpu_s"] == pytest.approx(here_s)
    assert figures["upstream_j"] == pytest.approx(90.0 * there_s)
    assert figures["upstream_quality"] == "assumed"
    # All but one of the large model's answers came while the grid was at 100 g/kWh.
    assert figures["upstream_g"] == pytest.approx(90.0 * there_s * 100.0 / 3.6e6, rel=0.05)
    total = figures["requests_j"] + figures["serving_j"] + figures["load_generator_j"] + 40.0
    assert total == pytest.approx(50.0), "what the meters charged, and no more"


def test_refused_requests_and_other_services_cost_nothing():
    """A refused request names no variant, and the columns hold those of every service."""
    refused = [record(k, "large", Outcome.OVERLOADED)._replace(variant="", replica="", cpu_s=0.0) for k in range(5)]
    others = [record(k, "small")._replace(service="other", variant="third") for k in range(5)]
    run = mixed()
    more = replace(run, requests=run.prices.columns(RequestColumns.of([*HALF, *refused, *others])))
    figures, plain = (summarise_run([one], cost(), [compared(one)]) for one in (more, run))
    assert figures["refused"] == 5 and figures["requests"] == plain["requests"] + 5
    for name in ("requests_cpu_s", "upstream_j", "requests_j", "saving_ratio"):
        assert figures[name] == pytest.approx(plain[name])


def test_requests_that_no_variant_answered_cost_nothing():
    """Refused ones, and those of a moment in which every server was gone."""
    lost = [record(k, "small", Outcome.UNAVAILABLE)._replace(variant="", cpu_s=0.0) for k in (100, 101)]
    without = mixed()
    run = replace(without, requests=without.prices.columns(RequestColumns.of([*HALF, *lost])))
    figures, other = (summarise_run([one], cost(), [compared(one)]) for one in (run, without))
    assert figures["failed"] == 2 and figures["requests_cpu_s"] == pytest.approx(other["requests_cpu_s"])
    assert figures["upstream_j"] == pytest.approx(other["upstream_j"])


@pytest.mark.parametrize(("watts", "saving"), [(10.0, 0.3), (90.0, 0.5 * (1 - 0.4 / 9)), (2.0, 0.5 * (1 - 0.4 * 5))])
def test_savings_compare_joules_and_not_seconds(watts, saving):
    """Half of the answers are the small model's: 40 % of the large one's seconds, at its own watts."""
    run = mixed(watts)
    found = compared(run)
    assert found.energy_saving_ratio == pytest.approx(saving, abs=0.02)
    figures = summarise_run([run], cost(), [found])
    base_j = math.fsum(one.cpu_s for one in (record(k, "large") for k in range(100))) * watts
    assert figures["baseline_requests_j"] == pytest.approx(base_j, rel=0.02)


def test_the_saving_of_everything_counts_what_the_servers_drew():
    near, far = (summarise_run([run], cost(), [compared(run)]) for run in (mixed(), mixed(carbon=None)))
    for figures in (near, far):
        assert 0 < figures["saving_machine_ratio"] < figures["saving_ratio"]
    spent = 50.0 + far["upstream_j"]
    more = far["baseline_requests_j"] - far["baseline_requests_j"] * (1 - far["saving_ratio"])
    assert far["saving_machine_ratio"] == pytest.approx(more / (spent + more))


@given(st.lists(st.sampled_from(["small", "large"]), max_size=60), st.floats(0.1, 500.0), st.floats(0.1, 500.0))
def test_priced_requests_sum_to_seconds_times_watts(variants, large_w, small_w):
    entries = tuple(
        replace(entry, active_w=large_w if entry.variant == "large" else small_w) for entry in profile().entries
    )
    prices = prices_of({"large": THERE, "small": HERE}, replace(profile(), entries=entries))
    records = [record(k, name) for k, name in enumerate(variants)]
    requests = RequestColumns.of(records)
    joules = math.fsum(float(block["cpu_s"].sum()) for block in prices.columns(requests).blocks("sums"))
    expected = math.fsum(one.cpu_s * {"large": large_w, "small": small_w}[one.variant] for one in records)
    assert joules == pytest.approx(expected, rel=1e-9)
    plain = np.concatenate([block["cpu_s"] for block in requests.blocks()] or [np.empty(0)])
    assert plain.tolist() == [one.cpu_s for one in records], "what was recorded stays"


def test_a_service_of_this_machine_has_no_prices():
    assert not prices_of({"small": HERE}, profile())
    assert "upstream_j" not in summarise_run([served()], cost(), [None])
    requests = RequestColumns.of(HALF)
    assert NOTHING.columns(requests) is requests and NOTHING.predictor(PREDICTOR) is PREDICTOR
