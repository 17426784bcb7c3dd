import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.perf.lengths.prompt_features import READ_CHARACTERS
from joulery.perf.lengths.word_vectors import WordVectors

VECTORS = np.array([[100, 0], [0, 50], [-128, 127]], np.int8)
WORDS = WordVectors("three words", ["tea", "moon", "a"], VECTORS)


@pytest.mark.parametrize(
    ("prompt", "numbers"),
    [
        ("", [0, 0]),
        ("zebra 42 ?!", [0, 0]),
        ("Tea", [100, 0]),
        ("TEA, moon!", [50, 25]),
        ("tea tea moon", [200 / 3, 50 / 3]),
        ("teas a", [-128, 127]),
        ("\ud800 tea\x00", [100, 0]),
    ],
)
def test_a_prompt_is_the_mean_of_the_words_that_are_known(prompt, numbers):
    assert WORDS(prompt) == pytest.approx(numbers)


@given(st.text())
def test_any_text_has_finite_numbers_within_those_of_the_words(prompt):
    found = WORDS(prompt)
    assert found.shape == (2,) and bool(np.all(np.isfinite(found)))
    assert bool(np.all(found <= VECTORS.max(0))) and bool(np.all(found >= np.minimum(VECTORS.min(0), 0)))


@given(st.lists(st.sampled_from(["tea", "moon", "a", "zebra"]), max_size=8), st.randoms())
def test_the_order_of_words_does_not_matter(words, draw):
    other = list(words)
    draw.shuffle(other)
    assert WORDS(" ".join(other)) == pytest.approx(WORDS(" ".join(words)))


def test_of_a_long_prompt_its_beginning_and_its_end_are_read():
    assert WORDS("x" * READ_CHARACTERS + " moon") == pytest.approx([0, 50])
    assert WORDS("tea " + "x" * READ_CHARACTERS) == pytest.approx([100, 0])
    assert WORDS("x" * READ_CHARACTERS + " moon " + "x" * READ_CHARACTERS) == pytest.approx([0, 0])


@pytest.mark.parametrize(
    ("words", "vectors"),
    [
        (["tea"], VECTORS),
        ([], VECTORS[:0]),
        (["tea", "moon", "tea"], VECTORS),
        (["tea", "moon", "a"], VECTORS.astype(np.float64)),
        (["tea", "moon", "a"], VECTORS[:, 0]),
    ],
)
def test_words_and_vectors_that_do_not_fit_are_refused(words, vectors):
    with pytest.raises(DataError):
        WordVectors("wrong", words, vectors)
