"""Output-length predictions: cache, predictor, mean; and how completions update them."""

import numpy as np
import pytest

from joulery.domain.serving.generation import TokenUsage
from joulery.perf.lengths.pace import OnlinePace
from joulery.runtime.llm.length_prediction import LONGEST_REMEMBERED, Forecaster, LengthScore
from joulery.store.semantic_cache import SemanticCache
from tests.runtime.llm.fakes import CLASS_TOKENS, FakePredictor, ask, forecaster


class Meaning(FakePredictor):
    """Prompts that begin alike mean the same."""

    def predict(self, prompt):
        return LengthScore(super().predict(prompt).score, np.array([float(ord(prompt[0])), 100.0]) if prompt else None)


def usage(words):
    return TokenUsage(5, words, reported=True)


def test_the_predictor_speaks_in_the_tokens_of_its_classes_and_the_client_has_the_last_word() -> None:
    asked = forecaster()
    assert asked.forecast(ask("p3")).tokens == CLASS_TOKENS[3]
    short = asked.forecast(ask("p3", max_tokens=20))
    assert short.tokens == pytest.approx(20, rel=0.05) and short.tokens < 20
    assert short.unlimited_tokens == CLASS_TOKENS[3]
    assert asked.forecast(ask("p3")).source == "predictor"
    assert asked.sources == {"predictor": 3}


def test_a_limit_that_cuts_everybody_leaves_the_order_as_it_is() -> None:
    asked = forecaster()
    under = [asked.forecast(ask(f"p{digit}", max_tokens=60)).service_s for digit in range(5)]
    assert under == sorted(set(under))
    assert asked.forecast(ask("p4", max_tokens=8)).service_s < under[0]


def test_a_long_prompt_takes_time_to_read() -> None:
    asked = forecaster()
    for words, prompt in ((40, "w" * 40 + "3"), (40, "w" * 20_000 + "3")):
        for _ in range(300):
            request = ask(prompt, max_tokens=1000)
            asked.completed(request, asked.forecast(request), usage(words), 0.1 + len(prompt) / 4000 + words * 0.01)
    short, long = asked.forecast(ask("x1", max_tokens=1000)), asked.forecast(ask("w" * 20_000 + "1", max_tokens=4))
    assert long.tokens < short.tokens
    assert long.service_s > short.service_s
    assert long.service_s == pytest.approx(5.1, rel=0.1)


def test_without_a_predictor_and_when_it_throws_or_says_nothing_a_request_is_an_average_one() -> None:
    plain = Forecaster("llm")
    assert (plain.forecast(ask()).tokens, plain.forecast(ask()).source) == (150.0, "mean")
    asked = forecaster()
    asked.predictor.predict = lambda prompt: LengthScore(float("nan"))
    assert asked.forecast(ask("p0")).source == "mean"
    assert asked.failures == {"ArithmeticError": 1}


def test_a_prompt_seen_before_has_the_length_it_had_and_one_that_means_the_same_too() -> None:
    asked = forecaster(Meaning(), SemanticCache(10))
    request = ask("abc 3")
    asked.completed(request, asked.forecast(request), usage(77), 1.0)
    assert asked.forecast(ask("ABC 3")).tokens == 77
    same = asked.forecast(ask("another 0"))
    assert (same.tokens, same.source) == (77, "cache")
    assert asked.forecast(ask("\x00 different 0")).source == "predictor"
    assert Forecaster("other", Meaning(), asked.cache).forecast(request).source == "predictor"


def test_an_answer_cut_at_the_clients_limit_teaches_speed_and_that_it_was_at_least_so_long() -> None:
    asked = forecaster(Meaning(), SemanticCache(10))
    request = ask("abc 3", max_tokens=20)
    before = asked.pace.service_s(100)
    asked.completed(request, asked.forecast(request), usage(20), 60.0)
    assert asked.pace.service_s(100) > before
    # What the limit hid is not known: the same prompt is expected to be longer than the limit, others as before.
    assert asked.forecast(ask("abc 3")).tokens == 20 + CLASS_TOKENS[3]
    assert asked.forecast(request).tokens == 20
    assert asked.forecast(ask("\x00 3")).tokens == CLASS_TOKENS[3]
    longer = ask("abd 3", max_tokens=900)
    asked.completed(longer, asked.forecast(longer), usage(900), 60.0)
    assert asked.forecast(ask("\x00 3")).tokens > CLASS_TOKENS[3]
    plain = Forecaster("llm")
    plain.completed(request, plain.forecast(request), usage(20), 1.0)
    assert plain.forecast(ask()).tokens == 150.0
    plain.completed(longer, plain.forecast(longer), usage(900), 1.0)
    assert plain.forecast(ask()).tokens == pytest.approx(150.0 + 0.02 * 900)


def test_a_length_that_is_known_is_not_forgotten_for_an_answer_that_was_cut() -> None:
    asked = forecaster(Meaning(), SemanticCache(10))
    whole, cut = ask("abc 3"), ask("abc 3", max_tokens=20)
    asked.completed(whole, asked.forecast(whole), usage(77), 1.0)
    asked.completed(cut, asked.forecast(cut), usage(20), 1.0)
    assert asked.forecast(whole).tokens == 77
    longer = ask("abc 3", max_tokens=100)
    asked.completed(longer, asked.forecast(longer), usage(100), 1.0)
    assert asked.forecast(whole).tokens == 177


def test_long_prompts_are_not_kept_and_failed_ones_leave_the_cache_as_it_is() -> None:
    asked = forecaster(Meaning(), SemanticCache(10))
    for prompt in ("x" * (LONGEST_REMEMBERED + 1), "boom"):
        request = ask(prompt)
        asked.completed(request, asked.forecast(request), usage(9), 1.0)
    assert len(asked.cache) == 0
    request = ask("abc 3")
    asked.completed(request, asked.forecast(request), usage(9), 1.0)
    assert asked.failures == {"ZeroDivisionError": 1}


def test_a_cache_that_cannot_be_used_is_counted() -> None:
    asked = forecaster(Meaning(), SemanticCache(10))
    request = ask("abc 3")
    asked.completed(request, asked.forecast(request), usage(9), 1.0)
    asked.predictor.predict = lambda prompt: LengthScore(2.0, np.ones(7))
    other = ask("zzz")
    expected = asked.forecast(other)
    assert expected.source == "predictor"
    asked.completed(other, expected, usage(9), 1.0)
    assert sum(asked.failures.values()) == 1
    assert asked.forecast(ask("yyy")).source == "predictor"


def test_completions_move_what_a_class_means_and_the_order_stays() -> None:
    asked = forecaster()
    for _ in range(300):
        request = ask("p3")
        asked.completed(request, asked.forecast(request), usage(900), 2.0)
    moved = [asked.forecast(ask(f"another {digit}")).tokens for digit in range(5)]
    assert moved[3] == pytest.approx(900, rel=0.1)
    assert moved == sorted(moved)
    assert moved[0] == CLASS_TOKENS[0]


def test_prompts_of_a_form_that_was_answered_shortly_are_expected_to_be_so_again() -> None:
    asked = forecaster()
    form = "Reply with the sentiment of this review alone: the {} was fine 3"
    for thing in ("tea", "boat", "film"):
        request = ask(form.format(thing))
        asked.completed(request, asked.forecast(request), usage(4), 0.1)
    next_one, other = asked.forecast(ask(form.format("walk"))), asked.forecast(ask("Tell a story of a walk 3"))
    assert next_one.tokens < 40
    assert other.tokens > 200
    cut = ask(form.format("walk"), max_tokens=1)
    asked.completed(cut, asked.forecast(cut), usage(1), 0.1)  # that it was longer than one is no news
    assert asked.forecast(ask(form.format("song"))).tokens == pytest.approx(next_one.tokens, rel=0.2)
    asked.predictor.predict = lambda prompt: LengthScore(float("nan"))
    assert asked.forecast(ask(form.format("walk"))).source == "mean"


def test_the_pace_is_learned_from_completions() -> None:
    pace, random = OnlinePace(), np.random.default_rng(1)
    for tokens in random.integers(5, 500, 600):
        pace.completed(float(tokens), 0.5 + 0.1 * tokens)
    assert pace.per_token_s == pytest.approx(0.1, rel=0.05)
    assert pace.service_s(100.0) == pytest.approx(10.5, rel=0.05)


def test_a_predictor_is_loaded_before_the_first_request_and_a_damaged_one_is_shown_by_that() -> None:
    asked = []

    class Lazy(FakePredictor):
        def predict(self, prompt):
            asked.append(prompt)
            if len(asked) == 1:
                raise ZeroDivisionError("it is damaged")
            return super().predict(prompt)

    made = forecaster(Lazy())
    made.load()
    assert len(asked) == 1 and not made.failures and not made.sources, "no request was forecast"
    assert made.forecast(ask("tell me 3")).source == "predictor"
    Forecaster("llm").load()
