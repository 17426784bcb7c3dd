"""A real Slurm that gathers energy (``acct_gather_energy/rapl``) from registers that this test writes."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm_accounting import accounting_missing, slurm_database
from tests.slurm_cluster import missing, slurm_cluster
from tests.waiting import wait_until

REGISTERS = [Path(f"/dev/cpu/{cpu}/msr") for cpu in range(os.cpu_count() or 1)]
UNIT, PACKAGE = 0x606, 0x611
JOULES = 2.0**-16
"""What a unit of the counters is worth, as the first register says."""
STEP_J, STEP_S = 5.0, 0.1


def lacking() -> str | None:
    """Why no Slurm can read registers of this test; None when one can."""
    if (why := missing() or accounting_missing()) is not None:
        return why
    if not all(file.parent.is_dir() for file in REGISTERS):
        return "this machine has no /dev/cpu"
    return "this machine has registers of its own" if any(file.exists() for file in REGISTERS) else None


pytestmark = [pytest.mark.e2e, pytest.mark.skipif(lacking() is not None, reason=str(lacking()))]

SITE = """\
joulery: 1
carbon: {{kind: constant, intensity: 250 g/kWh, source: "stated for a test"}}
meters: {{use: [slurm]}}
clusters:
- name: sensors
  jobs: {{backend: slurm, slurm: {{conf: {folder}/slurm.conf, meters: {folder}/energy}}}}
"""
CONF = """\
AcctGatherEnergyType=acct_gather_energy/rapl
AcctGatherNodeFreq=1
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=energy=1,task=1
"""
COLUMNS = "JobID,JobName,User,Account,Partition,State,Submit,Start,End,ElapsedRaw,AllocTRES,ConsumedEnergyRaw"


class Counter:
    """Energy counters of all processors, as Intel's, which go up until the end."""

    def __init__(self) -> None:
        self.joules = 100.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.wait(STEP_S):
            self.joules += STEP_J
            self._write()

    def _write(self) -> None:
        for file in REGISTERS:
            with file.open("r+b") as register:
                register.seek(PACKAGE)
                register.write(struct.pack("<Q", round(self.joules / JOULES)))

    @contextmanager
    def running(self) -> Iterator[Counter]:
        """Files for registers, gone at the end."""
        try:
            for file in REGISTERS:
                with file.open("xb") as register:
                    register.truncate(0x700)
                    register.seek(UNIT)
                    register.write(struct.pack("<Q", 16 << 8 | 3))
            self._write()
            self._thread.start()
            yield self
        finally:
            self._end.set()
            if self._thread.is_alive():
                self._thread.join()
            for file in REGISTERS:
                file.unlink(missing_ok=True)


def joulery(*words: str) -> list[str]:
    return [sys.executable, "-m", "joulery", *words]


def test_what_slurm_measured_is_in_the_report_and_what_it_measures_in_the_agents_samples(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nwhile [ ! -e enough ]; do :; done\n")
    site = tmp_path / "site.yaml"
    site.write_text(SITE.format(folder=folder))
    environment = {key: value for key, value in os.environ.items() if key != "SLURM_CONF"}
    with (
        Counter().running() as counter,
        slurm_database(folder) as accounting,
        slurm_cluster(
            folder, nodes=1, gpus=1, name="q", cluster="sensors", accounting=accounting, conf_lines=CONF
        ) as cluster,
    ):
        before_j = counter.joules
        job = cluster.submit(script, "--gres=gpu:1")
        # The environment names neither the node nor its Slurm.
        words = joulery("agent", str(site), "--node", "q1", "--period", "1 s", "--json")
        wait_until(lambda: re.search("CurrentWatts=[1-9]", cluster.run("scontrol", "show", "node", "q1")), "a reading")
        agent = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert agent.stdout is not None
            samples = (json.loads(line)["jobs"] for line in agent.stdout)
            sampled = next((jobs for jobs in samples if jobs.get(job, {}).get("energy_j", 0.0) > 0), None)
        finally:
            agent.terminate()
            _, error = agent.communicate()
        assert sampled is not None, error
        (folder / "enough").touch()

        def rows(*flags: str) -> str:
            return cluster.run("sacct", *flags, "-a", "-P", "-S", "now-1days", "-o", COLUMNS)

        wait_until(lambda: "COMPLETED" in rows("-X"), "the end of the job")
        most_j = counter.joules - before_j
        (tmp_path / "jobs.txt").write_text(rows())
        (tmp_path / "alone.txt").write_text(rows("-X"))

    def report(name: str) -> subprocess.CompletedProcess[str]:
        words = joulery("report", "--from-sacct", str(tmp_path / name), "--json")
        return subprocess.run(words, env=environment, capture_output=True, text=True)

    done = report("jobs.txt")
    assert done.returncode == 0, done.stderr
    total = json.loads(done.stdout)["total"]
    assert (total["jobs"], total["quality"]) == (1, "measured") and 0 < total["measured_j"] <= most_j
    # A job's own row has no energy where no step of srun ran.
    done = report("alone.txt")
    assert done.returncode == 2 and "not measured" in done.stderr
