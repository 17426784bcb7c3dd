"""The order of service that observed lengths call for: by submission if they are alike, by service if they vary."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.policies.training.green import Green, green_paper
from joulery.policies.training.service_order import first_come, length_scv
from tests.policies.training.test_green import view

lengths = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=50)


@given(lengths)
def test_of_ended_jobs_it_is_variance_over_squared_mean(ended: list[float]) -> None:
    assert length_scv(ended) == pytest.approx(np.var(ended) / np.mean(ended) ** 2, abs=1e-9)


@given(lengths, lengths, st.floats(1e-3, 1e3))
def test_the_unit_of_time_and_the_order_do_not_matter(ended: list[float], running: list[float], unit: float) -> None:
    scv = length_scv(ended, running)
    assert length_scv([one * unit for one in ended[::-1]], [one * unit for one in running[::-1]]) == pytest.approx(
        scv, rel=1e-6, abs=1e-9
    )
    assert scv >= 0


@given(lengths)
def test_jobs_that_have_had_less_than_any_that_ended_say_nothing(ended: list[float]) -> None:
    least = min(ended) * 0.5
    assert length_scv(ended, [least] * 7) == pytest.approx(length_scv(ended), abs=1e-9)


def test_long_jobs_that_still_run_count_with_what_they_have_had() -> None:
    # Product limit by hand: 1 with mass 1/2 (two of four end there), 9 with the rest.
    assert length_scv([1.0, 1.0], [9.0, 9.0]) == pytest.approx(41.0 / 25.0 - 1.0)
    assert length_scv([1.0, 1.0]) == 0.0


@pytest.mark.parametrize("odd", [math.nan, math.inf, 0.0, -3.0])
def test_lengths_that_are_none_do_not_count(odd: float) -> None:
    assert math.isnan(length_scv([odd]))
    assert length_scv([odd, 2.0, 2.0], [odd]) == 0.0
    assert length_scv([1e308, 1e308]) == 0.0


def test_one_standard_error_is_evidence_and_it_holds_until_lengths_vary_more_than_exponentially() -> None:
    assert first_come(0.0, 1, before=False) and not first_come(0.01, 1, before=False)
    assert first_come(0.9, 100, before=False) and not first_come(0.91, 100, before=False)
    assert first_come(1.0, 100, before=True) and not first_come(1.01, 100, before=True)
    assert not first_come(math.nan, 0, before=True)


alike = st.tuples(st.integers(2, 30), st.integers(1, 8), st.integers(0, 2**32 - 1))


@given(alike)
def test_among_jobs_of_equal_length_nothing_stops_and_the_first_go_first(case: tuple[int, int, int]) -> None:
    n, gpus, seed = case
    rng = np.random.default_rng(seed)
    running = np.zeros(n, int)
    running[rng.permutation(n)[:gpus]] = 1
    policy = Green()
    seen = view(
        1e6, running.tolist(), [1.0] * n, gpus=gpus, footprint_kg=rng.uniform(0, 9, n), gpu_w=rng.uniform(50, 300, n),
        attained_gpu_s=rng.uniform(0, 3600, n), ended_gpu_s=np.full(40, 3600.0), max_gpus=np.ones(n, int),
    )  # fmt: skip
    step = policy.step(policy.initial(), seen)
    allocation = step.decisions[0].value
    kept = np.flatnonzero(running).tolist()
    free = gpus - len(kept)
    waits = np.flatnonzero(running == 0).tolist()
    assert list(allocation.run) == kept + waits[:free]
    assert [job for job, _ in allocation.waiting] == waits[free:]
    assert "in order of submission" in step.decisions[0].reason
    again = policy.recall(policy.remember(step.state))
    assert again == step.state and again.first_come


@given(alike)
def test_when_lengths_vary_the_decision_is_that_of_the_order_by_service(case: tuple[int, int, int]) -> None:
    n, gpus, seed = case
    rng = np.random.default_rng(seed)
    seen = view(
        1e6, (rng.random(n) < 0.3).astype(int).tolist(), [1.0] * n, gpus=gpus, footprint_kg=rng.uniform(0, 9, n),
        attained_gpu_s=rng.uniform(1, 10, n), ended_gpu_s=np.array([1.0] * 30 + [1e4] * 2),
    )  # fmt: skip
    observed, service = (
        policy.step(policy.initial(), seen).decisions[0] for policy in (Green(), Green(order="service"))
    )
    assert observed.value == service.value and observed.reason == service.reason


def test_nothing_known_is_by_service_and_as_published_always() -> None:
    columns = {"footprint_kg": np.array([9.0, 1.0]), "gpus": 1, "max_gpus": np.ones(2, int)}
    known = {**columns, "ended_gpu_s": np.full(99, 3600.0)}

    def first(policy: Green, **seen: object) -> list[int]:
        settled = policy.step(policy.initial(), view(0.0, [1, 1], [1.0, 1.0], max_gpus=np.ones(2, int))).state
        return list(policy.step(settled, view(1e6, [0, 0], [math.nan] * 2, **seen)).decisions[0].value.run)

    bare = {"oldest_share": 0.0, "ageing_s": None, "mu": 1.0, "ceiling_gpu_s": None, "levels": None}
    assert first(Green(**bare), **columns) == [1], "no lengths are known"
    assert first(Green(**bare), **known) == [0]
    assert first(Green(**bare, order="first-come"), **columns) == [0]
    assert first(Green(**bare, order="service"), **known) == [1]
    assert first(green_paper(mu=1.0), **known) == [1]


def test_a_job_that_fits_nowhere_blocks_narrower_ones_after_three_rounds() -> None:
    policy = Green(order="first-come", cap=4, oldest_share=0.0)
    state = policy.initial()
    for turn in range(5):
        seen = view(
            1e6, [2, 0, 0], [1.0, math.nan, math.nan], gpus=4, min_gpus=np.array([2, 4, 1]),
            max_gpus=np.array([2, 4, 1]), requested=np.array([2, 4, 1]),
        )  # fmt: skip
        step = policy.step(state, seen)
        state = step.state
        assert list(step.decisions[0].value.run) == ([0, 2] if turn < 3 else [0])


def test_a_wide_job_takes_gpus_from_younger_ones_once_it_is_the_oldest() -> None:
    policy, widths = Green(order="first-come", cap=4), np.array([2, 4, 1])
    state = policy.initial()

    def runs(running: list[int], jobs: list[int]) -> list[int]:
        nonlocal state
        seen = view(
            1e5, running, [1.0 if n else math.nan for n in running], gpus=4, job=np.array(jobs),
            submit_s=np.array(jobs, float), min_gpus=widths[jobs], max_gpus=widths[jobs], requested=widths[jobs],
        )  # fmt: skip
        step = policy.step(state, seen)
        state = step.state
        assert "the oldest first on" in step.decisions[0].reason
        return list(step.decisions[0].value.run)

    assert all(runs([2, 0, 1], [0, 1, 2]) == [0, 2] for _ in range(6)), "no GPU idles for the wide job"
    assert runs([0, 1], [1, 2]) == [1]


def test_running_jobs_grow_only_while_none_waits() -> None:
    policy = Green(order="first-come", gamma=0.5, theta=1.0, cap=4)
    grown = policy.step(policy.initial(), view(1e6, [1], [1.0], gpus=2)).decisions[0].value
    crowded = policy.step(policy.initial(), view(1e6, [1, 0, 0], [1.0, math.nan, math.nan], gpus=2)).decisions[0].value
    assert grown.run == {0: 2}
    assert crowded.run == {0: 1, 1: 1}


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such order"):
        Green(order="shortest")  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=30), st.lists(st.integers(1, 6), max_size=30))
def test_unfinished_jobs_of_the_length_of_an_ended_one_are_still_at_risk_when_it_ends(
    ended: list[int], running: list[int]
) -> None:
    """The product limit as a textbook writes it: length by length, ends before withdrawals."""
    survival, moments = 1.0, [0.0, 0.0]
    for length in sorted({*ended, *running}):
        at_risk = sum(one >= length for one in (*ended, *running))
        falls = survival * ended.count(length) / at_risk
        if length == max((*ended, *running)):
            falls = survival
        survival -= falls
        moments = [moment + falls * length ** (at + 1) for at, moment in enumerate(moments)]
    assert length_scv(ended, running) == pytest.approx(max(0.0, moments[1] / moments[0] ** 2 - 1.0), abs=1e-9)
