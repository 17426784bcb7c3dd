"""What the language models of a run were asked and what that took: kept as requests end, told at its end."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from joulery.domain.quality import Quality, weakest
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.generation import GenerationCost


@dataclass(slots=True)
class _Account:
    """One model's requests so far.

    Attributes:
        requests, failed: How many ended, and how many of them without an answer.
        latency_s: Of the answers, s.
        prompt_tokens, completion_tokens: Read and written.
        charged, charged_tokens: Answers whose joules are known, and tokens written for known joules.
        energy_j, carbon_g: Known ones, of what failed too; grams None until some are known.
        qualities: Of the joules.
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
        """As numbers; NaN where nothing is known."""
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
    """Counts the requests of language models.

    Args:
        owners: Whom each model is charged to.
    """

    def __init__(self, owners: Mapping[str, str]) -> None:
        self._owners = dict(owners)
        self._accounts = {model: _Account() for model in owners}

    def request(self, record: RequestRecord) -> None:
        """A request has ended; one that named no model of these is nobody's."""
        account = self._accounts.get(record.service)
        if account is None:
            return
        account.requests += 1
        if record.outcome is Outcome.OK:
            account.latency_s.append(record.latency_s)
        else:
            account.failed += 1

    def took(self, model: str, record: RequestRecord, cost: GenerationCost) -> None:
        """What a request took that an engine had, answered or not."""
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
        """An entry a model.

        ``energy_j`` is what its requests were charged, failed ones included; ``energy_per_request_j`` divides it by the
        answers whose joules are known, ``energy_per_token_j`` by the tokens written for it. NaN: not known.
        """
        return [
            {"model": model, "owner": self._owners[model], **account.figures()}
            for model, account in self._accounts.items()
        ]
