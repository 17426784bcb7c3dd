"""Observe language models for the clock governor of their device (μ-Serve, ATC'24, section 3.4).

Every request carries its predicted service time, so that a governor that looks ahead can compute how long the running
and queued answers take at each clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from joulery.domain.serving.service import Slo
from joulery.perf.lengths.step_time import BatchedRequest, StepCost
from joulery.policies.clocks.observation import BatchingEngine, ColocatedService, CompletedRequest, Pending, Work
from joulery.runtime.llm.length_prediction import prompt_tokens
from joulery.runtime.llm.service import GenerationTask, LLMService
from joulery.runtime.llm.statistics import RecentAnswer

_OVERRUN_RATIO = 0.25
_PATIENCE_S = 1.0
_ROOM = 4096
"""Capacity assumed for an engine in whose queue nothing waits."""
_FULL_KV_RATIO = 0.98
DEADLINE_QUANTILE = 0.99
"""Share of answers that must end within the deadline where no SLO is stated."""


def slo_of(llm: LLMService) -> Slo:
    """The SLO of a model's answers: as stated, else its deadline."""
    return llm.settings.slo or Slo(llm.settings.deadline_s, DEADLINE_QUANTILE)


def colocated_llms(llms: Iterable[LLMService], now_s: float) -> tuple[ColocatedService, ...]:
    """Every model with its work and its pending requests, in the order of its queue."""
    return tuple(_colocated(llm, now_s) for llm in llms)


def _colocated(llm: LLMService, now_s: float) -> ColocatedService:
    slo, answers = slo_of(llm), llm.traffic.served(now_s)
    power_w = _power_w(answers)
    ratio, read_s = llm.forecaster.upper_ratio, llm.forecaster.pace.per_read_s
    tasks = llm.tasks()
    pending = [
        Pending(
            task.arrival_s,
            task.forecast.service_s,
            power_w * task.forecast.service_s,
            task.start_s if task.in_engine else math.nan,
            _batched(task, ratio, read_s),
        )
        for task in tasks
    ]
    engine = BatchingEngine(_cost_beside_others(llm, pending), capacity(llm, tasks, now_s))
    completed = [CompletedRequest(each.end_s, each.latency_s) for each in answers]
    return ColocatedService(
        llm.name,
        slo,
        _work(llm, slo, answers, power_w, now_s),
        pending,
        completed,
        eventful=True,
        batch=engine,
        late_budget=llm.traffic.late_budget(slo),
    )


def _cost_beside_others(llm: LLMService, pending: Sequence[Pending]) -> StepCost:
    """The cost of a step with the sequences of other clients, which are assumed to be like joulery's."""
    cost, others = llm.steps.times.cost, llm.others
    running = [each.batched.kv_tokens for each in pending if each.batched is not None and each.batched.running]
    kv = others * sum(running) / len(running) if running else 0.0
    return replace(cost, fixed_s=cost.fixed_s + cost.per_sequence_s * others + cost.per_kv_token_s * kv)


def _batched(task: GenerationTask, ratio: float, per_read_s: float) -> BatchedRequest:
    """The tokens of a request; one longer than predicted is assumed to have a quarter of its predicted length left."""
    limit = math.inf if task.request.max_tokens is None else task.request.max_tokens
    predicted, written = min(task.forecast.tokens * ratio, limit), float(task.tokens_written)
    left = max(predicted - written, min(_OVERRUN_RATIO * predicted, limit - written), 1.0)
    read = float(prompt_tokens(task.request))
    if task.generating:
        return BatchedRequest(left, read + written, 0.0, running=True)
    if task.paused:
        return BatchedRequest(left, read + written, 0.0, running=False)
    return BatchedRequest(left, read, per_read_s * read, running=False)


def capacity(llm: LLMService, tasks: Sequence[GenerationTask], now_s: float) -> int:
    """Sequences that fit into the engine's batch.

    Engines without a queue get as many as ``max_num_seqs`` from joulery. Others report their queue: where requests wait
    or the KV cache is full, there is no room. Without a report, there is no room where a request has waited for its
    first token for longer than its prompt takes to read.
    """
    running = sum(task.generating for task in tasks)
    if not llm.engine.dialect.orders:
        return max(llm.settings.max_num_seqs, running)
    if (load := llm.reports.load) is not None:
        full = load.waiting > 0 or load.kv_usage_ratio >= _FULL_KV_RATIO
        return max(running, 1) if full else _ROOM
    per_read_s = llm.forecaster.pace.per_read_s
    for task in tasks:
        if not task.started and not math.isnan(task.start_s):
            patience_s = _PATIENCE_S + 4 * per_read_s * prompt_tokens(task.request)
            if running and now_s - task.start_s > patience_s:
                return running
    return _ROOM


def _work(llm: LLMService, slo: Slo, answers: tuple[RecentAnswer, ...], power_w: float, now_s: float) -> Work:
    """Work of a model by its recent answers; by the forecast of an average answer where there are none."""
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
