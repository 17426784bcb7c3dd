"""``joulery profile --from RUNS --predict ROWS``: the contract of its JSON, its text, and its errors."""

import csv
import json
import statistics
from collections import defaultdict

import pytest

from joulery.ui.cli import main
from tests.data_folder import data_folder
from tests.perf.llm.made_up import runs

HEAD = ("model_id", "gpu_model", "num_gpus", "weight_precision", "task", "avg_batch_size", "max_num_seqs")
MEASURED = ("avg_power_watts", "output_throughput_tokens_per_sec", "median_itl_ms", "p99_itl_ms")


def play(capsys, *arguments):
    code = main(["profile", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def table(file, columns, rows):
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return file


@pytest.fixture
def measured(tmp_path):
    """Runs of the made-up engine as a file."""
    rows = [
        {
            "model_id": run.point.model_id,
            "gpu_model": run.point.gpu.name,
            "num_gpus": run.point.num_gpus,
            "weight_precision": run.point.precision,
            "task": run.point.task,
            "avg_batch_size": run.point.batch,
            "max_num_seqs": "",
            "avg_power_watts": run.power_w,
            "output_throughput_tokens_per_sec": run.throughput_tps,
            "median_itl_ms": 1e3 * run.itl_p50_s,
            "p99_itl_ms": 1e3 * run.itl_p99_s,
        }
        for run in runs()
    ]
    return table(tmp_path / "runs.csv", (*HEAD, *MEASURED), rows)


def asked(folder, *rows):
    return table(folder / "rows.csv", HEAD, [dict(zip(HEAD, row, strict=True)) for row in rows])


def test_json_keeps_the_rows_and_says_their_basis(capsys, tmp_path, measured):
    rows = asked(
        tmp_path,
        ("Qwen/Qwen3-8B", "H100", 1, "bf16", "chat", 8, ""),
        ("Qwen/Qwen3-8B", "H100", 1, "bf16", "chat", 20, 32),
        ("google/gemma-3-27b-it", "MI300X", 1, "bf16", "chat", "", 64),
    )
    code, out, err = play(capsys, "--from", measured, "--predict", rows, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert [row["basis"] for row in document["rows"]] == ["measured", "fitted", "transferred"]
    assert [row["gpu_model"] for row in document["rows"]] == ["H100", "H100", "MI300X"]
    for row in document["rows"]:
        figures = ("energy_per_token_j", "throughput_tps", "power_w", "itl_p99_s", "error_ratio")
        assert all(row[figure] > 0 for figure in figures)
        assert row["energy_per_token_j"] == pytest.approx(row["power_w"] / row["throughput_tps"])
    assert document["runs"] == 30


def test_text_shows_every_row_with_its_error(capsys, tmp_path, measured):
    rows = asked(tmp_path, ("meta-llama/Llama-3.1-70B-Instruct", "H100", 1, "bf16", "chat", 8, ""))
    code, out, _ = play(capsys, "--from", measured, "--predict", rows)
    assert code == 0
    assert "±" in out
    assert "does not fit" in out
    assert "cross-validation on 30 measured runs" in out


def test_without_rows_the_fit_is_judged_and_kept(capsys, tmp_path, measured):
    kept = tmp_path / "profile.json"
    code, out, _ = play(capsys, "--from", measured, "-o", kept)
    assert code == 0
    assert "a load between measured ones" in out
    assert json.loads(kept.read_text())["rows"] == []


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (("Qwen/Qwen3-8B", "H1000", 1, "bf16", "", 8, ""), "did you mean"),
        (("gpt-oss", "H100", 1, "bf16", "", 8, ""), "gpt-oss-20b"),
        (("Qwen/Qwen3-8B", "H100", 1, "bf16", "", "", ""), "max_num_seqs is empty"),
        (("Qwen/Qwen3-8B", "H100", 0, "bf16", "", 8, ""), "num_gpus is '0'"),
        (("Qwen/Qwen3-8B", "H100", 1, "bf16", "", "nan", ""), "avg_batch_size is 'nan'"),
    ],
)
def test_a_bad_row_exits_2_and_names_its_line(capsys, tmp_path, measured, row, says):
    code, out, err = play(capsys, "--from", measured, "--predict", asked(tmp_path, row))
    assert (code, out) == (2, "")
    assert "rows.csv:2" in err
    assert says in err


def test_rows_without_measurements_and_one_measurement(capsys, tmp_path, measured):
    rows = asked(tmp_path, ("Qwen/Qwen3-8B", "H100", 1, "bf16", "", 8, ""))
    code, _, err = play(capsys, "--predict", rows)
    assert (code, "add --from" in err) == (2, True)
    one = tmp_path / "one.csv"
    one.write_text("\n".join(measured.read_text().splitlines()[:2]) + "\n")
    code, _, err = play(capsys, "--from", one, "--predict", rows)
    assert (code, "too few" in err) == (2, True)


@pytest.mark.slow
def test_rows_left_out_of_the_published_runs_are_within_the_bars(capsys, tmp_path):
    """Every fourth inner row of each curve is asked of the command, which sees the others."""
    with (data_folder("llm") / "mlenergy_runs.csv").open(newline="") as file:
        every = list(csv.DictReader(file))
    curves = defaultdict(list)
    for row in every:
        curves[tuple(row[name] for name in HEAD[:5])].append(row)
    hidden = []
    for curve in curves.values():
        curve.sort(key=lambda row: float(row["avg_batch_size"]))
        hidden += [row for index, row in enumerate(curve[1:-1]) if index % 4 == 1]
    seen = [row for row in every if row not in hidden]
    files = (table(tmp_path / "seen.csv", tuple(every[0]), seen), table(tmp_path / "rows.csv", HEAD, hidden))
    code, out, _ = play(capsys, "--from", files[0], "--predict", files[1], "--json")
    assert code == 0
    answers = json.loads(out)["rows"]
    bars = {
        "energy_per_token_j": (0.033, lambda row: float(row["energy_per_token_joules"])),
        "throughput_tps": (0.035, lambda row: float(row["output_throughput_tokens_per_sec"])),
        "power_w": (0.02, lambda row: float(row["avg_power_watts"])),
        "itl_p99_s": (0.08, lambda row: float(row["p99_itl_ms"]) / 1e3),
    }
    for figure, (bar, truth) in bars.items():
        errors = [abs(answer[figure] / truth(row) - 1) for answer, row in zip(answers, hidden, strict=True)]
        assert statistics.median(errors) <= bar, figure
    said = [
        abs(answer["energy_per_token_j"] / float(row["energy_per_token_joules"]) - 1) <= answer["error_p90_ratio"]
        for answer, row in zip(answers, hidden, strict=True)
    ]
    assert statistics.mean(said) >= 0.8


@pytest.mark.parametrize("words", [("llama-3.1-8b",), (), ("llama-3.1-8b", "--colocate")])
def test_a_model_without_a_site_names_what_there_is_for_language_models(capsys, words):
    assert main(["profile", *words]) == 2
    err = capsys.readouterr().err
    assert "SITE" in err and "--from" in err and "vllm" in err and "--mps" in err
    assert ("llama-3.1-8b" in err) is bool(words)
