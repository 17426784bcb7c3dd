"""Random streams: repeatable, independent, unmoved by what others draw."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.sim.core import streams as streams_module
from joulery.sim.core.streams import Streams

GOLDEN = [876, 7, 140, 539, 394]
NAMES = st.lists(st.text(max_size=8), min_size=1, max_size=3).map(tuple)


def test_docstring_example():
    assert doctest.testmod(streams_module) == (0, 4)


def test_numbers_of_a_name_are_fixed_for_ever():
    assert Streams(0)("arrivals").integers(0, 1000, 5).tolist() == GOLDEN
    assert Streams(1)("arrivals").integers(0, 1000, 5).tolist() != GOLDEN


@given(st.integers(0, 2**40), NAMES, NAMES)
def test_different_names_give_different_numbers(seed, one, other):
    streams = Streams(seed)
    same = bool(np.array_equal(streams(*one).random(4), streams(*other).random(4)))
    assert same == (one == other)


def test_names_are_parts_not_text():
    assert Streams(0)("a", "bc").random() != Streams(0)("ab", "c").random()


@given(st.integers(0, 50))
def test_what_one_source_draws_changes_nothing_for_another(draws):
    streams = Streams(3)
    arrivals, noise = streams("arrivals"), streams("noise")
    noise.random(draws)
    assert np.array_equal(arrivals.random(10), Streams(3)("arrivals").random(10))


def test_streams_of_neighbouring_seeds_and_names_are_uncorrelated():
    columns = [Streams(seed)("source", str(k)).standard_normal(4000) for seed in range(4) for k in range(4)]
    correlation = np.corrcoef(columns) - np.eye(16)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(4000)


def test_negative_seed_is_refused():
    with pytest.raises(ConfigError, match="seed"):
        Streams(-1)
