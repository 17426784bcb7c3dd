"""Language models of a session: ticks, charges and labels."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.quality import Quality
from joulery.domain.serving.engine import EnergyShare, Outcome, RequestRecord
from joulery.domain.serving.generation import GenerationCost, TokenUsage
from joulery.domain.serving.timeline import SiteLabel
from joulery.runtime.llm.hosted import HostedModels
from joulery.runtime.llm.service import LLMSettings
from joulery.runtime.serving.ticker import Ticker
from tests.runtime.serving.test_ticker import FlatGrid, StillMeters


def models(*names, services=()):
    engine = SimpleNamespace(variant="v1", name="e")
    return HostedModels(
        {
            name: SimpleNamespace(name=name, owner=f"of {name}", engine=engine, settings=LLMSettings(deadline_s=30.0))
            for name in names
        },
        services,
    )


def ended(hosted, model, latency_s=2.0, tokens=4, energy_j=1.0, outcome=Outcome.OK):
    share = None if energy_j is None else EnergyShare(energy_j, None, Quality.MODELLED)
    record = RequestRecord(model, "v1", "r", 100.0, 100.0, 100.0 + latency_s, outcome, latency_s, 0.0, 1, share)
    hosted.request(record)
    usage = TokenUsage(7, tokens, True)
    hosted.charge(model, record, GenerationCost("v1", "r", 100.0, 100.0, 102.0, usage, share, 4.0, "mean", 100.5))


def test_a_tick_counts_the_requests_of_its_period_alone():
    hosted = models("a", "b")
    ended(hosted, "a", 2.0, 4, 1.0)
    ended(hosted, "a", 40.0, 6, None, Outcome.DEADLINE)
    (first, other), energy_j = hosted.end_period()
    assert (first.requests, first.failed, first.tokens, first.latency_s, first.attainment_ratio) == (2, 1, 10, 2.0, 1.0)
    assert (first.first_token_s, first.energy_per_token_j, first.mix) == (0.5, 0.25, (("v1", 1.0),))
    assert other.requests == 0 and math.isnan(other.latency_s) and math.isnan(other.energy_per_token_j)
    assert energy_j == {"a": 1.0, "b": 0.0}
    assert all(tick.requests == 0 for tick in hosted.end_period()[0])
    assert [entry["requests"] for entry in hosted.usage.figures()] == [2, 0]


def test_a_model_named_like_a_service_has_a_label_of_its_own():
    (label,) = models("a", services=["a"]).labels()
    assert (label.name, label.slo_s, label.quantile_ratio) == ("a (language model)", 30.0, 0.99)
    assert label.language_model and math.isnan(label.variants[0][1])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 50.0)), max_size=6))
def test_the_charges_of_models_alone_add_up_to_what_the_run_is_charged(requests):
    hosted = models("a", "b")
    one = Ticker({}, FlatGrid(), StillMeters(), 1.0, models=hosted)
    for model, energy_j in requests:
        ended(hosted, model, energy_j=energy_j)
    tick = one.tick(10.0, 12.0, [])
    assert tick.energy_j == pytest.approx(6.0) and math.isnan(tick.baseline_g)
    charges = one.snapshot(SiteLabel("s", "act"), 0.0, 99.0, [], []).charges
    assert sum(charge.footprint.energy_j for charge in charges) == pytest.approx(6.0)
    assert {charge.owner for charge in charges} == {"of a", "of b"}
