"""GREEN's two optimisers in one multilevel feedback queue (NSDI'25): decides which jobs run on how many GPUs.

New jobs enter the upper queue and grow one GPU a round while each more GPU still pays in energy (section 5.1); then
they move to the lower queue, where those of least footprint go first, high-power jobs in green hours and low-power
ones in dirty hours (section 5.2). Between rounds waiting jobs start in the order of the last round; no
running job is moved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import repeat
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import ConfigError, DataError
from joulery.policies.training.allocation import Allocation, ClusterView
from joulery.policies.training.queues import (
    Filling,
    RestartBudget,
    TrackedJob,
    fill,
    fill_in_order,
    within_budget,
)
from joulery.policies.training.service_order import (
    ShiftRule,
    ceiling_kg,
    first_come,
    in_levels,
    length_scv,
    lesser_kg,
    oldest_first,
    oldest_gpus,
    shifting_factor,
    uppermost,
)
from joulery.policies.training.waiting import WaitingJobs, decide_waiting, due_first
from joulery.policies.training.widths import NO_POINTS, JobWidths, Points, prices, with_measured, with_power

ServiceOrder = Literal["service", "first-come", "observed"]
"""Orders of service."""


@dataclass(frozen=True, slots=True)
class GreenState:
    """Queues, targets and the profile cache.

    Attributes:
        jobs: Record of each unfinished job.
        profile: For each recurring kind, its degradation by number of GPUs, as far as jobs of it were measured.
        first_come: Whether jobs are served in the order of their submission.
        power_w: For each recurring kind, the power of a job by number of GPUs, W, where jobs are sized by a price.
        budget: Budget for the restarts that the oldest jobs cause, where jobs are wide.
    """

    jobs: Mapping[int, TrackedJob]
    profile: Points
    first_come: bool = False
    power_w: Points = field(default_factory=lambda: NO_POINTS)
    budget: RestartBudget = field(default_factory=RestartBudget)


@dataclass(frozen=True, slots=True)
class Green:
    """GREEN's policy. The defaults are ours; :func:`green_paper` has the paper's.

    Attributes:
        mu: Strength of the shift, at least 1; 1 switches it off.
        shift: Table of the shifting factors.
        theta: Share of the GPUs that the upper queue may take.
        gamma: Least degradation at which a job still grows; None for the load-dependent rule: ``gamma_low``, rising to
            0.95 while the GPUs wanted, as a multiple of the cluster's GPUs, grow from ``gamma_from`` to ``gamma_from``
            + 0.5.
        gamma_low, gamma_from: Parameters of that rule.
        cap: Most GPUs of a job; None for max(2, GPUs / 16).
        hysteresis: Factor on the priority of running jobs, 1 for none. At a quarter a running job counts as one level
            lower than it is, because levels differ by a factor of 4.
        profile_cache: Start a recurring kind of job where the last one of it settled.
        carbon_gamma: Added to gamma in dirty hours, subtracted in green ones.
        starve_ratio: A job whose present wait exceeds this many times its execution counts as having no footprint;
            None for never.
        ceiling_gpu_s: A footprint counts at most as that of this much service of the average job. Above this ceiling
            jobs are ordered by the hour and by submission, so that in an overload the longest end one after another
            instead of all together at its end; None for no ceiling.
        levels: Below the ceiling footprints count rounded down to a quarter, a sixteenth … of it, with so many levels:
            among jobs of similar footprints, the hour and submission decide, not the last gram; None to count every
            gram.
        oldest_share: Share of the GPUs that goes to the oldest jobs of the lower queue first, whatever their
            footprints: those that footprints put last then end during a rush instead of all together after it; 0 for
            none. More where jobs are wide (:func:`~joulery.policies.training.service_order.oldest_gpus`).
        oldest_age_s: From this age on jobs count as equally old for that share, and the smallest footprint goes first.
        progress_after_s: A job that has run for this long and reports progress counts with a quarter of the carbon that
            it will still cause, where that is less than what it has caused; among jobs of the highest level the one
            with most work left goes first. None to ignore progress.
        ageing_s: From this age on a job's priority number falls as its age grows, so that it runs in the end, whatever
            arrives later; None for never.
        preempt_after_s: A job takes GPUs from one that runs only after having waited this long, all its waits
            together; until then it starts when GPUs come free.
        regrow: A job that started narrow in a crowd widens to what its kind pays for once all jobs have room.
        lift_after_s: Where kinds of jobs have power limits, jobs start without one while some job has waited
            longer than this, because a limit delays all jobs behind it; None to keep the limits.
        las: Order the lower queue by attained service instead of carbon (the paper's ablation).
        fixed_gpus: Number of GPUs of every job, without scaling (the paper's ablation); None to scale.
        node_gpus: Beyond one node a job grows by whole nodes of this many GPUs: a node that it only half fills slows
            it down; None to grow GPU by GPU.
        order: How jobs that are not being sized are ordered: ``service`` by the carbon they have caused, ``first-come``
            by submission, ``observed`` by whichever the lengths of the jobs so far call for
            (:mod:`~joulery.policies.training.service_order`); ``service`` as long as no lengths are known.
        delay_ratio: A job with a deadline waits for cleaner hours where an hour of delay saves more than this share of
            what a GPU of the median job emits in an hour at the mean intensity ahead; None to ignore deadlines.
        price_ratio: Kinds of jobs that were measured run on the number of GPUs that costs least, where a second of
            completion time is worth this share of the power of the average kind on its fewest GPUs, at the mean
            intensity of the window (:mod:`~joulery.policies.training.widths`); ``gamma`` then holds for other jobs.
            None for gamma throughout.
    """

    mu: float = 2.0
    shift: ShiftRule = ShiftRule.MIRRORED
    theta: float = 0.3
    gamma: float | None = None
    gamma_low: float = 0.90
    gamma_from: float = 1.0
    cap: int | None = None
    hysteresis: float = 0.25
    profile_cache: bool = True
    carbon_gamma: float = 0.0
    starve_ratio: float | None = None
    ceiling_gpu_s: float | None = 7 * 3600.0
    levels: int | None = 3
    oldest_share: float = 0.25
    oldest_age_s: float = 3 * 86_400.0
    progress_after_s: float | None = 1800.0
    ageing_s: float | None = 4 * 86_400.0
    preempt_after_s: float = 1800.0
    regrow: bool = True
    lift_after_s: float | None = None
    las: bool = False
    fixed_gpus: int | None = None
    node_gpus: int | None = None
    delay_ratio: float | None = 0.6
    price_ratio: float | None = None
    order: ServiceOrder = "observed"
    name: str = "green"

    def __post_init__(self) -> None:
        if not self.mu >= 1:
            raise ConfigError("the shifting strength mu must be at least 1", got=str(self.mu))
        if not 0 < self.theta <= 1:
            raise ConfigError("theta is a share of the GPUs", got=str(self.theta), expected="above 0, at most 1")
        if not 0 <= self.oldest_share <= 1:
            raise ConfigError("oldest_share is a share of the GPUs", got=str(self.oldest_share), expected="0 to 1")
        if not 0 < self.hysteresis <= 1:
            raise ConfigError("hysteresis must lie in (0, 1]", got=str(self.hysteresis))
        if self.price_ratio is not None and not 0 <= self.price_ratio < float("inf"):
            raise ConfigError("a price is at least 0", pointer="price_ratio", got=str(self.price_ratio))
        if self.delay_ratio is not None and not self.delay_ratio >= 0:
            raise ConfigError("a delay has no negative price", pointer="delay_ratio", got=str(self.delay_ratio))
        for knob, least in _LEAST_OF:
            value = getattr(self, knob)
            if value is not None and not value >= least:
                raise ConfigError(f"{knob} is too short", got=str(value), expected=f"at least {least:g} s")
        if self.order not in get_args(ServiceOrder):
            expected = ", ".join(get_args(ServiceOrder))
            raise ConfigError("no such order of service", pointer="order", got=str(self.order), expected=expected)
        if self.levels is not None and self.levels < 1:
            raise ConfigError("footprints count in at least one level below the ceiling", got=str(self.levels))
        if self.node_gpus is not None and self.node_gpus < 1:
            raise ConfigError("a node has at least one GPU", got=str(self.node_gpus))

    def remember(self, state: GreenState) -> dict[str, object]:
        """The state as a JSON-ready dictionary, from which a scheduler continues after a restart."""
        return {
            "jobs": {str(job): list(astuple(known)) for job, known in state.jobs.items()},
            "profile": {str(kind): {str(n): d for n, d in points.items()} for kind, points in state.profile.items()},
            "first_come": state.first_come,
            "power_w": {str(kind): {str(n): w for n, w in points.items()} for kind, points in state.power_w.items()},
            "budget": state.budget.remember(),
        }

    def recall(self, document: Mapping[str, Mapping[str, Any]]) -> GreenState:
        """The state that :meth:`remember` wrote.

        Raises:
            DataError: ``document`` is not what :meth:`remember` writes.
        """
        try:
            jobs = {int(job): TrackedJob(*known) for job, known in document["jobs"].items()}
            profile, power_w = (
                {int(kind): {int(n): float(value) for n, value in points.items()} for kind, points in table.items()}
                for table in (document["profile"], document.get("power_w", {}))
            )
            budget = RestartBudget.recall(document.get("budget") or {})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not the memory of a training policy: {error}") from error
        known = MappingProxyType(jobs), MappingProxyType(profile), bool(document.get("first_come"))
        return GreenState(*known, MappingProxyType(power_w), budget)

    def initial(self) -> GreenState:
        """The state before the first round, with empty queues."""
        return GreenState(MappingProxyType({}), MappingProxyType({}))

    def step(self, state: GreenState, view: ClusterView, /) -> Step[GreenState]:
        """Run one round: measure, grow, settle, rank, allocate."""
        widths = self._widths(state, view)
        jobs = self._settle(state, widths, view)
        wait = self._waiting(state, jobs, view)
        due = frozenset(wait.due)
        if self.regrow:
            self._widen(jobs, widths, view, wait.held | due)
        in_order = self._first_come(state, view)
        (run, jobs, rest), budget, reason = self._handed_out(jobs, view, wait, in_order, state.budget)
        newcomers = {kind: widths.newcomer(kind, view.gpus).gpus for kind in widths.profile}
        if wait.held or due:
            reason += f"; {len(wait.held)} wait for a cleaner hour, {len(due)} run for their deadline"
        hold_s, hold_gpus = self._hold(view, wait)
        allocation = Allocation(
            run,
            rest,
            newcomers,
            held=tuple(view.job[sorted(wait.held)].tolist()),
            hold_slack_s=hold_s,
            hold_gpus=hold_gpus,
            full_power=self._lifted(view, wait),
        )
        decision = Decision("allocate", "cluster", allocation, self.name, reason)
        sized = not any(known.upper for known in jobs.values())
        patient = self.delay_ratio is not None and view.deadline_s is not None
        wake_s = float("inf") if sized and not rest and not patient else None
        after = GreenState(MappingProxyType(jobs), widths.profile, in_order, widths.power_w, budget)
        return Step(after, (decision,), wake_s)

    def _handed_out(
        self, jobs: dict[int, TrackedJob], view: ClusterView, wait: WaitingJobs, in_order: bool, budget: RestartBudget
    ) -> tuple[Filling, RestartBudget, str]:
        """Jobs that get GPUs, the budget left for restarts, and the state of the queues as text."""
        number, due = view.job.tolist(), frozenset(wait.due)
        ranked = [row for row in range(len(view)) if row not in wait.held and row not in due]
        upper = [row for row in ranked if jobs[number[row]].upper]
        lower = [row for row in ranked if not jobs[number[row]].upper]
        first = due_first(wait.due, view)
        least = () if view.min_gpus is None else view.min_gpus[lower].tolist()
        share, wide = oldest_gpus(self.oldest_share, view.gpus, least)
        by_rank = [] if in_order else self._ranked(lower, jobs, view, 0 if wide else share)

        def filled(oldest: Sequence[int], stopped: Collection[int] | None) -> Filling:
            if in_order:
                return fill_in_order(view, dict(jobs), first, ranked, oldest, stopped or (), blocking=not wide)
            rows = by_rank
            if stopped is not None:
                # Stops by rank cost too much here: what waits starts in order of submission.
                waits = [row for row in lower if row in stopped or not view.running[row]]
                rows = [*(row for row in by_rank if view.running[row] and row not in stopped), *waits]
            order = dict.fromkeys((*oldest, *rows))
            return fill(view, dict(jobs), first, upper, [*order], self.theta, blocking=not wide)

        if wide:
            oldest = self._oldest(lower, jobs, view, share)
            filling, budget = within_budget(budget, view, oldest, ranked, filled)
        else:
            filling = filled((), None)
        hour = "no intensity" if view.hour is None else f"{view.hour} hour"
        reason = f"{hour}; {len(upper)} in the upper and {len(lower)} in the lower queue, {len(filling[0])} run"
        reason += "; in order of submission, jobs are of similar lengths" if in_order else ""
        reason += f"; the oldest first on {share} GPUs, for some jobs are wide" if wide else ""
        return filling, budget, reason

    def _first_come(self, state: GreenState, view: ClusterView) -> bool:
        """Whether the jobs are served in the order of their submission."""
        if self.order != "observed" or view.ended_gpu_s is None:
            return self.order == "first-come"
        scv = length_scv(view.ended_gpu_s, view.attained_gpu_s)
        return first_come(scv, len(view.ended_gpu_s), state.first_come)

    def _waiting(self, state: GreenState, jobs: dict[int, TrackedJob], view: ClusterView) -> WaitingJobs:
        """Jobs that wait for a cleaner hour; jobs with a new reservation are marked."""
        if self.delay_ratio is None:
            return WaitingJobs()
        if view.deadline_s is None:
            return WaitingJobs(room=view.gpus)
        number = view.job.tolist()
        reserved = np.array([jobs[job].reserved for job in number], np.bool_)
        new = np.array([job not in state.jobs for job in number], np.bool_)
        wait = decide_waiting(view, [jobs[job].gpus for job in number], reserved, new, self.delay_ratio)
        for row in wait.reserved:
            if not reserved[row]:
                jobs[number[row]] = replace(jobs[number[row]], reserved=True)
        return wait

    def _hold(self, view: ClusterView, wait: WaitingJobs) -> tuple[float, int]:
        """Slack beyond which newcomers wait for the next round, and for how many GPUs; none in a clean hour."""
        ahead = view.ahead_g_per_kwh
        if self.delay_ratio is None or ahead is None or not len(ahead) or ahead[0] <= ahead[:24].mean():
            return float("inf"), 0
        return _HOLD_ROUNDS * view.round_s, wait.room

    def _lifted(self, view: ClusterView, wait: WaitingJobs) -> bool:
        """Whether to lift power limits because a job has waited too long; one with a reservation waits by choice."""
        if self.lift_after_s is None:
            return False
        waited_s = view.now_s - view.submit_s - view.executed_s
        if wait.reserved:
            waited_s[list(wait.reserved)] = 0.0
        return float(np.max(waited_s, initial=0.0)) > self.lift_after_s

    def _widths(self, state: GreenState, view: ClusterView) -> JobWidths:
        """Rule by which jobs are sized in this round, updated by this round's measurements."""
        profile, power_w = state.profile, state.power_w
        if self.profile_cache:
            profile = with_measured(profile, view)
            power_w = power_w if self.price_ratio is None else with_power(power_w, view)
        now, trying = None, frozenset[int]()
        if self.price_ratio is not None:
            tracked = [state.jobs.get(job) for job in view.job.tolist()]
            running, kinds = view.running.tolist(), view.kind.tolist()
            waiting = sum(not n and not (one and one.reserved) for n, one in zip(running, tracked, strict=True))
            now = prices(self.price_ratio, power_w, view, waiting)
            trying = frozenset(
                kind for kind, one in zip(kinds, tracked, strict=True)
                if one and one.upper and one.gpus not in profile.get(kind, ())
            )  # fmt: skip
        gamma = self._gamma(state, view)
        return JobWidths(profile, power_w, gamma, self._cap(view), self.node_gpus, self.fixed_gpus, now, set(trying))

    def _cap(self, view: ClusterView) -> int:
        return max(2, view.gpus // 16) if self.cap is None else self.cap

    def _gamma(self, state: GreenState, view: ClusterView) -> float:
        """Least degradation at which a job grows; larger, the fuller the cluster, unless ``gamma`` is set."""
        if self.gamma is not None:
            base = self.gamma
        else:
            wanted = sum(known.gpus for known in state.jobs.values())
            load = wanted / view.gpus
            rise = min(max((load - self.gamma_from) / 0.5, 0.0), 1.0)
            base = self.gamma_low + (_GAMMA_HIGH - self.gamma_low) * rise
        if view.hour is None:
            return base
        return base + (self.carbon_gamma if view.hour == "dirty" else -self.carbon_gamma)

    def _settle(self, state: GreenState, widths: JobWidths, view: ClusterView) -> dict[int, TrackedJob]:
        """Queue and number of GPUs of every job after this round's measurements."""
        jobs: dict[int, TrackedJob] = {}
        rows = zip(
            view.job.tolist(), view.running.tolist(), view.max_gpus.tolist(), view.kind.tolist(),
            view.remaining_s.tolist(), view.degradation.tolist(),
            repeat(1, len(view)) if view.min_gpus is None else view.min_gpus.tolist(), strict=True,
        )  # fmt: skip
        for job, running, most, kind, remaining_s, degradation, least in rows:
            known = state.jobs.get(job) or widths.newcomer(kind, most, least)
            if running > 0 and degradation == degradation:
                if known.degradation != degradation:
                    known = TrackedJob(known.upper, known.gpus, degradation, known.skipped, known.reserved)
                if known.upper and running == known.gpus:
                    known = widths.grown(known, kind, most, remaining_s, view.restart_s, least)
            if known.gpus > view.gpus >= least:  # it would wait for ever, or until GPUs are back
                known = replace(known, gpus=widths.within(known.gpus, view.gpus, least))
            jobs[job] = known
        return jobs

    def _widen(self, jobs: dict[int, TrackedJob], widths: JobWidths, view: ClusterView, fixed: frozenset[int]) -> None:
        """Give free GPUs to settled jobs that run on fewer than a new job of their kind would get, in place.

        The rows ``fixed`` keep their size.
        """
        number, kinds, most = view.job.tolist(), view.kind.tolist(), view.max_gpus.tolist()
        room = view.gpus - sum(jobs[job].gpus for job in number)
        if room <= 0 or self.fixed_gpus is not None:
            return
        # Unknown work counts as long.
        short = view.remaining_s < _WORTH_RESTARTS * view.restart_s * view.running
        order = np.argsort(-view.remaining_s, kind="stable")
        rows = order[(view.running > 0)[order] & ~short[order]]
        for row, running in zip(rows.tolist(), view.running[rows].tolist(), strict=True):
            known = jobs[number[row]]
            if known.upper or running != known.gpus or row in fixed:
                continue
            least = 1 if view.min_gpus is None else int(view.min_gpus[row])
            wide = widths.wanted(kinds[row], most[row], least, float(view.executed_s[row]))
            if 0 < wide - running <= room:
                jobs[number[row]] = replace(known, gpus=wide)
                room -= wide - running

    def _ranked(self, rows: Sequence[int], jobs: Mapping[int, TrackedJob], view: ClusterView, share: int) -> list[int]:
        """The lower queue, first to run first: the oldest on a share of the GPUs, then by ascending ``footprint /
        degradation × shift`` (Eq. 5), within bounds."""
        if not rows:
            return []
        index = np.asarray(rows, np.int64)
        degradation = np.array([jobs[job].degradation for job in view.job[index].tolist()])
        running = view.running[index] > 0
        waited_s = view.now_s - view.submit_s[index] - view.executed_s[index]
        counted, among_equals = self._counted(index, waited_s, view)
        priority = counted / degradation * self._shift(index, view)
        if self.ageing_s is not None:
            priority /= np.maximum((view.now_s - view.submit_s[index]) / self.ageing_s, 1.0)
        priority[running] *= self.hysteresis
        patient = ~running & (waited_s < self.preempt_after_s)
        order = np.lexsort((among_equals, priority, patient))  # stable: of equals the first in the view goes first
        wants = [jobs[job].gpus if may else 0 for job, may in zip(view.job[index].tolist(), ~patient, strict=True)]
        age_s = np.minimum(view.now_s - view.submit_s[index], self.oldest_age_s)
        old = oldest_first(age_s, counted, view.submit_s[index], wants, share)
        return [rows[at] for at in (*old, *(at for at in order.tolist() if at not in old))]

    def _oldest(
        self, rows: Sequence[int], jobs: Mapping[int, TrackedJob], view: ClusterView, gpus: int
    ) -> Sequence[int]:
        """The oldest jobs that run, or have waited long enough to take GPUs from a running job: as many as fill
        ``gpus`` GPUs, the last of them in full. Of jobs submitted together the first goes first, or they would stop one
        another in turn."""
        chosen: list[int] = []
        may = (view.running > 0) | (view.now_s - view.submit_s - view.executed_s >= self.preempt_after_s)
        for row in rows:
            if gpus <= 0:
                break
            if may[row]:
                chosen.append(row)
                gpus -= jobs[int(view.job[row])].gpus
        return chosen

    def _counted(self, index: IntArray, waited_s: FloatArray, view: ClusterView) -> tuple[FloatArray, FloatArray]:
        """The counted footprint of each ranked job, and the order among equals, least first: by submission; in the
        highest level the job with most work left goes first, so that it does not end alone on an idle cluster."""
        footprint = (view.attained_gpu_s if self.las else view.footprint_kg)[index]
        attained_s, first = view.attained_gpu_s[index], view.submit_s[index]
        ceiling = ceiling_kg(footprint, attained_s, self.ceiling_gpu_s)
        if self.progress_after_s is None:
            counted = in_levels(footprint, ceiling, self.levels)
        else:
            remaining_s = view.remaining_s[index]
            reported = (view.executed_s[index] >= self.progress_after_s) & (attained_s > 0) & ~np.isnan(remaining_s)
            counted = in_levels(lesser_kg(footprint, attained_s, remaining_s, reported), ceiling, self.levels)
            # A job without reported progress is expected to take as long again, as jobs of heavy-tailed lengths do.
            left_s = np.where(reported, remaining_s, attained_s)
            first = np.where(uppermost(counted, ceiling, self.levels), -left_s, first)
        if self.starve_ratio is not None:
            waits = view.running[index] == 0
            counted[waits & (waited_s > self.starve_ratio * view.executed_s[index])] = 0.0
        return counted, first

    def _shift(self, index: IntArray, view: ClusterView) -> FloatArray:
        """The factor of each ranked job, scaled over every job whose power is known; 1 where it is not."""
        known = ~np.isnan(view.gpu_w)
        factor = np.ones(len(view))
        factor[known] = shifting_factor(view.gpu_w[known], view.g_per_kwh, view.mean_g_per_kwh, self.mu, self.shift)
        return factor[index]


def green_paper(**changes: object) -> Green:
    """GREEN as published: the literal shifting table, none of our additions."""
    bare: dict[str, Any] = {
        "ceiling_gpu_s": None,
        "levels": None,
        "oldest_share": 0.0,
        "progress_after_s": None,
        "ageing_s": None,
        "preempt_after_s": 0.0,
        "regrow": False,
        "delay_ratio": None,
        "order": "service",
    }
    bare |= {"hysteresis": 1.0, "profile_cache": False, "gamma_low": 0.80, "gamma_from": 0.5}
    return Green(**{**bare, "shift": ShiftRule.PAPER, "name": "green-paper", **changes})


LEAN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "swift": MappingProxyType({"gamma_low": 0.75, "cap": 8}),
        "lean": MappingProxyType({"gamma_low": 0.85, "gamma_from": 0.8, "cap": 8, "price_ratio": 0.17}),
        "frugal": MappingProxyType({}),
    }
)
"""Changes to GREEN's settings in each kind of policy with power limits: how readily jobs grow."""
LEAN_ETA: Mapping[str, float] = MappingProxyType({"swift": 0.5, "lean": 0.7, "frugal": 0.5})
"""Weight of energy against time in the cost of the power limits of these policies."""


_LEAST_OF = (
    ("ceiling_gpu_s", 1.0),
    ("ageing_s", 1.0),
    ("preempt_after_s", 0.0),
    ("lift_after_s", 0.0),
    ("oldest_age_s", 0.0),
    ("progress_after_s", 0.0),
)
_GAMMA_HIGH = 0.95
_WORTH_RESTARTS = 10.0
"""A settled job is restarted wider only if its remaining time is at least this many restart times."""
_HOLD_ROUNDS = 2.0
"""A newcomer that has to start within this many rounds does not wait for the next one."""
