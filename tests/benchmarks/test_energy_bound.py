"""No scheduler undercuts the bound on energy at its own mean completion time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._energy_bound import least_energy_j
from joulery.perf.power.training_power import RTX3090_CLASSES, power_table
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.training.plant import Jobs
from joulery.sim.training.study import Setting, run_scheme
from tests.sim.training.test_cluster import DAY, workload

SETTING = Setting(nodes=8)
SCHEMES = ("green", "lean", "green-frugal", "green-swift", "swift", "tiresias-sleep", "fifo:sleep=1:limit=0.5", "zeus")


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(SCHEMES))
def test_every_scheme_needs_at_least_the_bound(seed: int, name: str) -> None:
    jobs = workload(14, seed)
    run = run_scheme(name, SETTING, jobs, Intensity(DAY))
    mean_s = float(np.mean(run.jct_s))
    bound_j = least_energy_j(SETTING, jobs, mean_s)
    assert run.cluster_kwh * 3.6e6 >= bound_j * (1 - 1e-12)
    assert least_energy_j(SETTING, jobs, 2 * mean_s) <= bound_j * (1 + 1e-9), "more time never needs more energy"
    assert least_energy_j(SETTING, jobs, math.inf) <= bound_j * (1 + 1e-9)


def test_one_job_that_may_take_any_time_runs_at_its_most_frugal() -> None:
    one = np.ones(1, np.int64)
    jobs = Jobs(np.zeros(1), np.array([1000.0]), 0 * one, one, one)
    job_w = float(power_table(RTX3090_CLASSES, SETTING.node).job_w[0, 1])
    assert least_energy_j(SETTING, jobs, 1000.0) <= (job_w - 5.0) * 1000.0
    assert least_energy_j(SETTING, jobs, 999.0) == math.inf, "one GPU at full power takes 1000 s"
    assert least_energy_j(SETTING, jobs, 1000.0) == pytest.approx((job_w - 5.0) * 1000.0, rel=1e-6)
    assert least_energy_j(SETTING, jobs, math.inf) < 0.9 * job_w * 1000.0
