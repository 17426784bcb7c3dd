"""Scenario files: what is read, and where a fault is said to be."""

import pytest

from joulery.config.parsing.reading import check_document, load
from joulery.config.scenario import (
    SCENARIO,
    BatchedServingScenario,
    VariantsScenario,
    load_scenario,
    scenario_schema,
)
from joulery.domain.errors import ConfigError

SERVING = """\
scenario: 1
kind: batched-serving
noise: 5 %
batching_delay: 3 ms
arrivals: {kind: gamma, cv: 2}
services:
  - name: W1
    model: alexnet
    rate: 1200 /s
    slo: {latency: 10 ms, quantile: 99 %}
  - name: W2
    model: ssd
    rate: 60 /min
    slo: {latency: 40 ms, quantile: 95 %}
    arrivals: {kind: poisson}
    rates: [{from: 0 s, rate: 5 /s}, {from: 2 min, rate: 0 /s}]
plans:
  - {name: igniter, policy: igniter}
  - name: mine
    gpus:
      - [{service: W1, share: 75 %, batch: 6}, {service: W2, share: 0.25, batch: 1}]
"""


def written(tmp_path, text):
    (tmp_path / "grid.csv").write_text("g_per_kwh\n100\n")
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    return path


def faults(tmp_path, text):
    scenario, errors = check_document(written(tmp_path, text), SCENARIO)
    assert scenario is None
    return [(error.pointer, error.line, str(error)) for error in errors]


def test_a_batched_serving_scenario_in_si_units(tmp_path):
    scenario = load_scenario(written(tmp_path, SERVING))
    assert isinstance(scenario, BatchedServingScenario)
    first, second = scenario.services
    assert (first.rate_rps, first.slo.as_slo().latency_s, first.slo.as_slo().quantile) == (1200.0, 0.01, 0.99)
    assert (second.rate_rps, second.slo.as_slo().quantile) == (1.0, 0.95)
    assert [(step.from_s, step.rate_rps) for step in second.rates] == [(0.0, 5.0), (120.0, 0.0)]
    assert scenario.batching_delay_s == pytest.approx(0.003)
    assert scenario.noise_cv == 0.05
    assert scenario.plans[1].gpus[0][1].share_ratio == 0.25
    assert (scenario.seeds, scenario.gpu, scenario.truth, scenario.neighbours) == (5, "v100", "v100-refit", "always")


def test_a_variants_scenario_with_its_defaults(tmp_path):
    text = "scenario: 1\nkind: variants\ncarbon: [{name: g, file: grid.csv}]\n"
    scenario = load_scenario(written(tmp_path, text))
    assert isinstance(scenario, VariantsScenario)
    assert scenario.carbon[0].file == tmp_path / "grid.csv"
    assert scenario.schemes == ("base", "co2opt", "blover", "clover", "learning", "oracle")
    assert (scenario.lambda_ratios, scenario.base_g_per_kwh, scenario.pue) == ((0.1,), 250.0, 1.5)
    assert (scenario.replan_ratio, scenario.trial_s, scenario.period_s, scenario.seeds) == (0.05, 30.0, 3600.0, 20)


@pytest.mark.parametrize(
    ("old", "new", "pointer", "line", "text"),
    [
        ("10 ms", "10 W", "services.0.slo.latency", 10, "is a power, not a time"),
        ("share: 75 %", "share: 76 %", "plans.1.gpus.0", 21, "has shares of 101 %"),
        ("share: 0.25", "share: 0", "plans.1.gpus.0.1.share", 21, "needs a share"),
        ("service: W2", "service: W3", "plans.1.gpus.0.1.service", 21, "not a service of this scenario"),
        ("name: W2", "name: W1", "services.1.name", 11, "is listed twice"),
        ("name: mine", "name: igniter", "plans.1.name", 19, "is listed twice"),
        ("policy: igniter", "policy: igniter, gpus: [[]]", "plans.0", 18, "one of the three"),
        ("{name: igniter, policy: igniter}", "{name: igniter}", "plans.0", 18, "one of the three"),
        ("from: 0 s", "from: 1 s", "services.1.rates.0.from", 16, "begin at 0 s"),
        ("from: 2 min", "from: 0 s", "services.1.rates.1.from", 16, "go forward"),
        ("quantile: 95 %", "quantile: 100 %", "services.1.slo.quantile", 14, "both excluded"),
        ("cv: 2", "cv: 51", "arrivals.cv", 5, "at most 50"),
        ("kind: poisson", "kind: poison", "services.1.arrivals.kind", 15, "not a known kind"),
        ("batch: 6", "batch: 0", "plans.1.gpus.0.0.batch", 21, "at least 1"),
        ("scenario: 1", "scenario: 2", "scenario", 1, "not a known value"),
        ("noise:", "noize:", "noize", 3, "unknown key"),
    ],
)
def test_faults_are_pointed_at(tmp_path, old, new, pointer, line, text):
    assert SERVING.count(old) == 1
    found = faults(tmp_path, SERVING.replace(old, new))
    assert [(found[0][0], found[0][1])] == [(pointer, line)]
    assert text in found[0][2]
    assert len(found) == 1


def test_an_unknown_or_missing_kind_lists_the_kinds(tmp_path):
    ((pointer, _, text),) = faults(tmp_path, "scenario: 1\nkind: varients\n")
    assert pointer == "kind"
    assert "batched-serving, variants" in text
    _, (error,) = check_document(written(tmp_path, "scenario: 1\n"), SCENARIO)
    assert error.message == "missing key 'kind'"
    assert "batched-serving" in error.hint


def test_files_must_be_there(tmp_path):
    ((pointer, _, text),) = faults(tmp_path, "scenario: 1\nkind: variants\ncarbon: [{name: g, file: grid2.csv}]\n")
    assert (pointer, "no such file" in text) == ("carbon.0.file", True)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="a scenario file is a mapping"):
        load_scenario(written(tmp_path, "- 1\n"))


def test_an_empty_list_is_too_short_but_a_faulty_item_is_only_that(tmp_path):
    ((pointer, _, text),) = faults(tmp_path, "scenario: 1\nkind: variants\ncarbon: []\n")
    assert (pointer, "needs at least 1 item" in text) == ("carbon", True)


def test_every_key_is_described():
    for name, part in scenario_schema()["$defs"].items():
        assert part.get("description"), name
        for key, field in part.get("properties", {}).items():
            if key != "kind":
                assert field.get("description") or "$ref" in field or "const" in field, f"{name}.{key}"


def test_a_site_file_and_a_scenario_file_are_distinguished(tmp_path):
    site, scenario = tmp_path / "site.yaml", tmp_path / "scenario.yaml"
    site.write_text("name: s\njoulery: 1\n")
    scenario.write_text("scenario: 1\nkind: ordering\n")
    with pytest.raises(ConfigError, match="site file") as caught:
        load_scenario(site)
    assert caught.value.line == 2
    with pytest.raises(ConfigError, match="scenario file") as caught:
        load(scenario)
    assert "joulery simulate" in caught.value.hint
