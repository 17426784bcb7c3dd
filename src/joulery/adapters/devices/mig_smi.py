"""MIG partitioning through ``sudo nvidia-smi mig``, for users who may run only that program as root.

NVML provides the data that an unprivileged user may read; the program provides the data that only root may read, and
makes every change. The parsers expect the output of driver 470 and later.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from joulery.adapters.devices.mig_surface import Blocked, GpuInstance, MigDevice, NvmlMig
from joulery.adapters.devices.nvidia_board import NvidiaBoard
from joulery.domain.gpu.mig import MigPlace, MigProfile

PROGRAM = "nvidia-smi"
GRANT = 'echo "$USER ALL=(root) NOPASSWD: $(command -v nvidia-smi)" | sudo tee /etc/sudoers.d/joulery-nvidia-smi'
_PATIENCE_S = 60.0
_GPU_ROW = re.compile(r"\|\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s+\|")
"""GPU, name, profile id, instance id, start, size."""
_COMPUTE_ROW = re.compile(r"\|\s+(\d+)\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s+\|")
"""GPU, GPU instance id, name, profile id, instance id, start, slices."""
_PLACES_ROW = re.compile(r"GPU\s+(\d+) Profile ID\s+(\d+) Placements: \{([\d,]+)\}:(\d+)")
_COMPUTE_IDS = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
"""Id of the compute instance profile of so many slices (nvidia-smi mig -lcip)."""


Run = Callable[[Sequence[str]], tuple[int, str]]


class SmiRefused(Exception):  # noqa: N818 - what the program said
    """``nvidia-smi`` refused or failed a command."""


class SmiDenied(SmiRefused):
    """This user may not run ``nvidia-smi`` as root any more."""


def smi_command() -> tuple[str, ...] | None:
    """The command with which this user runs ``nvidia-smi`` as root without a prompt; None where that is not granted."""
    program, sudo = shutil.which(PROGRAM), shutil.which("sudo")
    if program is None or sudo is None:
        return None
    try:
        asked = subprocess.run([sudo, "-n", "-l", program], capture_output=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return (sudo, "-n", program) if asked.returncode == 0 else None


def run_program(line: Sequence[str]) -> tuple[int, str]:
    """Run a command line, and return its exit status and output.

    Raises:
        SmiRefused: The command took too long.
    """
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SmiRefused(f"{' '.join(line)} took longer than {_PATIENCE_S:g} s") from error
    return done.returncode, (done.stdout + done.stderr).strip()


@dataclass(frozen=True, slots=True)
class SmiMig:
    """MIG through ``nvidia-smi``. Implements :class:`~joulery.adapters.devices.mig_surface.MigSurface`.

    Attributes:
        board: The board, for data that every user may read.
        command: Command that calls the program.
        run: Runs a command line, and returns its exit status and output.
    """

    board: NvidiaBoard
    command: tuple[str, ...]
    run: Run = run_program

    def mode(self) -> tuple[bool, bool]:
        """Whether MIG mode is on, and whether it will be after a reset."""
        return NvmlMig(self.board).mode()

    def set_mode(self, on: bool) -> None:
        """Switch MIG mode.

        Raises:
            Blocked: The mode changes only after a reset.
        """
        output = self._run("-mig", str(int(on)))
        if "pending" in output:
            raise Blocked(f"MIG mode of {self.board.device} changes after a reset only: {output.splitlines()[0]}")

    def profiles(self) -> tuple[MigProfile, ...]:
        """The profiles of the board, largest first; in MIG mode with the places that the program lists."""
        found = NvmlMig(self.board).profiles(places=False)
        if not self.mode()[0]:
            return found
        places = {
            int(row[1]): (tuple(sorted(int(start) for start in row[2].split(","))), int(row[3]))
            for row in _PLACES_ROW.findall(self._run("mig", "-lgipp"))
            if row[0] == self._index
        }
        ids = self._profile_ids()
        return tuple(
            MigProfile(one.name, one.compute_slices, size, one.memory_bytes, starts)
            for one in found
            for starts, size in (places.get(ids[one.name], ((), 0)),)
        )

    def instances(self) -> tuple[tuple[int, GpuInstance], ...]:
        """Every GPU instance with its id, by place."""
        compute: dict[str, list[int]] = {}
        for row in _COMPUTE_ROW.findall(self._list("-lci")):
            if row[0] == self._index:
                compute.setdefault(row[1], []).append(int(row[6]))
        found = []
        for gpu, name, _, number, start, size in _GPU_ROW.findall(self._list("-lgi")):
            if gpu == self._index:
                place = MigPlace(name, int(start), int(size))
                found.append((int(number), GpuInstance(place, tuple(sorted(compute.get(number, ()))))))
        return tuple(sorted(found, key=lambda pair: pair[1]))

    def create(self, instance: GpuInstance) -> None:
        """Create a GPU instance at its place, with its compute instances."""
        place = instance.place
        output = self._run("mig", "-cgi", f"{self._profile_ids()[place.profile]}:{place.start}")
        made = re.search(r"created GPU instance ID\s+(\d+)", output)
        if made is None:
            raise SmiRefused(f"{PROGRAM} did not name the instance that it made: {output!r}")
        for slices in instance.compute:
            self._run("mig", "-gi", made[1], "-cci", str(_COMPUTE_IDS[slices]))

    def destroy(self, instance_id: int) -> None:
        """Destroy a GPU instance, its compute instances first."""
        mine = [row for row in _COMPUTE_ROW.findall(self._list("-lci")) if row[:2] == (self._index, str(instance_id))]
        if mine:
            self._run("mig", "-gi", str(instance_id), "-dci")
        self._run("mig", "-gi", str(instance_id), "-dgi")

    def devices(self) -> tuple[MigDevice, ...]:
        """The instances as MIG devices, with their UUIDs and processes."""
        return NvmlMig(self.board).devices()

    @property
    def _index(self) -> str:
        return self.board.device.partition(":")[2]

    def _profile_ids(self) -> dict[str, int]:
        return NvmlMig(self.board).profile_ids()

    def _list(self, what: str) -> str:
        """A table of the program; empty where it found no instances."""
        try:
            return self._run("mig", what)
        except SmiRefused as error:
            if "instances found" in str(error):
                return ""
            raise

    def _run(self, *arguments: str) -> str:
        """Run the program on this board, and return its output.

        Raises:
            SmiDenied: The program may not be run as root any more.
            SmiRefused: The program failed, or took too long.
        """
        head = arguments[:1] if arguments[0] == "mig" else ()
        status, output = self.run([*self.command, *head, "-i", self._index, *arguments[len(head) :]])
        if status == 0:
            return output
        if "password is required" in output or "Insufficient Permissions" in output:
            raise SmiDenied(output)
        raise SmiRefused(output or f"{PROGRAM} ended with status {status}")
