"""Lengths foretold: cache, predictor, mean; and what completions teach."""

import numpy as np
import pytest

from joulery.domain.generation import TextUsage
from joulery.perf.text_pace import OnlinePace
from joulery.runtime.text.forecast import LONGEST_REMEMBERED, Forecaster, Guess
from joulery.store.semantic_cache import SemanticCache
from tests.runtime.text.fakes import CLASS_TOKENS, FakeGuesser, ask, forecaster


class Meaning(FakeGuesser):
    """Prompts that begin alike mean the same."""

    def guess(self, prompt):
        return Guess(super().guess(prompt).score, np.array([float(ord(prompt[0])), 100.0]) if prompt else None)


def told(words):
    return TextUsage(5, words, reported=True)


def test_the_predictor_speaks_in_the_tokens_of_its_classes_and_the_client_has_the_last_word() -> None:
    asked = forecaster()
    assert asked.forecast(ask("p3")).tokens == CLASS_TOKENS[3]
    assert asked.forecast(ask("p3", most_tokens=20)).tokens == 20
    assert asked.forecast(ask("p3")).source == "predictor"
    assert asked.sources == {"predictor": 3}


def test_without_a_predictor_and_when_it_throws_or_says_nothing_a_request_is_an_average_one() -> None:
    plain = Forecaster("llm")
    assert (plain.forecast(ask()).tokens, plain.forecast(ask()).source) == (150.0, "mean")
    asked = forecaster()
    asked.guesser.guess = lambda prompt: Guess(float("nan"))
    assert asked.forecast(ask("p0")).source == "mean"
    assert asked.failures == {"ArithmeticError": 1}


def test_a_prompt_seen_before_has_the_length_it_had_and_one_that_means_the_same_too() -> None:
    asked = forecaster(Meaning(), SemanticCache(10))
    request = ask("abc 3")
    asked.completed(request, asked.forecast(request), told(77), 1.0)
    assert asked.forecast(ask("ABC 3")).tokens == 77
    same = asked.forecast(ask("another 0"))
    assert (same.tokens, same.source) == (77, "cache")
    assert asked.forecast(ask("\x00 different 0")).source == "predictor"
    assert Forecaster("other", Meaning(), asked.cache).forecast(request).source == "predictor"


def test_an_answer_cut_at_the_clients_limit_teaches_speed_and_that_it_was_at_least_so_long() -> None:
    asked = forecaster(Meaning(), SemanticCache(10))
    request = ask("abc 3", most_tokens=20)
    before = asked.pace.service_s(100)
    asked.completed(request, asked.forecast(request), told(20), 60.0)
    assert asked.pace.service_s(100) > before
    assert asked.forecast(ask("abc 3")).source == "predictor"
    assert asked.forecast(ask("abc 3")).tokens == CLASS_TOKENS[3]
    longer = ask("abc 3", most_tokens=900)
    asked.completed(longer, asked.forecast(longer), told(900), 60.0)
    assert asked.forecast(ask("abc 3")).tokens > CLASS_TOKENS[3]
    plain = Forecaster("llm")
    plain.completed(request, plain.forecast(request), told(20), 1.0)
    assert plain.forecast(ask()).tokens == 150.0
    plain.completed(longer, plain.forecast(longer), told(900), 1.0)
    assert plain.forecast(ask()).tokens == 165.0


def test_long_prompts_are_not_kept_and_failed_ones_leave_the_cache_as_it_is() -> None:
    asked = forecaster(Meaning(), SemanticCache(10))
    for prompt in ("x" * (LONGEST_REMEMBERED + 1), "boom"):
        request = ask(prompt)
        asked.completed(request, asked.forecast(request), told(9), 1.0)
    assert len(asked.cache) == 0
    request = ask("abc 3")
    asked.completed(request, asked.forecast(request), told(9), 1.0)
    assert asked.failures == {"ZeroDivisionError": 1}


def test_a_cache_that_cannot_be_used_is_counted() -> None:
    asked = forecaster(Meaning(), SemanticCache(10))
    request = ask("abc 3")
    asked.completed(request, asked.forecast(request), told(9), 1.0)
    asked.guesser.guess = lambda prompt: Guess(2.0, np.ones(7))
    other = ask("zzz")
    expected = asked.forecast(other)
    assert expected.source == "predictor"
    asked.completed(other, expected, told(9), 1.0)
    assert sum(asked.failures.values()) == 1
    assert asked.forecast(ask("yyy")).source == "predictor"


def test_completions_move_what_a_class_means_and_the_order_stays() -> None:
    asked = forecaster()
    for _ in range(300):
        request = ask("p3")
        asked.completed(request, asked.forecast(request), told(900), 2.0)
    moved = [asked.forecast(ask(f"p{digit}")).tokens for digit in range(5)]
    assert moved[3] == pytest.approx(900, rel=0.1)
    assert moved == sorted(moved)
    assert moved[0] == CLASS_TOKENS[0]


def test_the_pace_is_learned_from_completions() -> None:
    pace, random = OnlinePace(), np.random.default_rng(1)
    for tokens in random.integers(5, 500, 600):
        pace.completed(float(tokens), 0.5 + 0.1 * tokens)
    assert pace.per_token_s == pytest.approx(0.1, rel=0.05)
    assert pace.service_s(100.0) == pytest.approx(10.5, rel=0.05)
