"""Language models as the clock governor of their device sees them (μ-Serve, ATC'24, section 3.4).

Every request carries its predicted service time, so a governor that looks ahead knows how long the running and queued
answers take at each clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from joulery.domain.serving.service import Slo
from joulery.runtime.llm.service import LLMService
from joulery.runtime.llm.statistics import RecentAnswer
from joulery.runtime.serving.colocated import ColocatedService, CompletedRequest, Pending, Work

DEADLINE_QUANTILE = 0.99
"""Share of the answers within the deadline that is kept where no SLO is stated."""


def slo_of(llm: LLMService) -> Slo:
    """The SLO of a model's answers: as stated, else its deadline."""
    return llm.settings.slo or Slo(llm.settings.deadline_s, DEADLINE_QUANTILE)


def colocated_llms(llms: Iterable[LLMService], now_s: float) -> tuple[ColocatedService, ...]:
    """Every model with its work and its pending requests, in the order of its queue."""
    return tuple(_colocated(llm, now_s) for llm in llms)


def _colocated(llm: LLMService, now_s: float) -> ColocatedService:
    slo, answers = slo_of(llm), llm.traffic.served(now_s)
    power_w = _power_w(answers)
    pending = [
        Pending(
            task.arrival_s,
            task.forecast.service_s,
            power_w * task.forecast.service_s,
            task.start_s if task.in_engine else math.nan,
        )
        for task in llm.tasks()
    ]
    completed = [CompletedRequest(each.end_s, each.latency_s) for each in answers]
    return ColocatedService(llm.name, slo, _work(llm, slo, answers, power_w, now_s), pending, completed, eventful=True)


def _work(llm: LLMService, slo: Slo, answers: tuple[RecentAnswer, ...], power_w: float, now_s: float) -> Work:
    """By the recent answers; by the forecast of an average answer where there are none."""
    took_s = np.array([each.work_s for each in answers] or [llm.forecaster.average_s])
    mean_s = float(took_s.mean())
    return Work(
        service_s=mean_s,
        own_tail_s=float(np.quantile(took_s, slo.quantile)),
        energy_j=power_w * mean_s,
        servers=_parallel(llm),
        rate_rps=llm.traffic.rate_rps(now_s),
    )


def _parallel(llm: LLMService) -> int:
    """Requests that the engine answers at once."""
    return llm.settings.max_num_seqs


def _power_w(answers: tuple[RecentAnswer, ...]) -> float:
    """Power above idle while an answer is generated; 0 where no answer's energy is known."""
    known = [(each.energy_j, each.work_s) for each in answers if each.energy_j is not None]
    work_s = math.fsum(took_s for _, took_s in known)
    return math.fsum(energy_j for energy_j, _ in known) / work_s if work_s > 0 else 0.0
