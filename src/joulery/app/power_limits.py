"""Power limits of the jobs on this machine: opens the devices, the tuner and the leases."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from joulery.adapters.clusters.progress import read_progress
from joulery.app.limits_config import LimitsConfig
from joulery.app.wiring.leases import start_watchdog
from joulery.app.wiring.limited_devices import limited_cpus, limited_gpus
from joulery.domain.cluster import Placement
from joulery.domain.errors import CapabilityError, JouleryError
from joulery.policies.clocks.power_limit import LIMIT_RATIOS, PowerLimitTuner
from joulery.runtime.leasing.job_limits import JobLimits, running_limits
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.store.jobs import JobLimitBook, NodeNotes
from joulery.store.leases import LeaseBook


@contextmanager
def job_limits(
    config: LimitsConfig,
    placements: Callable[[], tuple[Placement, ...]],
    progress: Callable[[int], Path],
    say: Callable[[Mapping[str, Any]], None],
    stop: threading.Event,
    *,
    cpus: bool = False,
) -> Iterator[None]:
    """Limit the power of this machine's jobs while the block runs; without permission or devices, only log a note.

    Args:
        config: The settings.
        placements: Returns the present placement of each job.
        progress: Returns the file in which a job reports its progress.
        say: Receives each change and note.
        stop: Set to end the limits.
        cpus: Whether to limit the CPUs of the machine, for jobs that run on them, instead of its GPUs.
    """
    try:
        tuner = _tuner(config)
        leases = LeaseBook()
        holder = LeaseHolder(leases, config.lease_s, watch=start_watchdog)
        found = [limited_cpus(holder, leases)] if cpus else limited_gpus(holder, leases)
        devices = {device.number: device for device in found}
    except CapabilityError as error:
        grant = f" (to enable it: {error.grant})" if error.grant else ""
        say({"kind": "note", "text": f"no power limits are set: {error}{grant}"})
        yield
        return
    book = None if config.known is None else JobLimitBook(Path(config.known))
    limits = JobLimits(
        tuner,
        devices,
        placements,
        lambda job: _reported(progress(job)),
        holder,
        book,
        say,
        (lambda placement: (0,)) if cpus else (lambda placement: placement.gpus),
        None if config.known is None or cpus else NodeNotes(Path(config.known) / "nodes"),
        config.lease_s,
    )
    try:
        with running_limits(limits, stop, time.time, config.period_s):
            yield
    except JouleryError as error:  # a GPU that refuses: its lease stays for the watchdog and doctor --reset
        say({"kind": "note", "text": str(error)})


def _tuner(config: LimitsConfig) -> PowerLimitTuner:
    return PowerLimitTuner(
        config.eta,
        config.max_slowdown,
        tuple(ratio for ratio in LIMIT_RATIOS if ratio >= config.min_ratio - 1e-9),
        config.trial_s,
        config.settle_s,
        config.period_s,
        config.review_s,
    )


def _reported(file: Path) -> tuple[float, float]:
    """Progress of a job, and the time it was written; NaN where the job reports none."""
    try:
        written_s = file.stat().st_mtime
    except OSError:
        return math.nan, math.nan
    return read_progress(file), written_s
