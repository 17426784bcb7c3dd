import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.policies.training.allocation import ClusterView, start_waiting
from joulery.policies.training.green import Green, green_paper
from joulery.policies.training.queues import TrackedJob
from joulery.policies.training.service_order import (
    ShiftRule,
    lesser_kg,
    normalised_power,
    oldest_first,
    shifting_factor,
)

powers = st.lists(st.floats(50, 400), min_size=1, max_size=20)


def view(now_s: float, running: list[int], degradation: list[float], **changes: object) -> ClusterView:
    n = len(running)
    base = ClusterView(
        now_s=now_s, gpus=64, g_per_kwh=100.0, mean_g_per_kwh=200.0, restart_s=120.0, job=np.arange(n),
        submit_s=np.arange(n, dtype=float), running=np.array(running), max_gpus=np.full(n, 8),
        requested=np.ones(n, np.int64), kind=np.arange(n), executed_s=np.full(n, 1800.0),
        attained_gpu_s=np.full(n, 1800.0), remaining_s=np.full(n, 2e4), footprint_kg=np.arange(n, dtype=float) + 1,
        degradation=np.array(degradation, float), gpu_w=np.full(n, 100.0),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@given(powers, st.floats(1, 3), st.sampled_from(list(ShiftRule)), st.floats(0, 500))
def test_the_factor_stays_within_the_strength_and_is_one_without_it(
    gpu_w: list[float], mu: float, rule: ShiftRule, now: float
) -> None:
    factor = shifting_factor(gpu_w, now, 250.0, mu, rule)
    assert bool(np.all((factor >= 1 / mu - 1e-12) & (factor <= mu + 1e-12)))
    assert bool(np.all(shifting_factor(gpu_w, now, 250.0, 1.0, rule) == 1.0))


@given(powers, st.floats(1.1, 3), st.floats(0, 500))
def test_mirrored_keeps_every_quadrants_direction_and_is_monotone(gpu_w: list[float], mu: float, now: float) -> None:
    power = np.sort(np.array(gpu_w))
    factor = shifting_factor(power, now, 250.0, mu, ShiftRule.MIRRORED)
    paper = shifting_factor(power, now, 250.0, mu, ShiftRule.PAPER)
    high, green = power >= np.median(power), now < 250.0
    assert factor[high] == pytest.approx(paper[high])
    assert bool(np.all((factor - 1.0) * (paper - 1.0) >= -1e-12))
    sign = -1 if green else 1
    for half in (high, ~high):
        assert bool(np.all(sign * np.diff(factor[half]) >= -1e-12))


def test_the_quadrants_by_hand() -> None:
    power = [100.0, 200.0, 300.0]
    assert normalised_power(power, 2.0).tolist() == [1.0, 1.5, 2.0]
    assert normalised_power([5.0, 5.0], 2.0).tolist() == [1.0, 1.0]
    dirty = shifting_factor(power, 300.0, 250.0, 2.0, ShiftRule.MIRRORED)
    green = shifting_factor(power, 200.0, 250.0, 2.0, ShiftRule.MIRRORED)
    assert dirty == pytest.approx([0.5, 1.5, 2.0])
    assert green == pytest.approx([2.0, 1 / 1.5, 0.5])
    assert shifting_factor(power, 300.0, 250.0, 2.0, ShiftRule.PAPER) == pytest.approx([1.0, 1.5, 2.0])
    assert shifting_factor(power, 200.0, 250.0, 2.0, ShiftRule.PAPER) == pytest.approx([1.0, 1 / 1.5, 0.5])


def test_a_job_grows_while_it_pays_and_rolls_back_when_it_does_not() -> None:
    policy, gpus = green_paper(gamma=0.9), []
    state = policy.initial()
    for degradation in (1.0, 0.95, 0.92, 0.80, 0.80):
        running = [gpus[-1]] if gpus else [1]
        step = policy.step(state, view(1800.0 * len(gpus), running, [degradation]))
        state = step.state
        gpus.append(step.decisions[0].value.run[0])
    assert gpus == [2, 3, 4, 3, 3]


def test_an_unmeasured_job_keeps_its_gpus() -> None:
    policy = green_paper(gamma=0.9)
    step = policy.step(policy.initial(), view(0.0, [1], [float("nan")]))
    assert step.decisions[0].value.run == {0: 1}


def test_growth_stops_before_the_end_and_long_jobs_get_a_lower_bar() -> None:
    policy = green_paper(gamma=0.9)
    nearly = policy.step(policy.initial(), view(0.0, [1], [1.0], remaining_s=np.array([200.0])))
    assert nearly.decisions[0].value.run == {0: 1}
    for remaining_s, expected in ((2e4, 1), (5e4, 3)):
        start = policy.step(policy.initial(), view(0.0, [1], [1.0], remaining_s=np.array([remaining_s])))
        later = policy.step(start.state, view(1800.0, [2], [0.87], remaining_s=np.array([remaining_s])))
        assert later.decisions[0].value.run == {0: expected}


def test_a_known_kind_starts_where_its_profile_says() -> None:
    policy = Green()
    state = policy.initial()
    for running, degradation in ((1, 1.0), (2, 0.95), (3, 0.7)):
        state = policy.step(state, view(0.0, [running], [degradation])).state
    step = policy.step(state, view(9e3, [2, 0], [0.95, float("nan")], kind=np.array([0, 0])))
    assert step.decisions[0].value.run == {0: 2, 1: 2}
    assert step.decisions[0].value.newcomer_gpus == {0: 2}


def test_the_upper_queue_keeps_to_its_share_but_no_gpu_is_left_idle() -> None:
    policy = green_paper(gamma=0.9, theta=0.25)
    crowded = view(0.0, [0] * 6, [float("nan")] * 6, gpus=4)
    step = policy.step(policy.initial(), crowded)
    assert sum(step.decisions[0].value.run.values()) == 4
    assert [job for job, _ in step.decisions[0].value.waiting] == [4, 5]


def test_least_footprint_first_and_hysteresis_for_those_that_run() -> None:
    policy = Green(mu=1.0, fixed_gpus=1, profile_cache=False, levels=None, hysteresis=0.5)
    state = policy.initial()
    start = policy.step(state, view(0.0, [1, 1, 1], [1.0] * 3))
    footprints = np.array([3.0, 2.0, 1.0])
    ranked = policy.step(start.state, view(1800.0, [0, 0, 0], [float("nan")] * 3, footprint_kg=footprints, gpus=1))
    assert list(ranked.decisions[0].value.run) == [2]
    held = policy.step(start.state, view(1800.0, [0, 1, 0], [float("nan")] * 3, footprint_kg=footprints, gpus=1))
    assert list(held.decisions[0].value.run) == [1] or footprints[1] * 0.5 == footprints[2]
    nearly = np.array([3.0, 1.9, 1.0])
    held = policy.step(start.state, view(1800.0, [0, 1, 0], [float("nan")] * 3, footprint_kg=nearly, gpus=1))
    assert list(held.decisions[0].value.run) == [1]


def test_a_starving_job_is_ranked_as_if_new() -> None:
    policy = Green(mu=1.0, fixed_gpus=1, profile_cache=False, starve_ratio=5.0)
    start = policy.step(policy.initial(), view(0.0, [1, 1], [1.0] * 2))
    waits = view(
        1e5, [1, 0], [float("nan")] * 2, gpus=1, footprint_kg=np.array([1.0, 9.0]), executed_s=np.array([9e4, 1800.0])
    )
    assert list(policy.step(start.state, waits).decisions[0].value.run) == [1]


def ranked(policy: Green, running: list[int] | None = None, g_per_kwh: float = 100.0, **columns: object) -> list[int]:
    """Jobs of the lower queue at 1e6 s, first to run first, on a cluster of one GPU; one entry of a column each."""
    arrays = {name: np.asarray(column, np.float64) for name, column in columns.items()}
    n = len(arrays["submit_s"])
    arrays.setdefault("remaining_s", np.full(n, np.nan))
    policy = dataclasses.replace(policy, fixed_gpus=1, profile_cache=False)
    settled = policy.step(policy.initial(), view(0.0, [1] * n, [1.0] * n)).state
    seen = view(1e6, running or [0] * n, [float("nan")] * n, gpus=1, g_per_kwh=g_per_kwh, **arrays)
    allocation = policy.step(settled, seen).decisions[0].value
    return [*allocation.run, *(job for job, _ in allocation.waiting)]


def test_beyond_the_ceiling_submission_decides_and_below_it_the_footprint() -> None:
    columns = {
        "footprint_kg": [9.0, 6.0, 3.0, 2.0],
        "attained_gpu_s": [9e3, 6e3, 3e3, 2e3],
        "submit_s": [0.0, 1.0, 2.0, 3.0],
    }
    bounded = Green(mu=1.0, ceiling_gpu_s=5e3, levels=None, ageing_s=None)
    assert ranked(bounded, **columns) == [3, 2, 0, 1]
    assert ranked(dataclasses.replace(bounded, ceiling_gpu_s=None), **columns) == [3, 2, 1, 0]
    assert ranked(dataclasses.replace(bounded, ceiling_gpu_s=2.5e3), **columns) == [3, 0, 1, 2]


def test_the_ceiling_is_the_footprint_of_the_average_jobs_service() -> None:
    # 20 g in 10,000 s on average, so 5,000 s of service are 10 g: the second has had less service, and more carbon.
    columns = {"footprint_kg": [0.008, 0.012], "attained_gpu_s": [7e3, 3e3], "submit_s": [1.0, 0.0]}
    policy = Green(mu=1.0, ageing_s=None, progress_after_s=None)
    assert ranked(dataclasses.replace(policy, ceiling_gpu_s=5e3), **columns) == [0, 1]
    assert ranked(dataclasses.replace(policy, ceiling_gpu_s=3e3), **columns) == [1, 0]


def test_below_the_ceiling_footprints_count_in_quarters() -> None:
    # 1 g a second: levels begin at 8,000, 2,000 and 500 s; below, everybody is equal.
    policy = Green(mu=1.0, ceiling_gpu_s=8e3, levels=2, ageing_s=None)

    def order(*attained_s: float) -> list[int]:
        return ranked(
            policy, footprint_kg=attained_s, attained_gpu_s=attained_s, submit_s=np.arange(len(attained_s), dtype=float)
        )

    assert order(7.9e3, 2e3) == [0, 1], "one level: who came first"
    assert order(2e3, 1.9e3) == [1, 0]
    assert order(9e4, 8e3) == [0, 1]
    assert order(8e3, 7.9e3) == [1, 0]
    assert order(499.0, 1.0) == [0, 1] and order(499.0, 0.0) == [0, 1], "under the lowest edge all are equal"
    assert order(1.9e3, 499.0) == [0, 1], "and as good as the lowest level"
    three = dataclasses.replace(policy, levels=3)
    assert ranked(three, footprint_kg=[1.9e3, 499.0], attained_gpu_s=[1.9e3, 499.0], submit_s=[0.0, 1.0]) == [1, 0]


@pytest.mark.parametrize(("waits_s", "first"), [(7e3, 0), (2e3, 0), (1.9e3, 1), (0.9e3, 1)])
def test_a_running_job_gives_way_to_none_less_than_two_levels_below(waits_s: float, first: int) -> None:
    policy = Green(mu=1.0, ceiling_gpu_s=8e3, levels=4, ageing_s=None)
    columns = {"footprint_kg": [8e3, waits_s], "attained_gpu_s": [8e3, waits_s], "submit_s": [0.0, 1.0]}
    assert ranked(policy, [1, 0], **columns)[0] == first


def test_without_emissions_submission_decides() -> None:
    nothing = {"footprint_kg": [0.0, 0.0, 0.0], "attained_gpu_s": [9e4, 1e3, 4e4], "submit_s": [2.0, 1.0, 0.0]}
    assert ranked(Green(mu=1.0), **nothing) == [2, 1, 0]


def test_the_hour_still_decides_among_those_at_the_ceiling() -> None:
    columns = {
        "footprint_kg": [9.0, 9.0],
        "attained_gpu_s": [9e3, 9e3],
        "gpu_w": [100.0, 300.0],
        "submit_s": [0.0, 1.0],
    }
    assert ranked(Green(ceiling_gpu_s=5e3), **columns) == [1, 0], "a green hour: the high-power job first"
    assert ranked(Green(ceiling_gpu_s=5e3, mu=1.0), **columns) == [0, 1]


def test_age_counts_only_from_its_bound_on() -> None:
    columns = {"footprint_kg": [8.0, 5.0], "attained_gpu_s": [9e3, 9e3]}
    policy = Green(mu=1.0, ceiling_gpu_s=None, ageing_s=1e5)
    assert policy.levels is not None, "levels lie below a ceiling: none without"
    assert ranked(policy, submit_s=[9.0e5, 9.5e5], **columns) == [1, 0], "both younger than the bound"
    assert ranked(policy, submit_s=[8.5e5, 9.5e5], **columns) == [1, 0], "8 / 1.5 > 5"
    assert ranked(policy, submit_s=[8.3e5, 9.5e5], **columns) == [0, 1], "8 / 1.7 < 5"
    assert ranked(dataclasses.replace(policy, ageing_s=None), submit_s=[1.0, 9.5e5], **columns) == [1, 0]


def test_a_newcomer_waits_before_it_preempts_and_goes_first_among_those_that_wait() -> None:
    policy = Green(mu=1.0, hysteresis=1.0, preempt_after_s=1800.0, ageing_s=None, levels=None)
    columns = {"footprint_kg": [9.0, 0.0, 5.0], "executed_s": [1e6, 0.0, 0.0]}
    assert ranked(policy, [1, 0, 0], submit_s=[0.0, 1e6 - 1799.0, 1e6 - 1799.0], **columns) == [0, 1, 2]
    assert ranked(policy, [1, 0, 0], submit_s=[0.0, 1e6 - 1800.0, 1e6 - 1799.0], **columns) == [1, 0, 2]
    assert ranked(dataclasses.replace(policy, preempt_after_s=0.0), [1, 0, 0], submit_s=[0.0, 1e6, 1e6], **columns) == [
        1,
        2,
        0,
    ]


service = st.lists(st.tuples(st.floats(1.0, 5e5), st.floats(0.0, 3e6), st.floats(0.05, 1.0)), min_size=2, max_size=12)


@given(service, st.floats(100.0, 300.0), st.floats(0.0, 400.0))
def test_a_job_that_goes_before_an_old_one_has_had_little(
    jobs: list[tuple[float, float, float]], high_w: float, now: float
) -> None:
    """The starvation bound, the oldest share aside: a younger job ahead of a job of age A counts for no more than
    mu^2 ceilings times four days / A; and what a job counts for is more than a quarter of its footprint, up to the
    ceiling."""
    attained_s, age_s, rate = (np.array(column) for column in zip(*jobs, strict=True))
    footprint = attained_s * rate
    policy, n, ageing_s = Green(hysteresis=1.0), len(jobs), 4 * 86_400.0
    order = ranked(
        policy, submit_s=1e6 - age_s, attained_gpu_s=attained_s, executed_s=np.zeros(n), g_per_kwh=now,
        footprint_kg=footprint, gpu_w=np.linspace(100.0, high_w, n),
    )  # fmt: skip
    ceiling = policy.ceiling_gpu_s * footprint.sum() / attained_s.sum()  # type: ignore[operator]
    patient = age_s < policy.preempt_after_s
    for at, job in enumerate(order):
        for ahead in order[:at]:
            if age_s[ahead] < min(ageing_s, age_s[job]) and patient[ahead] == patient[job]:
                counted = max(min(footprint[ahead], ceiling) / 4, ceiling / 64)
                assert counted <= policy.mu**2 * ceiling * ageing_s / max(ageing_s, age_s[job]) * (1 + 1e-9)


old = st.lists(
    st.tuples(st.floats(0.0, 9e5), st.sampled_from([1.0, 4.0, 16.0]), st.floats(0.0, 9e5), st.integers(0, 4)),
    min_size=1,
    max_size=14,
)


@given(old, st.integers(0, 16))
def test_the_oldest_share_goes_to_the_oldest_that_fit(jobs: list[tuple[float, float, float, int]], gpus: int) -> None:
    age_s, counted, submit_s, wants = (np.array(column) for column in zip(*jobs, strict=True))
    chosen = list(oldest_first(age_s, counted, submit_s, wants.tolist(), gpus))
    assert sum(wants[chosen]) <= gpus and all(wants[at] > 0 for at in chosen)
    order = [(-age_s[at], counted[at], submit_s[at]) for at in chosen]
    assert order == sorted(order)
    for at in set(range(len(jobs))) - set(chosen):
        before = [
            one
            for one in chosen
            if (-age_s[one], counted[one], submit_s[one]) <= (-age_s[at], counted[at], submit_s[at])
        ]
        assert wants[at] == 0 or wants[at] > gpus - sum(wants[before]), "passed over for those before it alone"


def running_jobs(policy: Green, running: list[int] | None = None, gpus: int = 4, **columns: object) -> list[int]:
    """Who runs, first to run first, of settled jobs of one GPU each, at 1e6 s."""
    arrays = {name: np.asarray(column, np.float64) for name, column in columns.items()}
    n = len(arrays["submit_s"])
    state = dataclasses.replace(policy.initial(), jobs={job: TrackedJob(upper=False, gpus=1) for job in range(n)})
    arrays["footprint_kg"] = arrays["attained_gpu_s"]
    seen = view(1e6, running or [0] * n, [float("nan")] * n, gpus=gpus, **arrays)
    return list(policy.step(state, seen).decisions[0].value.run)


def test_a_quarter_of_the_gpus_goes_to_the_oldest_whatever_they_have_had() -> None:
    columns = {"submit_s": [9e5, 8.9e5, 9.4e5, 9.5e5, 9.6e5], "attained_gpu_s": [9e4, 8e4, 30.0, 20.0, 10.0]}
    assert running_jobs(Green(mu=1.0), **columns) == [1, 2, 3, 4]
    assert running_jobs(Green(mu=1.0, oldest_share=0.5), **columns) == [1, 0, 2, 3]
    assert running_jobs(Green(mu=1.0, oldest_share=0.0), **columns) == [2, 3, 4, 0], "one is left to the longest"
    assert running_jobs(Green(mu=1.0), gpus=3, **columns) == [2, 3, 4], "less than one GPU is none"
    assert running_jobs(green_paper(mu=1.0), **columns) == [4, 3, 2, 1]


def test_beyond_three_days_all_are_equally_old_and_who_had_least_goes_first() -> None:
    day_s, policy = 86_400.0, Green(mu=1.0, ageing_s=None)
    columns = {"attained_gpu_s": [9e4, 1e3, 1.0, 1.0, 1.0], "executed_s": np.zeros(5)}

    def first(older_d: float, younger_d: float, policy: Green = policy) -> int:
        submit_s = [1e6 - older_d * day_s, 1e6 - younger_d * day_s, 9.9e5, 9.9e5, 9.9e5]
        return running_jobs(policy, submit_s=submit_s, **columns)[0]

    assert first(2.9, 2.8) == 0 and first(3.2, 3.1) == 1
    assert first(3.2, 3.1, dataclasses.replace(policy, oldest_age_s=1e6)) == 0
    same = {"attained_gpu_s": [9e4] * 4, "submit_s": [5e5, 4e5, 6e5, 7e5]}
    assert running_jobs(policy, gpus=4, **same)[0] == 1, "of those who had as much who came first"


def test_a_newcomer_has_no_oldest_share_before_it_may_preempt() -> None:
    columns = {"submit_s": [1e6 - 900.0, 1e6 - 600.0], "attained_gpu_s": [1.0, 9e4], "executed_s": [0.0, 600.0]}
    policy = Green(mu=1.0, oldest_share=1.0)
    assert running_jobs(policy, [0, 1], gpus=1, **columns) == [1]
    assert running_jobs(dataclasses.replace(policy, preempt_after_s=0.0), [0, 1], gpus=1, **columns) == [0]


def test_a_job_that_has_little_left_goes_before_one_that_has_had_less() -> None:
    # 1 g a second; levels begin at 8,000, 2,000, 500 and 125 s.
    policy = Green(mu=1.0, ceiling_gpu_s=8e3, ageing_s=None)
    had = {"footprint_kg": [8e3, 1e3, 9e4], "attained_gpu_s": [8e3, 1e3, 9e4], "submit_s": [1.0, 0.0, 2.0]}

    def order(left_s: float, executed_s: float = 8e3, policy: Green = policy) -> list[int]:
        executed = [executed_s, 1e3, 9e4]
        return ranked(policy, **had, executed_s=executed, remaining_s=[left_s, np.nan, 9e4])

    assert order(400.0) == [0, 1, 2] and order(1.9e3) == [0, 1, 2], "a quarter of 1,900 s is one level below"
    assert order(2.1e3) == [1, 0, 2], "of one level who came first"
    assert order(np.nan) == [1, 2, 0] and order(400.0, executed_s=1799.0) == [1, 2, 0], "too early to tell"
    assert order(400.0, executed_s=1800.0) == [0, 1, 2]
    assert order(400.0, policy=dataclasses.replace(policy, progress_after_s=None)) == [1, 0, 2]
    assert order(400.0, policy=dataclasses.replace(policy, las=True)) == [0, 1, 2]


def test_jobs_that_never_had_a_gpu_go_by_submission() -> None:
    nothing = {"footprint_kg": [0.0, 0.0], "attained_gpu_s": [0.0, 0.0], "submit_s": [1.0, 0.0]}
    assert ranked(Green(mu=1.0), **nothing, executed_s=[0.0, 0.0]) == [1, 0]
    assert ranked(Green(mu=1.0), **nothing, executed_s=[2e3, 2e3], remaining_s=[1e3, 2e3]) == [1, 0]


def test_of_those_that_count_most_the_one_with_most_left_goes_first() -> None:
    policy = Green(mu=1.0, ceiling_gpu_s=1e3, ageing_s=None)
    had = {"footprint_kg": [9e3, 9e3, 8e3], "attained_gpu_s": [9e3, 9e3, 8e3], "submit_s": [0.0, 1.0, 2.0]}
    ran = {"executed_s": [9e3, 9e3, 8e3]}
    assert ranked(policy, **had, **ran, remaining_s=[5e4, 7e4, 6e4]) == [1, 2, 0]
    assert ranked(policy, **had, **ran, remaining_s=[np.nan, 8.5e3, 9.5e3]) == [2, 0, 1], (
        "untold: as much as it has had"
    )
    assert ranked(dataclasses.replace(policy, progress_after_s=None), **had, remaining_s=[5e4, 7e4, 6e4]) == [0, 1, 2]
    below = had | {"footprint_kg": [9e3, 30.0, 20.0], "attained_gpu_s": [9e3, 30.0, 20.0]}
    assert ranked(policy, **below, **ran, remaining_s=[5e4, 6e4, 7e4]) == [1, 2, 0], "below them in order of submission"


@given(
    st.lists(
        st.tuples(st.floats(1.0, 1e5), st.floats(0.0, 2.0), st.floats(0.0, 1e6), st.booleans()), min_size=1, max_size=9
    )
)
def test_progress_only_ever_lessens_what_counts(jobs: list[tuple[float, float, float, bool]]) -> None:
    attained_s, rate, left_s, reported = (np.array(column) for column in zip(*jobs, strict=True))
    footprint = attained_s * rate
    lesser = lesser_kg(footprint, attained_s, np.where(reported, left_s, np.nan), reported)
    assert np.all(lesser <= footprint) and np.all(lesser[~reported] == footprint[~reported])
    assert lesser[reported] == pytest.approx(np.minimum(footprint, rate * left_s / 4)[reported])


@pytest.mark.parametrize(
    ("others", "remaining_s", "regrow", "expected"),
    [(0, 2e4, True, 2), (63, 2e4, True, 1), (62, 2e4, True, 2), (0, 1e3, True, 1), (0, 2e4, False, 1)],
)
def test_a_job_that_started_narrow_in_a_crowd_widens_when_there_is_room_for_all(
    others: int, remaining_s: float, regrow: bool, expected: int
) -> None:
    policy = Green(regrow=regrow)
    state = policy.initial()
    for running, degradation in ((1, 1.0), (2, 0.93), (3, 0.7)):
        state = policy.step(state, view(0.0, [running], [degradation])).state
    crowd = np.zeros(101, np.int64)
    nothing = [float("nan")] * 101
    state = policy.step(state, view(7e3, [0] * 101, nothing, job=np.arange(300, 401), kind=crowd - 1)).state
    narrow = policy.step(state, view(9e3, [0] * 101, nothing, job=np.arange(100, 201), kind=crowd))
    assert narrow.state.jobs[100].gpus == 1, "a newcomer of a kind that keeps 93 % on two, in a crowd"
    left = view(
        1e4, [1] * (others + 1), [1.0] * (others + 1), job=np.arange(100, 101 + others), kind=crowd[: others + 1],
        remaining_s=np.full(others + 1, remaining_s),
    )  # fmt: skip
    # A round looks at what was wanted in the one before: it is the second after the crowd that finds room.
    run = policy.step(policy.step(narrow.state, left).state, left).decisions[0].value.run
    assert run[100] == expected
    assert sum(run.values()) <= 64 and len(run) == others + 1, "no job is stopped for it"


def test_what_room_there_is_goes_to_the_longest_and_who_is_still_sized_goes_on_by_one() -> None:
    policy, same = Green(), np.zeros(3, np.int64)
    state = policy.initial()
    for running, degradation in ((1, 1.0), (2, 0.93), (3, 0.7)):
        sized = view(0.0, [running, 1], [degradation, float("nan")], kind=np.array([0, 0]))
        state = policy.step(state, sized).state
    assert state.jobs[0].gpus == 2 and state.jobs[1].upper and state.jobs[1].gpus == 1
    unmeasured = view(9e3, [2, 1], [0.93, float("nan")], kind=np.array([0, 0]))
    assert policy.step(state, unmeasured).decisions[0].value.run == {0: 2, 1: 1}
    narrow = {job: dataclasses.replace(state.jobs[0], gpus=1) for job in range(3)}
    crowd = dataclasses.replace(state, jobs=narrow)
    left = view(9e3, [1, 1, 1], [1.0] * 3, gpus=4, kind=same, remaining_s=np.array([2e4, 3e4, 1e4]))
    assert policy.step(crowd, left).decisions[0].value.run == {0: 1, 1: 2, 2: 1}


def test_power_limits_are_lifted_while_a_job_has_waited_too_long() -> None:
    policy = Green(lift_after_s=1e4)
    for now_s, lifted in ((11_799.0, False), (11_801.0, True)):
        seen = view(now_s, [1, 0], [1.0, float("nan")], submit_s=np.array([0.0, 0.0]))
        assert policy.step(policy.initial(), seen).decisions[0].value.full_power == lifted
        assert not Green().step(policy.initial(), seen).decisions[0].value.full_power


def test_a_wide_job_that_was_skipped_thrice_blocks_the_narrow_ones() -> None:
    policy = Green(mu=1.0, fixed_gpus=4, profile_cache=False)
    state = policy.initial()
    most, footprint_kg = np.array([4, 1, 1, 1]), np.array([2.0, 0.1, 0.2, 0.3])
    state = policy.step(state, view(0.0, [4, 1, 1, 1], [1.0] * 4, max_gpus=most)).state
    newcomers = [list(range(4)), *([0, *range(at, at + 3)] for at in range(4, 19, 3))]
    served = []
    for round_, jobs in enumerate(newcomers):
        full = view(
            1800.0 * round_, [0] * 4, [float("nan")] * 4, gpus=4, job=np.array(jobs), max_gpus=most,
            submit_s=np.array(jobs, float), footprint_kg=footprint_kg,
        )  # fmt: skip
        step = policy.step(state, full)
        state = step.state
        served.append(sorted(step.decisions[0].value.run))
    assert [len(run) for run in served[:4]] == [3, 3, 3, 1], "in the end only the upper queue's share still starts"


def test_passive_scheduling_backfills_in_order() -> None:
    assert start_waiting([(1, 2), (2, 4), (3, 1), (4, 1)], 3) == ([(1, 2), (3, 1)], [(2, 4), (4, 1)])
    assert start_waiting([(1, 2)], 0) == ([], [(1, 2)])


@pytest.mark.parametrize(
    "bad",
    [
        {"mu": 0.5},
        {"theta": 0.0},
        {"theta": 1.5},
        {"hysteresis": 0.0},
        {"delay_ratio": -0.1},
        {"node_gpus": 0},
        {"ceiling_gpu_s": 0.5},
        {"ceiling_gpu_s": 0.0},
        {"levels": 0},
        {"ageing_s": 0.0},
        {"lift_after_s": -1.0},
        {"ageing_s": -1.0},
        {"oldest_share": -0.1},
        {"oldest_share": 1.1},
        {"oldest_age_s": -1.0},
        {"progress_after_s": -1.0},
        {"preempt_after_s": -1.0},
    ],
)
def test_senseless_knobs_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Green(**bad)  # type: ignore[arg-type]


def test_beyond_one_node_a_job_grows_by_whole_nodes() -> None:
    policy, gpus = green_paper(gamma=0.9, node_gpus=2, cap=8), []
    state = policy.initial()
    for degradation in (1.0, 0.95, 0.92, 0.80, 0.80):
        running = [gpus[-1]] if gpus else [1]
        step = policy.step(state, view(1800.0 * len(gpus), running, [degradation]))
        state = step.state
        gpus.append(step.decisions[0].value.run[0])
    assert gpus == [2, 4, 6, 4, 4]
    learnt = Green(node_gpus=2, cap=8)
    state = learnt.initial()
    for running, degradation in ((1, 1.0), (2, 0.95), (4, 0.93), (6, 0.7)):
        state = learnt.step(state, view(0.0, [running], [degradation])).state
    assert learnt.step(state, view(9e3, [4], [0.93])).decisions[0].value.newcomer_gpus == {0: 4}


def test_dirty_hours_ask_more_of_a_gpu_and_green_ones_less() -> None:
    policy = green_paper(gamma=0.9, carbon_gamma=0.05)
    for now, expected in ((100.0, 2), (300.0, 1)):
        state = policy.step(policy.initial(), view(0.0, [1], [1.0])).state
        step = policy.step(state, view(1800.0, [2], [0.87], g_per_kwh=now))
        assert step.decisions[0].value.run[0] == (3 if expected == 2 else 1)


def test_an_hour_of_unknown_intensity_sets_no_limit_and_delays_no_job() -> None:
    unknown = {"g_per_kwh": 0.0, "mean_g_per_kwh": 0.0}
    policy = green_paper(gamma=0.9, carbon_gamma=0.05)
    for degradation, gpus in ((0.91, 3), (0.89, 1)):
        state = policy.step(policy.initial(), view(0.0, [1], [1.0])).state
        step = policy.step(state, view(1800.0, [2], [degradation], **unknown))
        assert step.decisions[0].value.run[0] == gpus, "the bar is gamma, neither more nor less"
        assert step.decisions[0].reason.startswith("no intensity; ")


@pytest.mark.parametrize(
    ("wanted", "gamma"), [(8, 0.8), (64, 0.8), (80, 0.875), (96, 0.95), (300, 0.95)], ids=lambda value: str(value)
)
def test_the_bar_for_one_more_gpu_rises_with_the_load(wanted: int, gamma: float) -> None:
    policy = Green(gamma_low=0.8, profile_cache=False, cap=64)
    crowd = view(0.0, [0] * wanted, [float("nan")] * wanted)
    state = policy.step(policy.initial(), crowd).state
    for degradation, grows in ((gamma + 0.01, True), (gamma - 0.01, False)):
        reported = [degradation, *[float("nan")] * (wanted - 1)]
        step = policy.step(state, view(1800.0, [1] + [0] * (wanted - 1), reported))
        assert step.state.jobs[0].upper == grows
