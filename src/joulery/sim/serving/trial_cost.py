"""What trials of configurations really cost the service: time, joules, and GPUs cut anew.

The published accounting takes a trial for 30 s. As published, a trial answers a thousand requests at the service's own
demand, and every change stops and starts all instances. How long models take to load was not published: left out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from joulery.sim.serving.trial_table import Bench

REQUESTS = 1000
"""Requests of a published trial."""
_STOP_S, _CUT_S, _START_S, _POLL_S, _BETWEEN_S, _SETTLE_S = 0.5, 1.0, 0.1, 2.0, 3.0, 20.0
"""The published pauses: stopping, destroying and creating slices, starting an instance, waiting until it answers,
between two trials, after the last change (repository boringlee24/sc23-clover, v1.0, ``system/``)."""


@dataclass(frozen=True, slots=True)
class TrialCost:
    """The cost of all trials of a run.

    Attributes:
        seconds: Time they and the changes between them take.
        energy_j: Joules of the requests they answer.
        reslices: How often GPUs are cut anew.
    """

    seconds: float
    energy_j: float
    reslices: int


def trial_cost(bench: Bench, trials: Sequence[int], invocations: int) -> TrialCost:
    """Add up trials in order.

    Args:
        bench: The service.
        trials: Rows tried.
        invocations: How often a search ended and the service changed to what it settled on.
    """
    if not trials:
        return TrialCost(0.0, 0.0, 0)
    cut = bench.space.graphs.reshape(len(bench.space), len(bench.space.variants), -1).sum(axis=1)
    seconds, energy_j, reslices = invocations * _SETTLE_S, 0.0, 0
    before = cut[bench.base_row]
    for row in trials:
        changed = bool((cut[row] != before).any())
        before = cut[row]
        # Where every GPU has a configuration of its own, which of them change is not told: all are taken to.
        reslices += changed * bench.table.gpus
        instances = bench.copies * int(cut[row].sum())
        seconds += REQUESTS * bench.interarrival_s + _STOP_S + _START_S * instances + _POLL_S + _BETWEEN_S
        seconds += _CUT_S * changed
        energy_j += REQUESTS * bench.metrics[row].energy_j
    return TrialCost(seconds, energy_j, reslices)
