"""Whole numbers by the number of GPUs: the same optimum as the solver's own branching, and a bound below it."""

import math
import random

import numpy as np
import pytest

from joulery.policies.placement.joint.gpu_counts import solve_at_once, solve_by_count
from joulery.policies.placement.master import SolveStatus, add_row, make_whole, new_model


def covering(seed, most=math.inf):
    """GPUs of several patterns that cover three demands; fractions of requests beside them."""
    rng = random.Random(seed)
    model, patterns = new_model(gap_ratio=1e-9), rng.randint(4, 9)
    rent = rng.choice([0.0, 5.0, 50.0])
    for _ in range(patterns):
        model.addCol(rent + rng.uniform(1, 4), 0.0, model.inf, 0, np.zeros(0, np.int32), np.zeros(0))
    model.addCol(1000.0, 0.0, most, 0, np.zeros(0, np.int32), np.zeros(0))
    for _ in range(3):
        row = [rng.choice([0.0, rng.uniform(0.2, 1.5)]) for _ in range(patterns)]
        add_row(model, rng.uniform(0.5, 6.0), math.inf, list(range(patterns + 1)), [*row, 1.0])
    make_whole(model, range(patterns))
    return model, range(patterns)


@pytest.mark.parametrize("seed", range(25))
def test_the_same_optimum_and_a_bound_below_it(seed):
    model, columns = covering(seed)
    once = solve_at_once(model)
    found = solve_by_count(covering(seed)[0], columns, 1e-9, 10_000)
    assert found.status is SolveStatus.OPTIMAL
    assert found.value == pytest.approx(once.value, rel=1e-7)
    assert found.proven <= found.value * (1 + 1e-9)
    assert found.proven >= found.value * (1 - 1e-6)
    counts = found.values[list(columns)]
    assert np.allclose(counts, np.rint(counts), atol=1e-6)


def test_a_gap_that_is_good_enough_still_bounds():
    for seed in range(10):
        model, columns = covering(seed)
        found, best = solve_by_count(model, columns, 0.05, 10_000), solve_at_once(covering(seed)[0]).value
        assert found.proven <= best * (1 + 1e-9)
        assert best * (1 - 1e-9) <= found.value <= best * 1.06


@pytest.mark.parametrize("seed", range(25))
def test_only_a_solution_better_than_the_one_known_is_sought(seed):
    best = solve_at_once(covering(seed)[0]).value
    model, columns = covering(seed)
    better = solve_by_count(model, columns, 1e-9, 10_000, beat=best * 1.01)
    assert better.status is SolveStatus.OPTIMAL
    assert better.value == pytest.approx(best, rel=1e-7)
    assert best * (1 - 1e-6) <= better.proven <= best * (1 + 1e-9)
    model, columns = covering(seed)
    none = solve_by_count(model, columns, 1e-9, 10_000, beat=best)
    assert none.status is not SolveStatus.OPEN
    assert min(none.value, best) == pytest.approx(best, rel=1e-7)
    assert best * (1 - 1e-6) <= none.proven <= best * (1 + 1e-9)


def test_patterns_left_out_at_one_number_of_gpus_are_back_at_the_next():
    for seed in range(25):
        model, columns = covering(seed)
        solve_by_count(model, columns, 1e-9, 10_000, beat=solve_at_once(covering(seed)[0]).value * 1.05)
        assert all(math.isinf(most) for most in model.getLp().col_upper_[: len(columns)])


def test_no_solution_is_said():
    model, columns = covering(3)
    add_row(model, -math.inf, -1.0, list(columns), [1.0] * len(columns))
    found = solve_by_count(model, columns, 1e-9, 100)
    assert (len(found.values), found.value, found.status) == (0, math.inf, SolveStatus.INFEASIBLE)
    assert math.isinf(solve_at_once(model).value)
