"""Load traced runs to report, compare and judge them for precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulery.accounting.operations.align import align, matched
from joulery.accounting.operations.precision import thinned
from joulery.accounting.operations.rows import TRANSFORMERS, Fold, added, folded
from joulery.accounting.steps import power_steps
from joulery.app.runs.accounts import run_openers
from joulery.domain.energy.power import PowerTrace
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.errors import DataError
from joulery.domain.trace.events import EventTrace
from joulery.runtime.tracing.traced import Anatomy, dissect_again, unfinished
from joulery.store.run.directory import Run, open_run
from joulery.store.run.readings import load_readings
from joulery.store.run.tensors import EVENTS, kept_events, kept_footprint


@dataclass(frozen=True, slots=True)
class RunAnatomy:
    """A traced run and the energy of its operations.

    Attributes:
        run: The run.
        name: Name of its folder, or the run's identifier.
        footprint: Joules by operation.
        again: The run accounted again, where it was killed before it could store its result; else None.
    """

    run: Run
    name: str
    footprint: TensorFootprint
    again: Anatomy | None = None

    @property
    def events(self) -> EventTrace | None:
        """Events of the run; None where it stores none."""
        if self.again is not None:
            return self.again.trace
        return kept_events(self.run) if EVENTS in self.run.series_names else None

    @property
    def power(self) -> tuple[PowerTrace, ...]:
        """Readings of its meters."""
        return load_readings(self.run).traces

    @property
    def windows_ns(self) -> list[tuple[int, int]]:
        """The accounted windows, Unix nanoseconds."""
        if self.again is not None:
            return [session.window_ns for session in self.again.sessions]
        sessions = _sessions(self.run)
        found = [(round(s["start_s"] * 1e9), round(s["end_s"] * 1e9)) for s in sessions]
        return found or [self.footprint.window_ns]


def _sessions(run: Run) -> Sequence[Mapping[str, Any]]:
    """Recorded sessions in the manifest of a traced run; empty where nothing was recorded."""
    found: Sequence[Mapping[str, Any]] = run.manifest.get("tracing", {}).get("sessions", ())
    return found


def step_counts(anatomies: Sequence[RunAnatomy]) -> dict[str, float | int | None]:
    """Steps of traced runs: ``training``, ``evaluation``, ``other``, ``recorded``, and two ratios.

    ``share_of_run_ratio`` is the recorded share of one run's time; None for several runs and old runs without it.
    ``energy_j_per_step`` are the joules of the operations of a recorded step, of all ranks together. ``samples`` and
    ``tokens`` are those of the recorded steps, as delivered by the data loaders (padding included), and
    ``energy_j_per_sample`` and ``energy_j_per_token`` the joules of the same operations divided by them; None where
    those of a recorded step are not known.
    """
    found = [one.run.manifest.get("tracing", {}).get("step_counts", {}) for one in anatomies]
    names = ("training", "evaluation", "other", "recorded")
    total: dict[str, float | int | None] = {name: sum(int(one.get(name, 0)) for one in found) for name in names}
    steps = 0.0
    samples, tokens = (
        _total([session.get(name) for one in anatomies for session in _sessions(one.run)])
        for name in ("samples", "tokens")
    )
    for one in anatomies:
        sessions = _sessions(one.run)
        processes = len({session["process"] for session in sessions})
        steps += sum(int(session["steps"]) for session in sessions) / max(1, processes)
    attributed_j = math.fsum(one.footprint.attributed_j for one in anatomies)
    return {
        **total,
        "share_of_run_ratio": found[0].get("share_of_run_ratio") if len(found) == 1 else None,
        "energy_j_per_step": attributed_j / steps if steps else None,
        "samples": samples,
        "tokens": tokens,
        "energy_j_per_sample": attributed_j / samples if samples else None,
        "energy_j_per_token": attributed_j / tokens if tokens else None,
    }


def _total(parts: Sequence[int | None]) -> int | None:
    """Sum of the parts; None where one is not known, or there is none."""
    known = [part for part in parts if part is not None]
    return sum(known) if parts and len(known) == len(parts) else None


def ranks(anatomies: Sequence[RunAnatomy]) -> list[dict[str, float | int | str | None]]:
    """The recorded processes of traced runs.

    Each has ``run``, ``process``, ``rank`` (null outside a distributed program), ``steps``, ``recorded_s`` and
    ``energy_j``, the joules of its operations (null where the run does not keep them).
    """
    rows: list[dict[str, float | int | str | None]] = []
    for one in anatomies:
        sessions = _sessions(one.run)
        for process in sorted({int(session["process"]) for session in sessions}):
            mine = [session for session in sessions if int(session["process"]) == process]
            rows.append(
                {
                    "run": one.name,
                    "process": process,
                    "rank": mine[0].get("rank"),
                    "steps": sum(int(session["steps"]) for session in mine),
                    "recorded_s": math.fsum(session["end_s"] - session["start_s"] for session in mine),
                    "energy_j": one.footprint.process_j.get(process),
                }
            )
    return rows


def load_anatomies(paths: Sequence[str | Path]) -> list[RunAnatomy]:
    """Load traced runs.

    Args:
        paths: Their folders.

    Raises:
        DataError: A folder is not a run, is named twice, was not traced, or was killed before a cycle of steps was
            complete.
    """
    found: list[RunAnatomy] = []
    for path in paths:
        run = open_run(path)
        again = dissect_again(run, run_openers()) if unfinished(run) else None
        footprint = kept_footprint(run) if again is None else again.footprint
        found.append(RunAnatomy(run, run.path.name or str(run.manifest["id"]), footprint, again))
    resolved = [one.run.path.resolve() for one in found]
    if len(set(resolved)) < len(resolved):
        raise DataError("a run is named twice", hint="name each run once")
    return found


def together(anatomies: Sequence[RunAnatomy], folds: Sequence[Fold] | None) -> TensorFootprint:
    """Add up the operations of several runs, and fold self-similar layers if ``folds`` is given."""
    whole = added([one.footprint for one in anatomies])
    return folded(whole, folds) if folds else whole


def stef(footprint: TensorFootprint, folds: Sequence[Fold] = TRANSFORMERS) -> dict[str, float]:
    """Joules by summarised name and phase: the measure by which the paper compares footprints."""
    summed: dict[str, float] = {}
    short = folded(footprint, folds)
    for op, phase, joules in zip(short.op, short.phase, short.energy_j.tolist(), strict=True):
        if joules == joules:
            key = f"{phase or 'other'}/{op}"
            summed[key] = summed.get(key, 0.0) + joules
    return summed


def stpf(footprint: TensorFootprint, folds: Sequence[Fold] = TRANSFORMERS) -> dict[str, float]:
    """Watts by summarised name and phase: energy per event time."""
    short = folded(footprint, folds)
    seconds: dict[str, float] = {}
    for op, phase, joules, ns in zip(
        short.op, short.phase, short.energy_j.tolist(), short.runtime_ns.tolist(), strict=True
    ):
        if joules == joules:
            key = f"{phase or 'other'}/{op}"
            seconds[key] = seconds.get(key, 0.0) + ns / 1e9
    return {key: joules / seconds[key] for key, joules in stef(footprint, folds).items() if seconds[key] > 0}


def sparser(anatomy: RunAnatomy, period_s: float) -> TensorFootprint:
    """Footprint as from a slower sampler: account the run again with fewer of its readings.

    Whole devices are accounted, not the run's share of them: similarity compares operations with one another.

    Raises:
        DataError: The run stores no events, or was sampled less often than that.
    """
    events = anatomy.events
    if events is None:
        raise DataError("the run keeps no events", file=str(anatomy.run.path))
    power = [thinned(trace, max(period_s, trace.period_s)) for trace in anatomy.power]
    trace, channels = matched(events, [power_steps(one) for one in power])
    return added([align(trace, channels, window) for window in anatomy.windows_ns])
