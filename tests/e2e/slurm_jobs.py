"""Training jobs for live tests: they checkpoint every epoch, end politely on SIGTERM and say what they did."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S, wait_until

JOB = """\
#!/usr/bin/env python3
import json, os, signal, sys, time
job = os.environ["SLURM_JOB_ID"]
# In the first second after slurmctld was restarted Slurm starts jobs without SLURM_GPUS_ON_NODE.
gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "1")) * int(os.environ["SLURM_JOB_NUM_NODES"])
epochs, epoch_s, power = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
state = f"state.{job}"
epoch = json.load(open(state)) if os.path.exists(state) else 0
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
print("start", epoch, "on", gpus, flush=True)
while epoch < epochs:
    time.sleep(0.02 if os.path.exists("hurry") else epoch_s / gpus**power)
    epoch += 1
    with open(state + ".tmp", "w") as file:
        json.dump(epoch, file)
    os.replace(state + ".tmp", state)
    print("epoch", epoch, flush=True)
    with open(f"progress/{job}", "a") as file:
        file.write(f"epoch {epoch}/{epochs}\\n")
    if stop and epoch < epochs:
        print("saved", flush=True)
        sys.exit(0)
print("finished", flush=True)
"""


class Daemon:
    """``joulery schedule``, or another verb that logs, as a process, its log as it comes."""

    def __init__(self, site: Path, env: Mapping[str, str], *flags: str, verb: str = "schedule") -> None:
        self.entries: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "joulery", verb, str(site), "--json", *flags],
            env=dict(env), cwd=site.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def until(self, wanted: Callable[[dict[str, Any]], bool], patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """The first entry of the log that is wanted."""
        at = 0

        def found() -> dict[str, Any] | None:
            nonlocal at
            ended = self.process.poll() is not None  # before the look: its last lines count
            for entry in self.entries[at:]:
                if wanted(entry):
                    return entry
                at += 1
            assert not ended, "the process ended"
            return None

        try:
            entry = wait_until(found, "the entry", patience_s)
        except TimeoutError as error:
            error.add_note(f"the log: {[*self.entries[:12], *self.entries[-12:]]}")
            raise
        assert entry is not None
        return entry

    def actions(self, verb: str) -> list[dict[str, Any]]:
        """What was done of one kind."""
        return [entry for entry in self.entries if entry["kind"] == "action" and entry["do"] == verb]

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self._end()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self._end()

    def _end(self) -> int:
        code = self.process.wait(30)
        self._reader.join(10)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.entries.append(json.loads(line))


def whole(output: Path, epochs: int) -> list[str]:
    """What is wrong with the output of a job that should have run every epoch once, in order, and finished.

    Slurm itself starts a job again whose end it did not see, because slurmctld was down at that moment: such a start
    finds nothing left to do and says once more that it has finished.
    """
    lines = output.read_text().splitlines()
    ran = [int(line.split()[1]) for line in lines if line.startswith("epoch ")]
    faults = []
    if ran != list(range(1, epochs + 1)):
        faults.append(f"{output.name}: epochs {ran}")
    idle_starts = sum(line.startswith(f"start {epochs} on") for line in lines)
    if lines.count("finished") != 1 + idle_starts:
        faults.append(f"{output.name}: finished {lines.count('finished')} times, {idle_starts} of them at once")
    return faults
