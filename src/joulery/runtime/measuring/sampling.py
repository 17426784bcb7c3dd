"""Start, await and end a sampler process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from joulery.domain.energy.channel import MeterSpec
from joulery.domain.errors import CapabilityError, ConfigError, DataError, JouleryError
from joulery.runtime.measuring.sampler_config import SamplerConfig
from joulery.runtime.measuring.terms import MAX_CPU_RATIO
from joulery.runtime.process import spawn_process

SAMPLER_PROGRAM = "joulery.app.sampler"
"""Module that runs in the sampler process; started by its name, never imported here."""
READY_S = 10.0
END_S = 5.0
_KINDS = {kind.kind: kind for kind in (CapabilityError, ConfigError, DataError)}


class SamplerProcess:
    """A running sampler process. It ends with this process in every case.

    Attributes:
        ready: Its first message, with the channels; None until then.
        done: Its last message, with its statistics; None until then, and when it ended early.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.ready: dict[str, Any] | None = None
        self.done: dict[str, Any] | None = None
        self._process = process
        self._heard = b""
        self._error: dict[str, Any] | None = None

    @classmethod
    def start(cls, config: SamplerConfig) -> Self:
        """Start a sampler; it is not ready yet.

        Raises:
            CapabilityError: No process can be started.
        """
        try:
            with (Path(config.folder) / "sampler.err").open("wb") as errors:
                process = spawn_process(SAMPLER_PROGRAM, (config.to_json(),), errors)
        except OSError as error:
            raise CapabilityError(f"the sampler cannot be started: {error}", resource=sys.executable) from error
        return cls(process)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until the sampler has read everything once.

        Raises:
            JouleryError: The sampler cannot start (its own error), it died, or it takes longer than ``timeout_s``.
        """
        self._listen(time.monotonic() + timeout_s, until_ready=True)
        if self.ready is None:
            raise self._why(f"the sampler was not ready after {timeout_s:g} s")

    def stop(self, timeout_s: float = END_S) -> None:
        """End the sampler after one more reading; it is killed when it takes too long. Safe to call twice.

        Raises:
            JouleryError: The sampler had ended early, or had to be killed; its files contain what it had written.
        """
        if self._process.returncode is None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(b"stop\n")
                self._process.stdin.close()
            except BrokenPipeError:  # it has ended; _why() reports the reason
                self._process.stdin = None
            self._listen(time.monotonic() + timeout_s, until_ready=False)
            try:
                self._process.wait(max(0.0, timeout_s / 2))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
        if self.done is None:
            raise self._why("the sampler had to be killed")

    def _listen(self, deadline_s: float, *, until_ready: bool) -> None:
        assert self._process.stdout is not None
        stdout = self._process.stdout.fileno()
        while not (until_ready and (self.ready is not None or self._error is not None)):
            wait_s = deadline_s - time.monotonic()
            if wait_s <= 0 or not select.select([stdout], [], [], wait_s)[0]:
                return
            chunk = os.read(stdout, 65536)
            if not chunk:  # it is about to end; until it has, its exit code is not known
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(0.0, deadline_s - time.monotonic()))
                return
            *lines, self._heard = (self._heard + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self.ready = message.get("ready", self.ready)
                self.done = message.get("done", self.done)
                self._error = message.get("error", self._error)

    def _why(self, otherwise: str) -> JouleryError:
        if self._error is not None:
            fields = dict(self._error)
            kind, message = fields.pop("kind"), fields.pop("message")
            if kind in _KINDS:
                return _KINDS[kind](message, **fields)
            return CapabilityError(message, hint=fields["hint"])
        code = self._process.poll()
        if code is None:
            return CapabilityError(otherwise)
        how = f"was ended by signal {-code}" if code < 0 else f"ended early with exit code {code}"
        return CapabilityError(f"the sampler {how}")


def start_sampler(
    folder: Path,
    meters: Sequence[MeterSpec] | None,
    period_s: float,
    also: Sequence[int] = (),
    boards: Sequence[str] = (),
) -> SamplerProcess:
    """Start a sampler for this process, for others that belong to it and for their children; wait until it is ready.

    Args:
        folder: Where it writes.
        meters: What it opens; None for what this machine has.
        period_s: Time between two readings.
        also: Further processes that belong to this one.
        boards: GPUs that belong to this process, whichever process computes there.

    Raises:
        JouleryError: It cannot start, or a meter that was named cannot be read.
    """
    config = SamplerConfig(
        folder=str(folder.absolute()),
        parent=os.getpid(),
        root=os.getpid(),
        include_root=True,
        period_s=period_s,
        max_cpu_ratio=MAX_CPU_RATIO,
        meters=None if meters is None else tuple(meters),
        also=tuple(also),
        boards=tuple(boards),
    )
    sampler = SamplerProcess.start(config)
    try:
        sampler.wait_ready()
    except JouleryError:
        with suppress(CapabilityError):  # the first error says why it did not start
            sampler.stop(timeout_s=1.0)
        raise
    return sampler
