"""Meter of the host's power from its management controller (BMC), through ``ipmitool dcmi power reading``.

The reading is the power of the whole node at its supplies, in whole watts, renewed about once a second. A controller
that offers DCMI without a sensor answers 0 W, or a deactivated reading: neither is accepted as a measurement.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from joulery.adapters.meters.host.polled import DIVIDED, PolledMeter
from joulery.domain.energy.channel import HOST, Channel, ReadingKind
from joulery.domain.errors import CapabilityError
from joulery.domain.quality import Quality

COMMAND = ("ipmitool", "dcmi", "power", "reading")
PERIOD_S = 1.0
TIMEOUT_S = 5.0
_POWER = re.compile(r"^\s*Instantaneous power reading:\s*(\d+)\s*Watts", re.MULTILINE)
_STATE = re.compile(r"^\s*Power reading state is:\s*(\w+)", re.MULTILINE)
_ADMINISTRATORS = "who may open /dev/ipmi0 controls the BMC, so leave it to root: "
_ROOT = "sudo joulery export --meter ipmi, or read the BMC with a read-only account: --meter redfish:URL"

Answer = Callable[[], tuple[int, str, str]]
"""Runs the command: exit status, standard output, standard error."""


def open_ipmi(answer: Answer | None = None, *, background: bool = True) -> PolledMeter:
    """Open a meter of the power of this host.

    Args:
        answer: Runs ``ipmitool``.
        background: Whether a thread polls the BMC.

    Raises:
        CapabilityError: No ``ipmitool``, no BMC, no permission, or a BMC without a power sensor.
    """
    ask = answer or _run
    first = (reading_w(ask),)
    channel = Channel("machine", HOST, ReadingKind.POWER, "ipmi", Quality.MEASURED, update_s=PERIOD_S)
    name = "the BMC (ipmitool)"
    return PolledMeter(
        (channel,),
        lambda: (reading_w(ask),),
        name,
        PERIOD_S,
        background=background,
        notes=(DIVIDED,),
        first=first,
    )


def reading_w(answer: Answer) -> float:
    """The power of the host now, watts.

    Raises:
        CapabilityError: The power is not available; the error states the reason.
    """
    code, out, err = answer()
    if code != 0:
        message = " ".join((err or out).split())[:200]
        if "permission denied" in message.lower() or "Could not open device" in message:
            raise _not_opened(message)
        raise CapabilityError(f"ipmitool fails: {message or f'exit status {code}'}", resource=COMMAND[0])
    power, state = _POWER.search(out), _STATE.search(out)
    if power is None:
        raise CapabilityError("the BMC gives no power reading (DCMI)", resource=" ".join(COMMAND))
    if state is not None and state[1] != "activated":
        raise CapabilityError(f"the BMC's power reading is {state[1]}", resource=" ".join(COMMAND))
    if int(power[1]) == 0:
        raise CapabilityError("the BMC answers 0 W: it has no power sensor", resource=" ".join(COMMAND))
    return float(power[1])


def _not_opened(message: str) -> CapabilityError:
    if any(Path("/dev", name).exists() for name in ("ipmi0", "ipmi/0", "ipmidev/0")):
        return CapabilityError(
            f"the BMC may not be asked: {message}", resource="/dev/ipmi0", hint=_ADMINISTRATORS + _ROOT
        )
    return CapabilityError(
        "no BMC here (/dev/ipmi0)", resource="/dev/ipmi0", hint="a server's driver is loaded by: sudo modprobe ipmi_si"
    )


def _run() -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            COMMAND,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise CapabilityError(
            "ipmitool is not installed", resource=COMMAND[0], hint="install the package ipmitool of the distribution"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CapabilityError(f"ipmitool does not answer: {error}", resource=COMMAND[0]) from error
    return done.returncode, done.stdout, done.stderr
