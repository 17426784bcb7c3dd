"""The scheduler's state, derived from the events of its journal alone.

The scheduler appends an event to the journal and applies it with :func:`apply_event`; after a restart
:func:`replay_events` applies them and gives the same state. The cluster is authoritative for its jobs; the state holds
the decisions on them and their measurements. An event is on the disk before the scheduler acts on it.

=============  ==============================================================================================
event          fields
=============  ==============================================================================================
``known``      ``jobs``: first submission of each new job, Unix seconds; ``kinds``: kinds of job not seen before;
               ``priority``: the cluster's own priority of each new job, where it has one
``plan``       the plan of a round: see :func:`plan_event`
``arrived``    ``job``, ``slots``, ``place``: a job submitted between rounds queues there, or last
``patient``    ``job``, ``pool``, ``waits``: a job with a deadline came between rounds; whether it waits
``started``    ``job``, ``slots``: the job is to run on so many slots
``follows``    ``job``, ``after``: job ``after`` continues under the number ``job``
``released``   ``job``, ``at_s``: a planned job was released; from now on the cluster may start it
``refused``    ``job``, ``until_s``, ``text``: it did not start on free slots, so it reserves none until then
``unsaved``    ``job``: its progress after a stop is less than half of that before: it is never stopped again
``lengths``    ``slot_s``: slot-seconds of the jobs that ended last; a compacted journal has it
``month``      ``month``: a calendar month began, UTC; what each job had cost until then is in the log
``forecast``   ``job`` and the fields of a forecast of it
``scored``     ``job``, ``of``, ``error``, ``inside``: what became of a forecast
``forecasts``  ``made``, ``scores``: all of them; a compacted journal has it
``gone``       ``job``: the job ended, or the cluster no longer lists it
``tallies``    ``jobs``: tally, energy sources and owner of each job whose measurements changed
=============  ==============================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import orjson

from joulery.accounting.forecasts import ForecastScore, JobForecast, kept
from joulery.accounting.training_jobs import JobWindow, Tally
from joulery.domain.cluster import ClusterJob
from joulery.domain.quality import Quality
from joulery.policies.training.service_order import ENDED_JOBS
from joulery.runtime.schedule.energy import SourceTotal

T = TypeVar("T")
Event = Mapping[str, Any]
"""One line of the journal, as read back from JSON."""


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The plan in force and what was measured.

    Attributes:
        policy: The policy's own state, JSON-ready; None before the first round.
        target: Slots each job is to run on; 0 for none.
        waiting: Jobs that start next when slots come free, in order, with the slots each wants.
        newcomers: Slots on which a new job of a kind starts, where that is known.
        passive: Whether waiting jobs may start between rounds.
        next_round_s: When running jobs may be moved again, Unix seconds.
        kinds: Recurring kinds of jobs; the index of a kind is the policy's number of it.
        tallies: What each job cost and how well it runs.
        submitted_s: First submission of each job, Unix seconds; Slurm loses it when it requeues a job.
        energy_seen: Last totals of each energy source, by job.
        who: Owner, name, partition and account of each job: reports need no cluster.
        stops: Running jobs that the last round moves; None for every job whose size differs from the plan's.
        priority: The cluster's own priority of each job when it was first seen.
        released_s: When a planned job was released that has not started yet, Unix seconds.
        refused: Until when a job that did not start on free slots reserves none, Unix seconds, and why.
        unsaved: Jobs that lost their progress when they were stopped.
        patient: Jobs that wait for a cleaner hour.
        hold_slack_s: Jobs that come before the next round and need not start for longer than this wait for it.
        holds: How many jobs with a deadline may still do so, by pool.
        ended_slot_s: Slot-seconds of the jobs that ended last, oldest first.
        month: Calendar month of the last tick, UTC, as ``2026-11``; empty before the first.
        forecasts: Forecasts of a job whose outcome is not known yet, by job.
        scores: Scores of the last forecasts, oldest first.
    """

    policy: Mapping[str, Any] | None = None
    target: Mapping[int, int] = field(default_factory=dict)
    waiting: tuple[tuple[int, int], ...] = ()
    newcomers: Mapping[int, int] = field(default_factory=dict)
    passive: bool = True
    next_round_s: float = -math.inf
    kinds: tuple[str, ...] = ()
    tallies: Mapping[int, Tally] = field(default_factory=dict)
    submitted_s: Mapping[int, float] = field(default_factory=dict)
    energy_seen: Mapping[int, Mapping[str, SourceTotal]] = field(default_factory=dict)
    who: Mapping[int, tuple[str, str, str, str]] = field(default_factory=dict)
    stops: frozenset[int] | None = None
    priority: Mapping[int, float] = field(default_factory=dict)
    released_s: Mapping[int, float] = field(default_factory=dict)
    refused: Mapping[int, tuple[float, str]] = field(default_factory=dict)
    unsaved: frozenset[int] = frozenset()
    patient: frozenset[int] = frozenset()
    hold_slack_s: float = math.inf
    holds: Mapping[str, int] = field(default_factory=dict)
    ended_slot_s: tuple[float, ...] = ()
    month: str = ""
    forecasts: Mapping[int, tuple[JobForecast, ...]] = field(default_factory=dict)
    scores: tuple[ForecastScore, ...] = ()

    def knows(self, job: int) -> bool:
        """Whether anything was decided for this job."""
        return job in self.target or any(job == waiting for waiting, _ in self.waiting)


def apply_event(state: SchedulerState, event: Event) -> SchedulerState:
    """The state after one event of the journal. Events of an unknown kind change nothing.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: The event lacks a field, or a field has another type.
    """
    change = _CHANGES.get(event["kind"])
    return state if change is None else change(state, event)


def replay_events(events: Iterable[Event]) -> tuple[SchedulerState, int]:
    """The state after a journal's events, and the number of events that could not be read and were left out."""
    state, unread = SchedulerState(), 0
    for event in events:
        try:
            state = apply_event(state, event)
        except (KeyError, TypeError, ValueError, AttributeError):
            unread += 1
    return state, unread


def compacted(state: SchedulerState) -> list[dict[str, Any]]:
    """The fewest events that give this state."""
    events = [
        {"kind": "plan", **plan_event(state)},
        {"kind": "tallies", **tallies_event(state, state.tallies)},
        {"kind": "known", "jobs": {}, "kinds": [], "priority": {str(job): p for job, p in state.priority.items()}},
    ]
    if state.ended_slot_s:
        events.append({"kind": "lengths", "slot_s": state.ended_slot_s})
    if state.month:
        events.append({"kind": "month", "month": state.month})
    if state.forecasts or state.scores:
        made = [forecast_event(job, one) for job, forecasts in state.forecasts.items() for one in forecasts]
        events.append({"kind": "forecasts", "made": made, "scores": list(map(scored_fields, state.scores))})
    events += [{"kind": "released", "job": job, "at_s": at_s} for job, at_s in state.released_s.items()]
    events += [{"kind": "refused", "job": job, "until_s": t, "text": text} for job, (t, text) in state.refused.items()]
    return [*events, *({"kind": "unsaved", "job": job} for job in sorted(state.unsaved))]


def forecast_event(job: int, forecast: JobForecast) -> dict[str, Any]:
    """The event that a forecast was made; its kind is named ``of``."""
    fields = {name: value for name, value in asdict(forecast).items() if name != "kind"}
    return {"kind": "forecast", "job": job, "of": forecast.kind, **fields}


def scored_fields(score: ForecastScore) -> dict[str, Any]:
    """The fields of a ``scored`` event without the job."""
    return {"of": score.kind, "error": score.error, "inside": score.inside}


def plan_event(state: SchedulerState, **changes: Any) -> dict[str, Any]:
    """The fields of a ``plan`` event: the state's plan with some fields replaced."""
    state = replace(state, **changes)
    return {
        "policy": state.policy,
        "target": {str(job): slots for job, slots in state.target.items()},
        "waiting": state.waiting,
        "newcomers": {str(kind): slots for kind, slots in state.newcomers.items()},
        "passive": state.passive,
        "next_round_s": state.next_round_s if math.isfinite(state.next_round_s) else None,
        "kinds": state.kinds,
        "born": {str(job): at_s for job, at_s in state.submitted_s.items()},
        "stops": None if state.stops is None else sorted(state.stops),
        "patient": sorted(state.patient),
        "hold_slack_s": state.hold_slack_s if math.isfinite(state.hold_slack_s) else None,
        "holds": dict(state.holds),
    }


def tallies_event(state: SchedulerState, jobs: Iterable[int]) -> dict[str, Any]:
    """The fields of a ``tallies`` event for some jobs of the state."""
    return {"jobs": {str(job): job_document(state, job) for job in jobs}}


def job_document(state: SchedulerState, job: int) -> dict[str, Any]:
    """The measurements of one job, JSON-ready."""
    tally = state.tallies[job]
    seen = state.energy_seen.get(job)
    return {
        **_fields(tally),
        "efficiency": {str(slots): value for slots, value in tally.efficiency.items()},
        "job_w": {str(slots): value for slots, value in tally.job_w.items()},
        "rates": {str(slots): value for slots, value in tally.rates.items()},
        "window": None if tally.window is None else _fields(tally.window),
        "seen": None if seen is None else [(name, tuple(_fields(total).values())) for name, total in seen.items()],
        "who": state.who.get(job),
    }


def _fields(flat: Tally | JobWindow | SourceTotal) -> dict[str, Any]:
    """The fields of a dataclass of plain values; ``dataclasses.asdict`` copies each one."""
    return {name: getattr(flat, name) for name in flat.__dataclass_fields__}


def differs(old: SchedulerState, new: SchedulerState, job: int) -> bool:
    """Whether the documents of a job differ; compared as JSON, where NaN equals NaN, unless they are equal anyway."""
    before, after = ((each.tallies[job], each.energy_seen.get(job), each.who.get(job)) for each in (old, new))
    return before != after and orjson.dumps(job_document(old, job)) != orjson.dumps(job_document(new, job))


def end_facts(job: ClusterJob | None, tally: Tally | None = None) -> dict[str, Any]:
    """The log's facts on a job that is over, beside its cost."""
    if job is None:
        return {"state": "unknown"}
    rates = {} if tally is None else {"rates": {str(slots): rate for slots, rate in tally.rates.items()}}
    who = {"name": job.name, "owner": job.owner, "partition": job.partition, "account": job.account}
    return {"state": job.state, **who, "restarts": job.restarts, **rates}


def job_cost(tally: Tally | None) -> dict[str, Any]:
    """Cost of a job, for the log."""
    tally = Tally() if tally is None else tally
    return {
        "executed_s": tally.executed_s,
        "slot_s": tally.slot_s,
        "energy_j": tally.energy_j,
        "carbon_g": tally.carbon_g,
        "carbon_covered_j": tally.carbon_covered_j,
        "unmetered_s": tally.unmetered_s,
        "quality": tally.quality,
    }


def tally_from(document: Mapping[str, Any]) -> Tally:
    """The tally that :func:`job_document` wrote; null stands for NaN, which JSON lacks."""
    values = {name: _number(document[name]) for name in Tally.__dataclass_fields__ if name in document}
    window = document.get("window")
    values["window"] = None if window is None else JobWindow(**{name: _number(value) for name, value in window.items()})
    for by_slots in ("efficiency", "job_w", "rates"):  # earlier versions wrote no power and no rates
        values[by_slots] = MappingProxyType({int(n): float(value) for n, value in document.get(by_slots, {}).items()})
    values["quality"] = Quality(document["quality"])
    return Tally(**values)


def _known(state: SchedulerState, event: Event) -> SchedulerState:
    jobs = {int(job): float(at_s) for job, at_s in event["jobs"].items()}
    kinds = tuple(str(kind) for kind in event["kinds"])
    priority = {int(job): float(value) for job, value in event.get("priority", {}).items()}
    return replace(
        state,
        submitted_s={**state.submitted_s, **jobs},
        kinds=state.kinds + kinds,
        priority={**state.priority, **priority},
    )


def _plan(state: SchedulerState, event: Event) -> SchedulerState:
    next_round_s, stops, hold_slack_s = event["next_round_s"], event.get("stops"), event.get("hold_slack_s")
    return replace(
        state,
        policy=event["policy"],
        target={int(job): int(slots) for job, slots in event["target"].items()},
        waiting=tuple((int(job), int(slots)) for job, slots in event["waiting"]),
        newcomers={int(kind): int(slots) for kind, slots in event["newcomers"].items()},
        passive=bool(event["passive"]),
        next_round_s=-math.inf if next_round_s is None else float(next_round_s),
        kinds=tuple(str(name) for name in event["kinds"]),
        submitted_s={int(job): float(at_s) for job, at_s in event["born"].items()},
        stops=None if stops is None else frozenset(int(job) for job in stops),
        patient=frozenset(int(job) for job in event.get("patient", ())),
        hold_slack_s=math.inf if hold_slack_s is None else float(hold_slack_s),
        holds={str(pool): int(jobs) for pool, jobs in event.get("holds", {}).items()},
    )


def _patient(state: SchedulerState, event: Event) -> SchedulerState:
    job, pool = int(event["job"]), str(event["pool"])
    state = replace(state, holds={**state.holds, pool: max(0, state.holds.get(pool, 0) - 1)})
    if not event["waits"]:
        return state
    return replace(state, patient=state.patient | {job}, target={**state.target, job: 0})


def _arrived(state: SchedulerState, event: Event) -> SchedulerState:
    place = int(event.get("place", len(state.waiting)))
    entry = (int(event["job"]), int(event["slots"]))
    return replace(state, waiting=(*state.waiting[:place], entry, *state.waiting[place:]))


def _started(state: SchedulerState, event: Event) -> SchedulerState:
    job, slots = int(event["job"]), int(event["slots"])
    waiting = tuple(entry for entry in state.waiting if entry[0] != job)
    stops = None if state.stops is None else state.stops - {job}
    return replace(
        state, waiting=waiting, target={**state.target, job: slots}, stops=stops,
        released_s=_without(state.released_s, job), patient=state.patient - {job},
    )  # fmt: skip


def _released(state: SchedulerState, event: Event) -> SchedulerState:
    return replace(state, released_s={**state.released_s, int(event["job"]): float(event["at_s"])})


def _refused(state: SchedulerState, event: Event) -> SchedulerState:
    job = int(event["job"])
    entry = (float(event["until_s"]), str(event["text"]))
    return replace(
        state, refused={**state.refused, job: entry}, target={**state.target, job: 0},
        released_s=_without(state.released_s, job),
    )  # fmt: skip


def _unsaved(state: SchedulerState, event: Event) -> SchedulerState:
    return replace(state, unsaved=state.unsaved | {int(event["job"])})


def _follows(state: SchedulerState, event: Event) -> SchedulerState:
    old, new = int(event["after"]), int(event["job"])
    return replace(
        state,
        policy=None if state.policy is None else _renamed(state.policy, old, new),
        target=_moved(state.target, old, new),
        tallies=_moved(state.tallies, old, new),
        energy_seen=_moved(state.energy_seen, old, new),
        submitted_s=_moved(state.submitted_s, old, new),
        who=_moved(state.who, old, new),
        priority=_moved(state.priority, old, new),
        unsaved=_in_place(state.unsaved, old, new),
        patient=_in_place(state.patient, old, new),
        forecasts=_moved(state.forecasts, old, new),
        waiting=tuple((new if job == old else job, slots) for job, slots in state.waiting),
    )


def _gone(state: SchedulerState, event: Event) -> SchedulerState:
    job = int(event["job"])
    return replace(
        state,
        policy=None if state.policy is None else _forgotten(state.policy, job),
        target=_without(state.target, job),
        tallies=_without(state.tallies, job),
        energy_seen=_without(state.energy_seen, job),
        submitted_s=_without(state.submitted_s, job),
        who=_without(state.who, job),
        ended_slot_s=_with_length(state, job),
        stops=None if state.stops is None else state.stops - {job},
        priority=_without(state.priority, job),
        released_s=_without(state.released_s, job),
        refused=_without(state.refused, job),
        unsaved=state.unsaved - {job},
        patient=state.patient - {job},
        forecasts=_without(state.forecasts, job),
        waiting=tuple(entry for entry in state.waiting if entry[0] != job),
    )


def _with_length(state: SchedulerState, job: int) -> tuple[float, ...]:
    """The lengths of ended jobs with that of one more, if it ran at all."""
    slot_s = state.tallies[job].slot_s if job in state.tallies else 0.0
    return (*state.ended_slot_s, slot_s)[-ENDED_JOBS:] if slot_s > 0 else state.ended_slot_s


def _lengths(state: SchedulerState, event: Event) -> SchedulerState:
    return replace(state, ended_slot_s=tuple(float(slot_s) for slot_s in event["slot_s"]))


def _month(state: SchedulerState, event: Event) -> SchedulerState:
    return replace(state, month=str(event["month"]))


def _forecast(state: SchedulerState, event: Event) -> SchedulerState:
    job, of = int(event["job"]), str(event["of"])
    numbers = {name: float(_number(event[name])) for name in ("made_s", "amount", "low", "high", "before")}
    others = tuple(one for one in state.forecasts.get(job, ()) if one.kind != of)
    return replace(state, forecasts={**state.forecasts, job: (*others, JobForecast(of, **numbers))})


def _scored(state: SchedulerState, event: Event) -> SchedulerState:
    job, of, inside = int(event["job"]), str(event["of"]), event["inside"]
    score = ForecastScore(of, float(event["error"]), None if inside is None else bool(inside))
    left = tuple(one for one in state.forecasts.get(job, ()) if one.kind != of)
    others = _without(state.forecasts, job)
    return replace(state, forecasts={**others, job: left} if left else others, scores=kept(state.scores, score))


def _forecasts(state: SchedulerState, event: Event) -> SchedulerState:
    for made in event["made"]:
        state = _forecast(state, made)
    for score in event["scores"]:
        state = _scored(state, {**score, "job": -1})
    return state


def _tallies(state: SchedulerState, event: Event) -> SchedulerState:
    tallies, seen, who = dict(state.tallies), dict(state.energy_seen), dict(state.who)
    for number, document in event["jobs"].items():
        job = int(number)
        tallies[job] = tally_from(document)
        if document.get("seen") is not None:
            seen[job] = _energy_seen(document["seen"])
        if document.get("who") is not None:
            owner, name, partition, account = (*document["who"], "")[:4]  # earlier versions wrote no account
            who[job] = (str(owner), str(name), str(partition), str(account))
    return replace(state, tallies=tallies, energy_seen=seen, who=who)


_CHANGES: Mapping[str, Callable[[SchedulerState, Event], SchedulerState]] = {
    "known": _known,
    "plan": _plan,
    "arrived": _arrived,
    "patient": _patient,
    "started": _started,
    "follows": _follows,
    "released": _released,
    "refused": _refused,
    "unsaved": _unsaved,
    "forecast": _forecast,
    "scored": _scored,
    "forecasts": _forecasts,
    "gone": _gone,
    "lengths": _lengths,
    "month": _month,
    "tallies": _tallies,
}


def _renamed(policy: Mapping[str, Any], old: int, new: int) -> Mapping[str, Any]:
    """A policy's document with one job under another number."""
    jobs = dict(policy.get("jobs", {}))
    if str(old) not in jobs:
        return policy
    jobs[str(new)] = jobs.pop(str(old))
    return {**policy, "jobs": jobs}


def _forgotten(policy: Mapping[str, Any], job: int) -> Mapping[str, Any]:
    """A policy's document without one job."""
    jobs = policy.get("jobs", {})
    return (
        policy if str(job) not in jobs else {**policy, "jobs": {j: entry for j, entry in jobs.items() if j != str(job)}}
    )


def _moved(table: Mapping[int, T], old: int, new: int) -> Mapping[int, T]:
    return table if old not in table else {**_without(table, old), new: table[old]}


def _in_place(jobs: frozenset[int], old: int, new: int) -> frozenset[int]:
    return jobs | {new} if old in jobs else jobs


def _without(table: Mapping[int, T], job: int) -> Mapping[int, T]:
    return table if job not in table else {other: value for other, value in table.items() if other != job}


def _energy_seen(entries: list[Any]) -> dict[str, SourceTotal]:
    """Totals by source; earlier versions wrote the last source alone, as ``[source, energy_j, slot_j]``."""
    if isinstance(entries[0], str):
        entries = [(entries[0], entries[1:])]
    return {str(name): SourceTotal(*map(float, total)) for name, total in entries}


def _number(value: Any) -> Any:
    return float("nan") if value is None else value
