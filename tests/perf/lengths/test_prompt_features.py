import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from joulery.perf.lengths import prompt_features as surface
from joulery.perf.lengths.prompt_features import FEATURES, READ_CHARACTERS, prompt_features


def of(prompt):
    return dict(zip(FEATURES, prompt_features(prompt).tolist(), strict=True))


def test_the_names_are_distinct():
    assert len(set(FEATURES)) == len(FEATURES)


@given(st.text(st.characters(), max_size=200))
@example("")
@example("\ud800 lone")
@example("\x00\n\n\t")
def test_any_string_has_finite_features(prompt):
    found = prompt_features(prompt)
    assert found.shape == (len(FEATURES),)
    assert bool(np.all(np.isfinite(found)))


def test_a_million_characters_are_read_at_both_ends_and_counted():
    long = "Write a poem. " + "x " * 500_000 + "Only code?"
    found = of(long)
    assert found["log_characters"] == pytest.approx(np.log1p(len(long)))
    assert found["topic poem"] == found["topic code"] == found["ends_with_question"] == 1.0
    assert found["log_words"] < np.log1p(READ_CHARACTERS)


SAID = st.sampled_from(surface._TOPICS).flatmap(lambda topic: st.from_regex(topic[1], fullmatch=True))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(SAID, st.sampled_from(["?", "(", "_", "7", "\n", "x", "é"])), max_size=20).map(" ".join))
@example("i wonder about " + "d" * 85 + " designer")
def test_topics_are_found_wherever_their_patterns_say(prompt):
    lower, found = prompt.lower(), of(prompt)
    for (name, _), pattern in zip(surface._TOPICS, surface._TOPIC_OF, strict=True):
        assert found[f"topic {name}"] == min(3, len(pattern.findall(lower))), name
        assert found[f"early {name}"] == (pattern.search(lower[:100]) is not None), name


@pytest.mark.parametrize(("name", "pattern"), surface._TOPICS)
def test_no_topic_is_passed_over(name, pattern):
    for alternative in re.sub(r"\([^()]*\)", "", pattern).split("|"):
        said = re.sub(r"\[(.)[^]]*\]|(.)\?|\\w[*+]?|\\(.)", r"\1\2\3", alternative)
        if re.fullmatch(pattern, said):
            assert of(f"so {said} now")[f"topic {name}"] >= 1, said


def test_what_is_asked_for():
    found = of("Give me five creative ideas in 200 words:\n- one thing\n2. two")
    assert found["asked_items"] == pytest.approx(np.log1p(5))
    assert found["asked_words"] == pytest.approx(np.log1p(200))
    assert found["opens with give"] == found["topic ideas"] + found["early ideas"] - found["topic ideas"] == 1.0
    assert found["numbered_lines"] == pytest.approx(np.log1p(2))
    assert found["count :"] == pytest.approx(np.log1p(1))
    assert found["log_lines"] == pytest.approx(np.log1p(3))


def test_words_count_whole():
    assert of("the classic recipes")["topic code"] == 0.0
    assert of("the class recipe")["topic code"] == 1.0
