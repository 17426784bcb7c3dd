"""Cost and efficiency of a training job from successive observations of it (GREEN, NSDI'25, sections 4 and 5.1).

Efficiency is progress per joule over a window at one number of slots. A window opens at the first progress after a
start, so it excludes the restoring of a checkpoint. It is evaluated where progress moves, so whole epochs are compared
with the energy they took.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from joulery.domain.cluster import JobRun
from joulery.domain.energy.carbon import JOULES_PER_KWH, CarbonSeries
from joulery.domain.quality import Quality, weakest

LEAST_DEGRADATION, MOST_DEGRADATION = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """One observation of a job, with its energy since the observation before.

    Attributes:
        t_s: Time of the observation, Unix seconds.
        elapsed_s: Time since the observation before; at least 0, even where the clock was set back.
        slots: Slots it holds; 0 while it waits.
        restarts: Number of times that it was restarted.
        progress_ratio: Share of its work that is done; NaN where it does not report progress.
        energy_j, slot_j: Energy of the job and of its slots since then; NaN where nothing measures it.
        quality: Quality of that energy.
        run: Its present run, or its last one; None where the cluster times no runs.
        covered_s: Time on slots that the energy covers; NaN for all of it.
    """

    t_s: float
    elapsed_s: float
    slots: int
    restarts: int
    progress_ratio: float
    energy_j: float
    slot_j: float
    quality: Quality = Quality.MEASURED
    run: JobRun | None = None
    covered_s: float = field(default=float("nan"))


@dataclass(frozen=True, slots=True)
class JobWindow:
    """An undisturbed stretch on one number of slots.

    Attributes:
        slots, restarts: Slots and restarts of the job, which identify the stretch.
        first_ratio: Progress at the start; NaN before any was seen.
        open_ratio: Progress where the window opened; NaN while it is still closed.
        elapsed_s, energy_j, slot_j, looks: Sums since it opened.
    """

    slots: int
    restarts: int
    first_ratio: float
    open_ratio: float = field(default=float("nan"))
    last_ratio: float = field(default=float("nan"))
    elapsed_s: float = 0.0
    energy_j: float = 0.0
    slot_j: float = 0.0
    looks: int = 0


@dataclass(frozen=True, slots=True)
class Tally:
    """Measurements of one job.

    Attributes:
        executed_s: Time it has held slots.
        slot_s: Slot-seconds it has held.
        energy_j: Joules counted.
        unmetered_s: Time it held slots while nothing measured it.
        carbon_g: Grams of the joules whose intensity was known.
        carbon_covered_j: Those joules.
        slot_w: Power of one slot in the last window; NaN before.
        progress_ratio: Last progress.
        rate_per_slot_s: Progress a second and slot in the last window; NaN before.
        efficiency: Progress per joule by number of slots.
        quality: Weakest quality of the energy.
        window: The present stretch; None while it waits.
        job_w: Power of the job by number of slots, W, over the windows of its efficiency.
        rates: Progress a second by number of slots, in the last window on each.
        run_start_s: Start of the run that was counted last, Unix seconds; 0 where the cluster times none.
        run_s: How much of that run is in ``executed_s``.
        ahead_s: Time that the energy covers and that ``executed_s`` has not reached yet.
    """

    executed_s: float = 0.0
    slot_s: float = 0.0
    energy_j: float = 0.0
    unmetered_s: float = 0.0
    carbon_g: float = 0.0
    carbon_covered_j: float = 0.0
    slot_w: float = field(default=float("nan"))
    progress_ratio: float = field(default=float("nan"))
    rate_per_slot_s: float = field(default=float("nan"))
    efficiency: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    quality: Quality = Quality.MEASURED
    window: JobWindow | None = None
    job_w: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    rates: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    run_start_s: float = 0.0
    run_s: float = 0.0
    ahead_s: float = 0.0

    def degradation(self, slots: int, least: int) -> float:
        """``EFF(slots) / EFF(least)`` in [0.05, 1] (Eq. 4); NaN until both are measured."""
        if slots == least and slots in self.efficiency:
            return 1.0
        if slots not in self.efficiency or least not in self.efficiency:
            return float("nan")
        return min(max(self.efficiency[slots] / self.efficiency[least], LEAST_DEGRADATION), MOST_DEGRADATION)

    @property
    def remaining_s(self) -> float:
        """Work left in slot-seconds, at the rate of the last window; NaN unknown."""
        if not self.rate_per_slot_s > 0:
            return float("nan")
        return (1.0 - self.progress_ratio) / self.rate_per_slot_s


@dataclass(frozen=True, slots=True)
class MeasureRules:
    """Conditions under which a window counts (section 5.1: at least 5 minutes and 10 looks).

    Attributes:
        least_s: Shortest window.
        least_looks: Fewest observations in it.
    """

    least_s: float = 300.0
    least_looks: int = 10


def observe(tally: Tally, look: Look, rules: MeasureRules, carbon: CarbonSeries | None) -> Tally:
    """The tally after one more observation; energy and time only grow.

    The time on slots is that of the job's runs, whenever it is observed, where the cluster times them; else the time
    between observations in which it held slots.

    Args:
        tally: The tally before.
        look: The observation.
        rules: Conditions under which a window counts.
        carbon: Intensity over the time since the observation before; None or a gap where unknown.
    """
    changes, window = _charged(tally, look, carbon), tally.window
    changes["progress_ratio"] = _later(tally.progress_ratio, look.progress_ratio)
    if look.slots == 0:
        # Energy up to its stop is reported after the stop: it counts, and the time since does not.
        return replace(tally, window=None, **changes)
    if window is None or (window.slots, window.restarts) != (look.slots, look.restarts):
        fresh = JobWindow(look.slots, look.restarts, first_ratio=look.progress_ratio)
        return replace(tally, window=fresh, **changes)
    return _measured(replace(tally, window=_grown(window, look), **changes), look, rules)


def job_grams(energy_j: float, t0_s: float, t1_s: float, carbon: CarbonSeries | None) -> float:
    """Grams of energy spread evenly over a time; NaN where the intensity is not known all along."""
    if carbon is None or math.isnan(energy_j):
        return float("nan")
    return energy_j * carbon.mean(t0_s, max(t0_s, t1_s)) / JOULES_PER_KWH


def _held_s(tally: Tally, look: Look) -> float:
    """Time on slots to add: the growth of the job's run."""
    elapsed_s = look.elapsed_s if look.slots else 0.0
    if look.run is None:
        return elapsed_s
    known = tally.run_start_s == look.run.start_s
    counted_s = tally.run_s if known else 0.0
    if math.isnan(look.run.held_s):  # its start alone is known: no look counts time from before it
        return min(elapsed_s, max(0.0, look.t_s - look.run.start_s - counted_s))
    if not known and tally.window is not None and not tally.run_start_s:
        return min(elapsed_s, look.run.held_s)  # an earlier version counted this run from look to look
    return max(0.0, look.run.held_s - counted_s)


def _charged(tally: Tally, look: Look, carbon: CarbonSeries | None) -> dict[str, Any]:
    """The fields of the tally that an observation changes by its time and its energy, to be replaced in one copy."""
    held_s = _held_s(tally, look)
    slots = look.slots if look.run is None else look.run.slots
    changes: dict[str, Any] = {"executed_s": tally.executed_s + held_s, "slot_s": tally.slot_s + held_s * slots}
    if look.run is not None:
        same = tally.run_start_s == look.run.start_s
        counted_s = tally.run_s + held_s if same else held_s
        if not math.isnan(look.run.held_s):
            counted_s = max(counted_s, look.run.held_s)
        changes |= {"run_start_s": look.run.start_s, "run_s": counted_s}
    if math.isnan(look.energy_j):
        return changes | {"unmetered_s": tally.unmetered_s + held_s}
    if not math.isnan(look.covered_s):
        ahead_s = tally.ahead_s + look.covered_s - held_s
        changes |= {"unmetered_s": tally.unmetered_s + max(0.0, -ahead_s), "ahead_s": max(0.0, ahead_s)}
    if not look.slots and not look.energy_j > 0:
        return changes
    carbon_g = job_grams(look.energy_j, look.t_s - look.elapsed_s, look.t_s, carbon)
    known = not math.isnan(carbon_g)
    return changes | {
        "energy_j": tally.energy_j + look.energy_j,
        "carbon_g": tally.carbon_g + (carbon_g if known else 0.0),
        "carbon_covered_j": tally.carbon_covered_j + (look.energy_j if known else 0.0),
        "quality": weakest((tally.quality, look.quality)),
    }


def _grown(window: JobWindow, look: Look) -> JobWindow:
    """The window with one more observation: still closed, opening now, or longer."""
    ratio = look.progress_ratio
    if math.isnan(window.energy_j) and not math.isnan(look.energy_j):
        return JobWindow(window.slots, window.restarts, first_ratio=ratio)  # from here on it is measured
    if math.isnan(window.open_ratio):
        if math.isnan(window.first_ratio):
            return replace(window, first_ratio=ratio)
        opens = ratio > window.first_ratio
        return replace(window, open_ratio=ratio, last_ratio=ratio) if opens else window
    return replace(
        window,
        elapsed_s=window.elapsed_s + look.elapsed_s,
        energy_j=window.energy_j + look.energy_j,
        slot_j=window.slot_j + look.slot_j,
        looks=window.looks + 1,
    )


def _measured(tally: Tally, look: Look, rules: MeasureRules) -> Tally:
    """Evaluate the window where progress moved and it is long enough."""
    window = tally.window
    assert window is not None
    moved = look.progress_ratio > window.last_ratio
    if not moved or window.elapsed_s < rules.least_s or window.looks < rules.least_looks:
        return tally
    gained = look.progress_ratio - window.open_ratio
    rate = gained / (window.elapsed_s * window.slots)
    rates = MappingProxyType({**tally.rates, window.slots: rate * window.slots})
    window = replace(window, last_ratio=look.progress_ratio)
    tally = replace(tally, rate_per_slot_s=rate, rates=rates, window=window)
    if not window.energy_j > 0:
        return tally
    known = {**tally.efficiency, window.slots: gained / window.energy_j}
    job_w = MappingProxyType({**tally.job_w, window.slots: window.energy_j / window.elapsed_s})
    slot_w = window.slot_j / window.elapsed_s / window.slots
    slot_w = slot_w if slot_w > 0 else tally.slot_w
    return replace(tally, efficiency=MappingProxyType(known), job_w=job_w, slot_w=slot_w)


def _later(old: float, new: float) -> float:
    return old if math.isnan(new) else new
