"""Sleep control of a cluster's machine, by commands of its administrator.

The ways to put a machine to sleep (suspend, power-off through its BMC) and to wake it (Wake-on-LAN, BMC, a cloud's API)
depend on the site. The state of the machine is visible only from outside: Ray or Slurm report whether it is up.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from joulery.domain.errors import ActuationError, CapabilityError, ConfigError
from joulery.domain.gpu.device import DeviceCapability, DeviceChange, DeviceState, Knob, SleepSetting

COMMAND_S = 60.0
"""Time limit of a command, s. It starts the change; the machine may take longer."""
_SHOWN = 300
"""Characters shown of what a failed command printed."""


class NodeCommands:
    """A machine that commands put to sleep and wake. Implements :class:`joulery.domain.ports.Device`.

    Args:
        node: Its name.
        sleep: The command that puts it to sleep, as arguments; no shell is used.
        wake: The command that wakes it. It may run while the machine is awake.
        timeout_s: Time limit of a command, seconds.

    Raises:
        ConfigError: A command is empty.
    """

    def __init__(self, node: str, sleep: Sequence[str], wake: Sequence[str], timeout_s: float = COMMAND_S) -> None:
        if not sleep or not wake:
            raise ConfigError(f"node {node} needs a command that puts it to sleep and one that wakes it")
        self.device = f"node:{node}"
        self._node, self._sleep, self._wake, self._timeout_s = node, tuple(sleep), tuple(wake), timeout_s
        self._asleep = False

    def capability(self) -> DeviceCapability:
        """Settable where both programs are found."""
        missing = [arguments[0] for arguments in (self._sleep, self._wake) if shutil.which(arguments[0]) is None]
        detail = f"no such program: {', '.join(missing)}" if missing else "by commands of the site file"
        return DeviceCapability(self.device, self._node, Knob.SLEEP, not missing, detail)

    def observe(self) -> DeviceState[SleepSetting]:
        """The latest setting by this process; a machine that another process sent to sleep is shown as awake."""
        return DeviceState(SleepSetting(self._asleep), {"asleep": self._asleep})

    def apply(self, wanted: SleepSetting, /) -> DeviceChange[SleepSetting]:
        """Run the command, unless this process has set this state already.

        Raises:
            CapabilityError: There is no such program.
            ActuationError: The command failed, or took too long.
        """
        if wanted.asleep == self._asleep:
            return DeviceChange(wanted, wanted, 0.0, "nothing to do")
        return self._change(wanted.asleep)

    def reset(self, memento: Mapping[str, Any] | None = None, /) -> DeviceChange[SleepSetting]:
        """Wake the machine, or put it to sleep if it was observed asleep. The command always runs."""
        return self._change(bool((memento or {}).get("asleep", False)))

    def _change(self, asleep: bool) -> DeviceChange[SleepSetting]:
        before, arguments, begin_s = SleepSetting(self._asleep), self._sleep if asleep else self._wake, time.monotonic()
        self._run(arguments, "did not go to sleep" if asleep else "could not be woken")
        self._asleep = asleep
        return DeviceChange(before, SleepSetting(asleep), time.monotonic() - begin_s, " ".join(arguments))

    def _run(self, arguments: Sequence[str], fault: str) -> None:
        failure = f"{self.device} {fault}: {' '.join(arguments)}"
        try:
            done = subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                check=False,
            )
        except FileNotFoundError as error:
            raise CapabilityError(f"{failure}: no such program", resource=arguments[0]) from error
        except OSError as error:
            raise CapabilityError(f"{failure}: {error.strerror}", resource=arguments[0]) from error
        except subprocess.TimeoutExpired as error:
            raise ActuationError(f"{failure}: no end within {self._timeout_s:g} s") from error
        if done.returncode:
            printed = (done.stderr or done.stdout).strip()[-_SHOWN:] or "nothing printed"
            raise ActuationError(f"{failure}: exit status {done.returncode}: {printed}")
