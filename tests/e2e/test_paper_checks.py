"""``examples/anatomy/checks.py``: the paper's figures looked up in a run."""

import subprocess
import sys
from pathlib import Path

import pytest

from joulery.ui.cli import main

SCRIPT = Path(__file__).parents[2] / "examples" / "anatomy" / "checks.py"
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


@pytest.mark.parametrize(("slow_layer", "missed"), [(-1, []), (0, ["6 the same", "6 layer_0"])])
def test_each_figure_stands_beside_its_bar(tmp_path: Path, slow_layer: int, missed: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), run_of(tmp_path, slow_layer)], capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 11, done.stderr
    told = [line.split(maxsplit=1)[1] for line in lines if line.startswith("MISSED")]
    assert len(told) == len(missed) and all(line.startswith(start) for line, start in zip(told, missed, strict=True))
    assert done.returncode == bool(missed)
