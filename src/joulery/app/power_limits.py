"""Power limits of jobs on this machine: which GPUs, which policy, which leases."""

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
from joulery.app.wiring.devices import open_device, open_power, rapl_spec
from joulery.app.wiring.leases import start_watchdog
from joulery.domain.cluster import Placement
from joulery.domain.errors import CapabilityError, ConfigError, JouleryError
from joulery.domain.gpu.device import DeviceSpec, lease_name
from joulery.policies.clocks.power_limit import LIMIT_RATIOS, PowerLimitTuner
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.leasing.watchdog import revert_lease
from joulery.runtime.schedule.power_limits import Activity, JobLimits, LimitedDevice, running_limits
from joulery.store.jobs import JobLimitBook
from joulery.store.leases import LeaseBook, LeaseState, lease_state


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
    """Limit the power of this machine's jobs while the block runs; without rights or devices one note, and no limits.

    Args:
        config: The settings.
        placements: Where jobs run now.
        progress: The file in which a job reports its progress.
        say: Receives each change and note.
        stop: Ends it.
        cpus: Limit the CPUs of the machine, for jobs that run on them, instead of its GPUs.
    """
    try:
        tuner = _tuner(config)
        leases = LeaseBook()
        holder = LeaseHolder(leases, config.lease_s, watch=start_watchdog)
        found = [limited_cpus(holder, leases)] if cpus else limited_gpus(holder, leases)
        devices = {device.number: device for device in found}
    except CapabilityError as error:
        grant = f" (to have it: {error.grant})" if error.grant else ""
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


def limited_gpus(holder: LeaseHolder, leases: LeaseBook) -> list[LimitedDevice]:
    """The GPUs of this machine whose power limit this process may set.

    Raises:
        CapabilityError: There is none, this process may not, or it is in a container without a guard outside of it.
    """
    found: list[LimitedDevice] = []
    trouble: CapabilityError | None = None
    number = 0
    while True:
        try:
            found.append(_limited_gpu(number, holder, leases))
        except ConfigError:  # no such board
            break
        except CapabilityError as error:
            if not (error.resource or "").startswith("gpu:") or error.grant:
                raise
            trouble = error  # this board alone: it has no power management, or is lost
        number += 1
    if not found:
        raise trouble or CapabilityError("this machine has no GPU", resource="nvml")
    return found


def _limited_gpu(number: int, holder: LeaseHolder, leases: LeaseBook) -> LimitedDevice:
    """A GPU and the limit it has when no lease holds it.

    Raises:
        CapabilityError: Its power limit may not or cannot be set.
        ConfigError: There is no such board.
    """
    from joulery.adapters.devices.power.nvidia_activity import NvidiaActivity

    spec = DeviceSpec("nvidia-power", {"gpu": number})
    return _limited(number, spec, holder, leases, lambda: NvidiaActivity(number))


def limited_cpus(holder: LeaseHolder, leases: LeaseBook) -> LimitedDevice:
    """The CPUs of this machine as one device, and the limit they have when no lease holds it.

    Raises:
        CapabilityError: Their power limit may not or cannot be set, or their energy not be read.
    """
    from joulery.adapters.devices.power.rapl_activity import RaplActivity

    spec = rapl_spec()
    return _limited(0, spec, holder, leases, lambda: RaplActivity(spec.options.get("root")))


def _limited(
    number: int, spec: DeviceSpec, holder: LeaseHolder, leases: LeaseBook, activity: Callable[[], Activity]
) -> LimitedDevice:
    device = open_power(spec)
    able = device.capability()
    if not able.settable:
        raise CapabilityError(f"{able.device}: {able.detail}", resource=able.device, grant=able.grant or None)
    holder.require_guard(able)
    now_s = time.time()
    name = lease_name(able.uuid or able.device, spec.knob)
    revert_lease(leases, name, open_device, lambda lease: lease_state(lease, now_s) is not LeaseState.HELD)
    if (held := leases.read(name)) is not None:
        owner = f"process {held.owner.pid} ({held.owner.program})"
        raise CapabilityError(f"the power limit of {able.device} is leased by {owner}", resource=able.device)
    set_w = device.observe().setting.limit_w
    full_w = able.default_w if set_w is None else set_w
    return LimitedDevice(
        number, able.device, device, spec, activity(), able.name, able.uuid, full_w, able.limits_w[0], able.parts
    )


def _reported(file: Path) -> tuple[float, float]:
    """A job's progress, and when it was written; NaN where it reports none."""
    try:
        written_s = file.stat().st_mtime
    except OSError:
        return math.nan, math.nan
    return read_progress(file), written_s
