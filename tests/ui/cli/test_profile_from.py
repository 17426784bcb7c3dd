"""``joulery profile --from``: interference fitted on anybody's own measurements."""

import csv
import json

import pytest

from joulery.perf.catalog import profile
from joulery.perf.interference.document import from_document
from joulery.ui.cli import main
from tests.data_folder import data_folder
from tests.perf.interference.test_model import together

SOLO = ("model", "batch", "r_pct", "latency_ms")
PAIRS = ("model1", "batch1", "r1_pct", "latency1_ms", "model2", "batch2", "r2_pct", "latency2_ms")


def run(capsys, *arguments):
    code = main(["profile", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def write(file, columns, rows):
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(columns)
        writer.writerows(rows)
    return file


def made_up(folder, names):
    """Measurements of a GPU that behaves exactly as the published one, under other names."""
    real = dict(zip(names, ("resnet50", "vgg19"), strict=True))
    batches, shares = (1, 2, 4, 8, 16), (20.0, 40.0, 50.0, 60.0, 80.0)
    solo = [
        (name, b, r, together([(real[name], b, r)])[0][0].total_ms) for name in names for b in batches for r in shares
    ]
    pairs = []
    for b1 in batches:
        for b2 in batches:
            for r in shares:
                times, _ = together([(real[names[0]], b1, r), (real[names[1]], b2, 100 - r)])
                pairs.append((names[0], b1, r, times[0].total_ms, names[1], b2, 100 - r, times[1].total_ms))
    return write(folder / "solo.csv", SOLO, solo), write(folder / "pairs.csv", PAIRS, pairs)


@pytest.mark.slow
def test_the_published_measurements(capsys, tmp_path):
    data, kept = data_folder("igniter"), tmp_path / "mine.json"
    files = ("--from", data / "solo_grid_v100.csv", "--pairs", data / "pair_colocation_v100.csv")
    code, out, err = run(capsys, *files, "-o", kept, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    unseen = document["totals"]["held-out pairs"]
    assert unseen["mape_ratio"] <= 0.022
    assert unseen["p95_ratio"] <= 0.075
    assert {fit["model"] for fit in document["fits"]} == {"alexnet", "resnet50", "vgg19", "ssd"}
    assert from_document(json.loads(kept.read_text()) | {}).form == "calibrated"


def test_models_without_a_published_profile(capsys, tmp_path):
    """Only latencies are known of them; power is not, so throttling ends up in the other terms."""
    solo, pairs = made_up(tmp_path, ("ours", "theirs"))
    code, out, _ = run(capsys, "--from", solo, "--pairs", pairs, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["totals"]["solo"]["mape_ratio"] < 0.03
    assert document["totals"]["held-out pairs"]["mape_ratio"] < 0.05
    assert [note for note in document["notes"] if note.startswith("ours: ") and "estimated" in note]
    assert set(document["models"]) == {"ours", "theirs"}


def test_known_models_keep_what_is_known_of_them(capsys, tmp_path):
    solo, pairs = made_up(tmp_path, ("resnet50", "vgg19"))
    code, out, _ = run(capsys, "--from", solo, "--pairs", pairs, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["notes"] == []
    assert document["totals"]["held-out pairs"]["mape_ratio"] < 0.002
    assert document["models"]["vgg19"]["load_bytes"] == profile("v100")["vgg19"].load_bytes


def test_the_table_names_every_model_and_all(capsys, tmp_path):
    solo, pairs = made_up(tmp_path, ("resnet50", "vgg19"))
    code, out, _ = run(capsys, "--from", solo, "--pairs", pairs, "-o", tmp_path / "p.json")
    assert code == 0
    assert "held-out pairs" in out
    assert "resnet50" in out
    assert "p.json" in out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model,batch\nssd,1\n", "solo.csv:1: no column r_pct, latency_ms"),
        ("model,batch,r_pct,latency_ms\nssd,1,50,fast\n", "solo.csv:2: latency_ms is 'fast'"),
        ("model,batch,r_pct,latency_ms\nssd,1.5,50,3\n", "expected a whole number"),
        ("model,batch,r_pct,latency_ms\nssd,1,-50,3\n", "r_pct is '-50'"),
        ("model,batch,r_pct,latency_ms\nssd,1,50\n", "latency_ms is ''"),
        ("model,batch,r_pct,latency_ms\nnew,1,50,3\n", "new: Eq. 11 needs at least five"),
    ],
)
def test_measurements_that_are_none(capsys, tmp_path, content, said):
    _, pairs = made_up(tmp_path, ("resnet50", "vgg19"))
    (tmp_path / "solo.csv").write_text(content)
    code, _, err = run(capsys, "--from", tmp_path / "solo.csv", "--pairs", pairs)
    assert code == 2
    assert said in err


def test_missing_files_and_flags(capsys, tmp_path):
    solo, pairs = made_up(tmp_path, ("resnet50", "vgg19"))
    assert run(capsys, "--from", solo)[0] == 2
    assert run(capsys)[0] == 2
    assert "no GPU type 'h200'" in run(capsys, "--from", solo, "--pairs", pairs, "--base", "h200")[2]
    assert "cannot be read" in run(capsys, "--from", tmp_path / "none.csv", "--pairs", pairs)[2]
