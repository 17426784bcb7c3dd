"""Statistics of language models: recent arrivals and answers, and the totals of a run."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from joulery.domain.quality import Quality, weakest
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.generation import GenerationCost

SPAN_S = 60.0
"""Length of the window, s."""
_MIN_SPAN_S = 10.0
"""A rate is averaged over at least this: one request in the first second is not one request a second."""
_MAX_KEPT = 2048


class RecentAnswer(NamedTuple):
    """One answer.

    Attributes:
        end_s: Its end, Unix seconds.
        latency_s: From arrival to end, s.
        work_s: Its time in the engine, seconds at full clock.
        energy_j: Energy charged, J; None where unknown.
    """

    end_s: float
    latency_s: float
    work_s: float
    energy_j: float | None


class RecentTraffic:
    """Arrivals and answers of the last :data:`SPAN_S` seconds; at most the latest 2,048 of each."""

    def __init__(self) -> None:
        self._arrivals_s: deque[float] = deque(maxlen=_MAX_KEPT)
        self._served: deque[RecentAnswer] = deque(maxlen=_MAX_KEPT)
        self._first_s: float | None = None

    def arrived(self, at_s: float) -> None:
        """A request was accepted, Unix seconds."""
        self._first_s = at_s if self._first_s is None else self._first_s
        self._arrivals_s.append(at_s)

    def answered(self, end_s: float, latency_s: float, work_s: float, energy_j: float | None) -> None:
        """A request was answered to its end."""
        self._served.append(RecentAnswer(end_s, latency_s, work_s, energy_j))

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

    def figures(self) -> dict[str, Any]:
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
        }


class LLMUsage:
    """Totals of a run's requests, by model.

    Args:
        owners: The owner of each model.
    """

    def __init__(self, owners: Mapping[str, str]) -> None:
        self._owners = dict(owners)
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
            {"model": model, "owner": self._owners[model], **account.figures()}
            for model, account in self._accounts.items()
        ]
