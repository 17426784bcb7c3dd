"""Forty checkpointing jobs beside a real Slurm: quantum 20 s, a daemon killed mid-resize, slurmctld restarted.

``python -m tests.e2e.slurm_forty`` (root, slurm-wlm). Among the jobs are real PyTorch trainings where
``JOULERY_TORCH_PYTHON`` names an interpreter that has torch; each must end with the loss of an uninterrupted one, to
the bit. Prints one JSON object; exits 1 when a job was lost, run twice or left held, or ended elsewhere. Takes about
ten minutes, nearly all of them asleep; ``--short`` is the same with twelve jobs and a quantum of 4 s, in about 70 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.slurm_jobs import JOB, Daemon, whole
from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster
from tests.waiting import wait_until

TORCH_JOB = Path(__file__).with_name("torch_job.py")
SITE = """\
joulery: 1
mode: act
carbon: {kind: constant, intensity: 250 g/kWh, source: "stated for a benchmark"}
jobs:
  backend: slurm
  quantum: QUANTUM s
  poll: 500 ms
  restart: RESTART s
  measure: MEASURE s
  patience: 30 s
  power: {slot: 200 W}
  policy: {theta: 100 %, cap: 4, order: service}
  slurm: {progress: progress}
"""


@dataclass(frozen=True)
class Size:
    """How long it plays.

    Attributes:
        quantum_s, measure_s, restart_s: Of the site.
        first_epochs: Of the four jobs that come first and find room to grow; they scale well and badly in turn.
        jobs, epochs: How many come later, and how long each is.
        torch_jobs, torch_epochs: How many of those are trainings.
        hurry: Whether epochs take no time once everything was seen.
    """

    quantum_s: float
    measure_s: float
    restart_s: float
    first_epochs: int
    jobs: int
    epochs: int
    torch_jobs: int
    torch_epochs: int
    hurry: bool = False


FULL = Size(20, 8, 6, 300, 36, 60, 6, 60)
SHORT = Size(4, 1.5, 1, 300, 8, 200, 2, 200, hurry=True)
EPOCH_S = 0.5


class Play:
    """The jobs of one play, in a cluster."""

    def __init__(self, cluster: SlurmCluster, size: Size, torch_python: str | None) -> None:
        self.cluster, self.size, self.torch_python = cluster, size, torch_python
        self.epochs: dict[int, int] = {}
        self.trainings: list[int] = []
        self.alone: subprocess.Popen[str] | None = None
        site = SITE.replace("QUANTUM", f"{size.quantum_s:g}").replace("MEASURE", f"{size.measure_s:g}")
        (cluster.folder / "site.yaml").write_text(site.replace("RESTART", f"{size.restart_s:g}"))
        (cluster.folder / "progress").mkdir()
        (cluster.folder / "job.py").write_text(JOB)

    def submit(self, line: str, name: str, epochs: int) -> int:
        """A batch job of one line."""
        script = self.cluster.folder / f"{name}-{len(self.epochs)}.sh"
        script.write_text(f"#!/bin/bash\nexec {line}\n")
        options = ("--gres=gpu:1", "--ntasks=1", f"--job-name={name}", "--comment=joulery:min=1,max=4")
        job = int(self.cluster.submit(script, *options))
        self.epochs[job] = epochs
        return job

    def sleeper(self, epochs: int, *, scales: bool) -> int:
        """A job that sleeps its epochs away."""
        power = 1.0 if scales else 0.1
        return self.submit(f"{sys.executable} job.py {epochs} {EPOCH_S} {power}", f"kind{int(scales)}", epochs)

    def training(self) -> None:
        """A real one."""
        epochs = self.size.torch_epochs
        job = self.submit(f"{self.torch_python} {TORCH_JOB} {epochs} {EPOCH_S}", "torch", epochs)
        self.trainings.append(job)

    def train_alone(self) -> None:
        """Begin the uninterrupted training, while the others still run."""
        command = [str(self.torch_python), str(TORCH_JOB), str(self.size.torch_epochs)]
        self.alone = subprocess.Popen(command, cwd=self.cluster.folder, stdout=subprocess.PIPE, text=True)

    def requeue_trainings(self) -> None:
        """As an operator does it: each that runs and has not restarted yet does so now, in the midst of its epochs."""
        for job in self.trainings:
            output = self.cluster.folder / f"slurm-{job}.out"
            _until(lambda output=output: output.exists() and "epoch" in output.read_text(), 60)
            if not any(self.restarts([job])) and self.states()[job][0] == "RUNNING":
                self.cluster.run("scontrol", "requeue", str(job))

    def daemon(self) -> Daemon:
        """The scheduler."""
        return Daemon(self.cluster.folder / "site.yaml", self.cluster.env)

    def states(self) -> dict[int, tuple[str, str]]:
        """State and tag of every job Slurm knows."""
        return {number: (job["job_state"], job["admin_comment"]) for number, job in self.cluster.jobs().items()}

    def losses(self) -> dict[str, list[str]]:
        """The last loss of each training, and of an uninterrupted one."""
        if not self.trainings:
            return {}
        assert self.alone is not None
        straight, _ = self.alone.communicate()
        outputs = [(self.cluster.folder / f"slurm-{job}.out").read_text() for job in self.trainings]
        return {"alone": _loss(straight), "beside_slurm": [loss for text in outputs for loss in _loss(text)]}

    def restarts(self, jobs: Iterable[int]) -> list[int]:
        """How often each of these began to run, but for the first time."""
        outputs = [self.cluster.folder / f"slurm-{job}.out" for job in jobs]
        return [max(0, output.read_text().count("start ") - 1) if output.exists() else 0 for output in outputs]


def play(cluster: SlurmCluster, size: Size, torch_python: str | None) -> dict[str, object]:
    """Grow, be killed in the middle of it, shrink, preempt, lose slurmctld, end; what came of it."""
    scene = Play(cluster, size, torch_python)
    daemons: list[Daemon] = []
    try:
        return _play(scene, daemons)
    finally:
        for daemon in daemons:
            if daemon.process.poll() is None:
                daemon.kill()


def _play(scene: Play, daemons: list[Daemon]) -> dict[str, object]:
    cluster, size, begun_s = scene.cluster, scene.size, time.monotonic()
    for number in range(4):
        scene.sleeper(size.first_epochs, scales=number % 2 == 0)
    daemons.append(scene.daemon())
    daemons[0].until(_stops("from 1 to 2"), 120)
    daemons[0].kill()
    daemons.append(scene.daemon())
    second = daemons[1]
    second.until(_stops("from 2 to 1"), 180)
    for number in range(size.jobs):
        if scene.torch_python is not None and number < size.torch_jobs:
            scene.training()
        else:
            scene.sleeper(size.epochs, scales=number % 2 == 0)
    second.until(_stops("slots go to"), 180)
    # slurmctld 22.05 that goes down while GPU jobs are being requeued counts their GPUs as used for ever after.
    _until(lambda: not cluster.run("squeue", "-h", "-t", "CG").strip(), 30)
    cluster.stop_controller()
    time.sleep(3)
    cluster.start_controller()
    if scene.trainings:
        scene.train_alone()
    if size.hurry:
        scene.requeue_trainings()
        (cluster.folder / "hurry").touch()
    _until(lambda: not {state for state, _ in scene.states().values()} - {"COMPLETED", "FAILED", "CANCELLED"}, 1200)
    took_s = time.monotonic() - begun_s
    _until(lambda: not any(tag for _, tag in scene.states().values()), 60)
    code = second.stop()
    end = scene.states()
    reasons = [entry["reason"] for daemon in daemons for entry in daemon.actions("stop")]
    failed = [entry for daemon in daemons for entry in daemon.entries if entry.get("outcome") == "failed"]
    return {
        "jobs": len(end),
        "trainings": len(scene.trainings),
        "numbers_kept": set(end) == set(scene.epochs),
        "states": sorted({state for state, _ in end.values()}),
        "left_held": [job for job, (_, tag) in end.items() if tag],
        "faults": [fault for job, k in scene.epochs.items() for fault in whole(cluster.folder / f"slurm-{job}.out", k)],
        "grown": sum("from 1 to" in reason or "from 2 to 3" in reason or "to 4" in reason for reason in reasons),
        "shrunk": sum("from 2 to 1" in reason or "from 3 to 2" in reason for reason in reasons),
        "preempted": sum("slots go to" in reason for reason in reasons),
        "refused": len(failed),
        "restarts_of_trainings": scene.restarts(scene.trainings),
        "losses": scene.losses(),
        "exit_code": code,
        "took_s": round(took_s),
    }


def good(result: dict[str, object]) -> bool:
    """Whether nothing was lost, run twice, left held or changed."""
    losses = result["losses"]
    assert isinstance(losses, dict)
    same = len({loss for found in losses.values() for loss in found}) <= 1
    counted = len(losses.get("beside_slurm", ())) == result["trainings"]
    whole_jobs = not result["faults"] and not result["left_held"] and result["numbers_kept"]
    return bool(whole_jobs and same and counted and result["states"] == ["COMPLETED"] and result["exit_code"] == 0)


def torch_interpreter() -> str | None:
    """An interpreter that has torch: the one named, or this one; None where there is none."""
    python = os.environ.get("JOULERY_TORCH_PYTHON", sys.executable)
    has = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0
    return python if has else None


def main(arguments: list[str]) -> int:
    if reason := missing():
        print(reason)
        return 2
    torch_python = torch_interpreter()
    if torch_python is None:
        print("no torch (JOULERY_TORCH_PYTHON names an interpreter that has it): no trainings among them")
    with tempfile.TemporaryDirectory() as folder, slurm_cluster(Path(folder) / "slurm") as cluster:
        result = play(cluster, SHORT if "--short" in arguments else FULL, torch_python)
    print(json.dumps(result, indent=2))
    return 0 if good(result) else 1


def _stops(words: str) -> Callable[[dict[str, object]], bool]:
    return lambda entry: entry.get("do") == "stop" and words in str(entry["reason"])


def _until(ready: Callable[[], bool], patience_s: float) -> None:
    with contextlib.suppress(TimeoutError):  # the result says what did not come about
        wait_until(ready, "the state", patience_s)


def _loss(output: str) -> list[str]:
    """The last loss that a finished training reported."""
    found = [line.split()[1] for line in output.splitlines() if line.startswith("loss ")]
    return found[-1:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
