"""Plans for language models: against brute force, and the laws they obey."""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.gpu_types import gpu_facts
from joulery.domain.gpu.language_plan import TokenSlo
from joulery.perf.catalog.llm_runs import published_runs
from joulery.perf.llm.models import model_facts
from joulery.perf.llm.predictor import LlmPredictor
from joulery.policies.placement.language.candidates import ReplicaGroup, candidates, within
from joulery.policies.placement.language.master import SolvedShares
from joulery.policies.placement.language.search import plan_language
from joulery.policies.placement.language.task import LanguageGpu, LanguageRules, LanguageService, LanguageVariant

PREDICTOR = LlmPredictor(published_runs())
BIG, MIDDLE, SMALL = (
    LanguageVariant(model, "bfloat16", model_facts(model), quality, gpus)
    for model, quality, gpus in (
        ("meta-llama/Llama-3.1-70B-Instruct", 0.86, (2, 4)),
        ("Qwen/Qwen3-32B", 0.84, (1, 2)),
        ("meta-llama/Llama-3.1-8B-Instruct", 0.7, (1,)),
    )
)
H100 = LanguageGpu("H100", gpu_facts("H100"), 2.5, 120.0, None, None)
B200 = LanguageGpu("B200", gpu_facts("B200"), 5.5, 120.0, None, None)
RULES = LanguageRules("cost", 0.05, 256, 350.0, 1.2)
SLOS = (TokenSlo(1.0, 0.95), TokenSlo(0.05, 0.99))
CHAT = LanguageService("chat", 20.0, 512, 400, *SLOS, None, 0.0, (BIG, MIDDLE, SMALL), "lm-arena-chat")


@cache
def plans():
    """The plans made so far, by what was asked: frozen values, so that one answer serves every test."""
    return {}


def plan(*services, gpus=(H100, B200), rules=RULES):
    asked = repr((services or (CHAT,), gpus, rules))
    if asked not in plans():
        plans()[asked] = planned(*services, gpus=gpus, rules=rules)
    return plans()[asked]


def planned(*services, gpus=(H100, B200), rules=RULES):
    return plan_language(services or (CHAT,), gpus, PREDICTOR, rules, "test")


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["cost", "energy", "carbon"])
@pytest.mark.parametrize("quality", [0.0, 0.8, 0.85])
def test_the_bound_is_below_the_plan_and_near(objective, quality):
    made = plan(replace_service(minimum_quality_ratio=quality), rules=RULES._replace(objective=objective))
    assert made.bound.value <= made.objective_value * (1 + 1e-9)
    assert made.bound.gap_ratio <= 0.05
    assert sum(each.count * each.rate_rps for each in made.replicas) == pytest.approx(20.0)
    assert all(each.quality_ratio >= quality for each in made.replicas)
    for each in made.replicas:
        assert all(part.slack_ratio >= -1e-6 for part in each.parts)


def replace_service(**changes):
    return CHAT._replace(**changes)


def test_brute_force_finds_nothing_cheaper():
    """Counts of up to eight of the best replica of each group, in dollars: all of them."""
    made = plan(replace_service(minimum_quality_ratio=0.8, variants=(MIDDLE,)))
    groups = [
        candidates(ReplicaGroup(CHAT, MIDDLE, gpu, count), PREDICTOR, RULES)
        for gpu in (H100, B200)
        for count in MIDDLE.gpus
    ]
    best = [max(group, key=lambda each: each.rate_rps) for group in groups if isinstance(group, list)]
    costs = [
        sum(count * each.usd_per_hour for count, each in zip(counts, best, strict=True))
        for counts in product(range(9), repeat=len(best))
        if sum(count * each.rate_rps for count, each in zip(counts, best, strict=True)) >= 20.0
    ]
    assert made.usd_per_hour == pytest.approx(min(costs))
    assert made.bound.value == pytest.approx(min(costs))


def test_a_mixed_fleet_costs_no_more_than_one_type():
    service = replace_service(minimum_quality_ratio=0.8)
    mixed = plan(service).usd_per_hour
    assert mixed <= min(plan(service, gpus=(each,)).usd_per_hour for each in (H100, B200))


@pytest.mark.slow
def test_a_lower_quality_never_costs_more_and_a_tighter_slo_never_less():
    prices = [plan(replace_service(minimum_quality_ratio=q)).usd_per_hour for q in (0.85, 0.8, 0.0)]
    assert prices == sorted(prices, reverse=True)
    tight = plan(replace_service(itl=TokenSlo(0.035, 0.99), minimum_quality_ratio=0.8)).usd_per_hour
    assert tight >= prices[1]


def test_host_watts_count_and_grams_follow_from_watts():
    bare = tuple(gpu._replace(host_w=0.0) for gpu in (H100, B200))
    rules = RULES._replace(objective="energy")
    assert plan(gpus=bare, rules=rules).power_w < plan(rules=rules).power_w
    made = plan()
    assert made.carbon_g_per_hour == pytest.approx(made.power_w / 1e3 * 1.2 * 350)


def test_limits_of_the_pool_are_kept_and_two_services_share_it():
    code = CHAT._replace(name="code", rate_rps=5.0, minimum_quality_ratio=0.8)
    free = plan(code, replace_service(minimum_quality_ratio=0.8))
    limited = tuple(gpu._replace(available=limit) for gpu, limit in ((H100, 8), (B200, 3)))
    made = plan(code, replace_service(minimum_quality_ratio=0.8), gpus=limited)
    used = {name: sum(e.count * e.gpus for e in made.replicas if e.gpu == name) for name in ("H100", "B200")}
    assert used["H100"] <= 8
    assert used["B200"] <= 3
    assert made.usd_per_hour >= free.usd_per_hour
    assert {each.service for each in made.replicas} == {"chat", "code"}


def test_a_solver_out_of_time_leaves_replicas_of_one_kind_if_they_are_there(monkeypatch):
    monkeypatch.setattr("joulery.policies.placement.language.search.solve_replicas", lambda *_: SolvedShares((), 1.0))
    asked = replace_service(minimum_quality_ratio=0.8)
    made = planned(asked, gpus=(B200._replace(available=8),))
    assert sum(each.count * each.gpus for each in made.replicas) <= 8
    assert 0 < made.bound.gap_ratio < 1
    with pytest.raises(InfeasibleError, match="reached its limit"):
        planned(asked, gpus=(B200._replace(available=1),))


def test_too_few_gpus_say_which_and_what_would_do():
    with pytest.raises(InfeasibleError) as raised:
        plan(replace_service(minimum_quality_ratio=0.8), gpus=(B200._replace(available=2),))
    assert raised.value.binding == "fleet.gpus B200: available 2"
    assert raised.value.nearest["gpus"]["B200"] > 2


@pytest.mark.parametrize(
    ("changes", "binding"),
    [
        ({"itl": TokenSlo(0.001, 0.99)}, "chat: slo.itl"),
        ({"ttft": TokenSlo(0.01, 0.95)}, "chat: slo.ttft"),
        ({"answer_s": 0.1}, "chat: slo.answer"),
        ({"minimum_quality_ratio": 0.9}, "chat: minimum_quality"),
    ],
)
def test_an_slo_that_no_model_keeps_binds_and_the_nearest_is_named(changes, binding):
    with pytest.raises(InfeasibleError) as raised:
        plan(replace_service(**changes))
    assert raised.value.binding == binding
    assert raised.value.nearest
    assert raised.value.hint


def test_a_model_too_large_for_every_replica_is_said():
    huge = LanguageVariant("meta-llama/Llama-3.1-405B", "bfloat16", model_facts("meta-llama/Llama-3.1-405B"), 0.9, (1,))
    with pytest.raises(InfeasibleError, match="fits into the memory"):
        plan(replace_service(variants=(huge,)))


def test_carbon_without_an_intensity_is_refused():
    with pytest.raises(ConfigError, match="carbon intensity"):
        plan(rules=RULES._replace(objective="carbon", g_per_kwh=None))


def test_the_greatest_rate_is_where_the_slo_ends():
    for each in candidates(ReplicaGroup(CHAT, SMALL, H100, 1), PREDICTOR, RULES):
        assert within(CHAT, each.careful, 0.999 * each.rate_rps)
        full = each.rate_rps >= 0.99 * float(each.careful.ends_rps[-1])
        assert full or not within(CHAT, each.careful, 1.001 * each.rate_rps)


def test_a_margin_slows_what_slos_are_checked_on():
    kinds = [
        max(candidates(ReplicaGroup(CHAT, MIDDLE, B200, 1), PREDICTOR, rules), key=lambda each: each.rate_rps)
        for rules in (RULES, RULES._replace(margin_ratio=0.3), replace_margin(0.1))
    ]
    assert kinds[1].rate_rps < kinds[0].rate_rps
    assert kinds[2].margins == (pytest.approx(0.15), pytest.approx(0.15))
    assert replace(kinds[0], rate_rps=1.0).power_w(0.0) == kinds[0].curve.idle_w


def replace_margin(extra):
    return RULES._replace(extra_margin_ratio=extra)


def test_a_simulation_that_misses_an_slo_is_a_violation():
    made = plan_language((CHAT,), (H100, B200), PREDICTOR, RULES, "test", (), lambda served: (("itl", 0.06),))
    assert made.violations == made.replicas
    kept = plan_language((CHAT,), (H100, B200), PREDICTOR, RULES, "test", (), lambda served: (("itl", 0.04),))
    assert kept.violations == ()


LIMITED = tuple(gpu._replace(available=limit) for gpu, limit in ((H100, 8), (B200, 3)))


def prices_prove(proof):
    """The bound that a certificate's prices prove, worked out from the exported columns alone."""
    for each in proof.candidates:
        worth = each.rate_rps * (proof.demand_price[each.service] - each.per_rps)
        cost = each.fixed + each.gpus * proof.pool_price.get(each.gpu, 0.0)
        assert worth <= cost * (1 + 1e-9), each
    assert all(price >= 0 for price in proof.pool_price.values())
    demand = sum(price * proof.rates_rps[name] for name, price in proof.demand_price.items())
    return demand - sum(proof.pool_price[name] * most for name, most in proof.available.items())


def fractions(proof):
    """The relaxation over the exported columns by another solver."""
    many = len(proof.candidates)
    rows, low, high = [], [], []
    for name, rate in proof.rates_rps.items():
        rows.append([0.0] * many + [float(each.service == name) for each in proof.candidates])
        low.append(rate), high.append(rate)
    for at, each in enumerate(proof.candidates):
        row = [0.0] * (2 * many)
        row[at], row[many + at] = each.rate_rps, -1.0
        rows.append(row), low.append(0.0), high.append(math.inf)
    for name, most in proof.available.items():
        rows.append([float(each.gpus * (each.gpu == name)) for each in proof.candidates] + [0.0] * many)
        low.append(0.0), high.append(most)
    costs = [each.fixed for each in proof.candidates] + [each.per_rps for each in proof.candidates]
    return milp(costs, constraints=LinearConstraint(np.array(rows), low, high)).fun


@pytest.mark.parametrize("objective", ["cost", "energy"])
@pytest.mark.parametrize("gpus", [(H100, B200), LIMITED])
def test_prices_prove_the_bound_of_the_relaxation_again(objective, gpus):
    code = CHAT._replace(name="code", rate_rps=5.0, minimum_quality_ratio=0.8)
    made = plan(code, replace_service(minimum_quality_ratio=0.8), gpus=gpus, rules=RULES._replace(objective=objective))
    proof = made.certificate
    assert prices_prove(proof) == pytest.approx(proof.relaxed, rel=1e-9)
    assert proof.relaxed == pytest.approx(fractions(proof), rel=1e-6)
    assert proof.relaxed <= made.bound.value * (1 + 1e-6) <= made.objective_value * (1 + 2e-6)
    assert (max(proof.pool_price.values(), default=0.0) > 0) <= bool(proof.available)


def test_looser_limits_save_what_a_plan_with_them_saves_in_fractions():
    service = replace_service(minimum_quality_ratio=0.8)
    proof = plan(service).certificate
    looser = {each.what: each for each in proof.looser}
    assert looser["itl"].then == pytest.approx(0.055)
    wider = plan(service._replace(itl=TokenSlo(0.055, 0.99))).certificate
    assert 0 < looser["itl"].saves <= (proof.relaxed - wider.relaxed) * (1 + 1e-6)
    assert looser["quality"].model == "meta-llama/Llama-3.1-8B-Instruct"
    lower = plan(service._replace(minimum_quality_ratio=looser["quality"].then)).certificate
    assert looser["quality"].saves == pytest.approx(proof.relaxed - lower.relaxed, rel=1e-6)


def test_one_gpu_more_saves_no_more_than_its_price_says():
    service = replace_service(minimum_quality_ratio=0.8)
    rules = RULES._replace(objective="energy")
    some = plan(service, gpus=(H100, B200._replace(available=2)), rules=rules).certificate
    more = plan(service, gpus=(H100, B200._replace(available=3)), rules=rules).certificate
    assert some.pool_price["B200"] > 0
    assert 0 < some.relaxed - more.relaxed <= some.pool_price["B200"] * (1 + 1e-6)
