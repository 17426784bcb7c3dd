"""Prompts of one form have answers of like length, and no prompt of any kind breaks that."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.perf.lengths.pace import OnlineLengths
from joulery.perf.lengths.prompt_templates import CAPACITY, TemplateLengths, prompt_template

PRIOR = np.array([10.0, 20.0, 40.0, 80.0, 160.0])
POEM, LABEL = (
    "Please write a poem of some length about {}.",
    "Reply with the sentiment of this review alone: {} was fine.",
)


def nearness(one: str, other: str) -> float:
    return float(prompt_template(one) @ prompt_template(other))


def test_prompts_of_one_template_are_near_and_others_are_not() -> None:
    assert nearness(POEM.format("owls"), POEM.format("the sea")) > 0.7
    assert nearness(POEM.format("owls"), LABEL.format("owls")) < 0.3
    assert nearness("Add 17 and 4.", "Add 99 and 1.") > 0.4
    assert nearness("WRITE IT", "write it") == pytest.approx(1.0)


@given(st.text(max_size=3000))
def test_every_text_has_a_form_of_unit_length_or_none(text) -> None:
    form = prompt_template(text)
    length = float(form @ form)
    assert length == pytest.approx(1.0, rel=1e-4) or length == 0.0


@pytest.mark.parametrize("prompt", ["", "\ud800", "\x00\xff", "x" * 1_000_000, "a b " * 300_000])
def test_prompts_of_any_kind_and_size_have_a_form(prompt) -> None:
    assert np.all(np.isfinite(prompt_template(prompt)))


def test_what_was_completed_of_a_form_corrects_the_next_of_it_and_no_other() -> None:
    forms, lengths = TemplateLengths(), OnlineLengths(PRIOR)
    poem, label = prompt_template(POEM.format("owls")), prompt_template(LABEL.format("tea"))
    assert forms.ratio(poem, lengths) == 1.0
    for thing in ("kites", "snow", "cats", "rust"):
        forms.completed(prompt_template(POEM.format(thing)), 2.0, 400.0)
    assert 5.0 < forms.ratio(poem, lengths) < 10.0
    assert forms.ratio(label, lengths) == 1.0
    assert forms.ratio(prompt_template(""), lengths) == 1.0


def test_one_completion_moves_what_is_expected_two_thirds_of_the_way() -> None:
    forms, lengths = TemplateLengths(), OnlineLengths(PRIOR)
    poem = prompt_template(POEM.format("owls"))
    forms.completed(poem, 2.0, 400.0)
    assert forms.ratio(poem, lengths) == pytest.approx((401.0 / 41.0) ** (2.0 / 3.0), rel=1e-4)


def test_a_correction_is_of_what_is_expected_now() -> None:
    forms, lengths = TemplateLengths(), OnlineLengths(PRIOR)
    poem = prompt_template(POEM.format("owls"))
    for _ in range(300):
        forms.completed(poem, 2.0, 400.0)
        lengths.completed(2.0, 400.0)
    # The score has come to mean that by itself: nothing is counted twice.
    assert lengths.expected(2.0) * forms.ratio(poem, lengths) == pytest.approx(400.0, rel=0.02)


def test_one_endless_answer_does_not_outweigh_all_and_the_oldest_are_forgotten() -> None:
    forms, lengths = TemplateLengths(), OnlineLengths(PRIOR)
    poem = prompt_template(POEM.format("owls"))
    forms.completed(poem, 0.0, 1e9)
    assert forms.ratio(poem, lengths) <= 16.0
    for _ in range(CAPACITY):
        forms.completed(poem, 0.0, 10.0)
    assert forms.ratio(poem, lengths) == pytest.approx(1.0)


def test_completions_that_are_none_are_refused() -> None:
    for score, tokens in ((float("nan"), 1.0), (1.0, -1.0), (1.0, float("inf"))):
        with pytest.raises(DataError):
            TemplateLengths().completed(prompt_template("x"), score, tokens)
