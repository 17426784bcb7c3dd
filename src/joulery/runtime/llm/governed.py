"""Language models as the governor of their device sees them (μ-Serve, ATC'24, section 3.4: its models are generative).

Every request is known with the length it was forecast, so a governor that looks ahead sees what a long answer in the
queue will take at each clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from joulery.domain.serving.service import Slo
from joulery.runtime.llm.service import LLMService
from joulery.runtime.llm.statistics import Served
from joulery.runtime.serving.colocated import Answered, ColocatedService, Pending, Work

DEADLINE_QUANTILE = 0.99
"""The share of answers within the deadline that is kept where no SLO is stated."""


def promise(llm: LLMService) -> Slo:
    """What is promised of its answers: its SLO, else its deadline."""
    return llm.settings.slo or Slo(llm.settings.deadline_s, DEADLINE_QUANTILE)


def colocated_llms(llms: Iterable[LLMService], now_s: float) -> tuple[ColocatedService, ...]:
    """Every model with what its requests take, and what of them is not answered yet, in the order of its queue."""
    return tuple(_resident(llm, now_s) for llm in llms)


def _resident(llm: LLMService, now_s: float) -> ColocatedService:
    slo, served = promise(llm), llm.traffic.served(now_s)
    j_per_s = _watts(served)
    pending = [
        Pending(
            job.arrival_s,
            job.forecast.service_s,
            j_per_s * job.forecast.service_s,
            job.start_s if job.in_engine else math.nan,
        )
        for job in llm.jobs()
    ]
    answered = [Answered(each.end_s, each.latency_s) for each in served]
    return ColocatedService(llm.name, slo, _work(llm, slo, served, j_per_s, now_s), pending, answered)


def _work(llm: LLMService, slo: Slo, served: tuple[Served, ...], j_per_s: float, now_s: float) -> Work:
    """By its latest answers; by what an average one is forecast to take where there are none."""
    took_s = np.array([each.work_s for each in served] or [llm.forecaster.average_s])
    mean_s = float(took_s.mean())
    return Work(
        service_s=mean_s,
        own_tail_s=float(np.quantile(took_s, slo.quantile)),
        energy_j=j_per_s * mean_s,
        servers=llm.settings.max_num_seqs,
        rate_rps=llm.traffic.rate_rps(now_s),
    )


def _watts(served: tuple[Served, ...]) -> float:
    """Joules above idle a second of work; 0 where no answer says."""
    known = [(each.energy_j, each.work_s) for each in served if each.energy_j is not None]
    work_s = math.fsum(took_s for _, took_s in known)
    return math.fsum(energy_j for energy_j, _ in known) / work_s if work_s > 0 else 0.0
