"""The agent that meters one machine's jobs without reading a site file: that parser needs more memory than the agent.

``joulery agent`` reads the site, then replaces itself with a process that receives :class:`AgentConfig`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from joulery.adapters.clusters.slurm_node import job_of, node_placements
from joulery.app.limits_config import LimitsConfig
from joulery.app.wiring.meters import open_meters
from joulery.app.wiring.share import open_busy, open_tree
from joulery.domain.cluster import Placement
from joulery.domain.energy.channel import MeterSpec
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.runtime.schedule.energy import JobMeter, MachineShares
from joulery.runtime.schedule.polling import AgentTimes as AgentTimes
from joulery.runtime.schedule.polling import run_agent, stopped_by_signals
from joulery.runtime.schedule.spool import SpoolWriter, machine_id


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Settings of a node agent.

    Attributes:
        folder: Folder to which energy readings are written.
        node: Name of this node, for its file in the folder.
        only: Meter only the jobs that Slurm started under this name; all when empty.
        cluster: Meter only the jobs of the Slurm of this name; all when empty.
        meters: Meters to open; None for the preferred ones of this machine.
        times: Intervals of the agent.
        prolog: Folder to which a Slurm prolog writes the GPUs of each job; None for none.
        progress: Socket to listen on for progress, and the folder to store it in; None for none.
        limits: Settings of jobs' power limits; None for no limits.
    """

    folder: str
    node: str
    only: str
    meters: tuple[MeterSpec, ...] | None
    times: AgentTimes
    prolog: str | None = None
    progress: tuple[str, str] | None = None
    limits: LimitsConfig | None = None
    cluster: str = ""

    def to_json(self) -> str:
        """The configuration as one command-line argument."""
        meters = None if self.meters is None else [meter.as_dict() for meter in self.meters]
        return json.dumps({**asdict(replace(self, meters=None)), "meters": meters})

    @classmethod
    def from_json(cls, text: str) -> AgentConfig:
        """The reverse of :meth:`to_json`.

        Raises:
            ConfigError: The text was not written by :meth:`to_json`.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            meters, progress, limits = fields.pop("meters"), fields.pop("progress"), fields.pop("limits")
            return cls(
                meters=None if meters is None else tuple(MeterSpec(**spec) for spec in meters),
                progress=None if progress is None else (str(progress[0]), str(progress[1])),
                limits=None if limits is None else LimitsConfig(**limits),
                times=AgentTimes(**fields.pop("times")),
                **fields,
            )
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ConfigError(f"no agent configuration: {error}", got=text[:200], pointer="--orders") from error


def run_node_agent(config: AgentConfig, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Meter the jobs of this node until a signal ends it.

    Args:
        config: Settings of the agent.
        say: Receives each sample.

    Raises:
        CapabilityError: No meter answers, or the socket cannot be opened.
    """
    with ExitStack() as stack:
        if config.progress is not None:
            from joulery.adapters.clusters.progress import open_progress_socket

            path, folder = map(Path, config.progress)
            owner = partial(job_of, cluster=config.cluster)
            stack.callback(open_progress_socket(path, folder, owner).close)
        prolog = None if config.prolog is None else Path(config.prolog)
        placements = partial(node_placements, prolog=prolog, node=config.only, cluster=config.cluster)
        meter = node_meter(config.meters, placements)
        stack.callback(meter.close)
        spool = SpoolWriter(Path(config.folder), config.node, f"{time.time_ns():x}", machine=machine_id())
        stop = stack.enter_context(stopped_by_signals())
        if config.limits is not None:
            stack.enter_context(node_limits(config.limits, placements, say, stop))
        run_agent(meter, spool, config.times, say, stop)


def node_limits(
    config: LimitsConfig,
    placements: Callable[[], tuple[Placement, ...]],
    say: Callable[[Mapping[str, Any]], None],
    stop: threading.Event,
) -> AbstractContextManager[None]:
    """Limit the power of the jobs of this Slurm node while the block runs."""
    from joulery.app.power_limits import job_limits

    folder = Path(os.devnull) if config.progress is None else Path(config.progress)
    return job_limits(config, placements, lambda job: folder / str(job), say, stop)


def job_meter(
    specs: Sequence[MeterSpec] | None, placements: Callable[[], tuple[Placement, ...]], slots: int
) -> JobMeter:
    """Open the meters of this machine, with their energy split by job.

    Args:
        specs: Meters to open; None for the preferred ones of this machine.
        placements: Returns the present placement of each job.
        slots: Number of slots of this machine.

    Raises:
        CapabilityError: No meter answers.
    """
    opened = open_meters(specs)
    if not opened.meters:
        raise CapabilityError(
            "no meter answers here", hint="joulery doctor lists what can be read here, and how to grant the rest"
        )
    busy = open_busy()

    def tree(pid: int) -> object:
        return open_tree(pid, include_root=True, exclude=frozenset(), sockets=busy.sockets, group=None)

    return JobMeter(opened.meters, MachineShares(busy, tree, slots), placements)  # type: ignore[arg-type]


def node_meter(specs: Sequence[MeterSpec] | None, placements: Callable[[], tuple[Placement, ...]]) -> JobMeter:
    """Open the meters of this Slurm node, with their energy split by job.

    Args:
        specs: Meters to open; None for the preferred ones of this machine.
        placements: Returns the present placement of each of its jobs.

    Raises:
        CapabilityError: No meter answers.
    """
    try:
        slots = len(machine_gpus())
    except CapabilityError:
        slots = len(os.sched_getaffinity(0))
    return job_meter(specs, placements, slots)


def machine_gpus() -> tuple[int, ...]:
    """Board numbers of the GPUs of this machine.

    Raises:
        CapabilityError: No GPU answers.
    """
    from joulery.adapters.meters.nvml import open_nvml

    meter = open_nvml()
    boards = tuple(int(board.device.partition(":")[2]) for board in meter.boards)
    meter.close()
    return boards
