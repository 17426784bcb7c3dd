"""The process: closed forms against refits."""

import numpy as np
import pytest

from joulery.perf.llm.gaussian_process import GaussianProcess
from joulery.perf.llm.predictor import inputs_of
from joulery.perf.llm.shapes import SHAPES
from tests.perf.llm.made_up import runs

RUNS = runs()
VALUES = np.sin(np.arange(len(RUNS)))


@pytest.mark.parametrize("figure", SHAPES)
def test_leaving_out_in_closed_form_is_refitting_without(figure):
    out = np.array([3, 4, 17])
    points = [run.point for run in RUNS]
    whole = GaussianProcess(SHAPES[figure], inputs_of(points), VALUES)
    kept = [i for i in range(len(RUNS)) if i not in out]
    less = GaussianProcess(SHAPES[figure], inputs_of([points[i] for i in kept]), VALUES[kept])
    left = whole.left_out([out])
    again = less.predict(inputs_of([points[i] for i in out]))
    # The slopes turn about the mean of what is fitted, which moves a little: near, not equal.
    np.testing.assert_allclose(left.residual + VALUES[out], again.mean, atol=0.05)
    np.testing.assert_allclose(left.deviation, again.deviation, rtol=0.05)


def test_a_measured_point_is_met_and_the_deviation_grows_away_from_it():
    points = [run.point for run in RUNS]
    process = GaussianProcess(SHAPES["power"], inputs_of(points), VALUES)
    near, far, beyond = process.predict(inputs_of([points[1], points[1].at(22.0), points[1].at(4096.0)])).deviation
    assert near < far < beyond
    assert process.predict(inputs_of(points)).mean == pytest.approx(VALUES, abs=0.35)
