"""The accounts of a simulated cluster's jobs: one by one or all at once, the same to the last bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.perf.power.training_power import RTX3090_CLASSES, NodePower, power_table
from joulery.sim.training.job_accounts import MEASURE_S, JobAccounts

TABLE = power_table(RTX3090_CLASSES, NodePower())
COLUMNS = ("left_s", "executed_s", "attained_s", "job_j", "job_kg", "gpu_w", "_since_s", "_since_integral")


def started(n: int, seed: int) -> JobAccounts:
    """Jobs that all run, some of them still restarting."""
    rng = np.random.default_rng(seed)
    accounts = JobAccounts(rng.exponential(3600.0, n) + 1.0)
    for job, (gpus, row) in enumerate(zip(rng.integers(1, 5, n).tolist(), rng.integers(0, 8, n).tolist(), strict=True)):
        now_s = rng.uniform(0.0, 1000.0)
        accounts.start(job, now_s, 200.0 * now_s, gpus, now_s + rng.choice([0.0, 120.0, 3000.0]))
        accounts.set_rates(job, TABLE, row)
    return accounts


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 30), st.integers(0, 10_000), st.floats(1000.0, 1e5))
def test_all_at_once_is_one_by_one_to_the_last_bit(n: int, seed: int, until_s: float) -> None:
    together, apart = started(n, seed), started(n, seed)
    chosen = np.flatnonzero(np.random.default_rng(seed).random(n) < 0.7)
    for now_s in (until_s, until_s + 1800.0):
        together.update_all(chosen, now_s, 173.0 * now_s)
        for job in chosen.tolist():
            apart.update(job, now_s, 173.0 * now_s)
    for name in COLUMNS:
        assert getattr(together, name).tobytes() == getattr(apart, name).tobytes(), name


def test_one_job_by_hand() -> None:
    accounts = JobAccounts(np.array([7200.0]))
    accounts.start(0, 100.0, 100.0 * 200.0, 2, 220.0)
    job_w = accounts.set_rates(0, TABLE, 5)
    assert job_w == TABLE.job_w[5, 2] == accounts.job_w(0)
    accounts.update(0, 1000.0, 1000.0 * 200.0)
    assert accounts.job_j[0] == pytest.approx(900.0 * job_w)
    assert accounts.job_kg[0] == pytest.approx(900.0 * job_w / 3.6e6 * 0.2)
    assert (accounts.executed_s[0], accounts.attained_s[0]) == (900.0, 1800.0)
    assert accounts.left_s[0] == pytest.approx(7200.0 - 780.0 * TABLE.speedup[5, 2])
    assert accounts.work_left_s(0) == pytest.approx(accounts.left_s[0] / TABLE.speedup[5, 2])


def test_efficiency_is_known_once_a_job_has_run_undisturbed_for_long_enough() -> None:
    accounts = JobAccounts(np.full(2, 7200.0))
    accounts.start(0, 0.0, 0.0, 1, 120.0)
    accounts.set_rates(0, TABLE, 5)
    both = np.array([0, 1])
    for now_s, known in ((120.0 + MEASURE_S - 1.0, False), (120.0 + MEASURE_S, True)):
        accounts.update(0, now_s, 0.0)
        assert accounts.measured(both, now_s).tolist() == [known, False], "the second job waits"
        assert bool(np.isfinite(accounts.gpu_w[0])) is known
