"""Which preset a site is planned with that names none, and that the plan says why."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from joulery.app.planning.plans import PRESETS, PlanOptions, chosen_preset, plan_site
from joulery.config import load
from joulery.domain.errors import ConfigError
from joulery.ui.cli import plan as plan_command

EXAMPLES = Path(__file__).parents[3] / "examples"
SITE = """\
joulery: 1
fleet:
  gpus: [{name: V100, profile: v100-calibrated, price: 3.06 USD/hGPU}]
plan: {margin: 5 %, replicas: 1, max_batch: 8PLAN}
services:
  - {name: photos, model: resnet50, rate: 200 /s, slo: {latency: 30 ms, quantile: 99 %}SERVICE}
"""


def site_file(folder, plan="", gpu="", service=""):
    file = folder / "site.yaml"
    file.write_text(SITE.replace("PLAN", plan).replace("GPU", gpu).replace("SERVICE", service))
    return file


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({"plan": ", objective: energy"}, "plan.objective is energy"),
        ({"plan": ", objective: carbon, intensity: 300 g/kWh"}, "plan.objective is carbon"),
        ({"plan": ", weights: {cost: 1, energy: 0.2}"}, "plan.objective is weights"),
        ({"plan": ", power_cap: 500 W"}, "plan.power_cap is stated"),
        ({"plan": ", intensity: 300 g/kWh, carbon_cap: 150 g/h"}, "plan.carbon_cap is stated"),
        ({"gpu": ", host: 60 W"}, "states host watts"),
        ({"plan": ", preset: joint"}, ""),
        *(
            ({"plan": f", objective: energy{plan}", "service": service}, "plan.objective is energy")
            for plan, service in (
                (", failure_domain: gpu", ""),
                (", balancer: random", ""),
                ("", ", memory: 1 GB"),
                ("", ", spot: true"),
                ("", ", minimum_replicas: 2"),
            )
        ),
    ],
)
def test_what_joint_alone_reads_asks_for_it(tmp_path, stated, why):
    chosen = chosen_preset(load(site_file(tmp_path, **stated)))
    assert chosen.name == "joint" and why in chosen.why and bool(chosen.why) is bool(why)


def test_a_preset_that_python_names_wrongly_is_answered_with_all_there_are(tmp_path):
    with pytest.raises(ConfigError) as caught:
        plan_site(load(site_file(tmp_path)), PlanOptions("muservee"))
    assert (caught.value.pointer, caught.value.got) == ("--preset", "muservee")
    assert set(caught.value.expected.split(", ")) == set(PRESETS) and "muserve?" in caught.value.hint


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"plan": ", intensity: 300 g/kWh, moves: 3"},
        {"plan": ", objective: cost"},
        {"plan": ", objective: cost", "gpu": ", host: 60 W"},
        {"plan": ", preset: best, objective: energy, power_cap: 500 W", "gpu": ", host: 60 W"},
        {"plan": ", failure_domain: gpu, balancer: random", "service": ", memory: 1 GB, minimum_replicas: 2"},
    ],
)
def test_every_other_site_is_planned_as_ever(tmp_path, stated):
    site = load(site_file(tmp_path, **stated))
    assert chosen_preset(site) == ("best", "")


def test_variants_and_slices_ask_for_joint_whatever_the_objective(tmp_path):
    text = site_file(tmp_path, plan=", objective: cost").read_text()
    listed = text.replace("model: resnet50", "variants: [{model: resnet50, accuracy: 76 %}]")
    (tmp_path / "listed.yaml").write_text(listed)
    assert "variants" in chosen_preset(load(tmp_path / "listed.yaml")).why
    (tmp_path / "slices.csv").write_text("model,slice,batch,latency_s\n")
    cut = site_file(tmp_path, gpu=", measurements: slices.csv, idle: 60 W, busy: 300 W")
    assert "slices" in chosen_preset(load(cut)).why


def test_what_the_command_states_comes_first(tmp_path):
    site = load(site_file(tmp_path, gpu=", host: 60 W"))
    assert chosen_preset(site, "best") == ("best", "")
    assert chosen_preset(site, shares=True) == ("best", ""), "--follow is for plans of shares"
    assert "--objective is energy" in chosen_preset(load(site_file(tmp_path)), objective="energy").why
    assert chosen_preset(load(site_file(tmp_path, plan=", preset: best")), objective="energy") == ("best", "")


@pytest.mark.slow
def test_the_plan_says_why_in_its_first_line_and_best_still_counts_gpus(tmp_path):
    file = str(site_file(tmp_path, gpu=", host: 60 W"))
    shown = CliRunner().invoke(plan_command.command, [file])
    assert shown.exit_code == 0, shown.output
    first = shown.output.splitlines()[0]
    assert first == "preset joint, because fleet.gpus states host watts; --preset best for fewest GPUs"
    document = json.loads(CliRunner().invoke(plan_command.command, [file, "--json"]).output)
    assert document["why_preset"] == first and document["policy"] == "joint"
    best = json.loads(CliRunner().invoke(plan_command.command, [file, "--preset", "best", "--json"]).output)
    assert best["policy"] == "best" and "why_preset" not in best
    assert plan_site(load(site_file(tmp_path))).why_preset == ""


def test_no_example_changes_its_preset():
    texts = {file: file.read_text() for file in sorted(EXAMPLES.glob("*.yaml"))}
    sites = [load(file) for file, text in texts.items() if _plans(text)]
    assert len(sites) >= 5
    for site in sites:
        before = "language" if site.plan.language is not None and not site.services else site.plan.preset
        assert chosen_preset(site) == (before, "")


def _plans(text: str) -> bool:
    """Whether an example plans services, with nothing that this checkout lacks."""
    return "\nservices:" in text and "\nplan:" in text and "JOULERY_DATA" not in text
