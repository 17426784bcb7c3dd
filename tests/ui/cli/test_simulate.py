"""``joulery simulate``: the contract for scripts, the same bytes for the same seeds, faults named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from joulery.ui.cli import main
from tests.data_folder import data_folder

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SERVING = EXAMPLES / "igniter-12-simulate.yaml"
CLOVER = EXAMPLES / "clover-48h.yaml"
CONTRACT = {
    "service": str,
    "trace": str,
    "scheme": str,
    "lambda": float,
    "seed": int,
    "saving_ratio": float,
    "saving_same_gpus_ratio": float,
    "loss_points": float,
    "loss_ratio": float,
    "objective": float,
    "objective_oracle": float,
    "trials": int,
    "trials_meeting_sla_ratio": float,
    "settled_violations": int,
    "optimise_time_ratio": float,
}


def simulate(capsys, *arguments):
    code = main(["simulate", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def answer(capsys, *arguments):
    code, out, err = simulate(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_example_meets_every_slo_on_six_gpus_and_not_on_five(capsys):
    document = answer(capsys, SERVING, "--seeds", 2, "--policy", "igniter", "--policy", "first-fit")
    assert (document["kind"], document["quality"], document["truth"]) == ("batched-serving", "simulated", "v100-refit")
    igniter, first_fit = document["summary"]
    assert (igniter["policy"], igniter["gpus"], igniter["violations"]["mean"]) == ("igniter", 6, 0.0)
    assert (first_fit["policy"], first_fit["gpus"], first_fit["violations"]["mean"]) == ("first-fit", 5, 7.0)
    assert first_fit["violations_against_first"]["mean"] == 7.0
    assert first_fit["power_w_against_first"]["mean"] < 0
    assert [(result["policy"], result["seed"]) for result in document["results"]] == [
        ("igniter", 0),
        ("igniter", 1),
        ("first-fit", 0),
        ("first-fit", 1),
    ]
    result = document["results"][0]
    assert result["violations"] == []
    assert {service["name"] for service in result["services"]} == {f"W{number}" for number in range(1, 13)}
    assert sum(len(gpu["instances"]) for gpu in result["gpu"]) == 12
    parts = sum(gpu["idle_j"] + sum(one["dynamic_j"] for one in gpu["instances"]) for gpu in result["gpu"])
    assert parts == pytest.approx(result["energy_j"])
    assert result["power_w"] == pytest.approx(result["energy_j"] / document["window_s"])


def test_the_terminal_shows_plans_and_tails(capsys):
    code, out, _ = simulate(capsys, SERVING, "--seeds", 1, "--policy", "first-fit")
    assert code == 0
    assert "first-fit" in out
    assert "W12 (ssd)" in out
    assert "every number is simulated" in out


@pytest.mark.slow
def test_the_best_plan_meets_every_slo_on_five_gpus(capsys):
    summary = answer(capsys, SERVING, "--seeds", 2, "--policy", "best")["summary"][0]
    assert (summary["gpus"], summary["violations"]["mean"]) == (5, 0.0)


def test_policies_of_the_command_line_replace_the_files(capsys):
    document = answer(capsys, SERVING, "--seeds", 1, "--policy", "first-fit")
    assert [summary["policy"] for summary in document["summary"]] == ["first-fit"]
    document = answer(capsys, SERVING, "--seeds", 1, "--policy", "igniter", "--policy", "first-fit")
    assert [summary["policy"] for summary in document["summary"]] == ["igniter", "first-fit"]


def changed(tmp_path, old, new):
    text = SERVING.read_text()
    assert old in text
    path = tmp_path / "scenario.yaml"
    path.write_text(text.replace(old, new))
    return path


def test_poisson_arrivals_violate_every_slo(capsys, tmp_path):
    path = changed(tmp_path, "{kind: constant}", "{kind: poisson}")
    document = answer(capsys, path, "--seeds", 2, "--policy", "igniter")
    assert document["summary"][0]["violations"]["mean"] == 12.0


def test_greedy_batching_busy_neighbours_and_other_processes_can_be_asked_for(capsys, tmp_path):
    path = changed(
        tmp_path,
        "arrivals: {kind: constant}\nlength: 30 s",
        "arrivals: {kind: gamma, cv: 0.5}\nlength: 2 s\nneighbours: busy\nbatching_delay: 0 s",
    )
    document = answer(capsys, path, "--seeds", 1, "--policy", "igniter")
    instances = [one for gpu in document["results"][0]["gpu"] for one in gpu["instances"]]
    assert any(one["mean_batch"] < one["batch"] for one in instances)
    assert all(service["unanswered"] == 0 for service in document["results"][0]["services"])


def test_recorded_arrivals_and_changing_rates_are_played(capsys, tmp_path):
    (tmp_path / "log.csv").write_text("arrival_s\n" + "".join(f"{number / 10}\n" for number in range(60)))
    path = changed(
        tmp_path,
        "{name: W11, model: ssd, rate: 50 /s, slo: {latency: 40 ms, quantile: 99 %}}",
        "{name: W11, model: ssd, rate: 50 /s, slo: {latency: 40 ms, quantile: 99 %}, "
        "arrivals: {kind: recorded, file: log.csv}}",
    )
    path.write_text(
        path.read_text()
        .replace("length: 30 s", "length: 3 s\nwarmup: 1 s")
        .replace(
            "{name: W12, model: ssd, rate: 300 /s, slo: {latency: 55 ms, quantile: 99 %}}",
            "{name: W12, model: ssd, rate: 300 /s, slo: {latency: 55 ms, quantile: 99 %}, "
            "rates: [{from: 0 s, rate: 0 /s}]}",
        )
    )
    document = answer(capsys, path, "--seeds", 1, "--policy", "igniter")
    by_name = {service["name"]: service for service in document["results"][0]["services"]}
    assert by_name["W11"]["requests"] == 30
    assert by_name["W12"]["requests"] == 0


def test_a_run_directory_keeps_every_result(capsys, tmp_path):
    plans = ("--seeds", 1, "--policy", "igniter", "--policy", "first-fit")
    code, _, err = simulate(capsys, SERVING, *plans, "--out", tmp_path / "run")
    assert code == 0
    assert "kept in" in err
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["kind"], manifest["state"], manifest["scenario"]) == ("simulate", "closed", "igniter-12")
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["policy"] for line in lines] == ["igniter", "first-fit"]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["summary"][0]["gpus"] == 6
    code, _, err = simulate(capsys, SERVING, *plans, "--out", tmp_path / "run")
    assert (code, "already holds a run" in err) == (2, True)


@pytest.mark.slow
def test_clover_prints_the_contract(capsys):
    folder = data_folder("clover")
    grid = ("--carbon", folder / "carbon_traces_48h.csv", "--column", "CISO_March")
    document = answer(capsys, CLOVER, "--profile", folder / "synth_v1", *grid, "--seeds", 2)
    results, pools = document["results"], document["pools"]
    for pool in pools:
        same = [row for row in results if (row["scheme"], row["seed"]) == (pool["scheme"], pool["seed"])]
        savings = [row["saving_ratio"] for row in same]
        assert min(savings) <= pool["saving_ratio"] <= max(savings)
        assert pool["trials"] == sum(row["trials"] for row in same)
    assert len(results) == 3 * (4 * 1 + 2 * 2)
    for row in results:
        for key, kind in CONTRACT.items():
            assert isinstance(row[key], kind), key
        assert row["trace"] == "CISO_March"
    assert {row["scheme"] for row in results} == {"base", "co2opt", "blover", "clover", "learning", "oracle"}
    assert {row["service"] for row in results} == {"yolo", "efficientnet", "albert"}
    for row in results:
        if row["scheme"] == "clover":
            assert row["saving_ratio"] >= 0.75
            assert row["settled_violations"] == 0
            assert row["saving_same_gpus_ratio"] < 0.43 < row["saving_ratio"]
        if row["scheme"] == "oracle":
            assert row["objective"] == row["objective_oracle"]
        if row["scheme"] == "base":
            assert row["saving_ratio"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.slow
def test_clover_runs_on_the_built_in_profile(capsys, tmp_path):
    path = tmp_path / "one.yaml"
    text = CLOVER.read_text().replace("file: carbon/", f"file: {EXAMPLES}/carbon/")
    path.write_text(text.replace("period: 1 h", "period: 1 h\nservices: [yolo]"))
    code, out, _ = simulate(capsys, path, "--seeds", 2)
    assert code == 0
    assert "GB-March-2021, lambda 0.1" in out
    assert "same GPUs" in out
    assert "calibrated on the 18 measured points" in out
    assert {row["scheme"] for row in answer(capsys, path, "--policy", "clover")["results"]} == {"clover"}


@pytest.mark.slow
def test_the_same_seeds_give_the_same_bytes(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(CLOVER.read_text().replace("file: carbon/", f"file: {EXAMPLES}/carbon/") + "services: [yolo]\n")
    line = [sys.executable, "-m", "joulery", "simulate", str(path), "--seeds", "2", "--json"]
    first, again = (subprocess.run(line, capture_output=True, check=True) for _ in range(2))
    assert (first.stdout, first.stderr) == (again.stdout, b"")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((SERVING, "--policy", "magic"), 2, "no such provisioning policy"),
        ((SERVING, "--policy", "igniter", "--policy", "igniter"), 2, "is listed twice"),
        ((SERVING, "--profile", "x"), 2, "takes no --profile"),
        ((CLOVER, "--policy", "magic"), 2, "no scheme"),
        ((CLOVER, "--column", "x"), 2, "--carbon"),
        ((CLOVER, "--carbon", "nowhere.csv"), 2, "cannot be read"),
        ((CLOVER, "--profile", "nowhere"), 2, "cannot be read"),
        (("nowhere.yaml",), 2, "cannot be read"),
    ],
)
def test_faults_are_one_clear_line(capsys, arguments, code, text):
    found, out, err = simulate(capsys, *arguments)
    assert (found, out) == (code, "")
    assert text in err
    assert "Traceback" not in err
    found, out, err = simulate(capsys, *arguments, "--json")
    assert (found, out) == (code, "")
    assert json.loads(err)["error"]["kind"] in {"config", "data"}


def test_unknown_services_profiles_and_models_are_named(capsys, tmp_path):
    for old, new, text in (
        ("truth: v100-refit", "truth: v1000", "catalog has no"),
        ("gpu: v100  ", "gpu: v1000  ", "catalog has no"),
        ("model: alexnet, rate: 1200 /s", "model: gpt, rate: 1200 /s", "no coefficients for model 'gpt'"),
    ):
        code, _, err = simulate(capsys, changed(tmp_path, old, new), "--seeds", 1, "--policy", "igniter")
        assert (code, text in err) == (2, True), err
    path = tmp_path / "clover.yaml"
    path.write_text(CLOVER.read_text().replace("file: carbon/", f"file: {EXAMPLES}/carbon/") + "services: [dogs]\n")
    code, _, err = simulate(capsys, path)
    assert (code, "no service of that name" in err) == (2, True)


def test_a_plan_asked_for_too_much_power_is_infeasible(capsys, tmp_path):
    old = "- {name: igniter, policy: igniter}"
    crowd = ", ".join("{service: W9, share: 10 %, batch: 512}" for _ in range(10))
    path = changed(tmp_path, old, f"{old}\n  - {{name: crowd, gpus: [[{crowd}]]}}")
    code, _, err = simulate(capsys, path, "--seeds", 1, "--policy", "crowd")
    assert code in (2, 3), err
