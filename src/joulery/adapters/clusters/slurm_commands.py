"""Running one command of Slurm."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from joulery.domain.errors import CapabilityError


@dataclass(frozen=True, slots=True)
class Done:
    """What a command came to."""

    code: int
    out: str
    err: str


Runner = Callable[[Sequence[str]], Done]


def command_runner(timeout_s: float) -> Runner:
    """Runs commands as processes.

    Raises:
        CapabilityError: One took longer than ``timeout_s``, or could not be started.
    """

    def run(command: Sequence[str]) -> Done:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise CapabilityError(
                f"{' '.join(command[:3])} took longer than {timeout_s:g} s", resource=command[0]
            ) from error
        except OSError as error:
            raise CapabilityError(f"{command[0]} cannot be started: {error.strerror}", resource=command[0]) from error
        return Done(done.returncode, done.stdout, done.stderr)

    return run
