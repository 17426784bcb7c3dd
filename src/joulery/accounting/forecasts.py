"""Forecasts for jobs with an interval, and scores of their outcomes.

An interval is split-conformal (Vovk et al., 2005): the errors of the last forecasts of the same kind, in order, give
the quantiles. If errors to come are like those of the past it contains the outcome in nine of ten cases, whatever their
distribution; whether it did is counted, so that a wrong interval is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

LEVEL_RATIO = 0.9
"""Share of the outcomes that an interval is to contain."""
KEPT_SCORES = 400
"""Number of errors that are kept of each kind."""
OFFSETS: Mapping[str, float] = MappingProxyType({"start": 300.0, "end": 300.0, "grams": 1.0})
"""Kinds, with the offset added to a forecast before errors are divided by it: seconds, seconds, grams."""


@dataclass(frozen=True, slots=True)
class JobForecast:
    """A forecast for a job.

    Attributes:
        kind: ``start`` and ``end``: seconds from ``made_s`` on; ``grams``: those still to come.
        made_s: Time of the forecast, Unix seconds.
        amount: The expected amount.
        low, high: The interval; NaN while too few outcomes are known.
        before: Grams that the job had caused until then; 0 for other kinds.
    """

    kind: str
    made_s: float
    amount: float
    low: float = field(default=float("nan"))
    high: float = field(default=float("nan"))
    before: float = 0.0


@dataclass(frozen=True, slots=True)
class ForecastScore:
    """The score of a forecast against its outcome.

    Attributes:
        kind: Its kind.
        error: Outcome less forecast, divided by the forecast and its offset.
        inside: Whether its interval contained the outcome; None where it had none.
    """

    kind: str
    error: float
    inside: bool | None


@dataclass(frozen=True, slots=True)
class ForecastCoverage:
    """Accuracy and interval coverage of the forecasts of one kind.

    Attributes:
        kind: The kind.
        checked: Number of known outcomes.
        with_interval: Number of those whose forecast had an interval.
        inside: Number of those within the interval.
        median_error: Median of the relative errors; NaN without any.
        reliable: False where fewer lie within than chance explains (two standard errors); None below 20 intervals.
    """

    kind: str
    checked: int
    with_interval: int
    inside: int
    median_error: float
    reliable: bool | None

    @property
    def coverage_ratio(self) -> float:
        """Share of the intervals that contained the outcome; NaN without any."""
        return self.inside / self.with_interval if self.with_interval else math.nan

    def as_dict(self) -> dict[str, Any]:
        """The coverage as a JSON-ready dictionary."""
        ratio, error = self.coverage_ratio, self.median_error
        return {
            **asdict(self),
            "coverage_ratio": None if math.isnan(ratio) else ratio,
            "median_error": None if math.isnan(error) else error,
            "level_ratio": LEVEL_RATIO,
        }


def with_interval(kind: str, amount: float, scores: Iterable[ForecastScore]) -> tuple[float, float]:
    """The interval of a forecast; NaN while fewer outcomes are known than it needs (19 for nine in ten).

    Args:
        kind: One of :data:`OFFSETS`.
        amount: The forecast, at least 0.
        scores: Scores of earlier forecasts, of any kind.
    """
    errors = sorted(score.error for score in scores if score.kind == kind)
    tail = (1.0 - LEVEL_RATIO) / 2.0
    low_at, high_at = math.floor((len(errors) + 1) * tail + 1e-9), math.ceil((len(errors) + 1) * (1.0 - tail) - 1e-9)
    if low_at < 1 or high_at > len(errors):
        return math.nan, math.nan
    scale = amount + OFFSETS[kind]
    return max(0.0, amount + errors[low_at - 1] * scale), max(0.0, amount + errors[high_at - 1] * scale)


def scored(forecast: JobForecast, outcome: float) -> ForecastScore:
    """The score of a forecast whose outcome is known, in the same unit."""
    error = (outcome - forecast.amount) / (forecast.amount + OFFSETS[forecast.kind])
    inside = None if math.isnan(forecast.low) else bool(forecast.low <= outcome <= forecast.high)
    return ForecastScore(forecast.kind, error, inside)


def kept(scores: Sequence[ForecastScore], score: ForecastScore) -> tuple[ForecastScore, ...]:
    """The scores with one more, the oldest of its kind dropped where there are too many."""
    own = [at for at, other in enumerate(scores) if other.kind == score.kind]
    drop = own[0] if len(own) >= KEPT_SCORES else -1
    return (*(other for at, other in enumerate(scores) if at != drop), score)


def coverage(scores: Sequence[ForecastScore]) -> tuple[ForecastCoverage, ...]:
    """The accuracy and interval coverage of the forecasts of each kind."""
    return tuple(_coverage(kind, [score for score in scores if score.kind == kind]) for kind in OFFSETS)


def _coverage(kind: str, scores: Sequence[ForecastScore]) -> ForecastCoverage:
    judged = [score.inside for score in scores if score.inside is not None]
    inside = sum(judged)
    reliable = None
    if len(judged) >= _LEAST_JUDGED:
        error = math.sqrt(LEVEL_RATIO * (1.0 - LEVEL_RATIO) / len(judged))
        reliable = inside / len(judged) >= LEVEL_RATIO - 2.0 * error
    errors = sorted(score.error for score in scores)
    middle = math.nan
    if errors:
        half = len(errors) // 2
        middle = errors[half] if len(errors) % 2 else (errors[half - 1] + errors[half]) / 2.0
    return ForecastCoverage(kind, len(scores), len(judged), inside, middle, reliable)


_LEAST_JUDGED = 20
