"""Control of NVIDIA's MPS daemon: processes share a GPU at the same time, each with a share of its SMs.

``nvidia-cuda-mps-control`` comes with the driver and reads one command a line from its standard input. Each GPU has a
daemon of its own, identified by its pipe folder: clients name that folder in ``CUDA_MPS_PIPE_DIRECTORY`` and their
share in ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` (Volta and later), which applies for the lifetime of the client. No root
is needed: a daemon serves the user who started it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joulery.adapters.devices.change import Surface, change
from joulery.adapters.devices.nvidia_board import NvidiaBoard, open_board
from joulery.adapters.nvidia import ComputeMode, compute_mode
from joulery.domain.errors import ActuationError, CapabilityError, JouleryError
from joulery.domain.gpu.device import DEVICE, DeviceCapability, DeviceChange, DeviceState, Knob, MpsSetting

PROGRAM = "nvidia-cuda-mps-control"
_PATIENCE_S = 20.0
"""Time limit of one command."""
_QUIT_S = 5
"""Time that clients may continue after the daemon is asked to quit; then their servers are ended."""
_ROUNDING = 0.0006
"""The daemon prints shares in percent with one decimal."""


class MpsRefused(Exception):  # noqa: N818 - what the daemon said
    """The daemon refused or failed a command."""


class NvidiaMps:
    """The MPS daemon of one board, or of one MIG instance of it. Implements :class:`joulery.domain.ports.Device`.

    Args:
        gpu: Its index or UUID.
        nvml: The module ``pynvml``, or one that behaves like it.
        folder: Folder of the daemons' pipes and logs; a folder of this user in the system's temporary one when None.
        instance: UUID of the board's MIG instance that processes share; empty for the whole board.

    Raises:
        CapabilityError: No driver, or the program of the daemon is not installed.
        ConfigError: No such board.
    """

    def __init__(self, gpu: int | str = 0, nvml: Any = None, folder: str | None = None, instance: str = "") -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            raise CapabilityError(
                f"{PROGRAM} is not installed",
                resource=PROGRAM,
                hint="it comes with the driver's compute utilities (Debian: nvidia-cuda-mps, else nvidia-utils)",
            )
        self._program = program
        self._board: NvidiaBoard = open_board(gpu, nvml)
        self._uuid = instance or self._board.uuid
        self.device = f"{self._board.device}/{instance}" if instance else self._board.device
        base = Path(folder) if folder else Path(tempfile.gettempdir()) / f"joulery-mps-{os.getuid()}"
        self._folder = base / self._uuid

    def capability(self) -> DeviceCapability:
        """Whether this machine supports MPS shares; they need no privileges."""
        partitioned = self._is_whole and self._is_partitioned()
        return DeviceCapability(
            device=self.device,
            name=self._board.name,
            knob=Knob.MPS,
            settable=not partitioned,
            detail="MIG mode is on: a partitioned GPU is not shared"
            if partitioned
            else f"{self._program}, pipes in {self._folder}" + self._mode(),
        )

    def observe(self) -> DeviceState[MpsSetting]:
        """Whether the daemon runs, and the share of a client that names none."""
        try:
            setting = self._look()
        except (MpsRefused, OSError) as error:
            raise CapabilityError(f"the MPS daemon of {self.device} does not answer: {error}") from error
        return DeviceState(setting, {"running": setting.running, "share_ratio": setting.default_share_ratio})

    def clients(self) -> tuple[int, ...]:
        """The ids of the processes that the daemon serves now.

        Raises:
            CapabilityError: The daemon does not answer.
        """
        try:
            if not self._look().running:
                return ()
            servers = self._ask("get_server_list").split()
            return tuple(
                sorted(int(pid) for server in servers for pid in self._ask(f"get_client_list {server}").split())
            )
        except (MpsRefused, OSError, ValueError) as error:
            raise CapabilityError(f"the MPS daemon of {self.device} does not answer: {error}") from error

    def require_room(self) -> None:
        """Check that processes may compute on the board; exclusive-process mode does not prevent MPS.

        Raises:
            CapabilityError: The board's compute mode prohibits it.
        """
        self._board.require_room(shared=True)

    def environment(self, share_ratio: float) -> tuple[tuple[str, str], ...]:
        """Environment variables for a process to run with a share of this GPU's SMs; 1 sets no limit on a slice."""
        limit = (("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", f"{100 * share_ratio:g}"),)
        return (
            ("CUDA_VISIBLE_DEVICES", self._uuid),
            (DEVICE, "cuda"),
            *self._directories().items(),
            *(limit if self._is_whole or share_ratio < 1 else ()),
        )

    def apply(self, wanted: MpsSetting, /) -> DeviceChange[MpsSetting]:
        """Start the daemon, set its default share, or stop it."""
        if wanted.running and self._is_whole and self._is_partitioned():
            raise CapabilityError(
                f"{self.device} is partitioned (MIG mode is on); MPS shares whole GPUs", resource=self.device
            )
        old = self.observe().setting
        busy = self.clients() if old.running and not wanted.running else ()
        if busy:
            raise ActuationError(
                f"the MPS daemon of {self.device} serves process {', '.join(map(str, busy))}; nothing was changed",
                hint="end or move what runs there first",
            )
        return self._change(old, wanted, str(wanted))

    def reset(self, memento: Mapping[str, Any] | None = None, /) -> DeviceChange[MpsSetting]:
        """Restore the observed setting, or stop the daemon; remaining clients get a few seconds before it ends."""
        known = memento or {}
        before = MpsSetting(bool(known.get("running", False)), float(known.get("share_ratio", 1.0)))
        return self._change(self.observe().setting, before, "what it was")

    def close(self) -> None:
        """Shut down the connection to the driver; the daemon continues."""
        self._board.close()

    def _mode(self) -> str:
        """Meaning of the board's compute mode for MPS; empty for the default."""
        mode = compute_mode(self._board.nvml, self._board.handle)
        if mode is ComputeMode.PROHIBITED:
            return "; prohibited compute mode: nothing computes on it"
        return "; exclusive-process mode: only MPS shares it" if mode is ComputeMode.EXCLUSIVE else ""

    def _change(self, old: MpsSetting, new: MpsSetting, asked: str) -> DeviceChange[MpsSetting]:
        if not new.running:
            new = MpsSetting()
        if old == new:
            return DeviceChange(old, old, 0.0, "it was set so already")
        surface = Surface(
            f"MPS of {self.device}", self._converge, lambda: self._settled(new, old), (MpsRefused, OSError), _refused
        )
        return DeviceChange(old, new, change(surface, old, new, asked))

    def _converge(self, wanted: MpsSetting) -> None:
        running = self._look().running
        if not wanted.running:
            if running:
                self._ask(f"quit -t {_QUIT_S}")
            return
        if not running:
            for path in self._directories().values():
                Path(path).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._run("-d")
        self._ask(f"set_default_active_thread_percentage {100 * wanted.default_share_ratio:g}")

    def _settled(self, new: MpsSetting, old: MpsSetting) -> MpsSetting:
        """The current setting; a share that was rounded counts as the requested one."""
        found = self._look()
        for asked in (new, old):
            near = abs(found.default_share_ratio - asked.default_share_ratio) <= _ROUNDING
            if near and found.running == asked.running:
                return asked
        return found

    def _look(self) -> MpsSetting:
        if not (Path(self._directories()["CUDA_MPS_PIPE_DIRECTORY"])).exists():
            return MpsSetting()
        try:
            answer = self._ask("get_default_active_thread_percentage")
        except MpsRefused as error:
            if "Cannot find MPS control daemon" in str(error):
                return MpsSetting()
            raise
        try:
            return MpsSetting(True, float(answer) / 100)
        except ValueError as error:
            raise MpsRefused(f"its share reads {answer!r}") from error

    def _ask(self, command: str) -> str:
        """The daemon's answer to one command."""
        return self._run(command=command)

    def _run(self, *arguments: str, command: str = "") -> str:
        """Run the program, and return its output.

        Raises:
            MpsRefused: The program failed, or took too long.
        """
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": self._uuid, **self._directories()}
        # Into a file, not a pipe: the daemon that stays behind would hold a pipe open for ever.
        with tempfile.TemporaryFile() as output:
            try:
                done = subprocess.run(
                    [self._program, *arguments],
                    input=f"{command}\n".encode(),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environ,
                    timeout=_PATIENCE_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise MpsRefused(f"{command or 'its start'} took longer than {_PATIENCE_S:g} s") from error
            output.seek(0)
            answer = output.read().decode(errors="replace").strip()
        if done.returncode != 0:
            raise MpsRefused(answer or f"{PROGRAM} ended with status {done.returncode}")
        return answer

    def _directories(self) -> dict[str, str]:
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "log"),
        }

    @property
    def _is_whole(self) -> bool:
        return self._uuid == self._board.uuid

    def _is_partitioned(self) -> bool:
        nvml = self._board.nvml
        try:
            return bool(nvml.nvmlDeviceGetMigMode(self._board.handle)[0])
        except self._board.failures as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_NOT_SUPPORTED:
                return False
            raise self._board.trouble(error) from error


def _refused(error: Exception) -> JouleryError | None:
    if isinstance(error, PermissionError):
        return CapabilityError(f"the folder of the MPS daemon may not be written: {error}", resource=error.filename)
    return None
