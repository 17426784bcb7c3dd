"""``joulery plan --preset columns|clover``: from a site file to layouts, both accountings, and infeasible sites."""

import json
import re

import pytest
from click.testing import CliRunner

from joulery.app.planning.layouts import layout_request
from joulery.config import load
from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.perf.catalog.clover_services import CLOVER_SERVICES
from joulery.perf.queues.pull_document import as_document
from joulery.ui.cli.plan import command

SITE = """
joulery: 1
name: pool
fleet: {{gpus: [{{name: A30-24GB, price: 1 USD/h, available: {gpus}}}]}}
plan: {{preset: columns}}
services:
  - {{name: language, model: albert, rate: 2.5 /s, slo: {{latency: 170 ms, quantile: 95 %}}, {rule}}}
"""


def site(tmp_path, rule="minimum_accuracy: 86 %", gpus=4, **changes):
    text = SITE.format(rule=rule, gpus=gpus)
    for old, new in changes.items():
        text = text.replace(old, new)
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return path


def planned(path, *arguments):
    done = CliRunner().invoke(command, [str(path), *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_a_plan_says_what_runs_where_and_both_savings(tmp_path):
    kept = tmp_path / "plan.json"
    made = planned(site(tmp_path), "--out", str(kept))
    assert json.loads(kept.read_text()) == made
    assert (made["schema"], made["kind"]) == ("joulery.plan/1", "layouts")
    assert made["quality"] == "simulated"
    (service,) = made["services"]
    assert service["accuracy_ratio"] >= 0.86
    assert service["latency_s"] <= service["limit_s"] == 0.17
    assert service["baseline"]["gpus"] == 4
    assert made["gpus_on"] + made["gpus_off"] == 4
    assert made["gpus_on"] == sum(layout["count"] for layout in made["layouts"])
    idle_w = CLOVER_SERVICES["albert"].idle_w
    off_j = made["gpus_off"] * idle_w / 2.5
    lost = (service["saving_ratio"] - service["saving_same_gpus_ratio"]) * service["baseline"]["energy_j"]
    assert lost == pytest.approx(off_j), "the difference is the idle power of what is off"
    assert service["saving_same_gpus_ratio"] < service["saving_ratio"] < 1
    assert 0 <= made["corrected_gap_ratio"] <= made["gap_ratio"] < 1
    assert made["bound_w"] <= made["cost_w"]
    placed = [one["variant"] for layout in made["layouts"] for one in layout["instances"]]
    assert set(placed) <= {variant.name for variant in CLOVER_SERVICES["albert"].variants}


def test_the_papers_search_fills_every_gpu_alike(tmp_path):
    made = planned(site(tmp_path, "minimum_accuracy: 84 %", 2), "--preset", "clover")
    assert made["gpus_on"] == 2
    assert made["bound_w"] is None
    (layout,) = made["layouts"]
    assert layout["count"] == 2
    assert made["services"][0]["latency_s"] <= 0.17
    ours = planned(site(tmp_path, "minimum_accuracy: 84 %", 2))
    assert ours["services"][0]["energy_j"] <= made["services"][0]["energy_j"] * 1.001


def test_a_dirtier_grid_buys_less_accuracy(tmp_path):
    rule = "policy: {kind: clover, lambda: 0.3, base_intensity: 250 g/kWh}"
    clean, dirty = (planned(site(tmp_path, rule), "--intensity", f"{g} g/kWh") for g in (20, 800))
    assert clean["intensity_g_per_kwh"] == 20
    assert clean["services"][0]["accuracy_ratio"] > dirty["services"][0]["accuracy_ratio"]
    assert clean["services"][0]["energy_j"] > dirty["services"][0]["energy_j"]
    assert dirty["services"][0]["objective"] is not None


def test_costs_of_ones_own_are_read_from_a_file(tmp_path):
    costs = {"own": CLOVER_SERVICES["albert"]}
    document = as_document(costs)
    document["services"][0]["name"] = "own"
    (tmp_path / "costs.json").write_text(json.dumps(document))
    request = layout_request(load(site(tmp_path, **{"model: albert": "model: own, profile: costs.json"})))
    assert request.problem.services[0].costs.variants == CLOVER_SERVICES["albert"].variants
    with pytest.raises(ConfigError, match=r"no costs .* service language"):
        layout_request(load(site(tmp_path, **{"model: albert": "model: other, profile: costs.json"})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "owner: me"}, "does not state the value of accuracy"),
        ({"A30-24GB": "B100"}, "no MIG partitions are known for a B100"),
        ({"rate: 2.5 /s, ": ""}, "states no rate to plan for"),
    ],
)
def test_what_is_missing_is_said(tmp_path, changes, message):
    rule = changes.pop("rule", "minimum_accuracy: 86 %")
    with pytest.raises(ConfigError, match=message):
        layout_request(load(site(tmp_path, rule, **changes)))


def test_what_cannot_be_had_comes_with_the_nearest(tmp_path):
    path = site(tmp_path, "minimum_accuracy: 89.1 %", 1, **{"170 ms": "110 ms"})
    with pytest.raises(InfeasibleError, match=re.escape("of the 89.10% asked for")) as raised:
        CliRunner().invoke(command, [str(path)], catch_exceptions=False)
    assert raised.value.nearest["language"]["accuracy_ratio"] < 0.891
    assert raised.value.exit_code == 3


def test_the_terminal_explains(tmp_path):
    done = CliRunner().invoke(command, [str(site(tmp_path)), "--explain"], catch_exceptions=False)
    assert "same GPUs" in done.output
    assert "no pool costs less than" in done.output
    assert "is idle power of GPUs that are on" in done.output
    assert "of the latency limit is left" in done.output


def test_the_page_shows_every_gpu(tmp_path):
    file = tmp_path / "plan.html"
    made = planned(site(tmp_path), "--html", str(file))
    text = file.read_text()
    assert text.count(" × A30-24GB") == len(made["layouts"])
    for layout in made["layouts"]:
        for one in layout["instances"]:
            assert f"language: {one['variant']} on {one['slice']}" in text
    assert "src=" not in text
    with pytest.raises(ConfigError, match="take no --compare"):
        CliRunner().invoke(command, [str(site(tmp_path)), "--compare", "ffd"], catch_exceptions=False)
