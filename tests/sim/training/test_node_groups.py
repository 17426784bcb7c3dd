"""Clusters of several GPU types and node sizes: pools, energy by type, no GPU idle beside a job that it would hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from joulery.domain.arrays import IntArray
from joulery.domain.errors import DataError
from joulery.perf.power.training_power import RTX3090_CLASSES, on_boards, power_table, stacked, widened
from joulery.policies.training.baselines import Fifo
from joulery.policies.training.green import Green
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.cluster import TrainingRun
from joulery.sim.training.mixed_plant import MixedPlant
from joulery.sim.training.node_groups import NodeGroup, groups_of, members, pools_of
from joulery.sim.training.parts import joined, parts_of
from joulery.sim.training.plant import Cluster, Jobs
from joulery.sim.training.site_machines import node_of
from joulery.sim.training.study import Setting, jobs_from_trace, run_scheme
from tests.sim.training.test_cluster import DAY

GRID = Intensity(DAY)
GROUPS = (
    NodeGroup("a100", 2, node_of(4), 400.0, 2.0, "new"),
    NodeGroup("2080ti", 3, node_of(2), 250.0, 0.5, "old"),
    NodeGroup("a100", 1, node_of(8), 400.0, 2.0, "big"),
)
SCHEMES = ("green", "lean", "tiresias", "tiresias-sleep", "gaia", "fifo")


def workload(count: int, seed: int, *, masks: tuple[int, ...] = ()) -> Jobs:
    rng = Streams(seed)("workload of a test")
    submit_s = np.sort(rng.uniform(0.0, 40_000.0, count))
    jobs = jobs_from_trace(submit_s, rng.uniform(60.0, 30_000.0, count), Streams(seed))
    jobs = replace(jobs, requested=np.minimum(jobs.requested, 4))
    return replace(jobs, groups=np.asarray(rng.choice(masks, count), np.int64)) if masks else jobs


def joules(run: TrainingRun) -> float:
    return float(sum(use.job_j + use.idle_j for use in run.by_type))


def grams(run: TrainingRun) -> float:
    return float(sum(use.job_kg + use.idle_kg for use in run.by_type))


def test_groups_that_one_job_may_run_on_are_one_pool() -> None:
    assert pools_of(GROUPS, [0b001, 0b010, 0b100]) == ((0,), (1,), (2,))
    assert pools_of(GROUPS, [0b101, 0b010]) == ((0, 2), (1,))
    assert pools_of(GROUPS, [0b111]) == ((0, 1, 2),)
    assert pools_of(GROUPS, [0b011, 0b110]) == ((0, 1, 2),), "through the group that both share"
    assert [groups_of(GROUPS, *request) for request in (("a100", ""), ("a100", "big"), ("", "old"), ("", ""))] == [
        0b101, 0b100, 0b010, 0b111,
    ]  # fmt: skip
    assert groups_of(GROUPS, "h100", "") == 0 == groups_of(GROUPS, "a100", "old")


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(SCHEMES), st.sampled_from([2, 4]))
def test_a_cluster_of_one_group_is_the_cluster_without_groups(seed: int, name: str, gpus: int) -> None:
    jobs = workload(25, seed)
    plain = run_scheme(name, Setting(nodes=16 // gpus, node=node_of(gpus), placed=True), jobs, GRID)
    grouped = run_scheme(name, Setting(groups=(NodeGroup("x", 16 // gpus, node_of(gpus)),)), jobs, GRID)
    assert grouped.digest == plain.digest
    assert (grouped.cluster_kwh, grouped.cluster_kg) == (plain.cluster_kwh, plain.cluster_kg)
    assert (grouped.peak_w, grouped.fragmented_gpu_s) == (plain.peak_w, plain.fragmented_gpu_s)
    assert joules(grouped) == pytest.approx(plain.cluster_kwh * 3.6e6, rel=1e-12) and not plain.by_type


@settings(max_examples=12, deadline=None)
@example(0, "lean", [2])  # the first moment, with every node awake, takes most
@given(
    st.integers(0, 1000),
    st.sampled_from(SCHEMES),
    st.lists(st.sampled_from([0b001, 0b010, 0b100, 0b101, 0b011, 0b111]), min_size=1, max_size=4, unique=True),
)
def test_every_joule_and_gram_is_of_one_type(seed: int, name: str, masks: list[int]) -> None:
    jobs = workload(25, seed, masks=tuple(masks))
    run = run_scheme(name, Setting(groups=GROUPS), jobs, GRID, watch=lambda now_s, view, step: None)
    assert np.isfinite(run.finish_s).all()
    assert joules(run) == pytest.approx(run.cluster_kwh * 3.6e6, rel=1e-9)
    assert grams(run) == pytest.approx(run.cluster_kg, rel=1e-9)
    assert [(use.type, use.gpus) for use in run.by_type] == [("a100", 16), ("2080ti", 6)]
    assert all(0.0 <= use.gpu_s <= use.gpus * run.makespan_s * (1 + 1e-12) for use in run.by_type)
    edges_s, watts = run.power_timeline[:, 0], run.power_timeline[:, 1]
    ends_s = np.minimum(np.append(edges_s[1:], run.makespan_s), run.makespan_s)
    drawn_j = float(np.sum(watts * np.clip(ends_s - edges_s, 0.0, None)))
    assert drawn_j == pytest.approx(run.cluster_kwh * 3.6e6, rel=1e-9)
    assert run.peak_w == pytest.approx(float(watts.max()), rel=1e-12)


def test_pools_apart_are_clusters_apart_until_the_last_job_of_all() -> None:
    """Idle nodes of a pool whose jobs have ended go on idling while another pool works."""
    groups = (NodeGroup("a", 1, node_of(2)), NodeGroup("b", 1, node_of(2)))
    two = np.array([0, 0], np.int64)
    one = np.ones(2, np.int64)
    jobs = Jobs(np.zeros(2), np.array([1000.0, 9000.0]), two, one, one, groups=np.array([1, 2], np.int64))
    run = run_scheme("fifo", Setting(groups=groups), jobs, GRID)
    assert run.finish_s.tolist() == [1000.0, 9000.0]
    first, second = run.by_type
    share_w = node_of(2).idle_share_w
    assert first.idle_j == pytest.approx(share_w * (1000.0 + 2 * 8000.0))
    assert second.idle_j == pytest.approx(share_w * 9000.0)
    assert (first.gpu_s, second.gpu_s) == (1000.0, 9000.0)


def test_a_faster_type_ends_sooner_and_takes_the_power_of_its_board() -> None:
    one = np.ones(1, np.int64)
    jobs = Jobs(np.zeros(1), np.array([1000.0]), 0 * one, one, one)
    slow, fast = (
        run_scheme("fifo", Setting(groups=(NodeGroup("x", 1, node_of(1), limit_w, speed),)), jobs, GRID)
        for limit_w, speed in ((350.0, 1.0), (700.0, 4.0))
    )
    assert (slow.makespan_s, fast.makespan_s) == (1000.0, 250.0)
    gpu_w = RTX3090_CLASSES[0].gpu_w
    assert slow.job_j[0] == pytest.approx((gpu_w + 60.0 + 60.0) * 1000.0)
    assert fast.job_j[0] == pytest.approx((2 * gpu_w + 60.0 + 60.0) * 250.0)


def test_jobs_take_the_first_group_with_room_on_awake_nodes() -> None:
    groups = (NodeGroup("a", 1, node_of(2)), NodeGroup("b", 1, node_of(4)))
    times_s = np.array([0.0, 1.0, 2.0])
    wants = np.array([2, 2, 3], np.int64)
    jobs = Jobs(times_s, np.full(3, 5000.0), np.zeros(3, np.int64), wants, wants)
    run = run_scheme("fifo", Setting(groups=groups), jobs, GRID)
    assert run.by_type[0].gpu_s == pytest.approx(2 * run.finish_s[0])
    assert run.finish_s[2] > run.finish_s[1], "three GPUs are on no node before the second job ends"
    assert run.fragmented_gpu_s == 0.0, "two free GPUs hold no job of three, wherever they are"


def test_a_job_that_no_group_holds_is_an_error_that_names_it() -> None:
    jobs = workload(3, 0, masks=(0b010,))
    with pytest.raises(DataError, match=r"job 0 .* 7 GPUs.* 6"):
        run_scheme("fifo", Setting(groups=GROUPS), replace(jobs, requested=np.full(3, 7)), GRID)
    with pytest.raises(DataError, match=r"job 1\b"):
        run_scheme("fifo", Setting(groups=GROUPS), replace(jobs, groups=np.array([2, 0, 2])), GRID)


class Watched(MixedPlant):
    """Checks, whenever jobs were started, that no free GPUs would hold a waiting job."""

    checked = 0

    def _place_waiting(self, now_s: float) -> None:
        super()._place_waiting(now_s)
        for job in np.flatnonzero(self.accounts.gpus).tolist():
            assert self.group_of[job] in self.allowed[job]
        used = [sum(int(self.accounts.gpus[job]) for job in self.active if self.group_of[job] == at) for at in range(3)]
        assert used == [group.gpus - free for group, free in zip(GROUPS, self.free_gpus, strict=True)]
        if self.passive and not self.ended:
            assert not [job for job, gpus in self.waiting if self._fits(job, gpus)]
            self.checked += 1


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_no_gpus_idle_beside_a_waiting_job_that_they_would_hold(seed: int, plain: bool) -> None:
    """As plain backfill does, and so does GREEN: under either, whatever waits fits nowhere."""
    jobs = workload(30, seed, masks=(0b111, 0b101, 0b010, 0b001))
    ((groups, mine, numbers),) = parts_of(GROUPS, jobs, len(RTX3090_CLASSES), 0)
    tables = [
        power_table(on_boards(widened(RTX3090_CLASSES, 8), group.limit_w, group.speed_ratio), group.node)
        for group in groups
    ]
    cluster = Cluster(0, node_of(2), stacked(tables), GRID, placed=True, groups=groups)
    policy: Any = Fifo() if plain else Green()
    plant = Watched(cluster, mine, policy, None if plain else 1800.0, None)
    while plant.unfinished:
        plant.kernel.run(until_s=plant.kernel.now_s + 86_400.0)
    assert len(numbers) == 30 and plant.checked > 30


def test_members_of_a_set_of_groups() -> None:
    assert members(0b1011) == (0, 1, 3) and members(0) == ()
    bits: IntArray = np.array([1, 3], np.int64)
    assert [members(mask) for mask in bits.tolist()] == [(0,), (0, 1)]
    assert joined([cluster := Cluster(1, node_of(2), power_table(RTX3090_CLASSES, node_of(2)), GRID)]) is cluster
