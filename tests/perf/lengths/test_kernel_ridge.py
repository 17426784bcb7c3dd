import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError, DataError
from joulery.perf.lengths.classes import judge, rounded_class
from joulery.perf.lengths.kernel_ridge import (
    AnswerLengths,
    LengthRecipe,
    best_cuts,
    fit_lengths,
    mean_quality,
    normal_scores,
    ordinal,
)

RANDOM = np.random.default_rng(4)
FEATURES = RANDOM.normal(size=(240, 6))
TRUE = FEATURES[:, 0] + 0.5 * np.sin(2 * FEATURES[:, 3])
TOKENS = np.exp(4 + 0.7 * TRUE[:, None] + 0.3 * RANDOM.normal(size=(240, 3))) * np.array([1.0, 3.0, 0.5])
ANSWERS = AnswerLengths(("a", "b", "c"), TOKENS[:180])


@cache
def model():
    return fit_lengths(FEATURES[:180], (4, 2), ANSWERS)


def scores(fitted, rows):
    return np.array([fitted.scores(row) for row in rows])


def test_it_orders_prompts_it_has_not_seen():
    found = scores(model(), FEATURES[180:])
    for head, name in enumerate("abc"):
        quality = judge(found[:, head], TOKENS[180:, head], model().classes(name))
        assert quality.pairwise > 0.72
        assert quality.accuracy > 0.35


def test_the_quality_left_out_is_that_of_new_prompts_not_of_the_fit():
    found = scores(model(), FEATURES[:180])
    fitted = mean_quality([judge(found[:, h], TOKENS[:180, h], model().classes(name)) for h, name in enumerate("abc")])
    assert 0.70 < model().left_out.pairwise < fitted.pairwise


def test_a_model_never_seen_gets_the_shared_head():
    assert [model().head(name) for name in ("a", "c", "new")] == [0, 2, 3]
    quality = judge(scores(model(), FEATURES[180:])[:, 3], TOKENS[180:, 1], model().classes("b"))
    assert quality.pairwise > 0.72


def test_heads_are_half_shared():
    own = fit_lengths(FEATURES[:180], (4, 2), ANSWERS, LengthRecipe(shared_ratio=0.0))
    shared = fit_lengths(FEATURES[:180], (4, 2), ANSWERS, LengthRecipe(shared_ratio=1.0))
    row = FEATURES[200]
    blend = (own.raw_scores(row) + shared.raw_scores(row)) / 2
    assert model().raw_scores(row) == pytest.approx(blend)
    assert shared.raw_scores(row)[0] == pytest.approx(shared.raw_scores(row)[3])
    assert own.raw_scores(row)[0] != pytest.approx(own.raw_scores(row)[3])


def test_an_answer_that_is_missing_is_not_zero():
    holes = TOKENS[:180].copy()
    holes[::3, 1] = np.nan
    with_holes = fit_lengths(FEATURES[:180], (6,), AnswerLengths(("a", "b", "c"), holes))
    assert with_holes.classes("b").cuts == pytest.approx(
        np.quantile(holes[~np.isnan(holes[:, 1]), 1], [0.25, 0.5, 0.75, 0.99])
    )
    assert judge(scores(with_holes, FEATURES[180:])[:, 1], TOKENS[180:, 1], with_holes.classes("b")).pairwise > 0.7


def test_lengths_become_normal_scores_within_each_model():
    tokens = np.array([[10.0, 7.0], [1e9, 7.0], [np.nan, 7.0], [30.0, 7.0], [20.0, 7.0]])
    found = normal_scores(tokens)
    eighth = 1.1503494  # of the normal distribution, above the middle
    assert found[:, 0] == pytest.approx([-eighth, eighth, np.nan, 0.3186394, -0.3186394], nan_ok=True)
    assert found[:, 1] == pytest.approx(np.zeros(5))
    assert normal_scores(np.array([[1.0], [1.0], [2.0]]))[:, 0] == pytest.approx([-0.4307273, -0.4307273, 0.9674216])


def test_one_endless_answer_changes_no_order():
    endless = TOKENS[:180].copy()
    longest = endless.argmax(0)
    endless[longest, range(3)] *= 1e9
    again = fit_lengths(FEATURES[:180], (4, 2), AnswerLengths(("a", "b", "c"), endless))
    assert again.raw_scores(FEATURES[200]) == pytest.approx(model().raw_scores(FEATURES[200]))


def test_the_same_data_give_the_same_model():
    again = fit_lengths(FEATURES[:180], (4, 2), ANSWERS)
    assert all(np.array_equal(again.arrays[name], model().arrays[name]) for name in model().arrays)


def test_constant_features_and_outliers_do_no_harm():
    rows = np.column_stack([FEATURES[:180], np.ones(180)])
    model = fit_lengths(rows, (7,), ANSWERS)
    assert bool(np.all(np.isfinite(model.scores(np.full(7, 1e12)))))


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=30),
    st.lists(st.floats(-3, 3), min_size=4, max_size=4).map(sorted),
)
def test_stretching_keeps_order_and_rounding_gives_the_class(values, cuts):
    ranked, edges = np.sort(np.array(values)), np.array(cuts)
    stretched = ordinal(ranked, edges)
    assert bool(np.all(np.diff(stretched) >= 0))
    assert rounded_class(stretched).tolist() == np.searchsorted(edges, ranked, "right").tolist()
    assert np.array_equal(stretched, ordinal(ranked, np.tile(edges, (len(ranked), 1))))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 4)), min_size=1, max_size=9))
def test_the_cuts_are_the_best_of_all(rows):
    values = np.array([value for value, _ in rows], float)
    classes = np.array([label for _, label in rows])
    cuts = best_cuts(values, classes)
    assert bool(np.all(np.diff(cuts) >= 0))
    mine = int(np.sum(np.searchsorted(cuts, values, "right") == classes))
    edges = np.unique(np.concatenate([values - 0.5, values + 0.5]))
    every = itertools.combinations_with_replacement(edges, 4)
    assert mine == max(int(np.sum(np.searchsorted(each, values, "right") == classes)) for each in every)


@pytest.mark.parametrize(
    ("features", "blocks", "tokens", "said"),
    [
        (FEATURES[:60], (5,), TOKENS[:60], "do not fit"),
        (FEATURES[:59], (6,), TOKENS[:60], "do not fit"),
        (FEATURES[:20], (6,), TOKENS[:20], "20 prompts are too few"),
        (np.full((60, 6), np.nan), (6,), TOKENS[:60], "not finite"),
        (FEATURES[:60], (6,), np.vstack([TOKENS[:59], np.full((1, 3), np.nan)]), "a prompt has no answer"),
        (FEATURES[:60], (6,), np.where(np.arange(180).reshape(60, 3) % 3 == 1, np.nan, TOKENS[:60]), "0 answers of"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(features, blocks, tokens, said):
    with pytest.raises(DataError, match=said):
        fit_lengths(features, blocks, AnswerLengths(("a", "b", "c"), tokens))


def test_bad_lengths_recipes_and_rows_are_refused():
    with pytest.raises(DataError, match="do not fit"):
        AnswerLengths(("a",), TOKENS)
    with pytest.raises(DataError, match="negative or infinite"):
        AnswerLengths(("a", "b", "c"), -TOKENS)
    with pytest.raises(DataError, match="expected 6 features"):
        model().scores(FEATURES[0, :5])
    with pytest.raises(DataError, match="no model was evaluated"):
        mean_quality([])
    for bad in ({"width": 0.0}, {"mean_ridge": 0.0}, {"head_ridge": -1.0}, {"shared_ratio": 1.5}, {"folds": 1}):
        with pytest.raises(ConfigError):
            LengthRecipe(**bad)
