import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from joulery.app.simulation.training_study import with_known
from joulery.domain.errors import DataError
from joulery.perf.power.training_power import NodePower
from joulery.sim.training.plant import Jobs
from tests.command import Done, joulery

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
KEYS = {
    "policy", "region", "jobs", "mean_jct_s", "p99_jct_s", "makespan_s", "job_carbon_kg", "cluster_carbon_kg",
    "cluster_energy_kwh", "peak_power_w", "preemptions", "rescales", "digest",
}  # fmt: skip


def simulate(*arguments: str | Path) -> Done:
    return joulery("simulate", *arguments)


@pytest.mark.parametrize("name", ["green-day.yaml", "green-year.yaml"])
def test_the_examples_keep_the_contract(name: str) -> None:
    ask = ("simulate", str(EXAMPLES / name), "--days", "1", "--policies", "green,tiresias", "--seed", "3", "--json")
    done = joulery(*ask)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["policy"] for row in document["results"]] == ["green", "tiresias"]
    assert all(set(row) >= KEYS for row in document["results"])
    assert document["quality"] == "simulated" and document["regions"][0]["quality"] == "assumed"
    again = subprocess.run([sys.executable, "-m", "joulery", *ask], capture_output=True, text=True)
    assert again.stdout == done.stdout, "in another process, with another hash seed"


def test_jobs_are_placed_where_a_scenario_says_how_large_its_nodes_are(tmp_path: Path) -> None:
    text = (EXAMPLES / "green-day.yaml").read_text().replace("jobs_per_day: 791", "jobs_per_day: 80")
    assert "\ncluster:" not in text
    scenario = tmp_path / "placed.yaml"
    rows = {}
    for name, cluster in (("counted", "{nodes: 4}"), ("placed", "{nodes: 2, node_gpus: 4}")):
        scenario.write_text(f"{text}\ncluster: {cluster}\n")
        done = simulate(scenario, "--days", "1", "--policies", "tiresias,green-sleep", "--seed", "3", "--json")
        assert done.returncode == 0, done.stderr
        rows[name] = json.loads(done.stdout)["results"]
    assert all(row["fragmented_gpu_s"] == 0 for row in rows["counted"])
    assert any(row["fragmented_gpu_s"] > 0 for row in rows["placed"])
    assert [row["jobs"] for row in rows["placed"]] == [row["jobs"] for row in rows["counted"]]


def test_a_cluster_of_several_types_counts_energy_by_type() -> None:
    ask = (EXAMPLES / "green-types.yaml", "--days", "1", "--policies", "lean,fifo", "--json")
    for row in json.loads(simulate(*ask).stdout)["results"]:
        types = row["by_type"]
        assert [use["type"] for use in types] == ["rtx3090", "v100", "a100"] and all(use["gpus"] >= 16 for use in types)
        kwh = sum(use["job_energy_kwh"] + use["idle_energy_kwh"] for use in types)
        assert kwh == pytest.approx(row["cluster_energy_kwh"], rel=1e-9)
        assert sum(use["job_energy_kwh"] for use in types) == pytest.approx(row["job_energy_kwh"], rel=1e-9)
    text = simulate(*ask[:-1]).stdout
    assert "16 nodes of 2 rtx3090" in text and "GPU type" in text


GROUPS = """
cluster:
  groups:
  - {type: a100, nodes: 1, gpus: 4, partition: new}
  - {type: v100, nodes: 2, gpus: 2}
"""


@pytest.mark.parametrize(
    ("trace", "cluster", "says"),
    [
        ("h100,", GROUPS, "no group of nodes has gpu_type 'h100'"),
        ("a100,old", GROUPS, "no group of nodes has gpu_type 'a100' partition 'old'"),
        ("a100,new", "cluster: {nodes: 3, groups: [{type: x, nodes: 1, gpus: 1}]}", "groups already state"),
        ("a100,new", "cluster: {groups: [{type: x, nodes: 0, gpus: 1}]}", "nodes"),
        ("a100,new", "cluster: {groups: [{type: x, nodes: 1, gpus: 1, limit: 0 W}]}", "limit"),
        ("v100,new", GROUPS, None),
        ("a100,", GROUPS, None),
    ],
)
def test_jobs_of_a_file_run_on_the_type_they_name(tmp_path: Path, trace: str, cluster: str, says: str | None) -> None:
    (tmp_path / "jobs.csv").write_text(f"submit_s,duration_s,num_gpus,gpu_type,partition\n0,900,1,{trace}\n5,900,2,,\n")
    scenario = tmp_path / "types.yaml"
    scenario.write_text(
        f"scenario: 1\nkind: training\ntrace: {{kind: file, file: jobs.csv}}\n{cluster}\n"
        "regions: [{name: GB, carbon: {kind: typical, zone: GB}}]\npolicies: [fifo]\n"
    )
    done = simulate(scenario, "--json")
    if says is not None:
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
        return
    (row,) = json.loads(done.stdout)["results"]
    busy = {use["type"]: use["busy_ratio"] > 0 for use in row["by_type"]}
    assert busy == ({"a100": True, "v100": False} if trace == "a100," else {"a100": True, "v100": True})


def test_shares_of_types_are_checked(tmp_path: Path) -> None:
    for shares, cluster, says in (
        ("{x: 30 %}", "", "the cluster has no GPU types"),
        ("{x: 30 %}", GROUPS, "no group has this GPU type"),
        ("{a100: 80 %, v100: 30 %}", GROUPS, "exceed 100 %"),
    ):
        scenario = tmp_path / "types.yaml"
        scenario.write_text(
            "scenario: 1\nkind: training\n"
            f"trace: {{kind: synthetic, days: 1, jobs_per_day: 5, gpu_types: {shares}}}\n{cluster}\n"
            "regions: [{name: GB, carbon: {kind: typical, zone: GB}}]\n"
        )
        done = simulate(scenario)
        assert done.returncode == 2 and says in done.stderr, done.stderr


@pytest.mark.slow
def test_slack_hours_let_long_jobs_wait(tmp_path: Path) -> None:
    ask = (EXAMPLES / "green-year.yaml", "--days", "2", "--policies", "tiresias,green-sleep")
    rows = {}
    for hours in ("0", "24"):
        document = json.loads(simulate(*ask, "--slack-hours", hours, "--json").stdout)
        assert document["slack_hours"] == float(hours)
        rows[hours] = {row["policy"]: row for row in document["results"]}
    plain = json.loads(simulate(*ask, "--json").stdout)["results"]
    assert [row["digest"] for row in plain] == [row["digest"] for row in rows["0"].values()]
    assert rows["24"]["tiresias"]["digest"] == rows["0"]["tiresias"]["digest"], "only GREEN makes jobs wait"
    waited, at_once = rows["24"]["green-sleep"], rows["0"]["green-sleep"]
    assert waited["job_carbon_kg"] < at_once["job_carbon_kg"] and waited["mean_jct_s"] > at_once["mean_jct_s"]
    assert waited["with_deadline"] > 0 and waited["late"] == 0 and at_once["with_deadline"] == 0
    shown = simulate(*ask, "--slack-hours", "24").stdout
    assert "slack 24 h for jobs over 1 h" in " ".join(shown.split()) and "after their deadline" in shown
    refused = simulate(*ask, "--slack-hours", "-1")
    assert refused.returncode == 2 and "--slack-hours" in refused.stderr


def test_ones_own_trace_and_grid(tmp_path: Path) -> None:
    trace, grid = tmp_path / "jobs.csv", tmp_path / "grid.csv"
    trace.write_text("job_id,submit_s,duration_s,num_gpus\n0,0,3600,2\n1,60,7200,1\n2,90000,600,1\n")
    hours = [f"2024-01-{1 + h // 24:02d}T{h % 24:02d}:00:00Z,{100 + h % 24}" for h in range(72)]
    grid.write_text("timestamp_utc,ci_direct\n" + "\n".join(hours) + "\n")
    done = simulate(
        EXAMPLES / "green-year.yaml", "--trace", trace, "--carbon", grid, "--column", "ci_direct", "--days", "1",
        "--policies", "fifo", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["results"][0]["jobs"], document["results"][0]["region"]) == (2, "grid")
    assert document["regions"][0]["scope"] == "direct"
    table = simulate(EXAMPLES / "green-year.yaml", "--trace", trace, "--carbon", grid, "--column", "ci_direct")
    assert "every number is simulated" in table.stdout and "mean JCT" in table.stdout


def test_what_schedulers_foresee(tmp_path: Path) -> None:
    grid, wrong_forecast = tmp_path / "grid.csv", tmp_path / "forecast.csv"
    stamps = [f"2024-01-{1 + h // 24:02d}T{h % 24:02d}:00:00Z" for h in range(96)]
    values = [100 + 80 * ((h // 5) % 3) for h in range(96)]
    grid.write_text(
        "timestamp_utc,ci_direct\n" + "\n".join(f"{t},{v}" for t, v in zip(stamps, values, strict=True)) + "\n"
    )
    wrong = [f"{t},{300 - v}" for t, v in zip(stamps, values, strict=True)]
    wrong_forecast.write_text("timestamp_utc,ci_forecast\n" + "\n".join(wrong) + "\n")
    digests = {}
    for forecast in ("oracle", "typical", "30 %", str(wrong_forecast)):
        done = simulate(
            EXAMPLES / "green-year.yaml", "--carbon", grid, "--days", "2", "--policies", "gaia", "--json",
            "--carbon-forecast", forecast,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        digests[forecast] = json.loads(done.stdout)["results"][0]["digest"]
    assert len(set(digests.values())) == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policies", "greenest"], "no such training policy"),
        (["--days", "none"], "--days needs a whole number"),
        (["--seed", "-1"], "--seed needs a whole number"),
        (["--policies", "green:theta=high"], "takes a number"),
        (["--carbon-forecast", "tomorrow"], "neither a file nor a kind of forecast"),
        (["--carbon-forecast", "recorded"], "no recorded forecast for GB"),
        (["--column", "ci"], "--column names a column of --carbon"),
        (["--carbon", "missing.csv"], "missing.csv"),
        (["--trace", "missing.csv"], "missing.csv"),
        (["--profile", "folder"], "takes no --profile"),
    ],
)
def test_bad_flags_end_in_one_clear_error(arguments: list[str], says: str) -> None:
    done = simulate(EXAMPLES / "green-day.yaml", *arguments)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_trace_that_steps_back_is_refused_with_its_row(tmp_path: Path) -> None:
    trace = tmp_path / "jobs.csv"
    trace.write_text("submit_s,duration_s\n10,60\n5,60\n")
    done = simulate(EXAMPLES / "green-day.yaml", "--trace", trace)
    assert done.returncode == 2 and "order of submission" in done.stderr
    trace.write_text("submit_s,duration_s\n10,0\n")
    done = simulate(EXAMPLES / "green-day.yaml", "--trace", trace)
    assert done.returncode == 2 and "duration of 0.0 s" in done.stderr


KNOWN = """
scenario: 1
kind: training
trace: {kind: file, file: jobs.csv}
regions: [{name: x, carbon: {kind: typical, zone: GB}}]
"""


def test_what_a_trace_knows_of_its_jobs_is_used_in_place_of_the_drawn_kind(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text(
        "submit_s,duration_s,num_gpus,speedup,gpu_w\n0,6000,4,1:1 2:1.8 4:3,420\n0,6000,2,1:1 2:1.8 4:3,420\n"
    )
    (tmp_path / "known.yaml").write_text(KNOWN)
    done = simulate(tmp_path / "known.yaml", "--policies", "fifo", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["results"]
    assert row["mean_jct_s"] == pytest.approx((6000 / 3 + 6000 / 1.8) / 2)
    assert row["job_energy_kwh"] == pytest.approx((4 * 2000 + 2 * 6000 / 1.8) * 420 / 3.6e6, rel=0.02)


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ("1:1 2:x,", "speedup is 'x', expected a number above 0"),
        ("2:1.5 4:3,", "expected 1 for the fewest GPUs"),
        ("two,", "expected such as '1:1 2:1.9 4:3.4'"),
        (",nan", "gpu_w is 'nan', expected a number above 0"),
        (",-5", "gpu_w is '-5'"),
    ],
)
def test_what_a_trace_cannot_know_is_an_error_with_its_row(tmp_path: Path, cells: str, says: str) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text(f"submit_s,duration_s,num_gpus,speedup,gpu_w\n0,600,1,,\n5,600,1,{cells}\n")
    one = np.ones(2, np.int64)
    jobs = Jobs(np.array([0.0, 5.0]), np.full(2, 600.0), 0 * one, one, one)
    with pytest.raises(DataError) as error:
        with_known(jobs, file, NodePower())
    assert says in str(error.value) and "jobs.csv:3:" in str(error.value)
