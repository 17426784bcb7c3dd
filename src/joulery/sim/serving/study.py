"""Clover's study in virtual time: schemes that choose configurations hour by hour, judged on one table and one grid."""

from __future__ import annotations

from collections.abc import Sequence

from joulery.sim.core.streams import Streams
from joulery.sim.serving.outcome import SchemeOutcome, StudySettings, Timetable, objective_of, outcome
from joulery.sim.serving.schemes import SCHEMES
from joulery.sim.serving.trial_table import Bench


def run(
    scheme: str, bench: Bench, trace: str, intensities: Sequence[float], settings: StudySettings, streams: Streams
) -> SchemeOutcome:
    """One scheme, one service, one grid, one seed.

    Args:
        scheme: A name in ``SCHEMES``.
        bench: The service.
        trace: Name of the grid; with the service and the scheme it names the random stream.
        intensities: g/kWh in each period.
        settings: What the user fixes.
        streams: Randomness of the searches.
    """
    timetable = timetable_of(scheme, bench, trace, intensities, settings, streams)
    return outcome(scheme, bench, objective_of(bench.table, settings), intensities, settings, timetable)


def timetable_of(
    scheme: str, bench: Bench, trace: str, intensities: Sequence[float], settings: StudySettings, streams: Streams
) -> Timetable:
    """What a scheme runs; the arguments are those of :func:`run`."""
    rng = streams("search", bench.table.service, trace, scheme)
    return SCHEMES[scheme](bench, objective_of(bench.table, settings), intensities, settings, rng)
