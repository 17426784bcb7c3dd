"""``joulery measure --trace torch``: a program measured down to its operations, and one that cannot be."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from joulery.store.run.directory import open_run
from joulery.store.run.tensors import kept_events, kept_footprint

pytestmark = pytest.mark.e2e

TRAIN = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 4))
optimizer, loss = torch.optim.AdamW(model.parameters()), torch.nn.CrossEntropyLoss()
for step in range(8):
    optimizer.zero_grad()
    loss(model(torch.ones(32, 64)), torch.zeros(32, dtype=torch.long)).backward()
    optimizer.step()
print("trained")
sys.exit(7)
"""


def measured(folder: Path, program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    command = [sys.executable, "-m", "joulery", "measure", "--meter", "fake:50", "--trace", "torch", "--out", "run"]
    return subprocess.run(
        [*command, *flags, "--", sys.executable, "-W", "ignore", "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_an_unchanged_program_down_to_its_operations(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'joulery[torch]'")
    done = measured(tmp_path, TRAIN, "--steps", "skip=1,warmup=1,active=2,repeat=2", "--carbon", "360 g/kWh")
    assert done.returncode == 7 and done.stdout == "trained\n", done.stderr
    run = open_run(tmp_path / "run")
    footprint = kept_footprint(run)
    (device,) = footprint.devices
    assert device.attributed_j + device.unattributed_j == pytest.approx(device.total_j, rel=1e-9)
    assert device.carbon_g == pytest.approx(device.total_j * 360 / 3.6e6, rel=1e-6)
    names = dict(zip(zip(footprint.op, footprint.phase, strict=True), footprint.count.tolist(), strict=True))
    assert names["Sequential/0/addmm", "forward"] == names["Sequential/2/mm_1", "backward"] == 4
    assert all(
        path.startswith(("Sequential/", "CrossEntropyLoss/")) for path, _ in names if re.search(r"/(add)?mm", path)
    )
    assert run.manifest["tracing"]["steps"] == 4 and len(run.manifest["tracing"]["sessions"]) == 2
    assert all(abs(s["clock_offset_ns"]) < 10_000_000 for s in run.manifest["tracing"]["sessions"])
    assert len(kept_events(run)) > 100 and list((tmp_path / "run" / "trace").iterdir()) == []
    assert "Sequential/2" in done.stderr and "of 8 training steps" in done.stderr
    report = subprocess.run(
        [sys.executable, "-m", "joulery", "report", "run", "--by", "phase", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {row["op"] for row in json.loads(report.stdout)["ops"]} >= {"forward", "backward", "optimizer"}


def test_a_program_without_torch_is_measured_with_a_reason_why_there_is_no_more(tmp_path: Path) -> None:
    done = measured(tmp_path, "print('plain')\n")
    assert done.returncode == 0 and done.stdout == "plain\n"
    assert "called no PyTorch module" in done.stderr
    run = open_run(tmp_path / "run")
    assert run.report is not None and run.report["energy_j"] > 0 and run.closed
    report = subprocess.run(
        [sys.executable, "-m", "joulery", "report", "run", "--by", "op"], cwd=tmp_path, capture_output=True, text=True
    )
    assert report.returncode == 2 and "called no PyTorch module" in report.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--trace", "torch", "--steps", "active=0"], "not a schedule of steps"),
        (["--steps", "active=1"], "--steps needs --trace"),
        (["--trace", "caffe"], "caffe"),
    ],
)
def test_wrong_flags_start_nothing(tmp_path: Path, flags: list[str], says: str) -> None:
    command = [sys.executable, "-m", "joulery", "measure", *flags, "--", "touch", "started"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr
    assert not (tmp_path / "started").exists()
