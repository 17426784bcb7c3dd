"""joulery submit, schedule and jobs on this machine, as a person uses them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.slurm_jobs import Daemon, whole
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

SITE = """\
joulery: 1
mode: act
carbon: {kind: constant, intensity: 250 g/kWh, source: "stated for a test"}
meters: {use: [cpu-model], cpu_model: {idle: 20 W, max: 60 W}}
jobs:
  quantum: 2 s
  poll: 200 ms
  grace: 20 s
  restart: 1 s
  measure: 500 ms
  slots: {count: 2}
  policy: {theta: 100 %}
"""
TRAIN = """\
import json, os, signal, sys, time
epochs, epoch_s = int(sys.argv[1]), float(sys.argv[2])
state = "state." + os.environ["JOULERY_JOB"]
epoch = json.load(open(state)) if os.path.exists(state) else 0
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
print("start", epoch, "on", os.environ["JOULERY_GPUS"], flush=True)
while epoch < epochs:
    time.sleep(epoch_s / int(os.environ["JOULERY_GPUS"]))
    epoch += 1
    print("epoch", epoch, flush=True)
    with open(os.environ["JOULERY_PROGRESS"], "a") as file:
        file.write(f"epoch {epoch}/{epochs}\\n")
    if stop and epoch < epochs:
        json.dump(epoch, open(state, "w"))
        sys.exit(99)
print("finished", flush=True)
"""


class Desk:
    """A folder with a site, and joulery's verbs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "site.yaml").write_text(SITE)
        (folder / "train.py").write_text(TRAIN)
        self.env = {**os.environ, "PYTHONWARNINGS": "ignore::ResourceWarning"}

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "joulery", *words],
            cwd=self.folder, env=self.env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    def submit(self, *words: str, flags: tuple[str, ...] = ()) -> int:
        return int(json.loads(self("submit", "--json", *flags, "--", sys.executable, *words))["job"])

    def jobs(self) -> dict[int, dict[str, Any]]:
        return {row["job"]: row for row in json.loads(self("jobs", "--json"))["jobs"]}

    def output(self, job: int) -> Path:
        return self.folder / f"joulery-jobs/jobs/{job:06d}/output.log"

    def daemon(self) -> Daemon:
        return Daemon(self.folder / "site.yaml", self.env)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    for run in tmp_path.glob("joulery-jobs/jobs/*/run.json"):
        try:
            os.killpg(json.loads(run.read_text())["pid"], signal.SIGKILL)
        except ProcessLookupError:
            continue


def over(entry: dict[str, Any]) -> bool:
    return entry["kind"] == "over"


def test_jobs_run_grow_are_metered_and_survive_a_killed_scheduler(desk: Desk) -> None:
    job = desk.submit("train.py", "100", "0.1", flags=("--max", "2", "--owner", "ada", "--name", "toy"))
    first = desk.daemon()
    try:
        first.until(lambda entry: entry.get("do") == "stop" and "from 1 to 2" in entry["reason"])
    finally:
        first.kill()
    second = desk.daemon()
    try:
        ended = second.until(over)
    finally:
        assert second.stop() == 0, second.errors
    row = desk.jobs()[job]

    assert not whole(desk.output(job), 100)
    assert (row["state"], row["owner"], row["name"]) == ("done", "ada", "toy")
    # Killed before the grown job was started, the first scheduler leaves it to the second to start it, and to grow it.
    assert 1 <= row["restarts"] <= 2
    assert ended["energy_j"] > 0
    assert ended["carbon_g"] == pytest.approx(ended["energy_j"] * 250 / 3.6e6)
    assert row["energy_j"] == pytest.approx(ended["energy_j"])
    assert row["quality"] == "modelled"


def test_two_schedulers_of_one_site_are_one_too_many(desk: Desk) -> None:
    daemon = desk.daemon()
    try:
        daemon.until(lambda entry: entry["kind"] == "round")
        said = desk("schedule", "site.yaml", code=2)
        assert f"is scheduled by process {daemon.process.pid} already" in said
    finally:
        assert daemon.stop() == 0


def test_once_makes_one_round_and_ends(desk: Desk) -> None:
    job = desk.submit("-c", "print('hello')")
    lines = [json.loads(line) for line in desk("schedule", "site.yaml", "--once", "--json").splitlines()]

    assert len([line for line in lines if line["kind"] == "round"]) >= 1
    wait_until(lambda: desk.jobs()[job]["state"] == "done", "the end of the job")
    assert desk.output(job).read_text() == "hello\n"


@pytest.mark.parametrize("mode", ["advise", "shadow"])
def test_nothing_starts_unless_it_is_to_act(desk: Desk, mode: str) -> None:
    job = desk.submit("-c", "print('hello')")
    said = desk("schedule", "site.yaml", "--once", "--mode", mode)

    assert "start job 1 on 1" in said
    assert desk.jobs()[job]["state"] == "waiting"
    assert not desk.output(job).exists()


def test_cancelled_jobs_never_start(desk: Desk) -> None:
    job = desk.submit("-c", "print('hello')")
    assert json.loads(desk("jobs", "--cancel", str(job), "--json")) == {"job": job, "state": "cancelled"}
    desk("schedule", "site.yaml", "--once")

    assert desk.jobs()[job]["state"] == "cancelled"
    assert "there is no job 9" in desk("jobs", "--cancel", "9", code=4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("submit", "--min", "3", "--", "true"), "--min: the job can never run here (got 3, expected at most 2 slots)"),
        (("submit", "--min", "2", "--max", "1", "--", "true"), "is less than --min"),
        (("submit", "--site", "none.yaml", "--", "true"), "none.yaml: cannot be read"),
        (("schedule", "none.yaml"), "none.yaml: cannot be read"),
        (("schedule", "bare.yaml"), "this site has no jobs section"),
        (("schedule", "bad.yaml"), "bad.yaml:2 jobs.quantum: a time needs a unit"),
        (("schedule", "slow.yaml"), "must not be longer than the quantum"),
        (("schedule", "wide.yaml"), "slots of 1 cores need more than"),
    ],
)
def test_what_cannot_be_is_one_clear_error(desk: Desk, words: tuple[str, ...], said: str) -> None:
    (desk.folder / "bare.yaml").write_text("joulery: 1\n")
    (desk.folder / "bad.yaml").write_text("joulery: 1\njobs: {quantum: 30}\n")
    (desk.folder / "slow.yaml").write_text("joulery: 1\njobs: {quantum: 1 s, poll: 2 s}\n")
    (desk.folder / "wide.yaml").write_text("joulery: 1\njobs: {slots: {count: 4000}}\n")

    assert said in desk(*words, code=2)


TORCH = """\
import os, signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))  # before PyTorch is imported, which takes long
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(256, 8); y = x @ torch.randn(8, 1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
job = os.environ.get("JOULERY_JOB")
file, epoch = f"model.{job}", 0
if os.path.exists(file):
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"]); optimiser.load_state_dict(saved["optimiser"]); epoch = saved["epoch"]
while epoch < 60:
    time.sleep(0.15 if job else 0.0)
    while job and epoch == 20 and not stop and not os.path.exists(file):
        time.sleep(0.05)  # until it is moved
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimiser.zero_grad(); loss.backward(); optimiser.step(); epoch += 1
    if "JOULERY_PROGRESS" in os.environ:
        open(os.environ["JOULERY_PROGRESS"], "a").write(f"epoch {epoch}/60\\n")
    if stop and epoch < 60:
        torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "epoch": epoch}, file)
        sys.exit(99)
print("loss", loss.item().hex(), flush=True)
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed (pip install torch)")
def test_pytorch_training_that_was_moved_ends_with_the_same_loss(desk: Desk) -> None:
    (desk.folder / "learn.py").write_text(TORCH)
    plain = subprocess.run(
        [sys.executable, "learn.py"], cwd=desk.folder, env=desk.env, capture_output=True, text=True, check=True
    ).stdout
    job = desk.submit("learn.py", flags=("--max", "2"))
    daemon = desk.daemon()
    try:
        daemon.until(lambda entry: entry.get("do") == "stop" and "from 1 to 2" in entry["reason"])
        daemon.until(over)
    finally:
        assert daemon.stop() == 0, daemon.errors

    assert desk.jobs()[job]["restarts"] >= 1
    assert desk.output(job).read_text() == plain
