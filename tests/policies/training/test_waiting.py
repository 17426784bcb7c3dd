import dataclasses
import tracemalloc
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from joulery.policies.training.green import Green, green_paper
from joulery.policies.training.waiting import Reservations, decide_waiting, wants_to_wait
from tests.policies.training.test_green import view

DIRTY_NOW = np.array([300.0, 300.0, 100.0, 100.0, 300.0, 300.0, 300.0, 300.0])


def waiting_view(ahead: np.ndarray, work_h: list[float], slack_h: list[float], **changes: object):
    """Jobs that never ran, with so many hours of work and of slack beside it."""
    n = len(work_h)
    work_s = 3600.0 * np.array(work_h)
    base = view(0.0, [0] * n, [float("nan")] * n)
    return dataclasses.replace(
        base, **{
            "remaining_s": work_s, "deadline_s": work_s + 3600.0 * np.array(slack_h) + 240.0,
            "ahead_g_per_kwh": ahead, "expected_g_per_kwh": float(ahead[0]),
            "executed_s": np.zeros(n), "submit_s": np.zeros(n), **changes,
        }
    )  # fmt: skip


def latest(seen: object) -> np.ndarray:
    return seen.deadline_s - seen.remaining_s - 240.0  # type: ignore[attr-defined]


def test_a_job_waits_for_the_clean_hours_if_its_slack_reaches_them_and_they_are_worth_it() -> None:
    seen = waiting_view(DIRTY_NOW, [2.0] * 4, [3.0, 2.0, 0.4, np.inf])
    assert wants_to_wait(seen, [1] * 4, latest(seen), 0.1).tolist() == [True, True, False, False]
    assert not wants_to_wait(seen, [1] * 4, latest(seen), 2.0).any(), "a delay of that price is worth no gram"
    clean = waiting_view(DIRTY_NOW[2:], [2.0], [3.0])
    assert not wants_to_wait(clean, [1], latest(clean), 0.0).any(), "this hour is among the cleanest"
    unknown = dataclasses.replace(seen, ahead_g_per_kwh=None)
    assert not wants_to_wait(unknown, [1] * 4, latest(seen), 0.0).any()
    silent = dataclasses.replace(seen, remaining_s=np.full(4, np.nan))
    assert not decide_waiting(silent, [1] * 4, np.zeros(4, bool), np.ones(4, bool), 0.0).held


def test_a_running_job_stops_only_for_more_than_its_restart_costs() -> None:
    for next_hour, stops in ((290.0, False), (250.0, True)):
        ahead = np.array([300.0, next_hour, next_hour, 300.0])
        seen = waiting_view(ahead, [1.0], [2.0], running=np.array([1]), restart_s=240.0)
        assert wants_to_wait(seen, [1], latest(seen), 0.0).tolist() == [stops]


@given(
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_it_waits_exactly_if_no_best_choice_of_hours_runs_now(
    ahead: list[int], work_h: int, slack_h: int, ratio: float
) -> None:
    """Against every choice of hours: grams of the hours, and the price of each hour that the end comes later."""
    assume(len(ahead) >= work_h + slack_h)
    series = np.array(ahead, float)
    seen = waiting_view(series, [float(work_h)], [float(slack_h)])
    price = ratio * series.mean()
    costs = {
        chosen: sum(series[list(chosen)]) + price * (chosen[-1] + 1 - work_h)
        for chosen in combinations(range(work_h + slack_h), work_h)
    }
    best = min(costs.values())
    now = any(chosen[0] == 0 and cost <= best + 1e-9 for chosen, cost in costs.items())
    later = any(chosen[0] > 0 and cost <= best + 1e-9 for chosen, cost in costs.items())
    waits = bool(wants_to_wait(seen, [1], latest(seen), ratio)[0])
    assert waits in ({False} if not later else {True} if not now else {False, True})


def test_the_intensity_of_this_moment_decides_not_that_of_the_hour_from_now_on() -> None:
    """Late in a clean hour most of the next sixty minutes is dirty, and the rest of the clean hour is not wasted."""
    seen = waiting_view(np.array([400.0, 500.0, 100.0, 100.0]), [1.0], [2.0])
    late = dataclasses.replace(seen, expected_g_per_kwh=50.0)
    assert wants_to_wait(seen, [1], latest(seen), 0.0).all() and not wants_to_wait(late, [1], latest(late), 0.0).any()


def test_a_forecast_that_is_too_low_as_a_whole_makes_no_job_wait_for_ever() -> None:
    """It still says which hours are cleaner: the present hour counts as the forecast has it, not as it came."""
    flat = waiting_view(np.full(8, 100.0), [2.0], [5.0], g_per_kwh=400.0, mean_g_per_kwh=100.0)
    assert not wants_to_wait(flat, [1], latest(flat), 0.0).any()


def test_a_job_that_may_save_nothing_chooses_hours_that_follow_one_another() -> None:
    seen = waiting_view(np.array([100.0, 500.0, 500.0, 100.0, 200.0, 500.0]), [2.0] * 2, [4.0] * 2)
    states = dataclasses.replace(seen, remaining_s=np.array([7200.0, np.nan]), longest_s=np.full(2, 7200.0))
    assert wants_to_wait(states, [1] * 2, latest(seen), 0.0).tolist() == [False, True]


def test_reservations_count_every_hour_that_they_touch() -> None:
    book = Reservations(7200.0, 2)
    book.add(9000.0, 11000.0, 1)
    assert book.room() == 1
    book.add(0.0, 7300.0, 1)
    assert book.room() == 0
    assert book.fits(10800.0, 10900.0, 1) and not book.fits(10799.0, 10900.0, 1)
    assert book.fits(14400.0, 9e6, 2) and not book.fits(0.0, 9e6, 2)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300), st.integers(1, 3)), max_size=12))
def test_reservations_are_those_of_a_table_of_hours_however_far_ahead(asked: list[tuple[int, int, int]]) -> None:
    book, table = Reservations(0.0, 4), np.zeros(1000, np.int64)
    for begin, length, gpus in asked:
        free = bool(table[begin : begin + length].max() + gpus <= 4)
        assert book.fits(3600.0 * begin, 3600.0 * (begin + length), gpus) == free
        if free:
            book.add(3600.0 * begin, 3600.0 * (begin + length), gpus)
            table[begin : begin + length] += gpus
    assert book.room() == 4 - table.max()


def test_a_job_waits_only_while_its_gpus_can_be_reserved_and_runs_when_it_is_due() -> None:
    policy = Green(delay_ratio=0.0)
    seen = waiting_view(DIRTY_NOW, [2.0] * 3, [3.0] * 3, gpus=2)
    step = policy.step(policy.initial(), seen)
    allocation = step.decisions[0].value
    assert sorted(allocation.run) == [2] and allocation.waiting == (), "two wait, the third finds no reservation"
    assert "2 wait for a cleaner hour" in step.decisions[0].reason and step.wake_s is None
    assert [step.state.jobs[job].reserved for job in range(3)] == [True, True, False]
    due = dataclasses.replace(seen, now_s=2.6 * 3600.0, running=np.array([0, 0, 1]))
    after = policy.step(policy.recall(policy.remember(step.state)), due).decisions[0]
    assert sorted(after.value.run) == [0, 1] and "2 run for their deadline" in after.reason
    assert after.value.waiting == ((2, 1),)


def test_newcomers_wait_for_the_next_round_in_a_dirty_hour_as_far_as_gpus_can_be_reserved() -> None:
    policy = Green()
    seen = waiting_view(DIRTY_NOW, [2.0], [3.0])
    dirty = policy.step(policy.initial(), seen).decisions[0].value
    assert dirty.hold_slack_s == 3600.0 and dirty.hold_gpus == 63
    clean = policy.step(policy.initial(), waiting_view(DIRTY_NOW[2:], [2.0], [3.0])).decisions[0].value
    assert clean.hold_gpus == 0


def test_the_published_policy_and_one_without_a_price_ignore_deadlines() -> None:
    seen = waiting_view(DIRTY_NOW, [2.0] * 3, [3.0] * 3)
    for policy in (green_paper(), Green(delay_ratio=None)):
        allocation = policy.step(policy.initial(), seen).decisions[0].value
        assert sorted(allocation.run) == [0, 1, 2] and allocation.hold_gpus == 0


@pytest.mark.parametrize("fewest", [1, 2])
def test_a_due_job_keeps_its_gpus_where_it_is_surely_faster_on_them(fewest: int) -> None:
    policy = Green(delay_ratio=0.0)
    seen = waiting_view(DIRTY_NOW, [2.0], [3.0], min_gpus=np.array([fewest]))
    state = policy.step(policy.initial(), seen).state
    for degradation, gpus in ((0.9, 4), (0.3, fewest), (float("nan"), fewest)):
        due = dataclasses.replace(
            seen, now_s=4.5 * 3600.0, running=np.array([4]), degradation=np.array([degradation])
        )  # fmt: skip
        assert policy.step(state, due).decisions[0].value.run == {0: gpus}


def test_a_deadline_in_the_year_9999_takes_no_memory_for_the_hours_until_then() -> None:
    far = waiting_view(DIRTY_NOW, [2.0, 2.0], [7e7, 3.0])
    near = waiting_view(DIRTY_NOW, [2.0, 2.0], [2000.0, 3.0])
    tracemalloc.start()
    decided = decide_waiting(far, [1, 1], np.zeros(2, bool), np.ones(2, bool), 0.1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6
    assert decided == decide_waiting(near, [1, 1], np.zeros(2, bool), np.ones(2, bool), 0.1)
    assert decided.held == {0, 1}
