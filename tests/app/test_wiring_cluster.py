from pathlib import Path
from typing import Any

import pytest

from joulery.app.wiring.cluster import energy_source, green_policy, jobs_of, one_cluster
from joulery.config.jobs import JobsConfig
from joulery.config.parsing.reading import load
from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobState
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality
from joulery.domain.renames import RenamedWarning
from joulery.policies.training.green import Green, green_paper
from joulery.policies.training.service_order import ShiftRule
from tests.runtime.schedule.fake_cluster import FakeCluster

RUNNING = ClusterSnapshot(4, (ClusterJob(1, "job", "ada", 0.0, JobState.RUNNING, slots=1),))


@pytest.mark.parametrize(
    ("section", "field", "expected"),
    [
        ({"mu": 1.5}, "mu", 1.5),
        ({"theta": "50 %"}, "theta", 0.5),
        ({"gamma": 0.8}, "gamma", 0.8),
        ({"cap": 3}, "cap", 3),
        ({"shift": "paper"}, "shift", ShiftRule.PAPER),
        ({"hysteresis": 1.0}, "hysteresis", 1.0),
        ({"profiles": False}, "profile_cache", False),
        ({"carbon_gamma": 0.05}, "carbon_gamma", 0.05),
        ({"starve": 3.0}, "starve_ratio", 3.0),
        ({"node_slots": 2}, "node_gpus", 2),
        ({"ceiling": "2 h"}, "ceiling_gpu_s", 7200.0),
        ({"levels": 6}, "levels", 6),
        ({"oldest_share": "40 %"}, "oldest_share", 0.4),
        ({"oldest_share": "0 %"}, "oldest_share", 0.0),
        ({"by_progress": True}, "progress_after_s", 1800.0),
        ({"by_progress": False}, "progress_after_s", None),
        ({"ageing": "1 d"}, "ageing_s", 86_400.0),
        ({"preempt_after": "5 min"}, "preempt_after_s", 300.0),
        ({"order": "first-come"}, "order", "first-come"),
        ({"price_ratio": 0.3}, "price_ratio", 0.3),
    ],
)
def test_every_knob_of_a_site_reaches_the_policy(section: dict[str, Any], field: str, expected: object) -> None:
    for kind, preset in (("green", Green()), ("green-paper", green_paper())):
        made = green_policy(JobsConfig.model_validate({"policy": {"kind": kind, **section}}))
        changed = {name for name in Green.__dataclass_fields__ if getattr(made, name) != getattr(preset, name)}
        assert getattr(made, field) == expected
        assert changed <= {field}
    plain = green_policy(JobsConfig())
    assert plain == Green() and plain.theta == 0.3


def test_lean_sizes_jobs_by_a_price_of_their_time_unless_the_site_states_a_gamma() -> None:
    prices = {"": 0.17, "gamma": None, "price_ratio": 0.3}
    for key, expected in prices.items():
        section = {"kind": "lean", **({"gamma": 0.8} if key == "gamma" else {"price_ratio": 0.3} if key else {})}
        assert green_policy(JobsConfig.model_validate({"policy": section})).price_ratio == expected
    assert green_policy(JobsConfig.model_validate({"policy": {"kind": "frugal"}})).price_ratio is None


def test_bounds_on_waiting_are_counted_in_quanta_unless_the_site_says_otherwise() -> None:
    quick: dict[str, Any] = {"quantum": "20 s", "poll": "1 s"}
    policy = green_policy(JobsConfig.model_validate(quick))
    assert (policy.preempt_after_s, policy.progress_after_s, policy.ceiling_gpu_s) == (20.0, 20.0, 280.0)
    stated = green_policy(JobsConfig.model_validate({**quick, "policy": {"ceiling": "2 h", "preempt_after": "5 min"}}))
    assert stated.preempt_after_s == 300.0 and stated.ceiling_gpu_s == 7200.0
    published = green_policy(JobsConfig.model_validate({**quick, "policy": {"kind": "green-paper"}}))
    assert published.preempt_after_s == 0.0 and published.ceiling_gpu_s is None


@pytest.mark.parametrize(("meters", "assumed"), [("", {1}), (", slurm: {meters: spool}", set())])
def test_a_stated_power_counts_at_once_unless_agents_may_measure(
    tmp_path: Path, meters: str, assumed: set[int]
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(f"joulery: 1\njobs: {{backend: slurm, power: {{slot: 200 W}}{meters}}}\n")
    said: list[str] = []
    source = energy_source(load(site), FakeCluster(), said.append)
    totals = source.read(RUNNING)

    assert set(totals) == assumed and not said
    assert all(total.quality is Quality.ASSUMED for total in totals.values())


def test_a_site_that_measures_nothing_is_warned(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("joulery: 1\njobs: {backend: slurm}\n")
    said: list[str] = []
    assert energy_source(load(site), FakeCluster(), said.append).read(RUNNING) == {}
    assert "jobs have no meter" in said[0]


def test_the_former_name_of_the_oldest_share_is_read_and_names_the_new_one(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("joulery: 1\njobs: {policy: {elders: 40 %}}\n")
    with pytest.warns(RenamedWarning, match="oldest_share"):
        jobs = load(site).jobs

    assert jobs is not None and green_policy(jobs).oldest_share == 0.4


CLUSTERS = """\
joulery: 1
clusters:
- {name: a, jobs: {backend: slurm, slurm: {meters: m, progress: p}}}
- {name: b, jobs: {backend: slurm, state: s, slurm: {meters: m, progress: p}}}
"""


def test_clusters_that_share_folders_each_get_their_own(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(CLUSTERS)
    site = load(tmp_path / "site.yaml")
    a, b = (jobs_of(one_cluster(site, name)) for name in "ab")
    assert (a.slurm.cluster, a.slurm.meters, a.slurm.progress) == ("a", tmp_path / "m/a", tmp_path / "p/a")
    assert (b.slurm.cluster, b.slurm.meters, b.slurm.progress) == ("b", tmp_path / "m/b", tmp_path / "p/b")
    assert a.state.name == "a" and b.state == tmp_path / "s"
    with pytest.raises(ConfigError, match="which cluster"):
        one_cluster(site, None)
    with pytest.raises(ConfigError, match="no such cluster"):
        one_cluster(site, "c")
    alone = site.model_copy(update={"clusters": site.clusters[:1]})
    assert one_cluster(alone, None) == one_cluster(site, "a")
    plain = site.model_copy(update={"clusters": ()})
    assert one_cluster(plain, None) is plain
    with pytest.raises(ConfigError, match="no such cluster"):
        one_cluster(plain, "a")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("- {name: a, jobs: {}}", "a"),
        ("- {name: c, jobs: {state: s}}", "state folder of cluster b"),
        ("- {name: c, jobs: {slurm: {cluster: d}}}", "not the entry's name"),
        ("jobs: {}", "one cluster's"),
    ],
)
def test_clusters_are_kept_apart(tmp_path: Path, more: str, message: str) -> None:
    (tmp_path / "site.yaml").write_text(CLUSTERS + more + "\n")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "site.yaml")
