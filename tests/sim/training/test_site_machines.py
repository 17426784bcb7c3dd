"""A site's own nodes, and the power of its jobs, in simulations of its past."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.perf.power.training_power import RTX3090_CLASSES, NodePower, power_table, widened
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.node_groups import NodeGroup
from joulery.sim.training.plant import Jobs
from joulery.sim.training.savings import _sampled_jobs, savings
from joulery.sim.training.site_machines import SiteMachines, classes_of, node_of
from joulery.sim.training.study import Setting, run_scheme

FLAT = Intensity(np.full(24, 400.0))


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 8), st.floats(120.0, 900.0) | st.just(float("nan"))),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([2, 4, 8]),
)
def test_on_the_gpus_it_had_a_job_takes_what_was_measured(rows: list[tuple[int, int, float]], node_gpus: int) -> None:
    kind, gpus, job_w = (np.array(column) for column in zip(*rows, strict=True))
    machines = SiteMachines(node_of(node_gpus), job_w.astype(float))
    classes, found = classes_of(kind, gpus, machines, 8)
    table = power_table(classes, machines.node)
    node = machines.node
    least_w = node.idle_gpu_w + node.cpu_w + node.static_w / node.gpus
    for at, (drawn, count, watts) in enumerate(rows):
        row = int(found[at])
        assert classes[row].measured_name == RTX3090_CLASSES[drawn].name
        assert table.speedup[row, count] == pytest.approx(power_table(RTX3090_CLASSES, node).speedup[drawn, count])
        if np.isnan(watts):
            assert row == drawn, "an unknown power is the drawn kind's"
        else:
            assert table.job_w[row, count] / count == pytest.approx(max(watts, least_w), abs=5.1)


def test_joules_of_the_baseline_are_those_that_were_measured() -> None:
    """First come, first served on the GPUs the jobs had: the simulation gives back the measured energy."""
    rng = np.random.default_rng(3)
    n = 40
    submit_s, elapsed_s = np.sort(rng.uniform(0, 50_000, n)), rng.uniform(600, 20_000, n)
    gpus, job_w = rng.choice([1, 2, 4], n), rng.uniform(250.0, 900.0, n)
    machines = SiteMachines(node_of(4), job_w)
    classes, kind = classes_of(rng.integers(0, 8, n), gpus, machines, 8)
    work_s = elapsed_s * power_table(classes, machines.node).speedup[kind, gpus]
    jobs = Jobs(submit_s, work_s, kind, gpus, np.maximum(gpus, 8))
    run = run_scheme("fifo", Setting(nodes=64, node=machines.node, classes=classes), jobs, FLAT)
    assert run.job_j == pytest.approx(job_w * gpus * elapsed_s, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lean", "green-lean", "zeus", "pollux"])
def test_every_kind_of_scheme_runs_on_a_sites_own_machines(policy: str) -> None:
    n = 30
    rng = np.random.default_rng(5)
    submit_s, elapsed_s, gpus = np.sort(rng.uniform(0, 40_000, n)), rng.uniform(600, 9_000, n), rng.choice([1, 2, 8], n)
    job_w = np.where(rng.random(n) < 0.5, rng.uniform(400.0, 1000.0, n), np.nan)
    found = savings(submit_s, elapsed_s, gpus, FLAT, policy, 32, 2, SiteMachines(node_of(8), job_w, placed=True))
    assert found.fragmented is not None and 0.0 <= found.fragmented.low < 1.0
    assert (found.gpus, found.jobs) == (32, n)
    assert np.isfinite([found.cluster_carbon.mean, found.mean_jct.mean]).all()


def test_a_wider_node_keeps_the_power_of_a_gpus_share() -> None:
    assert node_of(2) == NodePower()
    wide = node_of(8)
    assert wide.static_w / wide.gpus == NodePower().static_w / 2 and wide.asleep_w == 4 * NodePower().asleep_w
    assert wide.idle_share_w == NodePower().idle_share_w


def test_without_known_power_nothing_changes() -> None:
    rng = np.random.default_rng(1)
    rows = np.sort(rng.uniform(0, 86_400, 20)), rng.uniform(600, 9_000, 20), rng.choice([1, 2], 20)
    assert savings(*rows, FLAT, "lean", 32, 2) == savings(*rows, FLAT, "lean", 32, 2, SiteMachines())


@given(
    st.integers(0, 7),
    st.dictionaries(st.integers(1, 8), st.floats(0.3, 1.0), min_size=2, max_size=5),
    st.sampled_from([8, 16]),
)
def test_a_known_speedup_holds_where_it_is_known_and_nowhere_exceeds_busy_gpus(
    drawn: int, efficiency: dict[int, float], widest: int
) -> None:
    least = min(efficiency)
    known = {n: 1.0 if n == least else max(ratio * n / least, 0.05) for n, ratio in efficiency.items()}
    one = np.zeros(1, np.int64)
    machines = SiteMachines(speedups=(known,), speedup_of=one)
    classes, row = classes_of(one + drawn, one + least, machines, widest)
    speedup = power_table(classes, machines.node).speedup
    usual = power_table(widened(RTX3090_CLASSES, widest), machines.node).speedup[drawn]
    own = speedup[row[0]]
    assert own[: least + 1] == pytest.approx(usual[: least + 1])
    for n, ratio in known.items():
        assert own[n] == pytest.approx(min(usual[least] * ratio, n), rel=1e-9)
    assert (own <= np.arange(widest + 1) + 1e-9).all()
    assert classes[row[0]].measured_name == RTX3090_CLASSES[drawn].name


def test_a_job_that_may_move_takes_the_time_and_power_of_each_type() -> None:
    """Recorded on the fast type, on which it ran 1000 s at 420 W; the slow one takes three times as long."""
    one = np.ones(1, np.int64)
    for allowed, seconds, gpu_w in ((0b10, 1000.0, 300.0), (0b01, 3000.0, 150.0), (0b11, 3000.0, 150.0)):
        groups = (NodeGroup("slow", 1, node_of(1)), NodeGroup("fast", 1, node_of(1), 700.0, 3.0))
        machines = SiteMachines(
            node_of(1), np.array([420.0]), True, groups, one * allowed,
            type_speed=np.array([3.0]), type_watts=np.array([2.0]),
        )  # fmt: skip
        jobs, classes = _sampled_jobs(np.zeros(1), np.array([1000.0]), one, Streams(0)("x"), machines)
        run = run_scheme("fifo", Setting(classes=classes, groups=groups), jobs, FLAT)
        assert run.makespan_s == pytest.approx(seconds)
        assert run.job_j[0] == pytest.approx((gpu_w + 120.0) * seconds)
