import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command import Done, joulery
from tests.data_folder import data_folder

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ssjf.yaml"


def simulate(*arguments: str | Path) -> Done:
    return joulery("simulate", EXAMPLE, *arguments)


def test_speculation_on_the_released_predictions() -> None:
    log = data_folder("muserve") / "lmsys_vicuna13b_predictions.parquet"
    document = json.loads(simulate("--requests", log, "--seeds", "4", "--json").stdout)
    rows = {row["policy"]: row for row in document["results"]}
    base = rows["fcfs"]
    assert rows["ssjf"]["mean_jct_s"] <= 0.71 * base["mean_jct_s"]
    assert rows["ssjf"]["p99_jct_s"] <= 1.40 * base["p99_jct_s"]
    assert rows["ssjf"]["max_wait_s"] <= 1.70 * base["max_wait_s"]
    assert rows["oracle"]["mean_jct_s"] == pytest.approx(0.535 * base["mean_jct_s"], rel=0.06)
    assert rows["ssjf-delayed"]["p99_jct_s"] <= 1.15 * base["p99_jct_s"]
    assert rows["ssjf-delayed"]["mean_jct_s"] <= 0.72 * base["mean_jct_s"]
    assert rows["boost"]["p99_jct_s"] <= 1.15 * base["p99_jct_s"]
    assert rows["boost"]["mean_jct_s"] <= 0.73 * base["mean_jct_s"]
    assert rows["rerank"]["p99_jct_s"] <= 1.15 * base["p99_jct_s"]
    assert rows["rerank"]["mean_jct_s"] <= 0.71 * base["mean_jct_s"]
    assert 0 < rows["rerank"]["interruptions_ratio"] < 1 and rows["ssjf"]["interruptions_ratio"] == 0
    for row in rows.values():
        assert row["throughput_rps"] == pytest.approx(base["throughput_rps"], rel=0.005)


def test_two_predictions_of_a_request_say_more_than_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    fine, coarse = rng.integers(0, 5, 8_000), rng.integers(0, 3, 8_000)
    columns = {"output_tokens": 20 + 30 * fine + 200 * coarse, "pred_cls5": fine, "pred_cls3": coarse}
    cut = {}
    for name, kept in (("both", 3), ("one", 2)):
        pq.write_table(pa.table(dict(list(columns.items())[:kept])), tmp_path / f"{name}.parquet")
        document = json.loads(simulate("--requests", tmp_path / f"{name}.parquet", "--seeds", "1", "--json").stdout)
        cut[name] = {row["policy"]: row["mean_jct_s"] for row in document["results"]}
    assert cut["both"]["fcfs"] == cut["one"]["fcfs"]
    assert cut["both"]["ssjf"] < 0.9 * cut["one"]["ssjf"]
    assert cut["both"]["oracle"] < 1.01 * cut["both"]["ssjf"]


@pytest.mark.slow
def test_the_example_runs_on_made_up_requests_and_says_so() -> None:
    done = simulate("--seeds", "1", "--json")
    document = json.loads(done.stdout)
    assert document["requests"] == "made up"
    assert {"policy", "mean_jct_s", "p99_jct_s", "max_wait_s", "throughput_rps"} <= set(document["results"][0])
    line = [sys.executable, "-m", "joulery", "simulate", str(EXAMPLE), "--seeds", "1", "--json"]
    assert subprocess.run(line, capture_output=True, text=True).stdout == done.stdout, "in another process too"
    assert "every number is simulated" in simulate("--seeds", "1").stdout


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"output_tokens": [1, 2]}, "pred_cls5"),
        ({"output_tokens": [1.0, float("nan")], "pred_cls5": [0, 1]}, "output_tokens is nan"),
        ({"output_tokens": [1, 2], "pred_cls5": [0, 1]}, "at least 100 answers"),
    ],
)
def test_a_log_that_cannot_be_used_is_one_clear_error(tmp_path: Path, columns: dict[str, list], says: str) -> None:
    log = tmp_path / "log.parquet"
    pq.write_table(pa.table(columns), log)
    done = simulate("--requests", log)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_no_parquet_at_all(tmp_path: Path) -> None:
    log = tmp_path / "log.parquet"
    log.write_text("not parquet")
    done = simulate("--requests", log)
    assert done.returncode == 2 and "Parquet" in done.stderr and "Traceback" not in done.stderr
    done = simulate("--policy", "lottery")
    assert done.returncode == 2 and "no such order" in done.stderr
