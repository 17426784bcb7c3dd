"""Request shares of several language models: Clover's objective, a request at a time, within an SLO.

The models of a family answer the same requests with different accuracy and joules: a large and a small one, or two
precisions. All of them run; only the shares of the requests change. This saves joules of requests, not the idle power
of servers.

The objective is linear in the shares, so the best choice is one model, or two at the accuracy floor. The joules of an
answer are measured while serving; a model whose joules are not known yet answers a small share until they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import InfeasibleError
from joulery.domain.serving.mix import Weights
from joulery.domain.serving.service import Slo
from joulery.policies.serving.caution import CALM, Caution
from joulery.policies.serving.objective import (
    ServiceObjectives,
    accuracy_change_ratio,
    carbon_change_ratio,
    weigh,
)

SET_SHARES = "set_shares"
_MEASURED_SHARE = 0.1
"""Share of the requests that a model answers until its joules are known."""
_CALM_S = 30.0
"""Seconds without a threat before a model that was slow is chosen again; more with caution."""
_SETTLE_S = 5.0
_BETTER = 0.01
"""A change of the shares must raise the objective by this much, unless the SLO or the accuracy floor asks for it."""


@dataclass(frozen=True, slots=True)
class ModelSeen:
    """Observation of one model.

    Attributes:
        name: The model.
        ready: Whether its engine accepts requests.
        energy_j: Joules an answer, mean of the latest; NaN while unknown.
        latency_s: The SLO's quantile of its latest answers; NaN for too few.
        wait_s: Predicted wait for the engine of a request that arrives now.
        ttft_s: The SLO's quantile of its latest times to the first token; NaN for too few, or without such an SLO.
        expected_ttft_s: Predicted time to the first token of a request that arrives now; NaN without such an SLO.
    """

    name: str
    ready: bool = True
    energy_j: float = math.nan
    latency_s: float = math.nan
    wait_s: float = 0.0
    ttft_s: float = math.nan
    expected_ttft_s: float = math.nan


@dataclass(frozen=True, slots=True)
class FamilySeen:
    """Observation of a family.

    Attributes:
        now_s: Unix seconds.
        g_per_kwh: Carbon intensity; NaN while unknown.
        models: Observations of the family's models.
    """

    now_s: float
    g_per_kwh: float
    models: tuple[ModelSeen, ...]

    def as_dict(self) -> dict[str, Any]:
        """The observation as a JSON-ready dictionary; NaN is null."""
        models = [
            {name: None if value != value else value for name, value in asdict(one).items()} for one in self.models
        ]
        g_per_kwh = self.g_per_kwh if math.isfinite(self.g_per_kwh) else None
        return {"now_s": self.now_s, "g_per_kwh": g_per_kwh, "models": models}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FamilySeen:
        """The inverse of :meth:`as_dict`.

        Raises:
            KeyError, TypeError: ``data`` is not what ``as_dict`` writes.
        """
        models = tuple(_model_seen(one) for one in data["models"])
        g_per_kwh = math.nan if data["g_per_kwh"] is None else float(data["g_per_kwh"])
        return cls(float(data["now_s"]), g_per_kwh, models)


@dataclass(frozen=True, slots=True)
class FamilyState:
    """State of a :class:`LanguageFamilyPolicy`.

    Attributes:
        shares: The shares decided on; empty before the first decision.
        decided_s: Time of that decision.
        slow_s: Time of the last threat to the SLO by each model that threatened it.
        cautions: Caution about choosing each of these models again.
    """

    shares: Weights = ()
    decided_s: float = -math.inf
    slow_s: tuple[tuple[str, float], ...] = ()
    cautions: tuple[tuple[str, Caution], ...] = ()

    def slow(self, now_s: float) -> set[str]:
        """The models that are not to be chosen yet."""
        cautions = dict(self.cautions)
        return {name for name, at_s in self.slow_s if now_s - at_s < _CALM_S * cautions.get(name, CALM).at(now_s)}

    def chosen(self, shares: Weights, now_s: float) -> FamilyState:
        """The state with other shares: models that were slow are in doubt from now on."""
        back = {name for name, _ in shares} - {name for name, _ in self.shares}
        cautions = tuple((name, one.risked(now_s, _CALM_S) if name in back else one) for name, one in self.cautions)
        return replace(self, shares=shares, decided_s=now_s, cautions=cautions)


@dataclass(frozen=True, slots=True)
class LanguageFamilyPolicy:
    """Chooses the shares of a family's models.

    Attributes:
        service: The family.
        accuracy_ratio: Accuracy of each model, by name.
        objectives: Weight of carbon, SLO and accuracy floor.
        base_g_per_kwh: Intensity at which the most accurate model's grams are the baseline.
        ttft: SLO of the time to the first token; None for none.

    Raises:
        InfeasibleError: No model is as accurate as the objectives ask.
    """

    service: str
    accuracy_ratio: Mapping[str, float]
    objectives: ServiceObjectives
    base_g_per_kwh: float
    ttft: Slo | None = None

    name = "language-family"

    def __post_init__(self) -> None:
        best = max(self.accuracy_ratio.values())
        if best < self.objectives.minimum_accuracy_ratio:
            raise InfeasibleError(
                f"{self.service}: no model is as accurate as {self.objectives.minimum_accuracy_ratio:.2%}",
                binding="minimum_accuracy",
                nearest=best,
                hint=f"ask for at most {best:.2%}",
            )

    @property
    def best(self) -> str:
        """The most accurate model: the baseline."""
        return max(self.accuracy_ratio, key=lambda name: self.accuracy_ratio[name])

    def as_dict(self) -> dict[str, Any]:
        """The policy as a JSON-ready dictionary with all that is needed to repeat its decisions."""
        return {
            "service": self.service,
            "accuracy_ratio": dict(self.accuracy_ratio),
            "objectives": self.objectives.as_dict(),
            "base_g_per_kwh": self.base_g_per_kwh,
            **(
                {}
                if self.ttft is None
                else {"ttft": {"latency_s": self.ttft.latency_s, "quantile": self.ttft.quantile}}
            ),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LanguageFamilyPolicy:
        """The inverse of :meth:`as_dict`.

        Raises:
            KeyError, TypeError, ValueError: ``data`` is not what ``as_dict`` writes.
        """
        ttft = Slo(**data["ttft"]) if data.get("ttft") else None
        return cls(**{**data, "objectives": ServiceObjectives.from_dict(data["objectives"]), "ttft": ttft})

    def initial(self) -> FamilyState:
        """The state before the first decision."""
        return FamilyState()

    def step(self, state: FamilyState, observation: FamilySeen, /) -> Step[FamilyState]:
        """Decide on the shares."""
        seen = observation
        state = self._watched(state, seen)
        usable, cause = self._usable(state, seen)
        wanted, words = self._best(usable, seen)
        if not cause and state.shares:
            if seen.now_s - state.decided_s < _SETTLE_S:
                return Step(state)
            if not self._is_better(wanted, state.shares, usable, seen):
                return Step(state)
        if _same(wanted, state.shares):
            return Step(state)
        shown = ", ".join(f"{name} {100 * share:.3g} %" for name, share in wanted)
        kind = "threat" if cause else "objective"
        decision = Decision(SET_SHARES, self.service, dict(wanted), self.name, f"{cause or words}: {shown}", kind)
        return Step(state.chosen(wanted, seen.now_s), (decision,))

    def _watched(self, state: FamilyState, seen: FamilySeen) -> FamilyState:
        """The state with the models that threaten the SLO now."""
        limit_s, slow, cautions = self.objectives.slo.latency_s, dict(state.slow_s), dict(state.cautions)
        known = state.slow(seen.now_s)
        for one in seen.models:
            if one.wait_s > limit_s / 2 or one.latency_s > limit_s or self._begins_late(one):
                slow[one.name] = seen.now_s
                if one.name not in known:
                    cautions[one.name] = cautions.get(one.name, CALM).struck(seen.now_s)
        return replace(state, slow_s=tuple(sorted(slow.items())), cautions=tuple(sorted(cautions.items())))

    def _begins_late(self, one: ModelSeen) -> bool:
        """Whether a model misses the SLO of the first token, or would with the next request."""
        return self.ttft is not None and max_known(one.ttft_s, one.expected_ttft_s) > self.ttft.latency_s

    def _usable(self, state: FamilyState, seen: FamilySeen) -> tuple[list[ModelSeen], str]:
        """The models that may answer, and the reason why others that answer now may not; empty for none.

        Where none is left, the model with the shortest wait of those that are ready may answer.
        """
        slow = state.slow(seen.now_s)
        ready = [one for one in seen.models if one.ready] or list(seen.models)
        usable = [one for one in ready if one.name not in slow]
        if not usable:
            usable = [min(ready, key=lambda one: (one.wait_s, one.name))]
        if not self._keeps_floor(usable):  # the floor comes before the SLO
            usable = ready
        out = {name for name, _ in state.shares} - {one.name for one in usable}
        down = sorted(out - {one.name for one in ready})
        late = sorted(out - set(down))
        reasons = [f"{', '.join(down)} down"] * bool(down) + [f"{', '.join(late)} too slow for the SLO"] * bool(late)
        return usable, " and ".join(reasons)

    def _keeps_floor(self, usable: Sequence[ModelSeen]) -> bool:
        return max(self.accuracy_ratio[one.name] for one in usable) >= self.objectives.minimum_accuracy_ratio - 1e-12

    def _best(self, usable: Sequence[ModelSeen], seen: FamilySeen) -> tuple[Weights, str]:
        """The best shares, and the reason as text; models of unknown joules answer a part until these are known."""
        known = [one for one in usable if one.energy_j > 0]
        unknown = [one.name for one in usable if not one.energy_j > 0]
        if not known or self._base_j(seen) is None:
            main = max(usable, key=lambda one: self.accuracy_ratio[one.name]).name
            return self._with_trials(((main, 1.0),), [name for name in unknown if name != main]), "joules not known yet"
        best = max(self._mixes(known), key=lambda one: (self._score(one, known, seen), -len(one)))
        words = "joules of all models known" if not unknown else "joules not known yet"
        return self._with_trials(best, unknown), words

    def _with_trials(self, shares: Weights, unknown: Sequence[str]) -> Weights:
        """The shares with a small part for each model of unknown joules, as far as the accuracy floor allows."""
        mixed = dict(shares)
        for name in unknown:
            trial = {**{other: (1 - _MEASURED_SHARE) * share for other, share in mixed.items()}}
            trial[name] = trial.get(name, 0.0) + _MEASURED_SHARE
            if self._accuracy(tuple(trial.items())) >= self.objectives.minimum_accuracy_ratio - 1e-12:
                mixed = trial
        return tuple(sorted(mixed.items(), key=lambda one: (-one[1], one[0])))

    def _mixes(self, models: Sequence[ModelSeen]) -> list[Weights]:
        """Each model alone, and pairs whose accuracy is the floor; the most accurate one where none keeps it."""
        accuracy, floor = self.accuracy_ratio, self.objectives.minimum_accuracy_ratio
        names = [one.name for one in models]
        above = [name for name in names if accuracy[name] >= floor - 1e-12]
        found: list[Weights] = [((name, 1.0),) for name in above]
        for high in above:
            for low in (name for name in names if accuracy[name] < floor - 1e-12):
                part = (accuracy[high] - floor) / (accuracy[high] - accuracy[low])
                if part > 0:
                    found.append(((high, 1.0 - part), (low, part)))
        return found or [((max(names, key=lambda name: accuracy[name]), 1.0),)]

    def _accuracy(self, shares: Weights) -> float:
        return math.fsum(share * self.accuracy_ratio[name] for name, share in shares)

    def _base_j(self, seen: FamilySeen) -> float | None:
        found = next((one.energy_j for one in seen.models if one.name == self.best), math.nan)
        return found if found > 0 else None

    def _score(self, shares: Weights, models: Sequence[ModelSeen], seen: FamilySeen) -> float:
        """Clover's objective of shares among models of known joules."""
        energy, base_j = {one.name: one.energy_j for one in models}, self._base_j(seen)
        assert base_j is not None  # asked before
        g_per_kwh = seen.g_per_kwh if math.isfinite(seen.g_per_kwh) else self.base_g_per_kwh
        spent = math.fsum(share * energy[name] for name, share in shares) * max(0.0, g_per_kwh)
        accuracy = accuracy_change_ratio(self._accuracy(shares), self.accuracy_ratio[self.best])
        return weigh(self.objectives.lambda_ratio, carbon_change_ratio(spent, base_j * self.base_g_per_kwh), accuracy)

    def _is_better(self, wanted: Weights, now: Weights, usable: Sequence[ModelSeen], seen: FamilySeen) -> bool:
        """Whether shares are worth a change; where joules are not known on both sides, any change is."""
        known = [one for one in usable if one.energy_j > 0]
        names = {one.name for one in known}
        if self._base_j(seen) is None or not {name for name, _ in (*wanted, *now)} <= names:
            return True
        if self._accuracy(now) < self.objectives.minimum_accuracy_ratio - 1e-12:
            return True
        return self._score(wanted, known, seen) > self._score(now, known, seen) + _BETTER


def max_known(*values: float) -> float:
    """The largest of the values that are known; 0 for none."""
    return max((value for value in values if not math.isnan(value)), default=0.0)


def _model_seen(data: Mapping[str, Any]) -> ModelSeen:
    values: dict[str, Any] = {name: math.nan if value is None else value for name, value in data.items()}
    return ModelSeen(**values)


def _same(one: Weights, other: Weights) -> bool:
    """Whether shares differ by less than one in a thousand requests."""
    a, b = dict(one), dict(other)
    return all(abs(a.get(name, 0.0) - b.get(name, 0.0)) < 1e-3 for name in {*a, *b})
