"""Traced runs that were killed on the way: what was recorded until then is accounted later."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from joulery.store.run.directory import open_run
from joulery.store.run.readings import read_samples
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

RECORDED = """
import json, os, sys, time
folder = json.loads(os.environ["JOULERY_TRACE"])["folder"]
stem = os.path.join(folder, f"torch-{os.getpid()}")

def mark(**fields):
    with open(stem + ".marks", "a") as marks:
        marks.write(json.dumps(fields) + chr(10))

def clocks():
    found = []
    for _ in range(2):
        unix, monotonic = time.time_ns(), time.monotonic_ns()
        found.append([unix, monotonic, monotonic + 2000, unix + 2000])
        time.sleep(0.001)
    return found

base = time.time_ns()
def event(cat, name, start, end):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": (start - base) / 1e3, "dur": (end - start) / 1e3}

mark(kind="begin", pid=os.getpid())
if "early" not in sys.argv:
    begin, until = clocks(), time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    start, end = begin[-1][3], time.time_ns()
    ends = clocks()
    events = [event("user_annotation", "joulery:clock", low[0] + 1000, low[0] + 1500) for low in begin + ends]
    events += [event("cpu_op", "QTN:Net/layer.0", start, end), event("cpu_op", "aten::mm", start + 1000, end - 1000)]
    with open(stem + "-1.json", "w") as trace:
        json.dump({"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": events}, trace)
    mark(kind="cycle", pid=os.getpid(), file=os.path.basename(stem) + "-1.json", steps=1, partial=False, begin=begin, end=ends)
print("recorded", flush=True)
while True:
    time.sleep(0.05)
"""  # noqa: E501
"""Leaves what a recorder leaves, then goes on as if it trained."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[psutil.Process]]:
    """Processes of the test; whatever is left of them is killed."""
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def recording(folder: Path, started: list[psutil.Process], *arguments: str) -> subprocess.Popen[str]:
    """A traced command that has recorded."""
    (folder / "train.py").write_text(RECORDED)
    measure = [sys.executable, "-m", "joulery", "measure", "--meter", "fake:50", "--carbon", "360 g/kWh"]
    process = subprocess.Popen(
        [*measure, "--trace", "torch", "--out", "run", "--", sys.executable, "train.py", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "recorded\n"
    started += [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return process


def joulery(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "joulery", *arguments], cwd=folder, capture_output=True, text=True)


def command_of(folder: Path) -> int:
    return int(next(open_run(folder / "run").log("started"))["pid"])


def sampled_until_now(folder: Path) -> None:
    """Wait until the sampler has written what it read of power and CPU time up to this moment."""
    now_ns = time.time_ns()

    def written() -> bool:
        readings = read_samples(folder / "run" / "samples")
        stamps = [int(times.edges_ns[-1]) for times in readings.busy.values()]
        stamps += [int(trace.t_ns[-1]) for trace in readings.traces if len(trace)]
        return bool(readings.busy and readings.traces) and min(stamps) > now_ns

    wait_until(written, "a reading after this moment")


def check(answer: dict[str, Any]) -> None:
    (device,) = answer["devices"].values()
    assert device["attributed_j"] + device["unattributed_j"] == pytest.approx(device["total_j"], rel=1e-9)
    energy = {row["op"]: row["energy_j"] for row in answer["ops"]}
    assert energy["Net/layer_0/mm"] > 0 and energy["Net/layer_0/mm"] > 100 * energy["Net/layer_0/<self>"]


def kept(run: Path) -> dict[Path, bytes]:
    """Every file of a run but the sampler's, which may still be at its end."""
    files = (file for file in run.rglob("*") if file.is_file() and file.parent.name != "samples")
    return {file: file.read_bytes() for file in files}


def test_a_killed_measuring_process_leaves_a_run_that_is_accounted_later(
    tmp_path: Path, started: list[psutil.Process]
) -> None:
    process = recording(tmp_path, started)
    sampled_until_now(tmp_path)
    process.kill()
    os.kill(command_of(tmp_path), signal.SIGKILL)
    process.communicate()
    before = kept(tmp_path / "run")
    answers = [
        joulery(tmp_path, "account", "run", "--json", "--out", "again"),
        joulery(tmp_path, "account", "run", "--json", "--estimator", "recency"),
        joulery(tmp_path, "report", "run", "--by", "op", "--json"),
        joulery(tmp_path, "report", "again", "--by", "op", "--json"),
        joulery(tmp_path, "account", "again", "--json"),
    ]
    for done in answers:
        assert done.returncode == 0, done.stderr
        check(json.loads(done.stdout))
        assert "killed" in done.stdout
    assert joulery(tmp_path, "report", "run", "--format", "perfetto", "--out", "t.json").returncode == 0
    assert kept(tmp_path / "run") == before, "looking changes nothing"
    refused = joulery(tmp_path, "account", "again", "--estimator", "regression")
    assert refused.returncode == 2 and "keeps its answer" in refused.stderr


def test_a_killed_command_keeps_the_cycles_that_were_complete(tmp_path: Path, started: list[psutil.Process]) -> None:
    process = recording(tmp_path, started)
    os.kill(command_of(tmp_path), signal.SIGKILL)
    _, stderr = process.communicate()
    assert process.returncode == 128 + signal.SIGKILL
    done = joulery(tmp_path, "report", "run", "--by", "op", "--json")
    check(json.loads(done.stdout))
    assert "the program was killed while recording" in done.stdout, stderr


def test_a_run_killed_before_a_cycle_was_complete_says_so(tmp_path: Path, started: list[psutil.Process]) -> None:
    process = recording(tmp_path, started, "early")
    sampled_until_now(tmp_path)
    process.kill()
    os.kill(command_of(tmp_path), signal.SIGKILL)
    process.communicate()
    for arguments in (("account", "run"), ("report", "run", "--by", "op")):
        done = joulery(tmp_path, *arguments)
        assert done.returncode == 2 and "killed before a cycle of steps was complete" in done.stderr, done.stderr
    assert joulery(tmp_path, "report", "run").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("account",), "name --events FILE and --power FILE, or a RUN"),
        (("account", "--events", "e.csv"), "name --events FILE and --power FILE, or a RUN"),
        (("account", "run", "--offset", "3"), "leave those flags out"),
        (("account", "run"), "holds no run"),
    ],
)
def test_wrong_flags_are_refused(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = joulery(tmp_path, *arguments)
    assert done.returncode == 2 and says in done.stderr
