"""Simulate one training job under the policy that learns its power limit, as the nodes' agents run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from joulery.perf.power.training_power import RTX3090_W, JobClass, limit_responses
from joulery.policies.clocks.power_limit import LimitedJobView, LimitPoint, PowerLimitState, PowerLimitTuner

Response = Callable[[float], tuple[float, float]]
"""Step time and power under a limit (a share of full power), both against full power."""


@dataclass(frozen=True, slots=True)
class LimitedJobRun:
    """Result for a job.

    Attributes:
        timeline: When each limit was set: ``(seconds from its start, share of full power)``.
        settled_s: When the search for the best limit ended; infinite if it did not.
        work_s: Work done, in seconds at full power.
        energy_j: Energy of its devices, J.
        state: The policy's last state.
    """

    timeline: tuple[tuple[float, float], ...]
    settled_s: float
    work_s: float
    energy_j: float
    state: PowerLimitState


def run_limited_job(
    tuner: PowerLimitTuner,
    response: Response,
    elapsed_s: float,
    *,
    full_w: float,
    board_w: float,
    known: tuple[LimitPoint, ...] = (),
    watch: Callable[[float, float, PowerLimitState], None] | None = None,
) -> LimitedJobRun:
    """Simulate a job that is observed every period; limits take effect at once.

    Args:
        tuner: The policy.
        response: Effect of a limit on the job.
        elapsed_s: Duration of the run.
        full_w: Power of its devices at full power, W.
        board_w: Their power limit, W.
        known: Measured effects of limits on earlier jobs of its kind.
        watch: Called at every observation with the time, the work done and the policy's state.
    """
    state, ratio, now_s, work_s, energy_j = tuner.initial(), 1.0, 0.0, 0.0, 0.0
    timeline, settled_s = [(0.0, 1.0)], float("inf")
    while True:
        view = LimitedJobView(now_s, "job", ratio, work_s, now_s, energy_j, board_w, known)
        step = tuner.step(state, view)
        state = step.state
        if watch is not None:
            watch(now_s, work_s, state)
        for decision in step.decisions:
            ratio = float(decision.value)
            timeline.append((now_s, ratio))
        if state.finished(tuner) and settled_s > now_s:
            settled_s = now_s
        if now_s >= elapsed_s:
            return LimitedJobRun(tuple(timeline), settled_s, work_s, energy_j, state)
        dt_s = min(tuner.period_s, elapsed_s - now_s)
        time_ratio, power_ratio = response(ratio)
        now_s += dt_s
        work_s += dt_s / time_ratio
        energy_j += full_w * power_ratio * dt_s


@dataclass(frozen=True, slots=True)
class LearnedLimit:
    """The limit that the policy finds for a kind of job.

    Attributes:
        ratio: The limit, as a share of the board's.
        first_s: Productive time at full power before a new job runs under it, s.
        again_s: The same where the effects of limits on the kind are known: the limit is tried once, and kept.
    """

    ratio: float
    first_s: float
    again_s: float


def learned_limits(
    classes: tuple[JobClass, ...], tuner: PowerLimitTuner, board_w: float = RTX3090_W
) -> Mapping[str, LearnedLimit]:
    """Limit that the policy finds for each class on the measured response, and the time it takes. Modelled.

    The time of the first search counts as full power throughout, although the job runs under some limit for most of it.
    """
    return {job.name: _learned_limit(tuple(limit_responses(job).items()), job.gpu_w, tuner, board_w) for job in classes}


@lru_cache(maxsize=4096)
def _learned_limit(
    responses: tuple[tuple[float, tuple[float, float]], ...], gpu_w: float, tuner: PowerLimitTuner, board_w: float
) -> LearnedLimit:
    response = _response(dict(responses))
    run = run_limited_job(tuner, response, tuner.review_s, full_w=gpu_w, board_w=board_w)
    again = run_limited_job(tuner, response, tuner.review_s, full_w=gpu_w, board_w=board_w, known=run.state.points)
    ratio = tuner.best(run.state.points, run.state.full_w, board_w).ratio
    kept_s, kept = again.timeline[-1]
    again_s = kept_s if kept == ratio < 1 else again.settled_s
    return LearnedLimit(ratio, run.settled_s, min(run.settled_s, again_s))


def _response(known: Mapping[float, tuple[float, float]]) -> Response:
    def response(ratio: float) -> tuple[float, float]:
        return known[ratio] if ratio < 1 else (1.0, 1.0)

    return response
