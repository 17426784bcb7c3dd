"""What the scheduler must know to go on after it was killed: the fold of its journal.

The cluster is the truth about jobs; this is only what was meant for them. Every change is appended before it is acted
upon, so that a scheduler which dies between the two finishes it when it comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from joulery.accounting.training_jobs import Tally, Window
from joulery.domain.quality import Quality
from joulery.runtime.schedule.energy_delta import SourceTotal

T = TypeVar("T")


@dataclass(slots=True)
class Memory:
    """The plan in force and what was learnt.

    Attributes:
        policy: The policy's own memory, as it wrote it; None before the first round.
        target: Slots each job is meant to run on.
        waiting: Who starts next when slots come free, with the slots each wants.
        newcomers: Slots on which a newcomer of a kind starts, where that is known.
        passive: Whether anybody may start between rounds.
        next_round_s: When running jobs may be moved again, Unix seconds.
        kinds: Recurring kinds of jobs; their place in the list is the policy's number of them.
        tallies: What each job cost and how well it runs.
        born: When each job was submitted first; Slurm forgets that when it requeues one.
        seen: What each source has told of each job's energy.
        who: Owner, name and partition of each job: reports need no cluster.
    """

    policy: Mapping[str, Any] | None = None
    target: dict[int, int] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    newcomers: dict[int, int] = field(default_factory=dict)
    passive: bool = True
    next_round_s: float = -math.inf
    kinds: list[str] = field(default_factory=list)
    tallies: dict[int, Tally] = field(default_factory=dict)
    born: dict[int, float] = field(default_factory=dict)
    seen: dict[int, Mapping[str, SourceTotal]] = field(default_factory=dict)
    who: dict[int, tuple[str, str, str]] = field(default_factory=dict)

    def knows(self, job: int) -> bool:
        """Whether anything was ever meant for this job."""
        return job in self.target or any(job == waiting for waiting, _ in self.waiting)

    def fold(self, entry: Mapping[str, Any]) -> None:
        """Take in one line of the journal."""
        kind = entry["kind"]
        if kind == "plan":
            self.policy = entry["policy"]
            self.target = {int(job): int(slots) for job, slots in entry["target"].items()}
            self.waiting = [(int(job), int(slots)) for job, slots in entry["waiting"]]
            self.newcomers = {int(kind): int(slots) for kind, slots in entry["newcomers"].items()}
            self.passive = bool(entry["passive"])
            self.next_round_s = float(entry["next_round_s"])
            self.kinds = [str(name) for name in entry["kinds"]]
            self.born = {int(job): float(at_s) for job, at_s in entry["born"].items()}
        elif kind == "arrived":
            self.waiting.append((int(entry["job"]), int(entry["slots"])))
        elif kind == "started":
            self.waiting = [(job, slots) for job, slots in self.waiting if job != entry["job"]]
            self.target[int(entry["job"])] = int(entry["slots"])
        elif kind == "follows":
            self.inherit(int(entry["after"]), int(entry["job"]))
        elif kind == "gone":
            self.forget(int(entry["job"]))
        elif kind == "tallies":
            for job, document in entry["jobs"].items():
                self.tallies[int(job)] = tally_from(document)
                if document.get("seen") is not None:
                    self.seen[int(job)] = _seen(document["seen"])
                if document.get("who") is not None:
                    owner, name, partition = document["who"]
                    self.who[int(job)] = (str(owner), str(name), str(partition))

    def forget(self, job: int) -> None:
        """A job is over."""
        self.target.pop(job, None)
        self.tallies.pop(job, None)
        self.seen.pop(job, None)
        self.who.pop(job, None)
        self.born.pop(job, None)
        self.waiting = [(other, slots) for other, slots in self.waiting if other != job]

    def inherit(self, old: int, new: int) -> None:
        """A job goes on under another number: what was meant for it and what it cost go with it."""
        _move(self.target, old, new)
        _move(self.tallies, old, new)
        _move(self.seen, old, new)
        _move(self.born, old, new)
        _move(self.who, old, new)
        self.waiting = [(new if job == old else job, slots) for job, slots in self.waiting]
        if self.policy is not None:
            self.policy = renamed(self.policy, old, new)

    def plan(self) -> dict[str, Any]:
        """The plan as a line of the journal."""
        return {
            "policy": self.policy,
            "target": {str(job): slots for job, slots in self.target.items()},
            "waiting": self.waiting,
            "newcomers": {str(kind): slots for kind, slots in self.newcomers.items()},
            "passive": self.passive,
            "next_round_s": self.next_round_s,
            "kinds": self.kinds,
            "born": {str(job): at_s for job, at_s in self.born.items()},
        }

    def costs(self) -> dict[str, Any]:
        """The tallies as a line of the journal."""
        jobs = {
            str(job): {**_document(tally), "seen": _told(self.seen.get(job)), "who": self.who.get(job)}
            for job, tally in self.tallies.items()
        }
        return {"jobs": jobs}


def remembered(entries: Iterable[Mapping[str, Any]]) -> tuple[Memory, int]:
    """The fold of a journal, and how many of its lines are none of ours: those are left out."""
    memory, strange = Memory(), 0
    for entry in entries:
        try:
            memory.fold(entry)
        except (KeyError, TypeError, ValueError, AttributeError):
            strange += 1
    return memory, strange


def renamed(policy: Mapping[str, Any], old: int, new: int) -> Mapping[str, Any]:
    """What a policy wrote down, with one job under another number."""
    jobs = dict(policy.get("jobs", {}))
    if str(old) not in jobs:
        return policy
    jobs[str(new)] = jobs.pop(str(old))
    return {**policy, "jobs": jobs}


def _move(table: dict[int, T], old: int, new: int) -> None:
    if old in table:
        table[new] = table.pop(old)


def _seen(entries: list[Any]) -> dict[str, SourceTotal]:
    """What :func:`_told` wrote; earlier versions wrote the last source alone, as ``[source, energy_j, slot_j]``."""
    if isinstance(entries[0], str):
        entries = [(entries[0], entries[1:])]
    return {str(name): SourceTotal(*map(float, told)) for name, told in entries}


def _told(seen: Mapping[str, SourceTotal] | None) -> list[tuple[str, tuple[float, ...]]] | None:
    """Sources in order, JSON-ready."""
    return None if seen is None else [(name, astuple(told)) for name, told in seen.items()]


def _document(tally: Tally) -> dict[str, Any]:
    """A tally, JSON-ready."""
    return {
        **{name: getattr(tally, name) for name in Tally.__dataclass_fields__},
        "efficiency": {str(slots): value for slots, value in tally.efficiency.items()},
        "window": None if tally.window is None else asdict(tally.window),
    }


def tally_from(document: Mapping[str, Any]) -> Tally:
    """The tally that :meth:`Memory.costs` wrote; what JSON cannot say (NaN) is null there."""
    values = {name: _number(document[name]) for name in Tally.__dataclass_fields__ if name in document}
    window = document.get("window")
    values["window"] = None if window is None else Window(**{name: _number(value) for name, value in window.items()})
    values["efficiency"] = MappingProxyType({int(n): float(e) for n, e in document["efficiency"].items()})
    values["quality"] = Quality(document["quality"])
    return Tally(**values)


def _number(value: Any) -> Any:
    return float("nan") if value is None else value
