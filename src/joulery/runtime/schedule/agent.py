"""The node agent: every so often, what each job of this node has drawn so far, to a file the scheduler reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from joulery.runtime.schedule.energy import JobMeter
from joulery.runtime.schedule.spool import SpoolWriter


@dataclass(frozen=True, slots=True)
class AgentTimes:
    """How often an agent works.

    Attributes:
        sample_s: Distance of the samples.
        rounds: How many samples to take; None for ever.
    """

    sample_s: float = 30.0
    rounds: int | None = None


def run_agent(
    meter: JobMeter,
    spool: SpoolWriter,
    times: AgentTimes,
    say: Callable[[Mapping[str, Any]], None],
    stop: threading.Event,
    clock_s: Callable[[], float] = time.time,
) -> None:
    """Sample until told to stop. Totals that could not be written are in the next line that can.

    Args:
        meter: What the jobs of this node draw.
        spool: Where it is left.
        times: How often.
        say: Told of each sample.
        stop: Ends it, after one last sample.
        clock_s: Unix seconds.
    """
    taken = 0
    while not (last := stop.wait(times.sample_s)) or taken == 0:
        taken += 1
        _sample(meter, spool, say, clock_s())
        if last or (times.rounds is not None and taken >= times.rounds):
            return
    _sample(meter, spool, say, clock_s())


def _sample(meter: JobMeter, spool: SpoolWriter, say: Callable[[Mapping[str, Any]], None], now_s: float) -> None:
    totals = meter.update()
    kept = spool.write(now_s, totals)
    say(
        {
            "t_s": now_s,
            "jobs": {str(job): {"energy_j": total.energy_j, "slot_j": total.slot_j} for job, total in totals.items()},
            "machine_j": meter.machine_j,
            "written": kept,
        }
    )
