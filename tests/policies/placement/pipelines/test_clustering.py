import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.policies.placement.pipelines.partition import cluster_operators, segment_operators
from tests.data_folder import data_folder

scores = st.lists(st.floats(-0.1, 2.2), max_size=60)


@given(scores, st.floats(0.01, 3))
def test_clusters_cover_the_model_in_order_and_break_where_the_score_jumps(
    values: list[float], threshold: float
) -> None:
    clusters = cluster_operators(values, threshold)
    assert [i for cluster in clusters for i in cluster] == list(range(len(values)))
    assert all(clusters)
    for before, after in itertools.pairwise(clusters):
        assert abs(values[after[0]] - np.mean([values[i] for i in before])) >= threshold - 1e-9


def test_golden_clusters() -> None:
    for case in json.loads((data_folder("muserve") / "cases_alg1_clustering_examples.json").read_text()):
        assert cluster_operators(case["scores"], case["thres"]) == case["clusters"]


def test_the_worked_example_and_the_empty_model() -> None:
    assert cluster_operators([2, 0.1, 0.1, 2], 0.5) == [[0], [1, 2], [3]]
    assert cluster_operators([], 0.5) == []
    assert cluster_operators([0.0, 0.5], 0.5) == [[0], [1]]


def test_a_missing_score_is_never_zero() -> None:
    with pytest.raises(ConfigError, match="operator 1 has no sensitivity score"):
        cluster_operators([0.1, float("nan")], 0.5)
    with pytest.raises(ConfigError, match="positive"):
        cluster_operators([0.1], 0.0)


def cost(values: list[float], weights: list[float], cuts: list[float], segments: list[list[int]]) -> float:
    total = sum(cuts[segment[0] - 1] for segment in segments[1:])
    for segment in segments:
        v, w = np.array([values[i] for i in segment]), np.array([weights[i] for i in segment])
        total += float(np.sum(w * (v - np.average(v, weights=w)) ** 2))
    return total


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0.1, 5), st.floats(0, 1)), min_size=1, max_size=8))
def test_the_segmentation_is_the_best_of_all(rows: list[tuple[float, float, float]]) -> None:
    values, weights, cuts = [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows][:-1]
    found = segment_operators(values, weights, cuts)
    assert [i for segment in found for i in segment] == list(range(len(rows)))
    every = []
    for marks in itertools.product([False, True], repeat=len(cuts)):
        segments: list[list[int]] = [[0]]
        for i, mark in enumerate(marks, 1):
            segments.append([i]) if mark else segments[-1].append(i)
        every.append(cost(values, weights, cuts, segments))
    assert cost(values, weights, cuts, found) == pytest.approx(min(every), abs=1e-9)


def test_segmentation_refuses_what_does_not_fit() -> None:
    assert segment_operators([], [], []) == []
    with pytest.raises(ConfigError, match="do not fit"):
        segment_operators([1.0, 2.0], [1.0, 1.0], [])
    with pytest.raises(ConfigError, match="positive"):
        segment_operators([1.0], [0.0], [])
