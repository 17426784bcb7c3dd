"""The physical form of a step."""

from dataclasses import replace

import numpy as np
import pytest

from joulery.perf.llm.roofline import DEFAULT_FACTORS, fit_factors, memory_limit, step_parts_s, step_times_s
from tests.perf.llm.made_up import FACTORS, point, runs


def test_parts_by_hand():
    weights_s, cache_s, arithmetic_s, overhead_s = step_parts_s(point(batch=10))
    assert weights_s == pytest.approx(8.2e9 * 2 / 3350e9)
    assert cache_s == pytest.approx(10 * 36 * 2 * 8 * 128 * 2 * (512 + 300) / 3350e9)
    assert arithmetic_s == pytest.approx(2 * 8.2e9 * 10 / 989.4e12)
    assert overhead_s == pytest.approx(36 * 6e-5)


def test_factors_of_a_made_up_engine_are_found():
    measured = runs()
    points = [run.point for run in measured]
    found = fit_factors(points, [run.token_time_s for run in measured])
    np.testing.assert_allclose(step_times_s(points, found), step_times_s(points, FACTORS), rtol=0.08)


def test_factors_are_never_negative_and_near_the_default_with_little_data():
    measured = runs()[:1]
    found = fit_factors([run.point for run in measured], [run.token_time_s / 3 for run in measured])
    assert min(found) >= 0
    assert found[2] == pytest.approx(DEFAULT_FACTORS[2], rel=0.2)


def test_memory_holds_what_the_weights_leave():
    small = point("Qwen/Qwen3-8B", batch=1)
    free = 0.9 * 80 * 2**30 - 8.2e9 * 2
    assert memory_limit(small) == pytest.approx(free / (36 * 2 * 8 * 128 * 2 * (512 + 300)))
    assert memory_limit(point("meta-llama/Llama-3.1-70B-Instruct", batch=1)) == 0
    assert memory_limit(replace(small, num_gpus=2)) > 2 * memory_limit(small)
