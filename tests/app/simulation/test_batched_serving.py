"""Scenarios of kind batched-serving: plan files, profiles of one's own, a balancer that deals at random."""

import json
from dataclasses import replace

import pytest

from joulery.app.planning.plans import plan_site
from joulery.app.simulation import Overrides, run_scenario
from joulery.config import load
from joulery.config.scenario import load_scenario
from joulery.domain.errors import ConfigError, DataError
from joulery.perf import catalog
from joulery.perf.interference.document import as_document

SITE = """
joulery: 1
fleet: {{gpus: [{{name: V100, {profile}, price: 3.06 USD/h{gpu}}}]}}
plan: {{arrivals: {{kind: poisson}}{plan}}}
services:
  - {{name: A, model: alexnet, rate: 900 /s, slo: {{latency: 15 ms, quantile: 99 %}}}}
  - {{name: S, model: ssd, rate: 500 /s, slo: {{latency: 60 ms, quantile: 99 %}}}}
"""
SCENARIO = """
scenario: 1
kind: batched-serving
seeds: 2
length: 20 s
noise: 5 %
arrivals: {{kind: poisson}}
services:
  - {{name: A, model: alexnet, rate: 900 /s, slo: {{latency: 15 ms, quantile: 99 %}}}}
  - {{name: S, model: ssd, rate: 500 /s, slo: {{latency: 60 ms, quantile: 99 %}}}}
{more}
plans: [{plans}]
"""


def planned(tmp_path, name="plan.json", profile="profile: v100-calibrated", gpu="", plan=""):
    (tmp_path / "site.yaml").write_text(SITE.format(profile=profile, gpu=gpu, plan=plan))
    made = plan_site(load(tmp_path / "site.yaml"))
    (tmp_path / name).write_text(json.dumps(made.document()))
    return made.plan


def simulated(tmp_path, plans, more=""):
    (tmp_path / "scenario.yaml").write_text(SCENARIO.format(more=more, plans=plans))
    return run_scenario(load_scenario(tmp_path / "scenario.yaml"), Overrides(), lambda done, total: None).document


def slower(factor, models=("alexnet", "ssd")):
    """A GPU on which everything takes so much longer."""
    known = catalog.profile("v100-calibrated")
    parts = ("k1", "k2", "k3", "k5", "launch_ms")
    return replace(
        known,
        models={
            name: replace(known[name], **{part: factor * getattr(known[name], part) for part in parts})
            for name in models
        },
    )


def test_a_plan_file_is_judged_as_it_was_written(tmp_path):
    plan = planned(tmp_path)
    document = simulated(tmp_path, "{name: mine, file: plan.json}")
    (summary,) = document["summary"]
    assert (summary["gpus"], summary["violations"]["mean"]) == (len(plan.gpus), 0.0)
    shares = [[one["share_ratio"] for one in gpu["instances"]] for gpu in document["results"][0]["gpu"]]
    assert shares == [[each.share_ratio for each in gpu.instances] for gpu in plan.gpus]


def test_a_truth_of_ones_own_shows_that_a_plan_does_not_hold_there(tmp_path):
    planned(tmp_path)
    (tmp_path / "slow.json").write_text(json.dumps(as_document(slower(1.5))))
    document = simulated(tmp_path, "{name: mine, file: plan.json}", "truth_file: slow.json")
    assert document["truth"] == "slow.json"
    assert document["summary"][0]["violations"]["mean"] > 0
    planned(tmp_path, "careful.json", "profile_file: slow.json")
    document = simulated(tmp_path, "{name: mine, file: careful.json}", "truth_file: slow.json")
    assert document["summary"][0]["violations"]["mean"] == 0.0


def test_policies_plan_with_a_profile_of_ones_own(tmp_path):
    (tmp_path / "slow.json").write_text(json.dumps(as_document(slower(2.0))))
    plans = "{name: usual, policy: best}, {name: own, policy: best, profile_file: slow.json}"
    usual, own = simulated(tmp_path, plans)["summary"]
    assert own["gpus"] > usual["gpus"]
    (all_own,) = simulated(tmp_path, "{name: own, policy: best}", "gpu_file: slow.json")["summary"]
    assert all_own["gpus"] == own["gpus"]


def test_a_random_balancer_is_harder_than_turns_and_can_be_planned_for(tmp_path):
    """The same replicas and requests: dealt at random they queue longer; a plan for that keeps the SLO."""
    plans = "{name: turns, policy: best, margin: 5 %}, {name: random, policy: best, margin: 5 %, balancer: random}"
    found = {}
    for balancer in ("turns", "random"):
        document = simulated(tmp_path, plans, f"balancer: {balancer}")
        assert document["balancer"] == balancer
        for result in document["results"]:
            tail = max(one["tail_s"] for one in result["services"] if one["name"] == "S")
            found.setdefault((balancer, result["policy"]), []).append(tail)
    assert max(found["turns", "turns"]) < max(found["random", "turns"])
    assert max(found["random", "random"]) <= 0.06


def test_services_that_differ_from_the_plan_are_named(tmp_path):
    planned(tmp_path)
    text = (tmp_path / "plan.json").read_text().replace('"workload": "S"', '"workload": "T"')
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(DataError, match="service S") as caught:
        simulated(tmp_path, "{name: mine, file: plan.json}")
    assert "plan.json" in caught.value.file


def test_a_file_that_is_no_plan_is_one_clear_error(tmp_path):
    (tmp_path / "plan.json").write_text('{"hello": 1}')
    with pytest.raises(DataError, match="not a plan"):
        simulated(tmp_path, "{name: mine, file: plan.json}")
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(DataError, match="not an interference profile"):
        simulated(tmp_path, "{name: a, policy: best}", "truth_file: profile.json")


@pytest.mark.parametrize(
    "plan",
    [
        "{name: a}",
        "{name: a, policy: best, file: scenario.yaml}",
        "{name: a, policy: b, profile: v, profile_file: scenario.yaml}",
    ],
)
def test_a_plan_has_one_source(tmp_path, plan):
    with pytest.raises(ConfigError):
        simulated(tmp_path, plan)


def test_the_largest_batch_of_a_plan_is_kept(tmp_path):
    document = simulated(tmp_path, "{name: small, policy: best, max_batch: 2}")
    assert max(one["batch"] for gpu in document["results"][0]["gpu"] for one in gpu["instances"]) <= 2
