"""Plan language models: replicas on the fleet's GPU types from ``plan.language`` of a site file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from joulery.app.profiling.llm.sources import read_runs
from joulery.config.carbon import CarbonConstant
from joulery.config.plan import GpuConfig, LanguagePlanSection, LanguageServiceConfig, ServedModelConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.gpu_types import gpu_facts
from joulery.domain.gpu.language_plan import LanguagePlan, TokenSlo
from joulery.perf.catalog import llm_runs
from joulery.perf.llm.models import (
    LanguageModelFacts,
    estimated_facts,
    model_facts,
    nearest_names,
    precision_name,
    table_names,
)
from joulery.perf.llm.predictor import LlmPredictor
from joulery.perf.llm.replica import FIRST_OVERHEAD_S, STEP_NOISE_RATIO
from joulery.perf.llm.runs import LlmRun
from joulery.policies.placement.language.search import ServedReplicas, plan_language
from joulery.policies.placement.language.task import LanguageGpu, LanguageRules, LanguageService, LanguageVariant
from joulery.sim.core.arrivals import poisson
from joulery.sim.core.streams import Streams
from joulery.sim.queues.continuous_batching import BatchedReplica, open_trial

SEED = 1
_REQUESTS = 150
"""Smallest number of requests of a simulation, warm-up included."""
_FEWEST = 20
"""Smallest number of requests from which a simulation reports a quantile."""


def plan_language_models(site: Site, g_per_kwh: float | None = None) -> LanguagePlan:
    """Plan a site's language models.

    Args:
        site: A site with ``plan.language``.
        g_per_kwh: Carbon intensity; the stated one of the site when None.

    Raises:
        ConfigError: No such section, no GPU types, or an unknown GPU type, model or precision.
        DataError: The measured runs cannot be used.
        InfeasibleError: No plan is within the SLOs and the GPUs there are.
    """
    section = site.plan.language
    if section is None:
        raise ConfigError("the site plans no language models", pointer="plan.language", hint="add plan.language")
    if not site.fleet.gpus:
        raise ConfigError("there are no GPUs to plan with", pointer="fleet.gpus", expected="at least one GPU type")
    runs = read_runs(section.runs) if section.runs else list(llm_runs.published_runs())
    source = ", ".join(str(file) for file in section.runs) or llm_runs.SOURCE
    known = {run.point.model_id: run.point.facts for run in runs}
    gpus = [_gpu(index, gpu) for index, gpu in enumerate(site.fleet.gpus)]
    services = [_service(index, service, runs, known) for index, service in enumerate(section.services)]
    if g_per_kwh is None and isinstance(site.carbon, CarbonConstant):
        g_per_kwh = site.carbon.g_per_kwh
    rules = LanguageRules(section.objective, site.plan.margin_ratio, section.max_num_seqs, g_per_kwh, site.pue)
    predictor, notes = LlmPredictor(runs), _notes(site, section)
    if not any(run.power_w is not None for run in runs) or not any(run.itl_p99_s is not None for run in runs):
        raise DataError(
            "a plan needs runs with power and the 99th percentile of the time between tokens",
            hint="add avg_power_watts and p99_itl_ms to the runs",
        )
    return _judged(lambda now: plan_language(services, gpus, predictor, now, source, notes, simulated), rules)


def _judged(make: Callable[[LanguageRules], LanguagePlan], rules: LanguageRules) -> LanguagePlan:
    """Make the plan, again with a larger margin while its simulation misses an SLO; three times at most."""
    plan = make(rules)
    for extra in (0.05, 0.1):
        if all(each.kept for each in plan.replicas):
            break
        plan = make(rules._replace(extra_margin_ratio=extra))
    return plan


def simulated(served: ServedReplicas) -> tuple[tuple[str, float], ...]:
    """Simulate the latencies of one replica with a model apart from the planner's.

    Steps have noise, prompts delay the batch, and lengths are geometric.

    Returns:
        A quantile for each SLO, the mean for a whole answer, s; empty with fewer than 20 first tokens.
    """
    curve, service = served.candidate.curve, served.candidate.group.service
    truth = BatchedReplica(curve.itl_p50_s, curve.stall_s, curve.answer_tokens, STEP_NOISE_RATIO)
    answer_s = float(curve.token_time_s[-1]) * curve.answer_tokens
    end_s = max(600.0, min(20 * answer_s, 3600.0), _REQUESTS / served.rate_rps)
    arrivals = poisson(served.rate_rps).times_s(end_s, Streams(SEED)("arrivals"))
    trial = open_trial(truth, arrivals, end_s, end_s / 5, SEED)
    if len(trial.first_token_s) < _FEWEST:
        return ()
    found = []
    if service.ttft is not None:
        first_s = trial.first_token_quantile_s(service.ttft.quantile_ratio) + FIRST_OVERHEAD_S
        found.append(("ttft", first_s))
    if service.itl is not None:
        found.append(("itl", trial.token_quantile_s(service.itl.quantile_ratio)))
    if service.answer_s is not None:
        found.append(("answer", float(trial.first_token_s.mean()) + trial.in_flight / served.rate_rps))
    return tuple(found)


def _notes(site: Site, section: LanguagePlanSection) -> tuple[str, ...]:
    """The plan's assumptions as text."""
    notes = ["requests arrive at random (Poisson); time to first token follows from the prompt's arithmetic, assumed"]
    idle = [gpu.name for gpu in site.fleet.gpus if gpu.idle_w is None]
    if idle:
        notes.append(f"idle power of {', '.join(idle)} unknown: taken as with one request (fleet.gpus idle: states it)")
    if all(gpu.host_w == 0 for gpu in site.fleet.gpus):
        notes.append("host power is not counted (fleet.gpus host: states it)")
    if site.plan.margin_ratio is None:
        notes.append("margins are the errors of the predictions (two of three rows left out alike stayed within)")
    return tuple(notes)


def _gpu(index: int, gpu: GpuConfig) -> LanguageGpu:
    try:
        facts = gpu_facts(gpu.profile or gpu.name)
    except ConfigError as error:
        raise ConfigError(
            error.message,
            pointer=f"fleet.gpus.{index}.name",
            got=error.got,
            expected=error.expected,
            hint=error.hint,
        ) from None
    return LanguageGpu(gpu.name, facts, gpu.price_usd_per_hour, gpu.host_w, gpu.idle_w, gpu.available)


def _service(
    index: int, service: LanguageServiceConfig, runs: list[LlmRun], known: dict[str, LanguageModelFacts]
) -> LanguageService:
    tasks = sorted({run.point.task for run in runs})
    task = service.task or (tasks[0] if len(tasks) == 1 else "")
    if service.task is not None and service.task not in tasks:
        raise ConfigError(
            f"no measured run has task {service.task}",
            pointer=f"plan.language.services.{index}.task",
            got=service.task,
            expected=", ".join(each for each in tasks if each) or "no task",
        )
    slo = service.slo
    return LanguageService(
        service.name,
        service.rate_rps,
        service.input_tokens,
        service.output_tokens,
        None if slo.ttft is None else TokenSlo(slo.ttft.latency_s, slo.ttft.quantile_ratio),
        None if slo.itl is None else TokenSlo(slo.itl.latency_s, slo.itl.quantile_ratio),
        slo.answer_s,
        service.minimum_quality_ratio,
        tuple(
            _variant(f"plan.language.services.{index}.variants.{at}", variant, known)
            for at, variant in enumerate(service.variants)
        ),
        task,
    )


def _variant(pointer: str, variant: ServedModelConfig, known: dict[str, LanguageModelFacts]) -> LanguageVariant:
    try:
        facts = _facts(variant, known)
        precision = precision_name(variant.precision)
    except ConfigError as error:
        raise ConfigError(
            error.message, pointer=pointer, got=error.got, expected=error.expected, hint=error.hint
        ) from None
    return LanguageVariant(variant.model, precision, facts, variant.quality_ratio, tuple(sorted(set(variant.gpus))))


def _facts(variant: ServedModelConfig, known: dict[str, LanguageModelFacts]) -> LanguageModelFacts:
    """Known facts of a model: measured, tabulated, or stated. A size that only its id contains may be mistyped.

    Raises:
        ConfigError: None of these is available, or the size is stated although the model was measured.
    """
    model, total = variant.model, variant.parameters_billions
    if total is None:
        facts = known.get(model)
        return facts if facts is not None else _known_facts(model, known)
    if model in known:
        raise ConfigError(
            f"the measured runs have model {model}, so its size is theirs",
            got=f"parameters_billions {total:g}",
            expected="no size of a model that was measured",
            hint="leave out parameters_billions and what stands beside it, or rename the model",
        )
    active = total if variant.active_parameters_billions is None else variant.active_parameters_billions
    facts = estimated_facts(model.strip().lower(), total * 1e9, active * 1e9)
    layers = facts.layers if variant.layers is None else float(variant.layers)
    kv_bytes = facts.kv_bytes * layers / facts.layers if variant.kv_bytes is None else variant.kv_bytes
    return replace(facts, layers=layers, kv_bytes=kv_bytes, known=True)


def _known_facts(model: str, known: dict[str, LanguageModelFacts]) -> LanguageModelFacts:
    try:
        facts = model_facts(model)
    except ConfigError:
        facts = None
    if facts is not None and facts.known:
        return facts
    short = {each.rpartition("/")[2].lower(): each for each in known}
    nearest = nearest_names(model.rpartition("/")[2].lower(), dict.fromkeys([*short, *table_names()]))
    stated = "state parameters_billions (and active_parameters_billions, layers, kv_cache_per_token) beside it"
    meant = ", ".join(short.get(each, each) for each in nearest.split(", "))
    raise ConfigError(
        f"model {model} is neither in the measured runs nor known by its architecture and size",
        got=model,
        expected="a model of the runs, or of a known architecture, with its size: such as Qwen/Qwen3-14B",
        hint=f"did you mean {meant}? For another model {stated}" if nearest else stated,
    )
