"""From a site file to a request for shares: batch limits and the margin that a profile's own errors ask for."""

import json
from dataclasses import replace

import pytest

from joulery.app.planning.plans import PlanOptions, plan_site
from joulery.app.planning.shares import share_request
from joulery.config import load
from joulery.domain.errors import ConfigError
from joulery.perf import catalog
from joulery.perf.interference.document import as_document
from joulery.perf.interference.model import ModelFit

SITE = """
joulery: 1
fleet: {{gpus: [{{name: V100, profile_file: profile.json, price: 3.06 USD/h}}]}}
plan: {{arrivals: {{kind: constant}}{plan}}}
services:
  - {{name: A, model: alexnet, rate: {rate} /s, slo: {{latency: 15 ms, quantile: 99 %}}}}
"""


def site(tmp_path, errors=(), plan="", rate=400):
    profile = replace(catalog.profile("v100"), fits=(ModelFit("alexnet", "held-out pairs", tuple(errors)),))
    (tmp_path / "profile.json").write_text(json.dumps(as_document(profile if errors else catalog.profile("v100"))))
    (tmp_path / "site.yaml").write_text(SITE.format(plan=plan, rate=rate))
    return load(tmp_path / "site.yaml")


def test_the_errors_a_profile_reports_become_the_margin(tmp_path):
    assert share_request(site(tmp_path)).rules.margin_ratio == 0.0
    wrong = site(tmp_path, [-0.2] * 20)
    assert share_request(wrong).rules.margin_ratio == pytest.approx(0.25), "measured is 1.25 times the prediction"
    assert plan_site(wrong).document()["margin_ratio"] == pytest.approx(0.25)


def test_predictions_that_are_too_long_need_no_margin(tmp_path):
    assert share_request(site(tmp_path, [0.6] * 20)).rules.margin_ratio == 0.0


def test_a_margin_that_is_stated_counts(tmp_path):
    assert share_request(site(tmp_path, [-0.2] * 20, plan=", margin: 5 %")).rules.margin_ratio == 0.05


def test_a_margin_takes_a_larger_share(tmp_path):
    careful = plan_site(site(tmp_path, [-0.2] * 20)).plan
    bold = plan_site(site(tmp_path)).plan
    assert careful.gpus[0].share_ratio > bold.gpus[0].share_ratio
    assert all(each.latency_s * 1.25 <= each.limit_s for gpu in careful.gpus for each in gpu.instances)


def test_a_profile_that_predicts_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="alexnet") as caught:
        share_request(site(tmp_path, [-0.95] * 20))
    assert "margin" in caught.value.hint


@pytest.mark.parametrize("preset", ["igniter", "best", "ffd", "ffd++", "gslice", "gpulets"])
@pytest.mark.parametrize("rate", [300, 9000])
def test_no_preset_plans_a_batch_above_the_limit(tmp_path, preset, rate):
    """9000 /s takes replicas: the limit holds on that path as well."""
    plan = plan_site(site(tmp_path, plan=", max_batch: 8", rate=rate), PlanOptions(preset)).plan
    batches = [each.batch for gpu in plan.gpus for each in gpu.instances]
    assert batches and max(batches) <= 8


def test_a_preset_without_a_margin_says_that_the_profile_errs(tmp_path):
    """A record of 60 % error may not pass as a plan that keeps every SLO without a word."""
    wrong = site(tmp_path, [-0.375] * 20)
    document = plan_site(wrong, PlanOptions("igniter")).document()
    assert document["uncovered_error_ratio"] == pytest.approx(0.6)
    assert "uncovered_error_ratio" not in plan_site(wrong).document(), "preset best plans with a margin of 60 %"
    bold = plan_site(site(tmp_path, [-0.375] * 20, plan=", margin: 5 %"))
    assert bold.uncovered_ratio == pytest.approx(0.6)


RANDOM = """
joulery: 1
fleet: {{gpus: [{{name: V100, profile: v100-calibrated, price: 3.06 USD/h, memory: 16 GB, per_host: 2}}]}}
plan: {{balancer: random, failure_domain: host{margin}}}
services:
  - {{name: A, model: alexnet, rate: 400 /s, slo: {{latency: 15 ms}}, memory: 2 GB, minimum_replicas: 2}}
"""


def test_the_keys_of_a_site_reach_the_plan(tmp_path):
    (tmp_path / "site.yaml").write_text(RANDOM.format(margin=""))
    request = share_request(load(tmp_path / "site.yaml"))
    assert request.rules.random_margins == dict(catalog.profile("v100-calibrated").bands)
    assert (request.rules.balancer, request.rules.domain) == ("random", "host")
    plan = plan_site(load(tmp_path / "site.yaml")).document()
    assert [(gpu["memory_bytes"], gpu["memory_limit_bytes"], gpu["host"]) for gpu in plan["gpus"]] == [
        (4e9, 16e9, 0),
        (4e9, 16e9, 1),
    ]
    (tmp_path / "site.yaml").write_text(RANDOM.format(margin=", margin: 0 %"))
    assert share_request(load(tmp_path / "site.yaml")).rules.random_margins == {}, "a stated margin is the margin"


def test_the_memory_of_a_board_is_the_catalogs_where_it_is_not_stated(tmp_path):
    (tmp_path / "site.yaml").write_text(RANDOM.format(margin="").replace(", memory: 16 GB", ""))
    assert share_request(load(tmp_path / "site.yaml")).types[0].memory_bytes == pytest.approx(16e9, rel=0.1)


@pytest.mark.parametrize(
    ("name", "said", "unsaid"),
    [
        ("H100", ("--mps", "profile_file", "plan.language"), ("did you mean",)),
        ("A100-40GB", ("--mps", "profile_file", "columns"), ("did you mean", "plan.language")),
        ("p3.2xlarge", ("profile: v100", "--mps"), ("did you mean",)),
        ("V1000", ("did you mean profile: v100?", "--mps"), ()),
    ],
)
def test_a_gpu_type_without_a_profile_is_named_by_its_key_with_what_can_be_done(tmp_path, name, said, unsaid):
    text = RANDOM.format(margin="").replace(", profile: v100-calibrated", "").replace("V100", name)
    (tmp_path / "site.yaml").write_text(text)
    assert f"name: {name}" in text and "profile" not in text
    with pytest.raises(ConfigError) as caught:
        share_request(load(tmp_path / "site.yaml"))
    error = caught.value
    assert (error.pointer, error.got) == ("fleet.gpus.0.name", name)
    assert "v100-calibrated" in error.expected
    assert [part for part in said if part not in error.hint] == []
    assert [part for part in unsaid if part in error.hint] == []


def test_a_wrong_profile_is_named_by_its_key(tmp_path):
    (tmp_path / "site.yaml").write_text(RANDOM.format(margin="").replace("profile: v100-calibrated", "profile: v1000"))
    with pytest.raises(ConfigError) as caught:
        share_request(load(tmp_path / "site.yaml"))
    assert (caught.value.pointer, caught.value.got) == ("fleet.gpus.0.profile", "v1000")
    assert "v100" in caught.value.hint
