import json
from pathlib import Path

import pytest

from joulery.ui.cli import main
from reproduce.__main__ import main as reproduce

LAYER = (
    ("attention/self/query/addmm", 20),
    ("attention/self/bmm", 9),
    ("attention/output/dense/addmm", 12),
    ("intermediate/dense/addmm", 30),
    ("output/dense/addmm", 29),
)


def run_of(folder: Path, slow_layer: int) -> str:
    """A BERT of twelve layers, one of which may take twice its time."""
    rows, at = ["op,start_ns,dur_ns,device,lane,phase"], 0
    for layer in range(12):
        for phase, weight in (("forward", 1), ("backward", 2)):
            for op, length in LAYER:
                took = length * 10_000 * weight * (1 + (layer == slow_layer))
                name = op if phase == "forward" else op.replace("addmm", "mm")
                for part in range(weight):
                    leaf = f"{name}_{part}" if part else name
                    rows.append(f"M/bert/encoder/layer_{layer}/{leaf},{at},{took // weight},CPU:0,main,{phase}")
                    at += took // weight
    (folder / "e.csv").write_text("\n".join(rows) + "\n")
    (folder / "p.csv").write_text(f"t_ns,device,power_w\n0,CPU:0,50\n{at},CPU:0,50\n")
    arguments = ["account", "--events", str(folder / "e.csv"), "--power", str(folder / "p.csv"), "--json"]
    assert main([*arguments, "--out", str(folder / "run")]) == 0
    return str(folder / "run")


@pytest.mark.parametrize(("slow_layer", "missed"), [(-1, []), (0, ["standard deviation", "layer_0"])])
def test_each_figure_stands_beside_its_range(tmp_path: Path, capsys, slow_layer: int, missed: list[str]) -> None:
    run = run_of(tmp_path, slow_layer)
    capsys.readouterr()
    code = reproduce(["smaragdine", run, "--json"])
    claims = json.loads(capsys.readouterr().out)["claims"]
    assert len(claims) == 11
    outside = [claim["what"] for claim in claims if claim["verdict"] != "holds"]
    assert len(outside) == len(missed) and all(word in what for what, word in zip(outside, missed, strict=True))
    assert code == bool(missed)


def test_a_run_of_another_model_is_an_error(tmp_path: Path, capsys) -> None:
    (tmp_path / "e.csv").write_text("op,start_ns,dur_ns,device,lane,phase\nM/bert/x/addmm,0,100,CPU:0,main,forward\n")
    (tmp_path / "p.csv").write_text("t_ns,device,power_w\n0,CPU:0,50\n100,CPU:0,50\n")
    arguments = ["account", "--events", str(tmp_path / "e.csv"), "--power", str(tmp_path / "p.csv"), "--json"]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    assert reproduce(["smaragdine", str(tmp_path / "run")]) == 2
    assert "bert/encoder" in capsys.readouterr().err
