"""Energy of jobs: metered on this machine, read from the agents of other nodes, or assumed from a stated power.

:func:`energy_delta` turns totals of several sources into joules since the last look, each counted once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from joulery.accounting.charge import ShareRule, split
from joulery.accounting.training_jobs import Look
from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobEnergy, JobRun, Placement
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.ports import Meter
from joulery.domain.quality import Quality, weakest
from joulery.runtime.measuring.share import BusyReader, TreeReader

Totals = Mapping[int, JobEnergy]
"""Energy totals by job."""
_KEPT = 8
"""Sources kept for each job: a scheduler that restarts without its disk begins a new stated-power source each time."""


@dataclass(frozen=True, slots=True)
class SourceTotal:
    """The last totals of one energy source for a job.

    Attributes:
        energy_j, slot_j: Its last totals.
        beside_j, beside_slot_j: Joules since then that were counted from other sources. When this source is back, its
            total includes that time, so they are subtracted.
        covered_s: Time on slots that its total covers; 0 where the source does not report it.
    """

    energy_j: float
    slot_j: float
    beside_j: float = 0.0
    beside_slot_j: float = 0.0
    covered_s: float = 0.0


NO_TOTALS: Mapping[str, SourceTotal] = MappingProxyType({})


def energy_delta(seen: Mapping[str, SourceTotal], total: JobEnergy) -> tuple[float, float, Mapping[str, SourceTotal]]:
    """Joules of a job and of its slots since the last look, and the totals to keep.

    A new source, or one whose total fell, starts at 0. A source that is back after another replaced it adds the growth
    of its total, less the joules counted from the other.
    """
    last = seen.get(total.source)
    if last is None or total.energy_j < last.energy_j or total.slot_j < last.slot_j:
        last = SourceTotal(0.0, 0.0)
    energy_j, beside_j = _less(total.energy_j - last.energy_j, last.beside_j)
    slot_j, beside_slot_j = _less(total.slot_j - last.slot_j, last.beside_slot_j)
    others = {
        source: replace(one, beside_j=one.beside_j + energy_j, beside_slot_j=one.beside_slot_j + slot_j)
        for source, one in seen.items()
        if source != total.source
    }
    kept = dict(list(others.items())[-(_KEPT - 1) :])
    covered_s = 0.0 if math.isnan(total.covered_s) else total.covered_s
    kept[total.source] = SourceTotal(total.energy_j, total.slot_j, beside_j, beside_slot_j, covered_s)
    return energy_j, slot_j, MappingProxyType(kept)


def covered_delta_s(seen: Mapping[str, SourceTotal], total: JobEnergy) -> float:
    """Time on slots that the joules since the last look cover; NaN for all of it."""
    last = seen.get(total.source, SourceTotal(0.0, 0.0))
    before_s = last.covered_s if total.covered_s >= last.covered_s else 0.0
    return total.covered_s - before_s


def look_at(
    job: ClusterJob, now_s: float, elapsed_s: float, total: JobEnergy | None, seen: Mapping[str, SourceTotal]
) -> tuple[Look, Mapping[str, SourceTotal]]:
    """One look at a job, and the totals to keep.

    Args:
        job: As the cluster shows it.
        now_s: Unix seconds.
        elapsed_s: Time since the look before.
        total: Its energy; None where nothing measures it.
        seen: Totals kept at the look before.
    """
    energy_j, slot_j, quality, covered_s = math.nan, math.nan, Quality.MEASURED, math.nan
    if total is not None:
        quality, covered_s = total.quality, covered_delta_s(seen, total)
        energy_j, slot_j, seen = energy_delta(seen, total)
    look = Look(
        now_s, elapsed_s, job.slots, job.restarts, job.progress_ratio, energy_j, slot_j, quality, job.run, covered_s
    )
    return look, seen


def _less(grown: float, counted: float) -> tuple[float, float]:
    """Joules to add now, and joules still to subtract later."""
    return max(0.0, grown - counted), max(0.0, counted - grown)


class StatedPower:
    """Energy of running jobs from a stated power of their slots, labelled assumed.

    Args:
        slot_w: Power of a busy slot.
        share_w: Power that a slot's share of the machine adds.
        clock_s: Seconds of a monotonic clock.
        after_s: How long a job must hold slots before its energy is assumed. A meter has this long to report the job
            first, so that no energy is both measured and assumed.
    """

    def __init__(
        self, slot_w: float, share_w: float, clock_s: Callable[[], float] = time.monotonic, *, after_s: float = 0.0
    ) -> None:
        self._slot_w, self._share_w, self._clock_s, self._after_s = slot_w, share_w, clock_s, after_s
        self._held_s: dict[int, float] = {}
        self._runs: dict[int, JobRun] = {}
        self._source = f"stated-{time.time_ns()}"
        self._at_s = clock_s()
        self._slot_s: dict[int, float] = {}

    def read(self, snapshot: ClusterSnapshot) -> Totals:
        """Totals of the jobs that hold slots."""
        now_s = self._clock_s()
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        for job in snapshot.jobs:
            held_s = grown_s(job.run, self._runs.get(job.id), elapsed_s, holds=job.slots > 0)
            if held_s > 0 or job.slots:
                slots = job.slots or (0 if job.run is None else job.run.slots)
                self._slot_s[job.id] = self._slot_s.get(job.id, 0.0) + slots * held_s
                self._held_s[job.id] = self._held_s.get(job.id, 0.0) + held_s
        self._runs = {job.id: job.run for job in snapshot.jobs if job.run is not None}
        each_w = self._slot_w + self._share_w
        return {
            job: JobEnergy(
                held_s * each_w, held_s * self._slot_w, Quality.ASSUMED, self._source, covered_s=self._held_s[job]
            )
            for job, held_s in self._slot_s.items()
            if self._held_s[job] >= self._after_s
        }


def grown_s(run: JobRun | None, before: JobRun | None, elapsed_s: float, *, holds: bool) -> float:
    """Time that a job held slots since the last look, seconds.

    Args:
        run: Its present or last run; None where the cluster times none.
        before: The run at the last look; None where it was not seen.
        elapsed_s: Time since the last look; a run not seen before counts for at most this.
        holds: Whether it holds slots now.
    """
    if run is None or math.isnan(run.held_s):
        return elapsed_s if holds else 0.0
    if before is None or before.start_s != run.start_s or math.isnan(before.held_s):
        return min(run.held_s, elapsed_s)
    return max(0.0, run.held_s - before.held_s)


class FirstSource:
    """Several sources; the total of a job is that of the first source that measures it."""

    def __init__(self, sources: Sequence[Callable[[ClusterSnapshot], Totals]]) -> None:
        self._sources = tuple(sources)

    def read(self, snapshot: ClusterSnapshot) -> Totals:
        """Totals of every job that any source measures."""
        found: dict[int, JobEnergy] = {}
        for read in reversed(self._sources):
            found.update(read(snapshot))
        return found


@dataclass(frozen=True, slots=True)
class MachineShares:
    """Sources for splitting the energy of a machine by job.

    Attributes:
        busy: Processor time of all processes.
        tree: The processor time of a process and its descendants.
        slots: Slots of the machine; idle energy of processors goes to the jobs that hold slots, by slot.
    """

    busy: BusyReader
    tree: Callable[[int], TreeReader]
    slots: int


class JobMeter:
    """Energy of the jobs of this machine since the meter was opened.

    The energy of a GPU goes to the job that holds it. Of a processor's energy a job gets its share of the processor
    time, and of the idle energy its share of the slots; the rest is attributed to no job, so that the sum never exceeds
    the energy of the machine. A job that held its slots for a part of the time between two updates gets that part of a
    board's energy and of the idle energy.

    Args:
        meters: Meters of the machine.
        shares: Sources for splitting processor energy.
        placements: Where jobs run now, and the runs that ended since the last call.
        clock_s: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        meters: Sequence[Meter],
        shares: MachineShares,
        placements: Callable[[], Iterable[Placement]],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meters, self._shares, self._placements, self._clock_s = tuple(meters), shares, placements, clock_s
        self.source = f"meter-{time.time_ns()}"
        self.machine_j = 0.0
        self._totals: dict[int, JobEnergy] = {}
        self._trees: dict[tuple[int, int], TreeReader] = {}
        self._cpu_s: dict[tuple[int, int], tuple[float, ...]] = {}
        self._readings = [meter.read() for meter in self._meters]
        self._busy_s, self._at_s = shares.busy.read(), clock_s()
        self._placed: dict[int, Placement] = {}
        self._parts: dict[int, float] = {}

    def read(self, snapshot: ClusterSnapshot) -> Totals:
        """Totals of every job seen so far; a job that is over is returned once more and dropped."""
        totals = self.update()
        for job in snapshot.jobs:
            if job.state.over:
                self._totals.pop(job.id, None)
        return totals

    def update(self) -> Totals:
        """Charge the energy since the last update to the jobs that ran then or run now."""
        now_s = self._clock_s()
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        listed = tuple(self._placements())
        ended = {placement.job: placement for placement in listed if placement.ended}
        placed = {placement.job: placement for placement in listed if not placement.ended}
        holders = {**self._placed, **ended, **placed}
        held_s = {job: self._held_s(job, ended.get(job), placed.get(job), elapsed_s) for job in holders}
        # A job alone on its slots from look to look has all of the time, whatever two clocks say of it.
        self._parts = {
            job: 1.0 if elapsed_s <= 0 or (job in self._placed and job in placed) else min(1.0, held_s[job] / elapsed_s)
            for job in holders
        }
        busy_s = self._shares.busy.read()
        all_cpu_s = np.subtract(busy_s, self._busy_s)
        cpu_s = {job: self._job_cpu_s(placement) for job, placement in holders.items()}
        for job, placement in ended.items():
            cpu_s[job] = cpu_s[job] + self._unseen_cpu_s(placement, all_cpu_s)
        self._busy_s = busy_s
        for number, meter in enumerate(self._meters):
            values = meter.read()
            for at, channel in enumerate(meter.channels):
                energy_j = _energy_j(channel, self._readings[number][at], values[at], elapsed_s)
                if not math.isnan(energy_j):
                    self.machine_j += energy_j
                    self._charge(channel, energy_j, holders, cpu_s, all_cpu_s, elapsed_s)
            self._readings[number] = tuple(
                old if math.isnan(new) else new for old, new in zip(self._readings[number], values, strict=True)
            )
        for job, grown in held_s.items():
            if job in self._totals:
                total = self._totals[job]
                self._totals[job] = replace(total, covered_s=total.covered_s + grown)
        self._placed = placed
        self._drop(placed)
        return dict(self._totals)

    def close(self) -> None:
        """Release meters and files."""
        for meter in self._meters:
            meter.close()
        for tree in self._trees.values():
            tree.close()
        self._trees.clear()
        self._shares.busy.close()

    def _charge(
        self,
        channel: Channel,
        energy_j: float,
        holders: Mapping[int, Placement],
        cpu_s: Mapping[int, np.ndarray[tuple[int], np.dtype[np.float64]]],
        all_cpu_s: np.ndarray[tuple[int], np.dtype[np.float64]],
        elapsed_s: float,
    ) -> None:
        device, _, number = channel.device.partition(":")
        if device == "gpu":
            owners = [placement.job for placement in holders.values() if int(number) in placement.gpus]
            whole = max(1.0, math.fsum(self._parts[job] for job in owners))
            for job in owners:
                own_j = energy_j * self._parts[job] / whole
                self._add(job, own_j, own_j, channel.quality)
            return
        sockets = (
            [self._shares.busy.sockets.index(int(number))] if device == "cpu" and number.isdigit() else slice(None)
        )
        capacity_s = float(np.sum(np.asarray(self._shares.busy.cpus)[sockets])) * elapsed_s
        all_s = float(np.sum(all_cpu_s[sockets]))
        held = math.fsum(placement.slots * self._parts[job] for job, placement in holders.items())
        of = max(self._shares.slots, held)
        for job, placement in holders.items():
            app_s = float(np.sum(cpu_s[job][sockets]))
            run, _, idle, _ = split([energy_j], [app_s], [all_s], by=ShareRule.CAPACITY, capacity_s=[capacity_s])
            own_j = float(run[0])
            slot_j = 0.0 if placement.gpus else own_j
            idle_j = float(idle[0]) * placement.slots * self._parts[job] / of
            self._add(job, own_j + idle_j, slot_j, channel.quality)

    def _job_cpu_s(self, placement: Placement) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Processor seconds of a job on each socket since the last update."""
        grown = np.zeros(len(self._shares.busy.sockets))
        for pid in placement.pids:
            key = (placement.job, pid)
            if key not in self._trees and placement.ended:
                continue  # the number may be another program's by now
            if key not in self._trees:
                self._trees[key] = self._shares.tree(pid)
                self._cpu_s[key] = (0.0,) * len(grown)
            tree = self._trees[key]
            tree.discover()
            now = tree.read()
            grown += np.subtract(now, self._cpu_s[key])
            self._cpu_s[key] = now
        return grown

    def _held_s(self, job: int, ended: Placement | None, now: Placement | None, elapsed_s: float) -> float:
        """Time that a job held slots since the last update, in a run that ended and in one that continues."""
        last = self._placed.get(job)
        before = None if last is None else last.run
        if ended is None and now is None:  # the machine times no runs, and it was there at the last update
            return elapsed_s
        runs = (one for one in (ended, now) if one is not None)
        return math.fsum(grown_s(one.run, before, elapsed_s, holds=True) for one in runs)

    def _unseen_cpu_s(
        self, ended: Placement, all_cpu_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Processor seconds of an ended run that no reading of its processes contains, by how busy each socket was."""
        seen_s = math.fsum(sum(self._cpu_s.get((ended.job, pid), ())) for pid in ended.pids)
        busy_s = np.maximum(all_cpu_s, 0.0)
        if not ended.cpu_s > seen_s or not busy_s.sum() > 0:
            return np.zeros(len(busy_s))
        return np.asarray(np.minimum(busy_s, (ended.cpu_s - seen_s) * busy_s / busy_s.sum()))

    def _add(self, job: int, energy_j: float, slot_j: float, quality: Quality) -> None:
        old = self._totals.get(job, JobEnergy(0.0, 0.0, Quality.MEASURED, self.source, covered_s=0.0))
        self._totals[job] = replace(
            old,
            energy_j=old.energy_j + energy_j,
            slot_j=old.slot_j + slot_j,
            quality=weakest((old.quality, quality)),
        )

    def _drop(self, placed: Mapping[int, Placement]) -> None:
        """Close the readers of processes that have ended."""
        alive = {(job, pid) for job, placement in placed.items() for pid in placement.pids}
        for key in self._trees.keys() - alive:
            self._trees.pop(key).close()
            del self._cpu_s[key]


def _energy_j(channel: Channel, before: float, now: float, elapsed_s: float) -> float:
    """Joules of one channel since the reading before; NaN where a reading is missing."""
    if channel.kind is not ReadingKind.COUNTER:
        return now * elapsed_s
    grown = now - before
    if grown < 0:
        # A wrapped counter continues from 0; a reset one starts from 0, and the energy before is unknown.
        grown = grown + channel.wrap_j if channel.wrap_j > 0 else now
    return grown
