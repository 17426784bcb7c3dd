"""Kernels of a command and their L2 cache use, from NVIDIA's kernel profiler (Nsight Compute, ``ncu``).

The profiler runs every kernel alone and several times, so the command takes longer and its timing is meaningless. It is
used for the number of kernels, and for the share of its peak at which each kernel keeps the L2 cache busy.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from joulery.domain.errors import CapabilityError, DataError

L2_PERCENT = "lts__t_sectors.avg.pct_of_peak_sustained_elapsed"
DURATION = "gpu__time_duration.sum"
_LONGEST_S = 600.0
_FORBIDDEN = "ERR_NVGPUCTRPERM"
_GRANT = (
    "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf, "
    "then load the driver again; or run as root"
)


class GpuKernel(NamedTuple):
    """One launch of a kernel.

    Attributes:
        duration_ns: Its duration when it runs alone.
        l2_percent: Sectors that the L2 cache moved during the launch, in percent of its peak.
    """

    duration_ns: float
    l2_percent: float


class NsightCompute:
    """Nsight Compute (``ncu``) of this machine.

    Args:
        program: Path of the program.
    """

    def __init__(self, program: str) -> None:
        self._program = program

    def kernels(self, command: Sequence[str], environ: Mapping[str, str]) -> tuple[GpuKernel, ...]:
        """Run a command to its end, and return every kernel that it launched, in order.

        Args:
            command: The command and its arguments.
            environ: Environment variables in addition to those of this process.

        Raises:
            CapabilityError: ncu may not read the counters, cannot be started or fails; the error states the reason.
            DataError: Its output is not the expected CSV, or the command took longer than ten minutes.
        """
        with tempfile.TemporaryDirectory(prefix="joulery-ncu-") as folder:
            log = Path(folder) / "kernels.csv"
            # The log file keeps what ncu says apart from what the command prints; base units are ns and percent.
            flags = ["--csv", "--print-units", "base", "--target-processes", "all", "--log-file", str(log)]
            asked = [self._program, *flags, "--metrics", f"{L2_PERCENT},{DURATION}", *command]
            try:
                done = subprocess.run(
                    asked,
                    env={**os.environ, **environ, "LC_ALL": "C"},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=_LONGEST_S,
                    check=False,
                )
            except OSError as error:
                raise CapabilityError(f"cannot start {self._program}: {error.strerror}", resource="ncu") from error
            except subprocess.TimeoutExpired as error:
                raise DataError(f"{self._program} took longer than {_LONGEST_S:g} s", hint="profile less") from error
            log_text = log.read_text(errors="replace") if log.exists() else ""
        if done.returncode != 0 or "==ERROR==" in log_text:
            raise _refused(log_text, done.stderr)
        return parse(log_text)


def nsight_compute() -> NsightCompute | None:
    """The profiler of this machine; None where it is not installed."""
    program = shutil.which("ncu")
    return None if program is None else NsightCompute(program)


def parse(log_text: str) -> tuple[GpuKernel, ...]:
    """Parse the kernels from the output of ``ncu --csv``, in the order of their launch.

    Raises:
        DataError: There is no table, or a kernel lacks one of the two metrics.
    """
    lines = log_text.splitlines()
    begin = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        if "No kernels were profiled" in log_text:
            return ()
        raise DataError("no table in what ncu printed", hint="is it Nsight Compute 2020 or newer? ncu --version")
    found: dict[int, dict[str, float]] = {}
    # Not read by joulery.tabular: these are lines of an output, not a file, and numbers have commas between thousands.
    for row, line in enumerate(csv.DictReader(lines[begin:]), start=begin + 2):
        try:
            found.setdefault(int(line["ID"]), {})[line["Metric Name"]] = float(line["Metric Value"].replace(",", ""))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not a line of ncu: {type(error).__name__} {error}", file="ncu", row=row) from error
    try:
        return tuple(GpuKernel(found[number][DURATION], found[number][L2_PERCENT]) for number in sorted(found))
    except KeyError as error:
        raise DataError(
            f"ncu did not measure {error} of every kernel", hint="does this GPU have that counter?"
        ) from error


def _refused(log_text: str, stderr: str) -> CapabilityError:
    """The error for a failure of ncu, with ncu's own message."""
    lines = [line.strip() for line in (*log_text.splitlines(), *stderr.splitlines()) if line.strip()]
    message = next((line for line in lines if "==ERROR==" in line), lines[-1] if lines else "it printed no message")
    reason = message.replace("==ERROR==", "").strip()
    hint = f"grant it: {_GRANT}" if _FORBIDDEN in reason else ""
    return CapabilityError(f"ncu cannot profile: {reason}", resource="ncu", hint=hint)
