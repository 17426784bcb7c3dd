"""Statistics of language models: recent arrivals and answers, and the totals of a run."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.quality import Quality, weakest
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.generation import EngineLoad, GenerationCost
from joulery.domain.serving.service import Slo
from joulery.perf.lengths.step_time import StepTimes
from joulery.policies.clocks.governor import late_budget

SPAN_S = 60.0
"""Length of the window, s."""
_MIN_SPAN_S = 10.0
"""A rate is averaged over at least this: one request in the first second is not one request a second."""
_MAX_KEPT = 2048
_COUNTED = 1000
"""Latest answers whose share within the SLO is counted."""
_STEP_WINDOW_S = 0.25
"""Least time over which a step is observed, s."""
_REPORT_LASTS_S, _REPORT_HALF_LIFE_S = 5.0, 10.0
_LAG_RATIO = 0.05
"""Tokens still on their way to joulery: a smaller difference from the engine's own count is no other client."""
_MOST_TOKENS_A_STEP = 16
"""Speculative decoding generates a few tokens a step; a message of more holds several steps."""


class RecentAnswer(NamedTuple):
    """One answer.

    Attributes:
        end_s: Its end, Unix seconds.
        latency_s: From arrival to end, s.
        work_s: Its time in the engine, seconds at full clock.
        energy_j: Energy charged, J; None where unknown.
        tokens: Tokens generated; 0 where unknown.
    """

    end_s: float
    latency_s: float
    work_s: float
    energy_j: float | None
    tokens: int = 0


class RecentTraffic:
    """Arrivals and answers of the last :data:`SPAN_S` seconds; at most the latest 2,048 of each."""

    def __init__(self) -> None:
        self._arrivals_s: deque[float] = deque(maxlen=_MAX_KEPT)
        self._served: deque[RecentAnswer] = deque(maxlen=_MAX_KEPT)
        self._first_s: float | None = None
        self._latencies_s: deque[float] = deque(maxlen=_COUNTED)

    def late_budget(self, slo: Slo) -> float:
        """Further answers that may be late within the SLO, by the latest ones."""
        late = sum(latency_s > slo.latency_s for latency_s in self._latencies_s)
        return late_budget(len(self._latencies_s), late, slo.quantile)

    def missed(self) -> None:
        """A request ended without an answer, at its deadline."""
        self._latencies_s.append(math.inf)

    def arrived(self, at_s: float) -> None:
        """A request was accepted, Unix seconds."""
        self._first_s = at_s if self._first_s is None else self._first_s
        self._arrivals_s.append(at_s)

    def answered(self, end_s: float, latency_s: float, work_s: float, energy_j: float | None, tokens: int = 0) -> None:
        """A request was answered to its end."""
        self._served.append(RecentAnswer(end_s, latency_s, work_s, energy_j, tokens))
        self._latencies_s.append(latency_s)

    def served(self, now_s: float) -> tuple[RecentAnswer, ...]:
        """The answers of the window, by their end."""
        while self._served and self._served[0].end_s < now_s - SPAN_S:
            self._served.popleft()
        return tuple(self._served)

    def rate_rps(self, now_s: float) -> float:
        """Arrivals a second over the window; 0 without arrivals."""
        if self._first_s is None:
            return 0.0
        while self._arrivals_s and self._arrivals_s[0] < now_s - SPAN_S:
            self._arrivals_s.popleft()
        seen_s = min(SPAN_S, max(now_s - self._first_s, _MIN_SPAN_S))
        if len(self._arrivals_s) == _MAX_KEPT:
            seen_s = max(now_s - self._arrivals_s[0], 1e-3)
        return len(self._arrivals_s) / seen_s


class EngineReports:
    """What an engine reports of its load, beside the tokens that joulery's own requests got from it.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._load: EngineLoad | None = None
        self._read_s = -math.inf
        self._own = self._own_before = 0
        self._own_tokens = self._all_tokens = 0.0

    @property
    def load(self) -> EngineLoad | None:
        """The latest report; None without one, or when it is older than :data:`_REPORT_LASTS_S`."""
        return self._load if self._clock() - self._read_s <= _REPORT_LASTS_S else None

    @property
    def own_ratio(self) -> float:
        """Share of the tokens generated lately that went to joulery's requests; 1 where no report says otherwise."""
        if not self._all_tokens > 0:
            return 1.0
        ratio = self._own_tokens / self._all_tokens
        return 1.0 if ratio >= 1.0 - _LAG_RATIO else ratio

    def generated(self, tokens: int) -> None:
        """Tokens of joulery's requests arrived."""
        self._own += tokens

    def add(self, load: EngineLoad | None) -> None:
        """A new report; None where there was none."""
        if load is None:
            return
        now_s, before = self._clock(), self._load
        made = math.nan if before is None else load.generated_tokens - before.generated_tokens
        if made >= 0:  # else the engine was started again
            kept = 0.5 ** ((now_s - self._read_s) / _REPORT_HALF_LIFE_S)
            self._all_tokens = kept * self._all_tokens + made
            self._own_tokens = kept * self._own_tokens + self._own - self._own_before
        self._load, self._read_s, self._own_before = load, now_s, self._own


class StepObserver:
    """Learns the time of a step of continuous batching from the tokens of all requests as they arrive.

    A step generates one token of each running request, so a step takes the time of all of them over their tokens.

    Args:
        times: Learns from each observation.
        clock: Monotonic seconds.
        work_s: Seconds of work at the highest clock so far (:class:`ProgressClock`).

    Attributes:
        others: Sequences of other clients in the batch.
    """

    def __init__(self, times: StepTimes, clock: Callable[[], float], work_s: Callable[[], float]) -> None:
        self.times = times
        self._clock, self._work_s = clock, work_s
        self.others = 0.0
        self._kv: dict[int, float] = {}
        self._kv_sum = 0.0
        self._begin()

    @property
    def running(self) -> int:
        """Requests whose answers have begun."""
        return len(self._kv)

    def began(self, number: int, prompt_tokens: int) -> None:
        """The first token of an answer has arrived."""
        if not self._kv:
            self._begin()
        self._advance()
        self._kv[number] = float(prompt_tokens)
        self._kv_sum += prompt_tokens

    def generated(self, number: int, tokens: int) -> None:
        """Further tokens of an answer have arrived; many at once are a whole answer, which shows no steps."""
        if number not in self._kv:
            return
        if tokens > _MOST_TOKENS_A_STEP:
            self.ended(number)
            return
        self._advance()
        self._kv[number] += tokens
        self._kv_sum += tokens
        self._tokens += tokens
        seconds = self._at_s - self._since_s
        if seconds >= _STEP_WINDOW_S and self._tokens >= 2 * self._sequence_s / seconds:
            self._observe(seconds)

    def ended(self, number: int) -> None:
        """An answer has ended, or broken off."""
        self._advance()
        self._kv_sum -= self._kv.pop(number, 0.0)

    def _begin(self) -> None:
        self._since_s = self._at_s = self._clock()
        self._since_work_s = self._work_s()
        self._sequence_s = self._kv_s = 0.0
        self._tokens = 0

    def _advance(self) -> None:
        now_s = self._clock()
        passed_s, self._at_s = now_s - self._at_s, now_s
        self._sequence_s += passed_s * len(self._kv)
        self._kv_s += passed_s * self._kv_sum

    def _observe(self, seconds: float) -> None:
        worked_s = self._work_s() - self._since_work_s
        slowdown = max(1.0, seconds / worked_s) if worked_s > 0 else 1.0
        own = max(1.0, self._sequence_s / seconds)
        kv = max(self._kv_s / seconds, 0.0) * (1.0 + self.others / own)
        self.times.observe(self._sequence_s / self._tokens, own + self.others, kv, slowdown)
        self._begin()


@dataclass(slots=True)
class _Account:
    """Totals of one model.

    Attributes:
        requests, failed: Requests that ended, and those of them without an answer.
        latency_s: Latencies of the answers, s.
        prompt_tokens, completion_tokens: Tokens read and generated.
        charged, charged_tokens: Answers of known energy, and tokens generated for known energy.
        energy_j, carbon_g: Known energy and carbon, failed requests included; grams None until some are known.
        qualities: Qualities of the energy.
    """

    requests: int = 0
    failed: int = 0
    latency_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    charged: int = 0
    charged_tokens: int = 0
    energy_j: float = 0.0
    carbon_g: float | None = None
    qualities: set[Quality] = field(default_factory=set)

    def figures(self, slo: Slo | None) -> dict[str, Any]:
        """The totals as a mapping; NaN where unknown."""
        latency_s = np.array(self.latency_s)
        p50_s, p95_s = np.quantile(latency_s, (0.5, 0.95)).tolist() if len(latency_s) else (math.nan, math.nan)
        known = bool(self.qualities)
        return {
            "requests": self.requests,
            "failed": self.failed,
            "p50_s": p50_s,
            "p95_s": p95_s,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "charged_requests": self.charged,
            "energy_j": self.energy_j if known else math.nan,
            "energy_per_request_j": self.energy_j / self.charged if self.charged else math.nan,
            "energy_per_token_j": self.energy_j / self.charged_tokens if self.charged_tokens else math.nan,
            "quality": str(weakest(self.qualities)) if known else None,
            "carbon_g": math.nan if self.carbon_g is None else self.carbon_g,
            **({} if slo is None else _attainment(latency_s, slo)),
        }


def _attainment(latency_s: FloatArray, slo: Slo) -> dict[str, Any]:
    within = float(np.mean(latency_s <= slo.latency_s)) if len(latency_s) else math.nan
    return {
        "answered": len(latency_s),
        "late": int(np.count_nonzero(latency_s > slo.latency_s)),
        "slo_s": slo.latency_s,
        "slo_quantile": slo.quantile,
        "slo_met": within >= slo.quantile,
        "attainment_ratio": within,
    }


class LLMUsage:
    """Totals of a run's requests, by model.

    Args:
        owners: The owner of each model.
        slos: The latency SLO of each model, where it has one.
    """

    def __init__(self, owners: Mapping[str, str], slos: Mapping[str, Slo] | None = None) -> None:
        self._owners, self._slos = dict(owners), dict(slos or {})
        self._accounts = {model: _Account() for model in owners}

    def request(self, record: RequestRecord) -> None:
        """Count a request that has ended; requests for other models are ignored."""
        account = self._accounts.get(record.service)
        if account is None:
            return
        account.requests += 1
        if record.outcome is Outcome.OK:
            account.latency_s.append(record.latency_s)
        else:
            account.failed += 1

    def charge(self, model: str, record: RequestRecord, cost: GenerationCost) -> None:
        """Add the cost of a request that an engine got, answered or not."""
        account = self._accounts[model]
        account.prompt_tokens += cost.usage.prompt
        account.completion_tokens += cost.usage.completion
        if cost.energy is None:
            return
        account.energy_j += cost.energy.energy_j
        account.charged += record.outcome is Outcome.OK
        account.charged_tokens += cost.usage.completion
        account.qualities.add(cost.energy.quality)
        if cost.energy.carbon_g is not None:
            account.carbon_g = (account.carbon_g or 0.0) + cost.energy.carbon_g

    def figures(self) -> list[dict[str, Any]]:
        """One entry per model; NaN where unknown.

        ``energy_j`` is the energy charged to its requests, failed ones included; ``energy_per_request_j`` divides it by
        the answers of known energy, ``energy_per_token_j`` by the tokens generated for it.
        """
        return [
            {"model": model, "owner": self._owners[model], **account.figures(self._slos.get(model))}
            for model, account in self._accounts.items()
        ]
