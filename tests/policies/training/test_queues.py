"""What restarts may take where old jobs stop younger ones: a share of what idles, and enough that none starves."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.policies.training.green import Green, GreenState
from joulery.policies.training.queues import LEAST_RESTART_SHARE, RestartBudget, _stopped
from tests.policies.training.test_green import view

WIDE = np.array([16, *(1,) * 16])


def crowded(now_s: float, running: list[int], restart_s: float = 120.0):
    """A job as wide as the cluster, and sixteen narrow ones, which came later; all have been there for a day."""
    return view(
        now_s, running, [1.0] * 17, gpus=16, min_gpus=WIDE, max_gpus=WIDE, requested=WIDE, restart_s=restart_s,
        submit_s=now_s - 86_400.0 + np.arange(17), footprint_kg=np.ones(17), attained_gpu_s=np.full(17, 1e4),
    )  # fmt: skip


def with_budget(policy: Green, gpu_s: float, seen_s: float) -> GreenState:
    return replace(policy.initial(), budget=RestartBudget(gpu_s, seen_s))


@pytest.mark.parametrize("restart_s", [120.0, 600.0, 3600.0])
@pytest.mark.parametrize("order", ["service", "first-come"])
def test_the_widest_job_of_a_full_cluster_runs_after_at_most_500_restarts(order, restart_s: float) -> None:
    policy, now_s = Green(order=order), 1e6
    state, rounds = with_budget(policy, 0.0, now_s), 0
    while True:
        step = policy.step(state, crowded(now_s, [0, *(1,) * 16], restart_s))
        state, run = step.state, step.decisions[0].value.run
        if 0 in run:
            break
        assert len(run) == 16, "until then none is stopped"
        rounds, now_s = rounds + 1, now_s + 1800.0
        assert rounds * 1800.0 <= restart_s / LEAST_RESTART_SHARE + 1800.0
    assert run == {0: 16} and rounds > 1
    assert state.budget.gpu_s < 16 * 1800.0 * LEAST_RESTART_SHARE + 1e-6, "it was spent"


def test_a_full_budget_is_there_at_first_and_what_idles_fills_it() -> None:
    policy = Green()
    first = policy.step(policy.initial(), crowded(1e6, [0, *(1,) * 16]))
    assert first.decisions[0].value.run == {0: 16} and first.state.budget.gpu_s == 16 * 1800.0 - 16 * 120.0
    idle = RestartBudget(0.0, 1e6).grown(crowded(1e6 + 1800.0, [0] * 17))
    assert idle == RestartBudget(0.1 * 16 * 1800.0, 1e6 + 1800.0)
    assert RestartBudget(0.0, 2e6).grown(crowded(1e6, [0] * 17)).gpu_s == 0.0, "a clock that was set back saves nothing"
    assert RestartBudget().grown(crowded(1e6, [0] * 17, 3600.0)).gpu_s == 16 * 3600.0, (
        "one stop can always be saved for"
    )


def test_it_is_remembered_and_older_notes_have_none() -> None:
    policy = Green()
    state = with_budget(policy, 12.5, 1e6)
    assert policy.recall(policy.remember(state)) == state
    assert policy.recall(policy.remember(policy.initial())).budget.gpu_s == math.inf
    older = {name: value for name, value in policy.remember(state).items() if name != "budget"}
    assert policy.recall(older).budget == RestartBudget() or math.isnan(policy.recall(older).budget.seen_s)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=12), st.integers(0, 40), st.integers(1, 40))
def test_as_few_gpus_stop_as_will_do(running: list[int], free: int, want: int) -> None:
    seen = view(
        1e6, [0, *running], [1.0] * (len(running) + 1), gpus=sum(running) + free,
        min_gpus=np.array([want, *running]),
    )  # fmt: skip
    rows = [*range(len(running) + 1)]
    stopped = _stopped(seen, [0], rows)
    freed = sum(running[row - 1] for row in stopped)
    if sum(running) + free < want:
        assert len(stopped) == len(running), "it cannot run at all"
        return
    assert free + freed >= want
    assert all(free + freed - running[row - 1] < want for row in stopped), "each of them is needed"
