"""Meter of the node's power as Slurm collects it (``acct_gather_energy``), from ``scontrol show node``.

It serves nodes whose sensors only ``slurmd`` may read. The plug-in decides what the watts cover: the whole node
(``ipmi``, ``xcc``, ``pm_counters``) or its processors (``rapl``). With ``gpu`` Slurm adds up boards that the meters
``nvml`` and ``amd`` read separately. ``joulery report --from-sacct`` reads the joules of finished jobs
(``ConsumedEnergyRaw``).
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

from joulery.adapters.clusters.slurm_commands import Runner, command, command_runner, raise_unless_done
from joulery.adapters.meters.host.polled import DIVIDED, PolledMeter
from joulery.domain.energy.channel import HOST, Channel, ReadingKind
from joulery.domain.errors import CapabilityError, JouleryError
from joulery.domain.quality import Quality

PERIOD_S = 10.0
TIMEOUT_S = 5.0
_TYPE = re.compile(r"^\s*AcctGatherEnergyType\s*=\s*(?:acct_gather_energy/)?(\S+)", re.MULTILINE)
_WATTS = re.compile(r"\bCurrentWatts=(\S+)")
_COMPONENTS = {"ipmi": HOST, "xcc": HOST, "pm_counters": HOST, "cray_aries": HOST, "ibmaem": HOST, "rapl": "packages"}

Ask = Callable[[str], str]
"""Slurm's output for ``configuration``, or for the name of a node. Raises JouleryError."""


def slurm_printer(run: Runner | None = None, conf: Path | None = None) -> Ask:
    """A function that returns Slurm's output for its configuration or for a node.

    Args:
        run: Runs a command of Slurm.
        conf: The cluster's slurm.conf; None for the one of the environment.
    """
    runner = run or command_runner(TIMEOUT_S, conf)

    def ask(what: str) -> str:
        arguments = command("configuration") if what == "configuration" else command("node", node=what)
        done = runner(arguments)
        raise_unless_done(done, arguments)
        return done.out

    return ask


def open_slurm_energy(
    node: str = "", ask: Ask | None = None, *, conf: Path | None = None, background: bool = True
) -> PolledMeter:
    """Open a meter of the power of this node.

    Args:
        node: The node's name in Slurm; when empty, ``SLURMD_NODENAME``, else the host's short name.
        ask: Runs the commands.
        conf: The cluster's slurm.conf; None for the one of the environment.
        background: Whether a thread polls Slurm.

    Raises:
        CapabilityError: Slurm does not answer, collects no energy, or has no reading of this node.
    """
    ask = ask or slurm_printer(conf=conf)
    node = node or os.environ.get("SLURMD_NODENAME") or platform.node().partition(".")[0]
    try:
        gathered = _TYPE.search(ask("configuration"))
    except JouleryError as error:
        raise CapabilityError(f"Slurm does not answer: {error}", resource="scontrol") from error
    plugin = gathered[1] if gathered else "none"
    component = _COMPONENTS.get(plugin)
    if component is None:
        raise CapabilityError(
            f"Slurm gathers no energy of nodes here (AcctGatherEnergyType is {plugin})",
            resource="slurm.conf",
            hint="AcctGatherEnergyType=acct_gather_energy/ipmi or rapl, and AcctGatherNodeFreq=10, in slurm.conf",
        )

    def read() -> tuple[float, ...]:
        return (power_w(ask, node),)

    first = read()
    channel = Channel("machine", component, ReadingKind.POWER, "slurm", Quality.MEASURED, update_s=PERIOD_S)
    notes = (DIVIDED,) if component == HOST else ()
    name = f"Slurm ({plugin})"
    return PolledMeter((channel,), read, name, PERIOD_S, background=background, notes=notes, first=first)


def power_w(ask: Ask, node: str) -> float:
    """The node's power at Slurm's last reading, watts.

    Raises:
        CapabilityError: Slurm does not show the node, or has no reading (``n/s``, or 0 before the first one).
    """
    try:
        watts = _WATTS.search(ask(node))
    except JouleryError as error:
        raise CapabilityError(f"Slurm does not show node {node}: {error}", resource=node) from error
    if watts is None or not watts[1].isdigit() or int(watts[1]) == 0:
        raise CapabilityError(
            f"Slurm has no power reading of node {node}",
            resource=node,
            hint="AcctGatherNodeFreq=10 in slurm.conf; its log of slurmd says what the plug-in lacks",
        )
    return float(watts[1])
