"""One power limit for a job on several nodes: the agents of its nodes agree through notes on a shared disk.

The agent of the job's first node decides for all: it learns the limit from the work of the job's slowest node
(:mod:`~joulery.policies.clocks.slowest_rank`) and the energy of all. Every agent reports its node and sets what the
first one wants. It is all or nothing: where one node may not be limited, or its agent does not answer, all nodes return
to full power.

The bound on the slowdown holds whatever one agent does, its death included. A note that is not renewed for the time of
a lease is ignored: the other nodes then return to full power, as the watchdog of a dead agent does. The job has earned
that time before its first trial.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from joulery.domain.errors import ConfigError
from joulery.policies.clocks.power_limit import LimitedJobView, LimitPoint, PowerLimitState, PowerLimitTuner
from joulery.policies.clocks.slowest_rank import SlowestRank


class Notes(Protocol):
    """Notes that the nodes of a job leave each other."""

    def write(self, job: int, node: str, note: Mapping[str, Any]) -> bool:
        """Overwrite the note of a node; False where that fails."""
        ...

    def read(self, job: int, node: str) -> Mapping[str, Any] | None:
        """The note of a node; None where there is none."""
        ...

    def remove(self, job: int, node: str) -> None:
        """Remove the note of a node."""
        ...


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Report of a node on a job.

    Attributes:
        at_s: Time of the report by the node's own clock.
        work: Busy cycles of its devices so far; NaN where they count none.
        energy_j: Energy of its devices so far, J.
        full_w: Full power of its devices together, W.
        ratio: The limit in force on all of its devices, as a share of full power.
        why_not: Why its devices may not be limited; empty where they may.
    """

    at_s: float
    work: float
    energy_j: float
    full_w: float
    ratio: float
    why_not: str = ""

    @classmethod
    def read(cls, note: Mapping[str, Any]) -> NodeReport | None:
        """The report in a note; None where the note contains none."""
        try:
            numbers = {name: math.nan if note[name] is None else float(note[name]) for name in _NUMBERS}
            return cls(**numbers, why_not=str(note["why_not"]))
        except (KeyError, TypeError, ValueError):
            return None


_NUMBERS = ("at_s", "work", "energy_j", "full_w", "ratio")


def careful_tuner(tuner: PowerLimitTuner, lease_s: float) -> PowerLimitTuner | None:
    """The policy of a job on several nodes: a limit may outlive an agent by a lease, and notes take a period each way.

    Returns:
        None where a trial is shorter than that.
    """
    try:
        return replace(tuner, period_s=lease_s + 3 * tuner.period_s)
    except ConfigError:
        return None


@dataclass(slots=True)
class JobNodes:
    """A job on several nodes, as handled by the agent of one of them.

    Args:
        job: Its number.
        hosts: Its nodes; the agent of the first one decides.
        host: This node.
        tuner: The policy, from :func:`careful_tuner`.
        notes: Where the agents leave their notes.
        patience_s: Seconds after which a note that is not renewed is ignored.
        session: Distinguishes the notes of this agent from those of an earlier one.

    Attributes:
        state: State of the policy, where the agent of this node decides.
        why_not: Why the job has kept full power for as long as the patience; empty where it is measured or limited.
    """

    job: int
    hosts: Sequence[str]
    host: str
    tuner: PowerLimitTuner
    notes: Notes
    patience_s: float
    session: str = field(default_factory=lambda: f"{time.time_ns():x}")
    state: PowerLimitState = field(init=False)
    why_not: str = ""
    _slowest: SlowestRank = field(init=False)
    _count: int = 0
    _full_s: float = math.nan
    _reason: str = ""
    _why_not: tuple[str, float] = ("", math.nan)
    _renewed: dict[str, tuple[tuple[Any, Any], float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state, self._slowest = self.tuner.initial(), SlowestRank(self.tuner.trial_s)

    @property
    def decides(self) -> bool:
        """Whether the agent of this node decides."""
        return self.host == self.hosts[0]

    def step(
        self, now_s: float, own: NodeReport, progress: tuple[float, float] | None, known: tuple[LimitPoint, ...]
    ) -> tuple[float, str]:
        """Report this node; return the limit it is to have, as a share of full power, and the reason.

        Args:
            now_s: Time.
            own: Report of this node.
            progress: The job's progress and its time, where progress is the measure of work; None for busy cycles.
            known: Effects of limits on earlier jobs of its kind.
        """
        reports, wants = {self.host: own}, (1.0, "")
        for host in self.hosts:
            note = None if host == self.host else self._renewed_note(host, now_s)
            report = None if note is None else NodeReport.read(note)
            if note is not None and report is not None:
                reports[host] = report
                if host == self.hosts[0]:
                    wants = _wanted(note)
        if self.decides:
            wants = self._decided(now_s, reports, progress, known)
        elif self.hosts[0] not in reports:
            wants = 1.0, f"the agent of node {self.hosts[0]}, which decides, does not answer"
        self._count += 1
        note = {**asdict(own), "session": self.session, "count": self._count, "wants": wants[0], "reason": wants[1]}
        if not self.notes.write(self.job, self.host, note):
            return 1.0, "the shared disk takes no notes"
        return wants

    def leave(self) -> None:
        """Remove the note of this node: the others return to full power."""
        self.notes.remove(self.job, self.host)

    def forget(self) -> None:
        """Drop all that was learned about the job."""
        self.state, self._slowest = self.tuner.initial(), SlowestRank(self.tuner.trial_s)
        self._full_s = math.nan

    def _renewed_note(self, host: str, now_s: float) -> Mapping[str, Any] | None:
        """The note of another node; None where it is not renewed any more, or not known to be."""
        if (note := self.notes.read(self.job, host)) is None:
            return None
        mark = (note.get("session"), note.get("count"))
        before, since_s = self._renewed.get(host, (mark, -math.inf))
        if mark != before:
            since_s = now_s
        self._renewed[host] = mark, since_s
        return note if 0 <= now_s - since_s < self.patience_s else None

    def _decided(
        self,
        now_s: float,
        reports: Mapping[str, NodeReport],
        progress: tuple[float, float] | None,
        known: tuple[LimitPoint, ...],
    ) -> tuple[float, str]:
        missing = next((host for host in self.hosts if host not in reports), "")
        if missing:
            return self._reset(f"the agent of node {missing} does not answer", now_s)
        refuses = next((host for host in self.hosts if reports[host].why_not), "")
        if refuses:
            return self._reset(f"node {refuses}: {reports[refuses].why_not}", now_s)
        ratios = {report.ratio for report in reports.values()}
        self._full_s = now_s if ratios != {1.0} or math.isnan(self._full_s) else self._full_s
        full = now_s - self._full_s >= self.tuner.settle_s
        work, self.why_not, self._why_not = progress, "", ("", math.nan)
        if progress is None:
            if any(math.isnan(report.work) for report in reports.values()):
                return self._reset("it reports its progress too rarely", now_s)
            nodes = {host: (report.at_s, report.work) for host, report in reports.items()}
            self._slowest = self._slowest.seen(now_s, nodes, full=full)
            if not self._slowest.known:
                return 1.0, "measures each node at full power"
            work = self._slowest.work_s, self._slowest.at_s
        assert work is not None
        measured = self.state.full_rate > 0
        view = LimitedJobView(
            now_s,
            str(self.job),
            ratios.pop() if len(ratios) == 1 else math.nan,
            *work,
            sum(report.energy_j for report in reports.values()),
            sum(report.full_w for report in reports.values()),
            known,
        )
        step = self.tuner.step(self.state, view)
        self.state = step.state
        if measured and not self.state.full_rate > 0:  # the job has changed, and so may have the share of each node
            self._slowest = SlowestRank(self.tuner.trial_s)
        self._reason = step.decisions[0].reason if step.decisions else self._reason
        return self.state.ratio, self._reason

    def _reset(self, reason: str, now_s: float) -> tuple[float, str]:
        """Return to full power on all nodes and drop all that was learned, earned credit included."""
        if reason != self._why_not[0]:
            self._why_not = reason, now_s
        self.why_not = reason if now_s - self._why_not[1] >= self.patience_s else ""
        self.forget()
        return 1.0, reason


def _wanted(note: Mapping[str, Any]) -> tuple[float, str]:
    """The limit that the deciding node wants; full power where its note has none."""
    try:
        ratio = float(note["wants"])
    except (KeyError, TypeError, ValueError):
        return 1.0, "the note of the node that decides cannot be read"
    return (ratio if 0 < ratio < 1 else 1.0), str(note.get("reason", ""))
