"""Power limits of the jobs of one machine: leased settings of its GPUs or CPUs, learned job by job.

Every period the loop reads where jobs run, passes each job's progress and energy to the policy
(:class:`~joulery.policies.clocks.power_limit.PowerLimitTuner`, the object that the simulator drives), and sets the
decided limit on every device of the job. When a job ends or returns to full power, its leases are released: each device
has the limit again that it had before.

Work is the progress that a job reports, where it reports often enough; else **assumed** to be proportional to the busy
cycles of its GPUs; CPUs count none. The agents of a job on several nodes agree on one limit
(:mod:`~joulery.runtime.leasing.job_nodes`). Devices that several jobs share keep full power: neither their energy nor
their cycles show the effect of a limit on each of the jobs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from joulery.domain.cluster import Placement
from joulery.domain.errors import JouleryError
from joulery.domain.gpu.device import PowerSetting
from joulery.policies.clocks.power_limit import LimitedJobView, LimitPoint, PowerLimitState, PowerLimitTuner
from joulery.runtime.leasing.job_nodes import JobNodes, NodeReport, Notes, careful_tuner
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.leasing.limited_device import LimitedDevice
from joulery.store.jobs import JobLimitBook

_REPORTS = 10
"""Changes of a job's progress within a trial from which on progress is its measure of work."""
_PATIENCE_S = 30.0
"""Time limit of the last step."""


@dataclass(slots=True)
class _Work:
    """Progress of a job against time, and its measure of work: ``busy cycles`` for as long as it reports too rarely."""

    since_s: float
    source: str = ""
    ratio: float = math.nan
    at_s: float = math.nan
    changes: int = 0
    delay_s: float = math.inf

    def look(self, now_s: float, progress: tuple[float, float], window_s: float) -> None:
        """Record the progress of the job: its value, and when it was written.

        A job may load its data for longer than the window, or report late on a busy machine: it is judged in every
        window until it reports often enough.
        """
        ratio, written_s = progress
        if not math.isnan(ratio) and ratio != self.ratio:
            self.changes += not math.isnan(self.ratio)
            self.delay_s = min(self.delay_s, now_s - written_s)  # the disk's clock may be another one
            self.ratio, self.at_s = ratio, min(written_s + self.delay_s, now_s)
        if self.source != "progress" and now_s - self.since_s >= window_s:
            self.source = "progress" if self.changes >= _REPORTS else "busy cycles"
            self.since_s, self.changes = now_s, 0


@dataclass(slots=True)
class _Job:
    """A job whose limit is learned."""

    devices: tuple[int, ...]
    kind: str
    work: _Work
    state: PowerLimitState
    ratio: float = 1.0
    known: tuple[LimitPoint, ...] = ()
    written: bool = False
    refused: str = ""
    reason: str = ""
    nodes: JobNodes | None = None

    @property
    def measured_kind(self) -> str:
        """The kind in the book: effects of a limit by busy cycles are kept apart from those by progress."""
        return f"{self.kind} by busy cycles" if self.work.source == "busy cycles" else self.kind


@dataclass(slots=True)
class JobLimits:
    """Sets the limits of the jobs of one machine.

    Args:
        tuner: The policy.
        devices: The devices, by number.
        placements: Where jobs run now.
        progress: Share of a job's work that is done and when it was written, Unix seconds; NaN where it reports none.
        holder: The leases.
        book: Measured effects of limits on jobs of a kind.
        say: Receives each change, and each problem.
        devices_of: The devices of a job, by number.
        notes: Notes that the agents of a job's nodes exchange; None without a shared folder.
        lease_s: How long a limit stays set after its last renewal.
    """

    tuner: PowerLimitTuner
    devices: Mapping[int, LimitedDevice]
    placements: Callable[[], tuple[Placement, ...]]
    progress: Callable[[int], tuple[float, float]]
    holder: LeaseHolder
    book: JobLimitBook | None
    say: Callable[[Mapping[str, Any]], None]
    devices_of: Callable[[Placement], tuple[int, ...]] = lambda placement: placement.gpus
    notes: Notes | None = None
    lease_s: float = 20.0
    _jobs: dict[int, _Job] = field(default_factory=dict)
    _left_alone: dict[int, str] = field(default_factory=dict)

    def step(self, now_s: float) -> None:
        """Check every job once, and set the decided limits.

        Args:
            now_s: Unix seconds.
        """
        placed = {one.job: one for one in self.placements()}
        readings = {number: gpu.activity.read(now_s) for number, gpu in self.devices.items()}
        owners: dict[int, int] = {}
        for placement in placed.values():
            for each in self.devices_of(placement):
                owners[each] = owners.get(each, 0) + 1
        for number, job in list(self._jobs.items()):
            one = placed.get(number)
            if one is not None and self._same(one, job) and not self._why_not(one, owners):
                continue
            self._give_back(number, job, "ended" if one is None else "it has other devices, or no longer alone")
            self._left(self._jobs.pop(number))
        for placement in placed.values():
            why_not = self._why_not(placement, owners)
            if why_not:
                self._leave(placement.job, why_not)
            else:
                self._look(placement, now_s, readings)
        self._left_alone = {job: why for job, why in self._left_alone.items() if job in placed}

    def renew(self) -> None:
        """Renew the leases; a job that lost one is set again at the next step."""
        for name in self.holder.renew():
            self.say({"kind": "note", "text": f"{name} was reverted by another process"})
            for number, job in self._jobs.items():
                if any(self.devices[gpu].lease == name for gpu in job.devices):
                    self._give_back(number, job, "its limit was reverted by another process")

    def close(self) -> None:
        """Revert every limit.

        Raises:
            ActuationError: A GPU refuses; its lease stays for the watchdog.
        """
        for number, job in self._jobs.items():
            self._give_back(number, job, "the agent ends")
            self._left(job)
        self._jobs.clear()
        self.holder.close()

    def _why_not(self, one: Placement, owners: Mapping[int, int]) -> str:
        """Reason why a job keeps full power; empty where its limit is learned."""
        if not self.devices_of(one):
            return "it has no GPU"
        if one.nodes > 1 and (why_not := self._why_not_together(one)):
            return f"it runs on {one.nodes} nodes, and {why_not}"
        if any(gpu not in self.devices for gpu in self.devices_of(one)):
            return "the limit of one of its GPUs may not be set"
        return "it shares a GPU with another job" if any(owners[gpu] > 1 for gpu in self.devices_of(one)) else ""

    def _why_not_together(self, one: Placement) -> str:
        """Reason why the nodes of a job cannot agree on a limit; empty where they can."""
        if self.notes is None:
            return "their agents share no folder (jobs.slurm.meters)"
        if careful_tuner(self.tuner, self.lease_s) is None:
            return "a trial is shorter than a lease and three periods (jobs.limits)"
        return "" if one.hosts else "Slurm does not name them"

    def _same(self, one: Placement, job: _Job) -> bool:
        """Whether a job has the devices and nodes that it had."""
        hosts = () if job.nodes is None else tuple(job.nodes.hosts)
        return self.devices_of(one) == job.devices and hosts == (one.hosts if one.nodes > 1 else ())

    def _left(self, job: _Job) -> None:
        if job.nodes is not None:
            job.nodes.leave()

    def _leave(self, job: int, why_not: str) -> None:
        if self._left_alone.get(job) != why_not:
            self._left_alone[job] = why_not
            self.say({"kind": "limit", "job": job, "ratio": 1.0, "text": f"keeps full power: {why_not}"})

    def _look(self, one: Placement, now_s: float, readings: Mapping[int, tuple[float, float]]) -> None:
        job = self._jobs.get(one.job)
        if job is None:
            job = self._jobs[one.job] = _Job(self.devices_of(one), self._kind(one), _Work(now_s), self.tuner.initial())
            job.nodes = self._nodes(one)
        judged_by = job.work.source
        job.work.look(now_s, self.progress(one.job), self.tuner.trial_s)
        if not job.work.source:
            return
        if job.work.source != judged_by:
            self._judge(one, job, reset=judged_by != "")
        energy_j = sum(readings[gpu][0] for gpu in self.devices_of(one))
        cycles = sum(readings[gpu][1] for gpu in self.devices_of(one))
        full_w = sum(self.devices[each].full_w * self.devices[each].parts for each in job.devices)
        progress = (job.work.ratio, job.work.at_s) if job.work.source == "progress" else None
        if job.nodes is not None:
            report = NodeReport(now_s, cycles, energy_j, full_w, job.ratio, job.refused)
            ratio, reason = job.nodes.step(now_s, report, progress, job.known)
            if ratio != job.ratio:
                self._set(one.job, job, ratio, reason)
            job.state = job.nodes.state
            if job.nodes.why_not:
                self._leave(one.job, job.nodes.why_not)
        elif progress is None and math.isnan(cycles) and job.state.last is None:
            self._leave(one.job, "it reports its progress too rarely")
            return
        else:
            work, work_s = (cycles, now_s) if progress is None else progress
            view = LimitedJobView(now_s, str(one.job), job.ratio, work, work_s, energy_j, full_w, job.known)
            step = self.tuner.step(job.state, view)
            job.state = step.state
            for decision in step.decisions:
                self._set(one.job, job, float(decision.value), decision.reason)
        self._remember(job)

    def _judge(self, one: Placement, job: _Job, *, reset: bool) -> None:
        """Start from the known effects by the job's measure of work; what busy cycles showed is dropped."""
        job.known = self._known(job)
        if reset:
            self._give_back(one.job, job, "it reports its progress now: it is measured again")
            job.state, job.written = self.tuner.initial(), False
            self._left_alone.pop(one.job, None)
            if job.nodes is not None:
                job.nodes.forget()

    def _nodes(self, one: Placement) -> JobNodes | None:
        """Agreement with the other nodes of a job on several; None for a job on this one alone."""
        tuner = careful_tuner(self.tuner, self.lease_s)
        if one.nodes == 1 or self.notes is None or tuner is None:
            return None
        return JobNodes(one.job, one.hosts, one.host, tuner, self.notes, self.lease_s)

    def _set(self, number: int, job: _Job, ratio: float, reason: str) -> None:
        """Set one limit on every GPU of a job, or release all of its leases."""
        if ratio >= 1:
            self._give_back(number, job, reason)
            return
        if job.refused:
            return
        try:
            for gpu in (self.devices[each] for each in job.devices):
                self.holder.set(gpu.device, gpu.spec, PowerSetting(gpu.limit_w(ratio)), f"job {number}: {reason}")
        except JouleryError as error:
            self._give_back(number, job, "a limit could not be set")
            job.refused = str(error)
            self.say({"kind": "note", "job": number, "text": f"job {number} keeps full power: {error}"})
            return
        job.ratio = ratio
        self._say(number, job, reason)

    def _give_back(self, number: int, job: _Job, reason: str) -> None:
        held = {lease.name for lease in self.holder.held}
        limited = job.ratio < 1
        job.ratio = 1.0
        for gpu in (self.devices[each] for each in job.devices):
            if gpu.lease not in held:
                continue
            try:
                self.holder.release(gpu.lease)
            except JouleryError as error:  # its lease stays: the watchdog reverts it
                self.say({"kind": "note", "job": number, "text": f"{gpu.label} is not given back yet: {error}"})
        if limited:
            self._say(number, job, reason)

    def _say(self, number: int, job: _Job, reason: str) -> None:
        devices = [self.devices[each] for each in job.devices]
        limits_w = {one.label: round(one.limit_w(job.ratio), 1) for one in devices}
        self.say(
            {
                "kind": "limit",
                "job": number,
                "ratio": job.ratio,
                "limits_w": limits_w,
                "work": job.work.source,
                "text": reason,
            }
        )

    def _kind(self, one: Placement) -> str:
        """Kind of a job: its program, the number and model of its devices, their full power, and its nodes."""
        if not one.kind:
            return ""
        first = self.devices[self.devices_of(one)[0]]
        nodes = f" on each of {one.nodes} nodes" if one.nodes > 1 else ""
        return f"{one.kind} on {len(self.devices_of(one))} × {first.model} at {first.full_w:g} W{nodes}"

    def _known(self, job: _Job) -> tuple[LimitPoint, ...]:
        if self.book is None or not job.kind:
            return ()
        return tuple(LimitPoint(*point) for point in self.book.read(job.measured_kind))

    def _remember(self, job: _Job) -> None:
        """Save the effects of the limits once the search is over."""
        done = job.state.finished(self.tuner)
        if self.book is not None and job.kind and done and not job.written and job.state.points:
            points = [(point.ratio, point.slowdown, point.power_ratio) for point in job.state.points]
            job.written = self.book.write(job.measured_kind, points)


@contextmanager
def running_limits(
    limits: JobLimits, stop: threading.Event, clock_s: Callable[[], float], period_s: float
) -> Iterator[None]:
    """Follow the limits of a machine in a thread while the block runs; then revert them.

    A step that fails is reported and tried again. Where the thread hangs or dies its leases expire, and the watchdog
    gives the limits back.

    Args:
        limits: The limits.
        stop: Ends the thread.
        clock_s: Unix seconds.
        period_s: Interval between two steps.

    Raises:
        ActuationError: The limit of a GPU cannot be reverted; its lease stays for the watchdog.
    """
    ended = threading.Event()

    def follow() -> None:
        last_error = ""
        while not ended.wait(period_s) and not stop.is_set():
            try:
                limits.renew()
                limits.step(clock_s())
            except JouleryError as error:
                if str(error) != last_error:
                    limits.say({"kind": "note", "text": f"power limits: {error}"})
                last_error = str(error)

    thread = threading.Thread(target=follow, name="power limits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_PATIENCE_S)
        if thread.is_alive():
            limits.say({"kind": "note", "text": "the driver does not answer: the watchdog gives the limits back"})
        else:
            limits.close()
