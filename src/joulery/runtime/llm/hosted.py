"""The language models of a session: their part of each tick, of the charges and of the report."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from joulery.domain.serving.engine import RequestRecord
from joulery.domain.serving.generation import GenerationCost
from joulery.domain.serving.timeline import ServiceLabel, ServiceTick
from joulery.runtime.llm.governed import slo_of
from joulery.runtime.llm.service import LLMService
from joulery.runtime.llm.statistics import LLMUsage
from joulery.runtime.session.requests import summarise


@dataclass(slots=True)
class _Period:
    """Requests of one model since the last tick."""

    records: list[RequestRecord] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    tokens: int = 0
    charged_tokens: int = 0
    energy_j: float = 0.0


class HostedModels:
    """Language models that a session serves, beside its services or alone.

    Args:
        llms: The models, by name.
        services: Names of the session's services: a model of the same name gets a label of its own.

    Attributes:
        usage: Totals of the run, by model.
    """

    def __init__(self, llms: Mapping[str, LLMService], services: Collection[str] = ()) -> None:
        self._llms = dict(llms)
        self._shown = {name: f"{name} (language model)" if name in services else name for name in llms}
        self._periods = {name: _Period() for name in llms}
        slos = {name: slo_of(llm) for name, llm in llms.items()}
        self.usage = LLMUsage({name: llm.owner for name, llm in llms.items()}, slos)

    @property
    def owners(self) -> dict[str, str]:
        """The owner of each model, by its label."""
        return {self._shown[name]: llm.owner for name, llm in self._llms.items()}

    @property
    def engines(self) -> list[dict[str, str]]:
        """The ``model``, ``engine`` and ``variant`` of each."""
        return [
            {"model": llm.name, "engine": llm.engine.name, "variant": llm.engine.variant} for llm in self._llms.values()
        ]

    def labels(self) -> tuple[ServiceLabel, ...]:
        """A label for each model; its accuracy is not known."""
        found = []
        for name, llm in self._llms.items():
            slo, variants = slo_of(llm), ((llm.engine.variant, math.nan),)
            found.append(ServiceLabel(self._shown[name], slo.latency_s, slo.quantile, variants, language_model=True))
        return tuple(found)

    def request(self, record: RequestRecord) -> None:
        """Count a request that has ended; requests for other models are ignored."""
        self.usage.request(record)
        if (period := self._periods.get(record.service)) is not None:
            period.records.append(record)

    def charge(self, model: str, record: RequestRecord, cost: GenerationCost) -> None:
        """Add the cost of a request that an engine got, answered or not."""
        self.usage.charge(model, record, cost)
        period = self._periods[model]
        period.tokens += cost.usage.completion
        if not math.isnan(cost.first_token_s):
            period.first_token_s.append(cost.first_token_s - cost.arrival_s)
        if cost.energy is not None:
            period.energy_j += cost.energy.energy_j
            period.charged_tokens += cost.usage.completion

    def end_period(self) -> tuple[tuple[ServiceTick, ...], dict[str, float]]:
        """The tick of each model since the last call, and the joules charged to its requests, by label."""
        ticks = tuple(self._tick(name) for name in self._llms)
        energy_j = {self._shown[name]: period.energy_j for name, period in self._periods.items()}
        self._periods = {name: _Period() for name in self._llms}
        return ticks, energy_j

    def _tick(self, name: str) -> ServiceTick:
        period = self._periods[name]
        latency_s, attainment_ratio, answers, served = summarise(period.records, slo_of(self._llms[name]))
        return ServiceTick(
            self._shown[name],
            requests=len(period.records),
            failed=len(period.records) - answers,
            latency_s=latency_s,
            attainment_ratio=attainment_ratio,
            mix=tuple((variant, count / answers) for variant, count in served.items()),
            tokens=period.tokens,
            first_token_s=float(np.median(period.first_token_s)) if period.first_token_s else math.nan,
            energy_per_token_j=period.energy_j / period.charged_tokens if period.charged_tokens else math.nan,
        )
