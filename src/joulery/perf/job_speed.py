"""Speed of a site's own kinds of training jobs by number and type of GPUs, learned from jobs that ended.

Two sources, never mixed for one kind. **Measured**: progress a second that one job reported on several numbers of GPUs.
**Learned**: elapsed times of ended jobs of the same owner and name, under the assumption that jobs of one name do equal
work. The assumption is checked twice: a ratio counts only where its interval is narrow, which it is not where lengths
vary, and :func:`backtest` counts the jobs whose time lies in the interval of the jobs before them.

Elapsed times are compared by their logarithms (ratios of geometric means; Welch's interval).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

LEVEL_RATIO = 0.9
"""Share of the outcomes that an interval is to contain."""
LEAST_JOBS = 3
"""Fewest ended jobs at one number and type of GPUs that a ratio rests on."""
_WIDEST = math.log(1.25)
"""A ratio that is not known to this factor counts as unknown."""
_T95 = (6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432, 1.8946)
"""Student's t at 95 % for 1 to 7 degrees of freedom (printed tables)."""
_Z95 = 1.6448536

Basis = Literal["measured", "learned"]


class EndedRun(NamedTuple):
    """A job that ended successfully.

    Attributes:
        kind: Name that similar jobs share.
        gpu_type: Type of its GPUs; empty where unknown.
        gpus: Number of its GPUs.
        value: The value to compare: elapsed seconds, or watts; above 0.
        start_s, end_s: Unix seconds.
    """

    kind: str
    gpu_type: str
    gpus: int
    value: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LearnedRatio:
    """A ratio with its 90 % interval.

    Attributes:
        ratio: The ratio.
        low, high: The interval; NaN for a single job.
        jobs, kinds: Numbers of jobs and kinds behind it.
        basis: ``measured`` or ``learned``.
    """

    ratio: float
    low: float
    high: float
    jobs: int
    kinds: int = 1
    basis: Basis = "learned"


SpeedUps = Mapping[int, LearnedRatio]
"""Speed by number of GPUs, relative to that on the smallest known number, which has the ratio 1."""


@dataclass(frozen=True, slots=True)
class IntervalCheck:
    """Count of values in the interval of earlier values of their kind, type and number of GPUs.

    Attributes:
        inside, checked: Values within their interval, and all values that had enough earlier ones.
    """

    inside: int
    checked: int

    @property
    def reliable(self) -> bool | None:
        """False where fewer values lie within than chance explains (two standard errors); None below 20 values."""
        if self.checked < 20:
            return None
        error = math.sqrt(LEVEL_RATIO * (1.0 - LEVEL_RATIO) / self.checked)
        return self.inside / self.checked >= LEVEL_RATIO - 2.0 * error


def t95(freedom: float) -> float:
    """Student's t at 95 % for at least 1 degree of freedom (rounded down), to 0.2 %."""
    whole = max(1, int(freedom))
    if whole <= len(_T95):
        return _T95[whole - 1]
    z = _Z95
    return z + (z**3 + z) / (4 * whole) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * whole**2)


def learned_speedups(runs: Iterable[EndedRun]) -> dict[tuple[str, str], SpeedUps]:
    """Speed-up of each kind on each type of GPU, where two numbers of GPUs or more are known well enough.

    Returns:
        By kind and type.
    """
    found: dict[tuple[str, str], SpeedUps] = {}
    grouped: dict[tuple[str, str], dict[int, _LogMean]] = {}
    for (kind, gpu_type, gpus), seen in _log_means(runs).items():
        if seen.n >= LEAST_JOBS:
            grouped.setdefault((kind, gpu_type), {})[gpus] = seen
    for key, by_gpus in grouped.items():
        base = min(by_gpus)
        ratios = {gpus: _ratio(by_gpus[base], seen) for gpus, seen in sorted(by_gpus.items()) if gpus != base}
        known = {gpus: ratio for gpus, ratio in ratios.items() if ratio is not None}
        if known:
            found[key] = {base: LearnedRatio(1.0, 1.0, 1.0, by_gpus[base].n), **known}
    return found


def measured_speedups(rates: Iterable[tuple[str, Mapping[int, float]]]) -> dict[str, SpeedUps]:
    """Speed-up of each kind from progress a second that its jobs reported on several numbers of GPUs.

    Args:
        rates: Kind, and progress a second by number of GPUs, of each job.
    """
    logs: dict[str, dict[tuple[int, int], list[float]]] = {}
    for kind, by_gpus in rates:
        known = {gpus: rate for gpus, rate in by_gpus.items() if 0 < rate < math.inf}
        base = min(known, default=0)
        for gpus in known.keys() - {base}:
            logs.setdefault(kind, {}).setdefault((base, gpus), []).append(math.log(known[gpus] / known[base]))
    found: dict[str, SpeedUps] = {}
    for kind, pairs in logs.items():
        # Jobs may have begun on different numbers: those of the commonest smallest one are compared.
        counts = Counter({base: 0 for base, _ in pairs})
        for (base, _), values in pairs.items():
            counts[base] += len(values)
        base = max(counts, key=lambda one: (counts[one], -one))
        ratios = {gpus: _measured(values) for (one, gpus), values in sorted(pairs.items()) if one == base}
        most = max(ratio.jobs for ratio in ratios.values())
        found[kind] = {base: LearnedRatio(1.0, 1.0, 1.0, most, basis="measured"), **ratios}
    return found


def type_ratios(runs: Sequence[EndedRun], *, faster_is_more: bool = True) -> dict[str, LearnedRatio]:
    """Speed of each GPU type relative to the type with most jobs, from kinds that ran on both with equally many GPUs.

    Args:
        runs: Elapsed times; with ``faster_is_more`` False other values, such as watts, whose ratio is not inverted.

    Returns:
        Ratio by type, 1 for the reference type; types that no kind compares with it well enough are left out.
    """
    counts = Counter(run.gpu_type for run in runs if run.gpu_type)
    if not counts:
        return {}
    reference = min(counts, key=lambda name: (-counts[name], name))
    means = _log_means(runs)
    pairs: dict[str, list[tuple[_LogMean, _LogMean, str]]] = {}
    for (kind, gpu_type, gpus), seen in means.items():
        other = means.get((kind, reference, gpus))
        if gpu_type not in ("", reference) and other and min(seen.n, other.n) >= LEAST_JOBS:
            pairs.setdefault(gpu_type, []).append((other, seen, kind))
    found = {reference: LearnedRatio(1.0, 1.0, 1.0, counts[reference])}
    for gpu_type, both in sorted(pairs.items()):
        ratio = _pooled(both, 1.0 if faster_is_more else -1.0)
        if ratio is not None:
            found[gpu_type] = ratio
    return found


def backtest(runs: Iterable[EndedRun]) -> IntervalCheck:
    """Check each value against the interval of the values of its kind, type and number of GPUs known at its start."""
    ended: list[tuple[float, int, EndedRun]] = []
    known: dict[tuple[str, str, int], _LogMean] = {}
    inside = checked = 0
    for number, run in enumerate(sorted(runs, key=lambda run: run.start_s)):
        while ended and ended[0][0] <= run.start_s:
            before = heapq.heappop(ended)[2]
            key = before.kind, before.gpu_type, before.gpus
            known[key] = known.get(key, _LogMean()).with_value(before.value)
        seen = known.get((run.kind, run.gpu_type, run.gpus))
        if seen is not None and seen.n >= LEAST_JOBS:
            half = t95(seen.n - 1) * math.sqrt(seen.variance * (1.0 + 1.0 / seen.n))
            checked += 1
            # Whole seconds: a kind whose jobs all took the same has no spread, and a second more is no surprise.
            inside += abs(math.log(run.value) - seen.mean) <= half + 1.0 / run.value
        heapq.heappush(ended, (run.end_s, number, run))
    return IntervalCheck(inside, checked)


class _LogMean(NamedTuple):
    """Mean and sum of squared deviations of logarithms (Welford)."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_value(self, value: float) -> _LogMean:
        log = math.log(value)
        mean = self.mean + (log - self.mean) / (self.n + 1)
        return _LogMean(self.n + 1, mean, self.squares + (log - self.mean) * (log - mean))

    @property
    def variance(self) -> float:
        return self.squares / (self.n - 1)


def _log_means(runs: Iterable[EndedRun]) -> dict[tuple[str, str, int], _LogMean]:
    found: dict[tuple[str, str, int], _LogMean] = {}
    for run in runs:
        key = run.kind, run.gpu_type, run.gpus
        found[key] = found.get(key, _LogMean()).with_value(run.value)
    return found


def _ratio(base: _LogMean, seen: _LogMean) -> LearnedRatio | None:
    """Values of ``base`` over those of ``seen``; None where the ratio is not known well enough."""
    half = _half(base, seen)
    if half > _WIDEST:
        return None
    log = base.mean - seen.mean
    return LearnedRatio(math.exp(log), math.exp(log - half), math.exp(log + half), base.n + seen.n)


def _half(one: _LogMean, other: _LogMean) -> float:
    """Half of Welch's interval of the difference of two means."""
    parts = (one.variance / one.n, other.variance / other.n)
    if sum(parts) == 0.0:
        return 0.0
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (one.n - 1) + parts[1] ** 2 / (other.n - 1))
    return t95(freedom) * math.sqrt(sum(parts))


def _measured(logs: Sequence[float]) -> LearnedRatio:
    mean = math.fsum(logs) / len(logs)
    if len(logs) == 1:
        return LearnedRatio(math.exp(mean), math.nan, math.nan, 1, basis="measured")
    spread = math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1))
    half = t95(len(logs) - 1) * spread / math.sqrt(len(logs))
    return LearnedRatio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs), basis="measured")


def _pooled(pairs: Sequence[tuple[_LogMean, _LogMean, str]], sign: float) -> LearnedRatio | None:
    """Pool several kinds into one ratio; from three kinds on, their spread determines the interval."""
    jobs, kinds = sum(base.n + seen.n for base, seen, _ in pairs), len({kind for *_, kind in pairs})
    logs: dict[str, list[float]] = {}
    for base, seen, kind in pairs:
        logs.setdefault(kind, []).append(sign * (base.mean - seen.mean))
    each = [math.fsum(values) / len(values) for values in logs.values()]
    if len(each) >= LEAST_JOBS:
        found = _measured(each)
        log, half = math.log(found.ratio), math.log(found.high / found.ratio)
    else:
        halves = [_half(base, seen) for base, seen, _ in pairs]
        log, half = math.fsum(each) / len(each), max(halves)
    if half > _WIDEST:
        return None
    return LearnedRatio(math.exp(log), math.exp(log - half), math.exp(log + half), jobs, kinds)
