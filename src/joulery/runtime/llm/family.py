"""Choose the model of a family of language models that gets the next request for the family."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from joulery.domain.decisions import Decision, Step
from joulery.domain.serving.engine import Outcome, RequestError, RequestRecord
from joulery.domain.serving.mix import MixCounter, MixStep, VariantMix
from joulery.domain.serving.service import Slo
from joulery.policies.serving.variants.language_family import FamilySeen, FamilyState, LanguageFamilyPolicy, ModelSeen
from joulery.runtime.llm.service import LLMService
from joulery.runtime.llm.statistics import RecentAnswer
from joulery.runtime.session.driver import ADVISED, APPLIED, LiveDriver
from joulery.runtime.session.history import SessionHistory

_ENOUGH = 10
"""Fewest answers for a latency quantile."""
_MEASURED = 30
"""Fewest answers for a mean of joules."""
_REMEMBERED = 200
"""Answers after which older ones fade from a mean of joules."""
_STALE_S = 3600.0
"""A mean of joules without a newer answer is measured again after this."""
_ASIDE_S = 5.0
"""Time for which a model gets no requests after it could not answer one."""


class _MeanEnergy:
    """Mean joules per answer of one model, over the latest answers."""

    def __init__(self) -> None:
        self._count, self._mean_j, self._latest_s = 0, 0.0, -math.inf

    def add(self, answers: Sequence[RecentAnswer]) -> None:
        """Count the answers that ended since the last call."""
        for one in answers:
            if one.energy_j is not None and one.end_s > self._latest_s:
                self._count += 1
                self._mean_j += (one.energy_j - self._mean_j) / min(self._count, _REMEMBERED)
        self._latest_s = max((one.end_s for one in answers), default=self._latest_s)

    def mean_j(self, now_s: float) -> float:
        """The mean; NaN with too few answers, or without a recent one."""
        if now_s - self._latest_s > _STALE_S:
            self._count = 0
        return self._mean_j if self._count >= _MEASURED else math.nan


class LanguageFamily:
    """Distributes the requests of one family over its models.

    Args:
        policy: Decides on the shares.
        models: The services of its models, by name.
        g_per_kwh: Intensity at a time, Unix seconds; NaN while unknown.
        acts: Whether decisions are carried out; else the most accurate model answers everything.
        clock: Monotonic seconds.

    Attributes:
        answered: Answers by model, of requests for the family.
        owner: Owner of its most accurate model.
        refused: Requests refused because no model would have begun to answer within the SLO of the first token.
    """

    def __init__(
        self,
        policy: LanguageFamilyPolicy,
        models: Mapping[str, LLMService],
        g_per_kwh: Callable[[float], float],
        *,
        acts: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy, self.models, self.acts = policy, dict(models), acts
        self.answered: Counter[str] = Counter()
        self.owner = self.models[policy.best].owner
        self._g_per_kwh, self._clock = g_per_kwh, clock
        self._counter = MixCounter()
        self._energy = {name: _MeanEnergy() for name in self.models}
        self._aside_s: dict[str, float] = {}
        self.refused = self._first_tokens = self._first_in_time = 0
        self._set({policy.best: 1.0})

    @property
    def name(self) -> str:
        """Its name for clients."""
        return self.policy.service

    @property
    def accuracy_ratio(self) -> float:
        """Mean accuracy of its answers, as declared; NaN without answers."""
        total = self.answered.total()
        accuracy = self.policy.accuracy_ratio
        return math.fsum(n * accuracy[name] for name, n in self.answered.items()) / total if total else math.nan

    def choose(self) -> list[str]:
        """The models that may answer the next request: the one whose turn it is, then the others by their wait.

        With an SLO of the first token those that keep it come first.

        Raises:
            RequestError: No model would begin to answer within that SLO; the error states when to retry.
        """
        now_s = self._clock()
        chosen = self._counter.choose(self._main, self.models, 0, 0.0)
        up = {name for name in self.models if self._is_up(name, now_s)}
        others = sorted((name for name in self.models if name != chosen), key=lambda name: (self._wait_s(name), name))
        ranked = sorted((chosen, *others), key=lambda name: name not in up)  # a stable sort
        ttft = self.policy.ttft
        return ranked if ttft is None or not self.acts else self._within(ranked, up, ttft)

    def failed(self, model: str) -> None:
        """Send a model's requests to the others for a while, because it could not answer one."""
        self._aside_s[model] = self._clock()

    def ended(self, record: RequestRecord, first_token_s: float = math.nan) -> None:
        """Count a request of the family that has ended, under the name of the model that answered.

        Args:
            record: The request.
            first_token_s: When its first token came, Unix seconds; NaN for never.
        """
        ttft = self.policy.ttft
        if ttft is not None and not math.isnan(first_token_s):
            self._first_tokens += 1
            self._first_in_time += first_token_s - record.arrival_s <= ttft.latency_s
        if record.outcome is Outcome.OK:
            self.answered[record.service] += 1

    def observe(self, now_s: float) -> FamilySeen:
        """The observation for its policy."""
        return FamilySeen(
            now_s, self._g_per_kwh(now_s), tuple(self._observe_model(name, now_s) for name in self.models)
        )

    def driver(self, history: SessionHistory) -> LiveDriver[FamilyState, FamilySeen]:
        """The loop that steps its policy once a second."""

        def watch(seen: FamilySeen, step: Step[FamilyState]) -> None:
            history.add_step(self.name, seen, step)

        return LiveDriver(self.policy, self.observe, self._act, watch=watch, record=history.add_decision)

    def summary(self) -> dict[str, Any]:
        """JSON-ready: the share of answers by model, and their mean accuracy."""
        total = self.answered.total()
        return {
            "family": self.name,
            "owner": self.owner,
            "answered": total,
            "variants": {name: self.answered[name] / total for name in self.models} if total else {},
            "accuracy_ratio": self.accuracy_ratio if total else None,
            **self._ttft_figures(),
        }

    def _ttft_figures(self) -> dict[str, Any]:
        """Attainment of the SLO of the first token; nothing without one."""
        ttft = self.policy.ttft
        if ttft is None:
            return {}
        kept = self._first_in_time / self._first_tokens if self._first_tokens else None
        return {
            "ttft_slo_s": ttft.latency_s,
            "ttft_quantile": ttft.quantile,
            "ttft_attainment_ratio": kept,
            "ttft_slo_met": kept is not None and kept >= ttft.quantile,
            "refused": self.refused,
        }

    async def _act(self, decision: Decision) -> tuple[str, str]:
        if not self.acts:
            return ADVISED, f"{self.policy.best} answers every request"
        self._set(decision.value)
        return APPLIED, "from the next request on"

    def _set(self, shares: Mapping[str, float]) -> None:
        self._main = max(shares, key=lambda name: shares[name])
        weights = tuple((name, share) for name, share in shares.items() if name != self._main)
        self._counter.mix = VariantMix((MixStep(1.0, 0.0, weights),) if weights else ())

    def _is_up(self, name: str, now_s: float) -> bool:
        return self.models[name].engine.ready and now_s - self._aside_s.get(name, -math.inf) >= _ASIDE_S

    def _wait_s(self, name: str) -> float:
        llm = self.models[name]
        return llm.waiting * llm.forecaster.average_s / llm.settings.max_num_seqs

    def _observe_model(self, name: str, now_s: float) -> ModelSeen:
        llm = self.models[name]
        answers = llm.traffic.served(now_s)
        energy = self._energy[name]
        energy.add(answers)
        ttft, now = self.policy.ttft, self._clock()
        first_s = math.nan if ttft is None else llm.first_tokens.quantile_s(ttft.quantile, now)
        quantile = self.policy.objectives.slo.quantile
        latencies_s = [one.latency_s for one in answers]
        return ModelSeen(
            name,
            ready=self._is_up(name, self._clock()),
            energy_j=energy.mean_j(now_s),
            latency_s=float(np.quantile(latencies_s, quantile)) if len(latencies_s) >= _ENOUGH else math.nan,
            wait_s=self._wait_s(name),
            ttft_s=first_s,
            expected_ttft_s=math.nan if ttft is None else self._expected_s(name, ttft),
        )

    def _expected_s(self, name: str, ttft: Slo) -> float:
        """The time to the first token of a request that arrives now, at the SLO's quantile; 0 at an idle model."""
        llm = self.models[name]
        if llm.idle:
            return 0.0  # nothing could make it faster, and its next first token shows what it takes
        return max(0.0, llm.predicted_wait_s() + llm.first_tokens.margin_s(ttft.quantile, self._clock()))

    def _within(self, names: Sequence[str], up: Collection[str], ttft: Slo) -> list[str]:
        """The models that answer within the SLO of the first token, the first choice first; then the others.

        Another model than the one whose turn it is answers only where the accuracy floor stays kept.

        Raises:
            RequestError: No model would answer within the SLO.
        """
        expected = {name: self._expected_s(name, ttft) for name in names if name in up}
        inside = [
            name
            for name, first_s in expected.items()
            if first_s <= ttft.latency_s and (name == names[0] or self._keeps_floor(name))
        ]
        if not inside and expected:
            self.refused += 1
            over_s = min(expected.values()) - ttft.latency_s
            raise RequestError(
                f"{self.name} could not begin to answer this request within its SLO of {ttft.latency_s:g} s",
                Outcome.OVERLOADED,
                retry_after_s=max(over_s, 0.0),
            )
        return [*inside, *(name for name in names if name not in inside)]

    def _keeps_floor(self, name: str) -> bool:
        """Whether one more answer of a model leaves the mean accuracy at the floor or above."""
        accuracy, count = self.policy.accuracy_ratio, self.answered.total()
        floor = self.policy.objectives.minimum_accuracy_ratio
        total = math.fsum(n * accuracy[one] for one, n in self.answered.items()) + accuracy[name]
        return total >= (floor - 1e-12) * (count + 1)


def family_of(families: Sequence[LanguageFamily], name: str) -> LanguageFamily | None:
    """The family with a name; None where there is none."""
    return next((one for one in families if one.name == name), None)
