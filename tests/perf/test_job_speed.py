"""Speed of kinds of jobs by number and type of GPUs, learned from ended jobs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtrit

from joulery.perf.job_speed import (
    EndedRun,
    backtest,
    learned_speedups,
    measured_speedups,
    t95,
    type_ratios,
)


def runs(seconds: list[float], gpus: int = 1, kind: str = "ada/train", gpu_type: str = "a100") -> list[EndedRun]:
    return [EndedRun(kind, gpu_type, gpus, value, 1e5 * at, 1e5 * at + value) for at, value in enumerate(seconds)]


@pytest.mark.parametrize("freedom", [*range(1, 40), 100, 1000])
def test_students_t_is_that_of_the_tables(freedom: int) -> None:
    assert t95(freedom) == pytest.approx(float(stdtrit(freedom, 0.95)), rel=2e-3)


@given(
    st.floats(1.0, 1e6), st.floats(0.2, 8.0), st.integers(0, 10_000), st.integers(3, 12), st.integers(2, 8)
)  # fmt: skip
def test_a_speedup_is_the_ratio_of_geometric_means_and_its_interval_holds_it(
    work_s: float, speed: float, seed: int, count: int, gpus: int
) -> None:
    rng = np.random.default_rng(seed)
    alone, together = (work_s * np.exp(rng.normal(0.0, 0.02, count)) for _ in range(2))
    found = learned_speedups(runs(list(alone)) + runs(list(together / speed), gpus))
    ups = found["ada/train", "a100"]
    assert set(ups) == {1, gpus} and ups[1].ratio == 1.0 and ups[1].jobs == count
    expected = math.exp(np.log(alone).mean() - np.log(together / speed).mean())
    assert ups[gpus].ratio == pytest.approx(expected, rel=1e-9)
    assert ups[gpus].low <= ups[gpus].ratio <= ups[gpus].high and ups[gpus].jobs == 2 * count
    scaled = learned_speedups([run._replace(value=10 * run.value) for run in runs(list(alone))] + [
        run._replace(value=10 * run.value) for run in runs(list(together / speed), gpus)
    ])  # fmt: skip
    assert scaled["ada/train", "a100"][gpus].ratio == pytest.approx(expected, rel=1e-9), "no unit of time counts"


def test_nine_in_ten_intervals_hold_the_truth_and_unlike_jobs_teach_nothing() -> None:
    rng = np.random.default_rng(4)
    held = 0
    for _ in range(400):
        alone, together = (np.exp(rng.normal(8.0, 0.1, 6)) for _ in range(2))
        ratio = learned_speedups(runs(list(alone)) + runs(list(together / 1.8), 2))["ada/train", "a100"][2]
        held += ratio.low <= 1.8 <= ratio.high
    assert 0.86 <= held / 400 <= 0.94
    unlike = [60.0, 900.0, 40_000.0, 300.0]
    assert learned_speedups(runs(unlike) + runs(unlike, 2)) == {}
    assert learned_speedups(runs([100.0] * 3) + runs([50.0] * 2, 2)) == {}, "two are too few"
    assert learned_speedups(runs([100.0] * 3) + runs([50.0] * 3, 2, gpu_type="v100")) == {}, "types are kept apart"
    assert learned_speedups([]) == {}


def test_measured_speedups_compare_the_progress_of_one_job_with_itself() -> None:
    found = measured_speedups(
        [("a", {1: 0.01, 2: 0.019}), ("a", {1: 0.5, 2: 0.95, 4: 1.7}), ("a", {2: 1.0, 4: 1.9}), ("b", {4: 0.1}),
         ("c", {1: 0.0, 2: 0.1, 4: 0.15}), ("d", {})]
    )  # fmt: skip
    assert set(found) == {"a", "c"}
    assert found["a"][2].ratio == pytest.approx(1.9) and found["a"][2].jobs == 2 and found["a"][2].basis == "measured"
    assert found["a"][4].ratio == pytest.approx(3.4) and math.isnan(found["a"][4].low), "one job has no interval"
    assert set(found["c"]) == {2, 4} and found["c"][4].ratio == pytest.approx(1.5)


def test_types_are_compared_on_kinds_that_ran_on_both() -> None:
    rng = np.random.default_rng(0)
    seen: list[EndedRun] = []
    for at in range(5):
        base_s = 10.0 ** rng.uniform(3, 5)
        for gpu_type, speed in (("v100", 1.0), ("a100", 2.0 * math.exp(rng.normal(0, 0.05)))):
            seen += runs(list(base_s / speed * np.exp(rng.normal(0, 0.01, 4))), 2, f"k{at}", gpu_type)
    seen += runs([100.0] * 9, kind="alone", gpu_type="v100") + runs([5.0] * 9, kind="other", gpu_type="h100")
    found = type_ratios(seen)
    assert set(found) == {"v100", "a100"}, "no kind ran on an H100 and on another type"
    assert found["v100"].ratio == 1.0
    assert found["a100"].low < 2.0 < found["a100"].high and (found["a100"].kinds, found["a100"].jobs) == (5, 40)
    watts = type_ratios([run._replace(value=200.0 if run.gpu_type == "v100" else 300.0) for run in seen],
                        faster_is_more=False)  # fmt: skip
    assert watts["a100"].ratio == pytest.approx(1.5)
    assert type_ratios([]) == {} == type_ratios(runs([1.0] * 5, gpu_type=""))


def test_types_that_unlike_kinds_disagree_on_are_not_known() -> None:
    seen: list[EndedRun] = []
    for kind, speed in (("a", 1.0), ("b", 3.0), ("c", 9.0)):
        seen += runs([900.0] * 4, kind=kind, gpu_type="v100") + runs([900.0 / speed] * 4, kind=kind, gpu_type="a100")
    assert set(type_ratios(seen)) == {"a100"}, "the reference alone"


def test_the_back_test_counts_nine_in_ten_and_knows_no_future() -> None:
    rng = np.random.default_rng(2)
    alike = [run for kind in range(40) for run in runs(list(np.exp(rng.normal(9.0, 0.2, 30))), kind=f"k{kind}")]
    found = backtest(alike)
    assert found.checked == 40 * 27 and 0.87 <= found.inside / found.checked <= 0.93 and found.reliable
    drifting = runs([100.0 * 2.0**at for at in range(60)])
    assert not backtest(drifting).reliable, "each takes twice as long as the one before"
    overlapping = [run._replace(start_s=0.0) for run in alike]
    assert backtest(overlapping).checked == 0, "none had ended when another began"
    same = backtest(runs([100.0] * 50))
    assert (same.inside, same.checked) == (47, 47)
    assert backtest([]).reliable is None
