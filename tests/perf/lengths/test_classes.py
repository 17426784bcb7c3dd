import csv

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.perf.lengths.classes import LengthClasses, fit_classes, judge, rounded_class
from tests.data_folder import data_folder


def test_classes_are_half_open_and_from_the_models_own_quantiles() -> None:
    classes = LengthClasses(np.array([42.0, 141.0, 294.0, 503.0]))
    assert classes.classify([0, 41, 42, 140, 141, 502, 503, 9999]).tolist() == [0, 0, 1, 1, 2, 3, 4, 4]
    assert LengthClasses.of(range(101)).cuts.tolist() == [25.0, 50.0, 75.0, 99.0]


def test_published_thresholds_are_reproduced() -> None:
    folder = data_folder("muserve")
    table = pq.read_table(folder / "alpaca_eval_lengths.parquet").to_pydict()
    models, tokens = np.array(table["model"]), np.array(table["out_tokens"], float)
    with (folder / "alpaca_eval_class_thresholds.csv").open() as handle:
        for row in csv.DictReader(handle):
            cuts = LengthClasses.of(tokens[models == row["model"]]).cuts
            assert cuts == pytest.approx([float(row[p]) for p in ("p25", "p50", "p75", "p99")], abs=0.01)


def test_the_released_predictor_is_as_good_as_it_was_measured_to_be() -> None:
    table = pq.read_table(data_folder("muserve") / "lmsys_vicuna13b_predictions.parquet").to_pydict()
    tokens, scores = np.array(table["output_tokens"], float), np.array(table["pred_cls5"], float)
    quality = judge(scores[:6000], tokens[:6000], LengthClasses(np.array([42.0, 141.0, 294.0, 503.0])))
    assert quality.accuracy == pytest.approx(0.600, abs=0.02)
    assert quality.macro_f1 == pytest.approx(0.511, abs=0.04)
    assert quality.kendall_tau == pytest.approx(0.636, abs=0.02)
    assert quality.pairwise == pytest.approx(0.778, abs=0.01)
    assert (quality.l1, quality.mse) == (pytest.approx(0.482, abs=0.03), pytest.approx(0.674, abs=0.05))
    calibration = fit_classes(scores, tokens)
    means = calibration.mean([0, 1, 2, 3])
    assert means == pytest.approx([36, 121, 228, 314], rel=0.03)
    assert bool(np.all(calibration.upper([0, 1, 2, 3]) > means))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=40))
def test_kendall_and_pairs_agree_with_the_definition(rows: list[tuple[int, int]]) -> None:
    s, t = np.array([row[0] for row in rows], float), np.array([row[1] for row in rows], float)
    quality = judge(s, t, LengthClasses.of(t))
    from scipy import stats  # takes most of a second, and each worker would

    expected = stats.kendalltau(s, t).statistic if len(set(s)) > 1 and len(set(t)) > 1 else 0.0
    assert quality.kendall_tau == pytest.approx(expected, abs=1e-12)
    pairs = [(i, j) for i in range(len(s)) for j in range(i) if t[i] != t[j]]
    good = sum(0.5 if s[i] == s[j] else float((s[i] > s[j]) == (t[i] > t[j])) for i, j in pairs)
    assert quality.pairwise == pytest.approx(good / len(pairs) if pairs else 0.5)


@given(st.lists(st.tuples(st.floats(0, 4), st.floats(1, 1000)), min_size=1, max_size=80))
def test_calibrated_lengths_never_fall_as_the_score_rises(rows: list[tuple[float, float]]) -> None:
    calibration = fit_classes([row[0] for row in rows], [row[1] for row in rows])
    grid = np.linspace(-1, 5, 61)
    assert bool(np.all(np.diff(calibration.mean(grid)) >= -1e-9))
    assert bool(np.all(calibration.upper(grid) >= calibration.mean(grid) - 1e-9))


def test_a_perfect_predictor_is_perfect_and_scores_round_half_up() -> None:
    tokens = np.arange(1.0, 201.0)
    classes = LengthClasses.of(tokens)
    quality = judge(classes.classify(tokens) + tokens / 1e4, tokens, classes)
    assert (quality.accuracy, quality.macro_f1, quality.kendall_tau, quality.pairwise) == (1.0, 1.0, 1.0, 1.0)
    assert rounded_class([-3.0, 0.49, 0.5, 3.5, 9.0]).tolist() == [0, 0, 1, 4, 4]


def test_nothing_to_learn_from_is_an_error() -> None:
    with pytest.raises(DataError, match="at least one"):
        LengthClasses.of([])
    with pytest.raises(DataError, match="ascending"):
        LengthClasses(np.array([2.0, 1.0, 3.0, 4.0]))
    with pytest.raises(DataError, match="as many"):
        fit_classes([1.0], [])
    with pytest.raises(DataError, match="as many"):
        judge([], [], LengthClasses.of([1.0]))
