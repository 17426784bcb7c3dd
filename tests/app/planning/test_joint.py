"""Preset joint from a site file: the command as one types it, its JSON contract, and input that cannot be meant."""

import json
import math

import pytest
from click.testing import CliRunner

from joulery.app.planning.joint import plan_joint_site
from joulery.app.planning.plans import PlanOptions, plan_site
from joulery.config import load
from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.store.plan_documents import document_of
from joulery.store.plans import read_plan
from joulery.ui.cli import plan as plan_command

SITE = """
joulery: 1
name: joint
fleet:
  gpus:
    - {name: V100, profile: v100-calibrated, truth: TRUTH, price: 3.06 USD/h, clocks: 2GPU}
plan: {preset: joint, margin: 5 %, replicas: 2PLAN}
services:
  - {name: photos, variants: [{model: resnet50, accuracy: 76.1 %}, {model: alexnet, accuracy: 56.5 %}],
     minimum_accuracy: FLOOR %, rate: 500 /s, slo: {latency: 30 ms, quantile: 99 %}}
  - {name: video, model: ssd, rate: 100 /s, slo: {latency: 45 ms, quantile: 99 %}}
"""


def site_file(folder, gpu="", plan="", floor="75", truth="v100-refit"):
    file = folder / "site.yaml"
    file.write_text(
        SITE.replace("GPU}", gpu + "}").replace("PLAN", plan).replace("FLOOR", floor).replace("TRUTH", truth)
    )
    return file


def run(*arguments):
    return CliRunner().invoke(plan_command.command, [str(each) for each in arguments], catch_exceptions=True)


@pytest.mark.slow
def test_the_json_keeps_its_contract(tmp_path):
    found = run(site_file(tmp_path), "--json", "--intensity", "300 g/kWh")
    assert found.exit_code == 0
    plan = json.loads(found.output)
    assert (plan["schema"], plan["kind"], plan["policy"]) == ("joulery.plan/1", "shares", "joint")
    assert plan["objective"] == "energy"
    assert 0 < plan["bound"]["value"] <= plan["power_w"] * (1 + 1e-9)
    assert plan["bound"]["gap_ratio"] == pytest.approx(1 - plan["bound"]["value"] / plan["power_w"])
    assert plan["carbon_g_per_hour"] == pytest.approx(0.3 * plan["power_w"])
    assert plan["power_w"] == pytest.approx(math.fsum(gpu["power_w"] for gpu in plan["gpus"]))
    assert plan["margin_ratio"] == 0.05
    assert plan["simulation"]["violations"] == []
    assert plan["simulation"]["power_w"] == pytest.approx(plan["power_w"], rel=0.03)
    for gpu in plan["gpus"]:
        for each in gpu["instances"]:
            assert each["variant"] in ("resnet50", "alexnet", "ssd")
            assert each["mode"] in ("mps", "whole")
            assert each["clock_mhz"] == gpu["clock_mhz"]
            assert (each["accuracy_ratio"] is None) is (each["workload"] == "video")
    prices = plan["certificate"]
    bound = sum(prices["demand_price"][name] * rate for name, rate in prices["rates_rps"].items())
    assert bound == pytest.approx(plan["bound"]["value"])


def test_a_plan_file_is_read_back_as_it_was(tmp_path):
    made = plan_site(load(str(site_file(tmp_path, plan=", judge: false"))))
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(made.document()))
    read = read_plan(file).plan()
    assert document_of(read) == document_of(made.plan)
    assert read.certificate.gap_ratio == made.plan.certificate.gap_ratio


@pytest.mark.slow
def test_the_text_says_clocks_watts_the_simulation_and_prices(tmp_path):
    found = run(site_file(tmp_path), "--explain", "--compare", "knobs")
    assert found.exit_code == 0
    for words in ("MHz", "modelled power", "simulated on V100 (refit), 3 seeds", "every SLO kept", "would cost about"):
        assert words in found.output
    for name in ("dedicated GPUs", "only variants chosen", "one after the other", "joint"):
        assert name in found.output


@pytest.mark.slow
def test_the_page_says_what_the_text_says(tmp_path):
    file = site_file(tmp_path)
    text = run(file, "--explain").output
    assert run(file, "--html", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    power = next(line for line in text.splitlines() if line.startswith("modelled power"))
    for said in (power.split(",")[0], "least energy", "simulated on", "would cost about"):
        assert said in text and said in page, said


def test_a_locked_knob_stays_where_it_is(tmp_path):
    site = load(str(site_file(tmp_path, plan=", judge: false", floor="60")))
    free = plan_joint_site(site).plan
    held = plan_joint_site(site, lock=["clock", "variant"]).plan
    assert {gpu.clock_set_mhz for gpu in held.gpus} == {1530.0}
    assert {e.model for gpu in held.gpus for e in gpu.instances} == {"resnet50", "ssd"}
    assert free.certificate.value <= held.certificate.value


def test_weights_add_dollars_of_rent_energy_and_grams(tmp_path):
    plan = ", judge: false, objective: weights, intensity: 400 g/kWh, weights: {cost: 1, energy: 0.2, carbon: 0.1}"
    made = plan_joint_site(load(str(site_file(tmp_path, plan=plan)))).plan
    watts = made.certificate.power_w
    expected = made.usd_per_hour + watts / 1000 * (0.2 + 0.1 * 0.4)
    assert made.certificate.value == pytest.approx(expected)
    assert made.certificate.objective.unit == "USD/h"
    alone = plan.replace("objective: weights, ", "")
    assert load(str(site_file(tmp_path, plan=alone))).plan.objective == "weights"


def test_an_error_of_weights_says_where_what_and_how_to_mend_it(tmp_path):
    file = site_file(tmp_path, plan=", weights: {cost: 0}")
    with pytest.raises(ConfigError) as caught:
        load(str(file))
    error = caught.value
    assert (error.line, error.pointer) == (7, "plan.weights") and error.expected and "weights: {cost: 1" in error.hint
    bare = run(site_file(tmp_path), "--objective", "weights")
    assert isinstance(bare.exception, ConfigError)
    assert bare.exception.pointer == "plan.weights" and "add plan.weights" in bare.exception.hint


def test_a_fleet_that_is_too_small_exits_with_3(tmp_path):
    with pytest.raises(InfeasibleError) as caught:
        plan_joint_site(load(str(site_file(tmp_path, gpu=", available: 1", plan=", judge: false"))))
    assert caught.value.exit_code == 3
    assert caught.value.binding == "number of GPUs: 1 V100"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"floor": "90"}, "no variant is as accurate"),
        ({"plan": ", objective: carbon"}, "need a carbon intensity"),
        ({"plan": ", objective: weights"}, "needs plan.weights beside it"),
        ({"plan": ", weights: {}"}, "weighs nothing"),
        ({"plan": ", weights: {cost: 0, energy: 0}"}, "weighs nothing"),
        ({"plan": ", weights: {cost: -1}"}, "plan.weights.cost: must be at least 0"),
        ({"plan": ", weights: {costs: 1}"}, "unknown key 'costs'"),
        ({"plan": ", weights: 1"}, "plan.weights: must be a mapping"),
        ({"plan": ", weights: {carbon: 0.1}"}, "plan.weights.carbon: grams need a carbon intensity"),
        ({"truth": "v101"}, "no GPU type 'v101'"),
        ({"gpu": ", host: -5 W"}, "host"),
        ({"plan": ", power_cap: 0 W"}, "power cap"),
        ({"plan": ", carbon_cap: 100 g/h"}, "needs a carbon intensity"),
        ({"plan": ", intensity: 300 g/kWh, carbon_cap: 0 g/h"}, "carbon_cap"),
        ({"plan": ", intensity: 300 g/kWh, carbon_cap: 100 W"}, "carbon_cap"),
        ({"plan": ", pue: .nan"}, "pue"),
    ],
)
def test_a_site_that_cannot_be_meant_is_refused(tmp_path, change, said):
    with pytest.raises(ConfigError) as caught:
        plan_joint_site(load(str(site_file(tmp_path, **change))))
    assert said in f"{caught.value} {caught.value.pointer}"


def test_grams_at_most_bind_as_their_watts_and_have_a_price(tmp_path):
    cheapest = plan_joint_site(load(str(site_file(tmp_path, plan=", objective: cost, judge: false")))).plan
    power_w = cheapest.certificate.power_w
    grams = 0.97 * 0.3 * 1.2 * power_w
    rules = f", objective: cost, judge: false, intensity: 300 g/kWh, pue: 1.2, carbon_cap: {grams:.6f} g/h"
    capped = plan_joint_site(load(str(site_file(tmp_path, plan=rules)))).plan
    certificate = capped.certificate
    assert certificate.carbon_cap_g_per_hour == pytest.approx(grams)
    assert certificate.objective.carbon_g_per_hour(certificate.power_w, len(capped.gpus)) <= grams * (1 + 1e-9)
    in_watts = f", objective: cost, judge: false, power_cap: {0.97 * power_w:.6f} W"
    same = plan_joint_site(load(str(site_file(tmp_path, plan=in_watts)))).plan.certificate
    assert certificate.value == pytest.approx(same.value)
    assert certificate.carbon_price == pytest.approx(certificate.power_price / (0.3 * 1.2))
    kept = tmp_path / "plan.json"
    kept.write_text(json.dumps(document_of(capped)))
    assert read_plan(kept).plan().certificate.carbon_cap_g_per_hour == pytest.approx(grams)
    said = run(site_file(tmp_path, plan=rules), "--explain").output
    assert ("10 g/h more under the carbon cap would save" in said) is (certificate.power_price > 0)
    assert "100 W more" not in said
    tighter = rules.replace(f"{grams:.6f}", "10")
    with pytest.raises(InfeasibleError) as caught:
        plan_joint_site(load(str(site_file(tmp_path, plan=tighter))))
    assert caught.value.binding == "carbon cap of 10 g/h (27.78 W of GPUs and hosts)"
    with pytest.raises(InfeasibleError) as caught:
        plan_joint_site(load(str(site_file(tmp_path, plan=rules + ", power_cap: 1 W"))))
    assert caught.value.binding == "power cap of 1 W"


def test_a_variant_without_quality_is_refused(tmp_path):
    file = site_file(tmp_path)
    file.write_text(file.read_text().replace("accuracy: 56.5 %", ""))
    with pytest.raises(ConfigError, match="accuracy"):
        load(str(file))


@pytest.mark.parametrize(
    ("change", "flags", "pointer", "text"),
    [
        ({"plan": ", weights: {carbon: 0.1}"}, (), "plan.weights.carbon", "weights"),
        ({"plan": ", objective: carbon"}, (), "plan.objective", "objective"),
        ({"plan": ", carbon_cap: 100 g/h"}, (), "plan.carbon_cap", "carbon_cap"),
        ({"plan": ", weights: {carbon: 0.1}"}, ("--envelope",), "plan.weights.carbon", "weights"),
    ],
)
def test_an_error_found_while_planning_names_file_and_line(tmp_path, change, flags, pointer, text):
    file = site_file(tmp_path, **change)
    error = run(*flags, file).exception
    assert isinstance(error, ConfigError)
    assert (error.file, error.pointer) == (str(file), pointer)
    assert text in file.read_text().splitlines()[error.line - 1]
    assert str(error).startswith(f"{file}:{error.line} {pointer}: ")


def test_a_model_that_no_gpu_type_knows_names_its_key(tmp_path):
    file = site_file(tmp_path)
    file.write_text(file.read_text().replace("model: alexnet", "model: alexnett"))
    error = run(file).exception
    assert isinstance(error, ConfigError)
    assert "alexnett" in file.read_text().splitlines()[error.line - 1]
    assert error.pointer.startswith("services.0.variants.")


def test_an_error_of_a_flag_names_no_line(tmp_path):
    error = run(site_file(tmp_path), "--objective", "carbon").exception
    assert isinstance(error, ConfigError)
    assert (error.file, error.line, error.pointer) == (None, None, "--objective")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (PlanOptions(preset="best", lock=("clock",)), "--lock goes with preset joint"),
        (PlanOptions(preset="best", objective="energy"), "--objective goes with preset joint"),
        (PlanOptions(lock=("colour",)), "no such knob"),
        (PlanOptions(compare=("worst",)), "no such policy"),
        (PlanOptions(compare=("igniter",)), "plans one model a service"),
        (PlanOptions(objective="water"), "no such objective"),
    ],
)
def test_a_flag_that_cannot_be_meant_is_refused(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        plan_site(load(str(site_file(tmp_path))), options)
