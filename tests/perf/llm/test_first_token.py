"""Time to first token of a made-up engine, and of measured load points where the data set is."""

import csv
import json

import numpy as np
import pytest

from joulery.domain.errors import DataError
from joulery.perf.llm.errors import Distance
from joulery.perf.llm.first_token import FirstTokenPredictor, LoadPoint
from joulery.perf.llm.replica import prompt_time_s
from joulery.perf.llm.runs import llm_point
from joulery.ui.cli import main
from tests.data_folder import data_folder

LOADS, PROMPTS = (4, 8, 16, 32), (512, 2048)


def asked(model="Qwen/Qwen3-8B", gpu="H100", batch=8, prompt=512, engine="vllm"):
    point = llm_point(model, gpu, 1, "bfloat16", batch, input_tokens=prompt, output_tokens=256)
    return LoadPoint(point, engine)


def measured(point):
    """A prompt waits for half of the others."""
    alone = prompt_time_s(point.point, point.point.input_tokens)
    return LoadPoint(point.point, point.engine, ttft_s=0.03 + alone * (1 + point.point.batch / 8))


POINTS = [
    measured(asked(model, gpu, batch, prompt))
    for model in ("Qwen/Qwen3-8B", "Qwen/Qwen3-14B")
    for gpu in ("H100", "H200")
    for batch in LOADS
    for prompt in PROMPTS
]
PREDICTOR = FirstTokenPredictor(POINTS)


@pytest.mark.parametrize(
    ("point", "distance", "basis"),
    [
        (asked(batch=8), Distance.MEASURED, "measured"),
        (asked(batch=12), Distance.INSIDE, "fitted"),
        (asked(batch=64), Distance.BEYOND, "fitted"),
        (asked(prompt=1024), Distance.CONFIGURATION, "transferred"),
        (asked(engine="sglang"), Distance.MODEL, "transferred"),
        (asked("Qwen/Qwen3-32B"), Distance.ARCHITECTURE, "transferred"),
        (asked(gpu="B200"), Distance.GPU, "transferred"),
    ],
)
def test_every_prediction_says_what_it_stands_on(point, distance, basis):
    (found,) = PREDICTOR.predict([point])
    assert (found.distance, found.basis) == (distance, basis)
    assert 0 < found.band.typical_ratio <= found.band.p90_ratio


@pytest.mark.parametrize(("point", "most"), [(asked(batch=8), 0), (asked(batch=12), 0.05), (asked(prompt=1024), 0.2)])
def test_a_made_up_engine_is_met(point, most):
    (found,) = PREDICTOR.predict([point])
    assert found.ttft_s == pytest.approx(measured(point).ttft_s, rel=most + 1e-12)


@pytest.mark.parametrize("points", [[], POINTS[:1], [*POINTS, asked()]])
def test_too_few_points_and_points_without_a_time_are_refused(points):
    with pytest.raises(DataError):
        FirstTokenPredictor(points)


def test_nothing_asked_is_nothing_answered():
    assert PREDICTOR.predict([]) == []


def table(file, rows):
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, tuple(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


@pytest.mark.slow
def test_load_points_left_out_of_the_command_are_within_the_bar(capsys, tmp_path):
    """Every fifth load point of one engine, all repetitions of it, is asked; the median error is within 25 %."""
    with (data_folder("llm") / "serving_latency.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["backend"] == "sglang"]
    keys = [
        tuple(row[name] for name in row if name not in ("id", "silicon_ttft_ms", "silicon_tpot_ms")) for row in rows
    ]
    hidden = set(sorted(set(keys))[::5])
    seen = table(tmp_path / "seen.csv", [row for row, key in zip(rows, keys, strict=True) if key not in hidden])
    rest = [row for row, key in zip(rows, keys, strict=True) if key in hidden]
    code = main(["profile", "--from", str(seen), "--predict", str(table(tmp_path / "rows.csv", rest)), "--json"])
    answers = json.loads(capsys.readouterr().out)["rows"]
    assert code == 0
    assert all(answer["basis"] in ("fitted", "transferred") for answer in answers)
    errors = [
        abs(answer["ttft_s"] / (float(row["silicon_ttft_ms"]) / 1e3) - 1)
        for answer, row in zip(answers, rest, strict=True)
    ]
    assert np.median(errors) <= 0.25
    within = [error <= answer["error_p90_ratio"] for error, answer in zip(errors, answers, strict=True)]
    assert np.mean(within) >= 0.75


def test_a_table_of_load_points_in_text(capsys, tmp_path):
    rows = [
        {
            "model_path": point.point.model_id,
            "system": "h100_sxm",
            "isl": int(point.point.input_tokens),
            "osl": 256,
            "batch_size": point.point.batch,
            "tp_size": 1,
            "precision": "bf16",
            "silicon_ttft_ms": 1e3 * point.ttft_s,
        }
        for point in POINTS[:8]
    ]
    file = table(tmp_path / "points.csv", rows)
    assert main(["profile", "--from", str(file), "--predict", str(file)]) == 0
    out = capsys.readouterr().out
    assert "cross-validation of TTFT on 8 load points" in out
    assert "measured" in out
    bad = tmp_path / "bad.csv"
    bad.write_text(file.read_text().replace("h100_sxm", "h100_sxq", 1))
    assert main(["profile", "--from", str(bad)]) == 2
    assert "H100-80GB" in capsys.readouterr().err
