"""``joulery plan`` of a site with ``plan.language``: the contract of its JSON, its text and page, and its errors."""

import json
from pathlib import Path

import pytest

from joulery.ui.cli import main

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "llm-fleet.yaml"


def play(capsys, *arguments):
    code = main(["plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def changed(folder, *pairs):
    text = EXAMPLE.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    file = folder / "site.yaml"
    file.write_text(text)
    return file


def test_the_keys_of_the_contract(capsys):
    code, out, err = play(capsys, EXAMPLE, "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert (plan["schema"], plan["kind"], plan["objective"], plan["quality"]) == (
        "joulery.plan/1",
        "language",
        "cost",
        "modelled",
    )
    assert 0 <= plan["bound"]["gap_ratio"] <= 0.05
    assert plan["bound"]["value"] <= plan["cost_usd_per_hour"]
    assert plan["carbon_g_per_hour"] == pytest.approx(plan["power_w"] / 1e3 * 1.2 * 350)
    assert plan["power_w"] == pytest.approx(sum(gpu["power_w"] + gpu["host_w"] for gpu in plan["gpus"]))
    assert plan["cost_usd_per_hour"] == pytest.approx(sum(gpu["usd_per_hour"] for gpu in plan["gpus"]))
    for gpu in plan["gpus"]:
        (instance,) = gpu["instances"]
        assert instance["mode"] == "whole"
        assert instance["clock_mhz"] is None
        assert instance["accuracy_ratio"] >= 0.8
        assert "Qwen3-32B" in instance["variant"]
    for service in plan["services"]:
        for slo in service["slo"]:
            assert slo["predicted_s"] <= slo["limit_s"]
            assert slo["simulated_s"] <= slo["limit_s"]


def test_the_text_answers_the_question_and_explains_and_the_page_and_the_file_are_kept(capsys, tmp_path):
    page, kept = tmp_path / "plan.html", tmp_path / "plan.json"
    code, out, _ = play(capsys, EXAMPLE, "--explain", "--html", page, "--out", kept)
    assert code == 0
    for said in ("least dollars an hour", "J a token", "each variant on one GPU type alone", "simulated with noise"):
        assert said in out
    assert "idle power of H100, B200 unknown" in out
    assert "<svg" in page.read_text()
    assert json.loads(kept.read_text())["kind"] == "language"


def test_another_objective_and_an_intensity_of_the_command_line(capsys, tmp_path):
    site = changed(tmp_path, ("objective: cost", "objective: carbon"))
    code, out, _ = play(capsys, site, "--intensity", "100 g/kWh", "--json")
    plan = json.loads(out)
    assert (code, plan["objective"], plan["intensity_g_per_kwh"]) == (0, "carbon", 100)


def test_runs_of_ones_own(capsys, tmp_path):
    head = (
        "model_id,gpu_model,num_gpus,weight_precision,avg_batch_size,output_throughput_tokens_per_sec,"
        "avg_power_watts,median_itl_ms,p99_itl_ms"
    )
    rows = [
        f"me/Mine-7B,L40S,1,fp8,{n},{n / (0.01 + 0.0001 * n)},{200 + n},{10 + n / 10},{15 + n / 5}" for n in (4, 64)
    ]
    (tmp_path / "mine.csv").write_text("\n".join((head, *rows)) + "\n")
    site = tmp_path / "site.yaml"
    site.write_text(
        "joulery: 1\nfleet: {gpus: [{name: L40S, price: 1 USD/h}]}\nplan:\n  language:\n    runs: [mine.csv]\n"
        "    services:\n      - {name: mine, rate: 2 /s, slo: {answer: 20 s}, variants: [{model: me/Mine-7B, "
        "precision: fp8, gpus: [1]}]}\n"
    )
    code, out, err = play(capsys, site, "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert plan["carbon_g_per_hour"] is None
    assert plan["services"][0]["accuracy_ratio"] is None
    assert plan["source"].endswith("mine.csv")


@pytest.mark.parametrize(
    ("old", "new", "code", "says"),
    [
        ("name: H100", "name: H1000", 2, "H100-80GB"),
        ("model: Qwen/Qwen3-32B", "model: gpt-oss", 2, "gpt-oss-20b"),
        ("model: Qwen/Qwen3-32B", "model: Qwen/Qwen3-33B", 2, "did you mean Qwen/Qwen3-32B"),
        ("model: Qwen/Qwen3-32B", "model: Qwen/Qwen3-32BB", 2, "parameters_billions"),
        ("model: Qwen/Qwen3-32B", "model: Qwen/Qwen3-32B, parameters_billions: 33", 2, "its size is theirs"),
        ("model: Qwen/Qwen3-32B", "model: x, parameters_billions: 3, active_parameters_billions: 4", 2, "is more than"),
        ("model: Qwen/Qwen3-32B", "model: x, layers: 64", 2, "needs parameters_billions"),
        ("model: Qwen/Qwen3-32B", "model: x, parameters_billions: 0", 2, "parameters_billions"),
        ("model: Qwen/Qwen3-32B", "model: x, parameters_billions: 3, kv_cache_per_token: 0 B", 2, "1 B to 1 GB"),
        ("model: Qwen/Qwen3-32B", "model: Qwen/Qwen3-32B, precision: bf61", 2, "no such precision"),
        (", quality: 84 %", "", 2, "needs the quality of every variant"),
        ("latency: 50 ms", "latency: 1 ms", 3, "keeps itl within 0.001 s"),
        ("minimum_quality: 80 %", "minimum_quality: 99 %", 3, "no variant has a quality of 99.0"),
        ("price: 5.5 USD/h", "price: 5.5 USD/h, available: 1", 0, ""),
        ("rate: 20 /s", "rate: 0 /s", 2, "rate"),
        ("price: 2.5 USD/h", "price: -2.5 USD/h", 2, "price"),
        ("objective: cost", "objective: joy", 2, "objective"),
        ("quantile: 99 %", "quantile: 100 %", 2, "quantile"),
        ("input_tokens: 512", "input_tokens: .nan", 2, "input_tokens"),
    ],
)
def test_what_is_wrong_is_one_error_with_its_exit_code(capsys, tmp_path, old, new, code, says):
    found, _, err = play(capsys, changed(tmp_path, (old, new)))
    assert found == code
    assert says in err


def test_a_model_that_nothing_knows_is_planned_for_by_its_stated_size(capsys, tmp_path):
    sized = "model: our/Chat-X, parameters_billions: 32.8, layers: 64, kv_cache_per_token: 262144 B"
    code, out, err = play(capsys, changed(tmp_path, ("model: Qwen/Qwen3-32B", sized)), "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert {each["variant"] for gpu in plan["gpus"] for each in gpu["instances"]} == {"our/Chat-X bfloat16"}
    assert plan["services"][0]["basis"] == "transferred"


@pytest.mark.parametrize("flags", [("--compare", "best"), ("--running", "x.json")])
def test_flags_of_other_plans_are_refused(capsys, flags):
    code, _, err = play(capsys, EXAMPLE, *flags)
    assert (code, "language models" in err) == (2, True)


def test_a_site_without_language_models_is_an_error(capsys, tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("joulery: 1\n")
    code, _, err = play(capsys, site, "--preset", "language")
    assert (code, "plan.language" in err) == (2, True)
