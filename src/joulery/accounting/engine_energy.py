"""Joules and grams of the models of an inference engine, from the counters that the engine itself keeps.

The engine's joules between two readings of its counters belong to the models that moved tokens meanwhile, in proportion
to their tokens (:data:`~joulery.accounting.token_energy.PROMPT_WEIGHT` for a token read, 1 for a token written); where
the engine counts no tokens, to their computing time, else to their requests. While requests run and no token moved, the
joules are kept for the next reading. Without a request they belong to the idle engine, as does the known idle power of
its GPUs at any time. Energy across a restart of the engine, or while a meter was silent, is unattributed, and the
tokens of that stretch are not counted: joules and tokens of a ratio are of the same stretches. Always ``models + idle +
unattributed + pending = engine``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from joulery.accounting.node_energy import EnergyTotal
from joulery.accounting.token_energy import PROMPT_WEIGHT
from joulery.domain.energy.workload import EngineCounters, ModelCounters
from joulery.domain.quality import Quality, weakest

WINDOW_S = 300.0
"""Time over which joules and grams per token and request are taken."""
MAX_MODELS = 100
"""Largest number of models of one engine that are counted separately."""
OTHER_MODELS = "other"


@dataclass(frozen=True, slots=True)
class ModelTotals:
    """Sums of one model since its book was opened.

    Attributes:
        energy_j, carbon_g, unknown_j: As in :class:`~joulery.accounting.node_energy.EnergyTotal`.
        requests: Requests answered.
        prompt_tokens, output_tokens: Tokens; NaN where the engine counts none.
    """

    energy_j: float = 0.0
    carbon_g: float = 0.0
    unknown_j: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0

    def minus(self, other: ModelTotals) -> ModelTotals:
        """The increase since ``other``."""
        return ModelTotals(
            self.energy_j - other.energy_j,
            self.carbon_g - other.carbon_g,
            self.unknown_j - other.unknown_j,
            self.requests - other.requests,
            self.prompt_tokens - other.prompt_tokens,
            self.output_tokens - other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class PerUnit:
    """Joules and grams of one model per token and request; NaN where there were none, or grams are not known.

    Attributes:
        output_token_j, output_token_g: All its joules and grams, per token generated.
        token_j, token_g: Joules and grams per token read or generated.
        request_j, request_g: Joules and grams per request answered.
    """

    output_token_j: float
    output_token_g: float
    token_j: float
    token_g: float
    request_j: float
    request_g: float


@dataclass(slots=True)
class _Pending:
    total: EnergyTotal = field(default_factory=EnergyTotal)
    known: bool = True


class EngineBook:
    """Books the joules of one engine on its models.

    Attributes:
        total, idle, unattributed: Sums since the book was opened.
        models: Sums of each model.
        quality: Weakest quality of the joules.
        restarts: Times that the engine's counters started again.
    """

    def __init__(self) -> None:
        self.total, self.idle, self.unattributed = EnergyTotal(), EnergyTotal(), EnergyTotal()
        self.models: dict[str, ModelTotals] = {}
        self.quality = Quality.MEASURED
        self.restarts = 0
        self._pending = _Pending()
        self._last: EngineCounters | None = None
        self._past: deque[tuple[float, Mapping[str, ModelTotals]]] = deque()

    @property
    def pending_j(self) -> float:
        """Joules that are kept until tokens are counted."""
        return self._pending.total.energy_j

    def spend(self, energy_j: float, g_per_kwh: float, quality: Quality, idle_j: float = 0.0) -> None:
        """Add joules of the engine's processes and devices.

        Args:
            energy_j: Joules; NaN where a meter was silent.
            g_per_kwh: Intensity meanwhile; NaN unknown.
            quality: Quality of the joules.
            idle_j: Part of them that its devices would have drawn idle: charged to no model.
        """
        if math.isnan(energy_j):
            self._pending.known = False
            return
        self.total.add(energy_j, g_per_kwh)
        self.idle.add(idle_j, g_per_kwh)
        self._pending.total.add(energy_j - idle_j, g_per_kwh)
        if energy_j > 0:
            self.quality = weakest((self.quality, quality))

    def observe(self, counters: EngineCounters, now_s: float) -> bool:
        """Divide the pending joules among models by the engine's counters; True if the engine has restarted.

        Args:
            counters: The engine's counters now.
            now_s: Seconds of a monotonic clock.
        """
        counters = _bounded(counters, self.models)
        last, self._last = self._last, counters
        if last is None:
            self._drop_pending()
            self._remember(now_s)
            return False
        restarted = _restarted(last, counters)
        if restarted or not self._pending.known:
            self.restarts += restarted
            self._drop_pending()
            self._remember(now_s)
            return restarted
        self._hand_out(_grown(last, counters), idle=last.active == 0 and counters.active == 0)
        self._remember(now_s)
        return False

    def per_unit(self, model: str, now_s: float, window_s: float = WINDOW_S) -> PerUnit:
        """Joules and grams of a model per token and request over the latest ``window_s``."""
        if model not in self.models:
            return PerUnit(*(math.nan,) * 6)
        since = next((past for at_s, past in self._past if at_s >= now_s - window_s), None)
        if since is None:
            return PerUnit(*(math.nan,) * 6)
        spent = self.models[model].minus(since.get(model, ModelTotals()))
        gram_g = spent.carbon_g if spent.unknown_j <= 1e-9 * spent.energy_j else math.nan
        tokens = spent.prompt_tokens + spent.output_tokens
        pairs = [
            _ratio(amount, units)
            for units in (spent.output_tokens, tokens, spent.requests)
            for amount in (spent.energy_j, gram_g)
        ]
        return PerUnit(*pairs)

    def _drop_pending(self) -> None:
        self.unattributed.merge(self._pending.total)
        self._pending = _Pending()

    def _hand_out(self, grown: Mapping[str, ModelCounters], *, idle: bool) -> None:
        weights = _weights(grown)
        whole = math.fsum(weights.values())
        pending = self._pending.total
        if whole > 0:
            for model, counted in grown.items():
                self._give(model, counted, pending, weights[model] / whole)
            self._pending = _Pending()
            return
        if idle:
            self.idle.merge(pending)
            self._pending = _Pending()

    def _give(self, model: str, counted: ModelCounters, pending: EnergyTotal, share: float) -> None:
        old = self.models.get(model, ModelTotals())
        self.models[model] = replace(
            old,
            energy_j=old.energy_j + share * pending.energy_j,
            carbon_g=old.carbon_g + share * pending.carbon_g,
            unknown_j=old.unknown_j + share * pending.unknown_j,
            requests=old.requests + counted.requests,
            prompt_tokens=old.prompt_tokens + counted.prompt_tokens,
            output_tokens=old.output_tokens + counted.output_tokens,
        )

    def _remember(self, now_s: float) -> None:
        self._past.append((now_s, dict(self.models)))
        while len(self._past) > 1 and self._past[1][0] <= now_s - WINDOW_S:
            self._past.popleft()


def _restarted(last: EngineCounters, now: EngineCounters) -> bool:
    """Whether a counter fell, or a model that was counted is gone."""
    for model, before in last.models.items():
        after = now.models.get(model)
        if after is None:
            return True
        pairs = (
            (before.requests, after.requests),
            (before.prompt_tokens, after.prompt_tokens),
            (before.output_tokens, after.output_tokens),
            (before.compute_s, after.compute_s),
        )
        if any(new < old for old, new in pairs):
            return True
    return False


def _grown(last: EngineCounters, now: EngineCounters) -> dict[str, ModelCounters]:
    grown = {}
    for model, after in now.models.items():
        before = last.models.get(model, ModelCounters(0.0, 0.0, 0.0, 0.0))
        grown[model] = ModelCounters(
            _since(before.requests, after.requests),
            _since(before.prompt_tokens, after.prompt_tokens),
            _since(before.output_tokens, after.output_tokens),
            _since(before.compute_s, after.compute_s),
        )
    return grown


def _since(before: float, after: float) -> float:
    """Growth of a counter; one that was not there before began at 0."""
    return after if math.isnan(before) else after - before


def _weights(grown: Mapping[str, ModelCounters]) -> dict[str, float]:
    """Work of each model: tokens where all models count them and some moved, else computing time, else requests."""
    tokens = {name: PROMPT_WEIGHT * one.prompt_tokens + one.output_tokens for name, one in grown.items()}
    compute_s = {name: one.compute_s for name, one in grown.items()}
    requests = {name: one.requests for name, one in grown.items()}
    for weights in (tokens, compute_s, requests):
        if math.fsum(weights.values()) > 0:
            return weights
    return dict.fromkeys(grown, 0.0)


def _bounded(counters: EngineCounters, known: Mapping[str, ModelTotals]) -> EngineCounters:
    """At most :data:`MAX_MODELS` models; the others count as one."""
    if len(counters.models) <= MAX_MODELS:
        return counters
    names = [*(name for name in counters.models if name in known), *(n for n in counters.models if n not in known)]
    kept = {name: counters.models[name] for name in names[: MAX_MODELS - 1]}
    rest = [counters.models[name] for name in names[MAX_MODELS - 1 :]]
    kept[OTHER_MODELS] = ModelCounters(
        math.fsum(one.requests for one in rest),
        math.fsum(one.prompt_tokens for one in rest),
        math.fsum(one.output_tokens for one in rest),
        math.fsum(one.compute_s for one in rest),
    )
    return EngineCounters(counters.engine, kept, counters.active)


def _ratio(amount: float, units: float) -> float:
    return amount / units if units > 0 else math.nan
