import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.policies.allocation import ClusterView, start_waiting
from joulery.policies.shifting import ShiftRule, normalised_power, shifting_factor
from joulery.policies.training import Green, green_paper

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
    policy = Green(mu=1.0, fixed_gpus=1, profile_cache=False)
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
    [{"mu": 0.5}, {"theta": 0.0}, {"theta": 1.5}, {"hysteresis": 0.0}, {"defer_ratio": -0.1}, {"node_gpus": 0}],
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


def test_in_a_dirty_hour_with_room_a_long_new_job_is_put_off_within_its_slack() -> None:
    policy = Green(defer_ratio=0.2)
    new = {"executed_s": np.zeros(3), "remaining_s": np.array([3e4, 3e4, 600.0]), "submit_s": np.array([0.0, 9e3, 9e3])}
    dirty = {"g_per_kwh": 300.0, "mean_g_per_kwh": 200.0}
    seen = view(1e4, [0, 0, 0], [float("nan")] * 3, **new, **dirty)
    step = policy.step(policy.initial(), seen)
    allocation = step.decisions[0].value
    assert sorted(allocation.run) == [0, 2], "the first has waited its 6000 s, the third has no slack to speak of"
    assert allocation.waiting == () and allocation.hold_longer_than_s == pytest.approx(9000.0)
    assert step.wake_s is None and "1 put off" in step.decisions[0].reason
    clean = policy.step(policy.initial(), view(1e4, [0, 0, 0], [float("nan")] * 3, **new))
    assert sorted(clean.decisions[0].value.run) == [0, 1, 2] and clean.decisions[0].value.hold_longer_than_s == np.inf
    full = policy.step(policy.initial(), view(1e4, [0, 0, 0], [float("nan")] * 3, **new, **dirty, gpus=3))
    assert sorted(full.decisions[0].value.run) == [0, 1, 2], "a full cluster has no hour to spare"
    never = Green().step(Green().initial(), seen).decisions[0].value
    assert sorted(never.run) == [0, 1, 2] and never.hold_longer_than_s == np.inf


def test_dirty_hours_ask_more_of_a_gpu_and_green_ones_less() -> None:
    policy = green_paper(gamma=0.9, carbon_gamma=0.05)
    for now, expected in ((100.0, 2), (300.0, 1)):
        state = policy.step(policy.initial(), view(0.0, [1], [1.0])).state
        step = policy.step(state, view(1800.0, [2], [0.87], g_per_kwh=now))
        assert step.decisions[0].value.run[0] == (3 if expected == 2 else 1)


@pytest.mark.parametrize(
    ("wanted", "gamma"), [(8, 0.8), (64, 0.8), (80, 0.875), (96, 0.95), (300, 0.95)], ids=lambda value: str(value)
)
def test_the_bar_for_one_more_gpu_rises_with_the_load(wanted: int, gamma: float) -> None:
    policy = Green(gamma=None, gamma_from=1.0, profile_cache=False, cap=64)
    crowd = view(0.0, [0] * wanted, [float("nan")] * wanted)
    state = policy.step(policy.initial(), crowd).state
    for degradation, grows in ((gamma + 0.01, True), (gamma - 0.01, False)):
        told = [degradation, *[float("nan")] * (wanted - 1)]
        step = policy.step(state, view(1800.0, [1] + [0] * (wanted - 1), told))
        assert step.state.jobs[0].upper == grows
