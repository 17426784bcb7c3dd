"""What a run's language models were asked and what that took."""

from __future__ import annotations

import math

import pytest

from joulery.domain.quality import Quality
from joulery.domain.serving.engine import EnergyShare, Outcome, RequestRecord
from joulery.domain.serving.generation import GenerationCost, TokenUsage
from joulery.runtime.llm.statistics import LLMUsage


def ended(
    ledger: LLMUsage,
    latency_s: float = 1.0,
    tokens: int = 4,
    energy: EnergyShare | None = None,
    outcome: Outcome = Outcome.OK,
    model: str = "writer",
) -> None:
    record = RequestRecord(model, "v", "r", 100.0, 100.0, 100.0 + latency_s, outcome, latency_s, 0.0, 1, energy)
    ledger.request(record)
    ledger.charge(
        model, record, GenerationCost("v", "r", 100.0, 100.0, 101.0, TokenUsage(7, tokens, True), energy, 4.0, "mean")
    )


def joules(energy_j: float, carbon_g: float | None = None, quality: Quality = Quality.MEASURED) -> EnergyShare:
    return EnergyShare(energy_j, carbon_g, quality)


def test_joules_are_those_of_all_requests_over_the_answers() -> None:
    ledger = LLMUsage({"writer": "ada", "silent": "bob"})
    ended(ledger, 1.0, 4, joules(6.0, 0.5))
    ended(ledger, 3.0, 8, joules(10.0, None, Quality.MODELLED))
    ended(ledger, 2.0, 2, joules(4.0), Outcome.CANCELLED)
    writer, silent = ledger.figures()
    assert (writer["model"], writer["owner"], writer["requests"], writer["failed"]) == ("writer", "ada", 3, 1)
    assert (writer["prompt_tokens"], writer["completion_tokens"]) == (21, 14)
    assert (writer["energy_j"], writer["energy_per_request_j"]) == (20.0, 10.0)
    assert writer["energy_per_token_j"] == pytest.approx(20 / 14)
    assert (writer["quality"], writer["carbon_g"]) == ("modelled", 0.5)
    assert (writer["p50_s"], writer["p95_s"]) == pytest.approx((2.0, 2.9))
    assert (silent["owner"], silent["requests"], silent["quality"]) == ("bob", 0, None)
    assert all(math.isnan(silent[name]) for name in ("p95_s", "energy_j", "energy_per_request_j", "carbon_g"))


def test_what_is_not_known_is_no_zero_and_dilutes_nothing() -> None:
    ledger = LLMUsage({"writer": "ada"})
    ended(ledger, energy=None)
    (writer,) = ledger.figures()
    assert math.isnan(writer["energy_j"]) and math.isnan(writer["energy_per_token_j"])
    ended(ledger, tokens=5, energy=joules(10.0))
    (writer,) = ledger.figures()
    assert (writer["energy_per_request_j"], writer["energy_per_token_j"], writer["charged_requests"]) == (10.0, 2.0, 1)
    assert math.isnan(writer["carbon_g"])


def test_refused_requests_take_nothing_and_strangers_have_no_owner() -> None:
    ledger = LLMUsage({"writer": "ada"})
    refused = RequestRecord("writer", "", "", 1.0, math.nan, 1.1, Outcome.OVERLOADED, 0.0, 0.0, 0, None)
    ledger.request(refused)
    ledger.request(refused._replace(service=""))
    (writer,) = ledger.figures()
    assert (writer["requests"], writer["failed"], writer["completion_tokens"]) == (1, 1, 0)
