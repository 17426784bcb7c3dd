"""Create the language models of a site, with their engines, predictors, order and meter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from joulery.adapters.meters.cputimes import open_cpu_times
from joulery.adapters.models import smollm2
from joulery.app.wiring.carbon import live_carbon_source
from joulery.app.wiring.meters import open_meters
from joulery.app.wiring.models import cache_folder
from joulery.app.wiring.site_meters import meter_specs
from joulery.config.carbon import CarbonConfig
from joulery.config.language import (
    LanguageFamilyConfig,
    LanguageModelConfig,
    LlamaEngineConfig,
    OrderConfig,
    UpstreamConfig,
)
from joulery.config.site import Mode, Site
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.ports import CarbonSource
from joulery.domain.serving.generation import GenerationRequest, LLMEngine
from joulery.domain.serving.service import Slo
from joulery.policies.ordering import Aging
from joulery.policies.reranking import Reranking
from joulery.policies.serving.objective import ServiceObjectives
from joulery.policies.serving.variants.language_family import LanguageFamilyPolicy
from joulery.runtime.llm.family import LanguageFamily
from joulery.runtime.llm.length_prediction import Forecaster
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.service import LLMService, LLMSettings
from joulery.runtime.measuring.share import OpenMeters
from joulery.runtime.serving.live_intensity import LiveIntensity
from joulery.steady_time import unix_s
from joulery.store.answer_log import AnswerLog
from joulery.store.semantic_cache import SemanticCache

if TYPE_CHECKING:
    from joulery.adapters.engines.remote.openai import Upstream

_OWN_RETRIES = 1
"""Number of retries for a request whose own llama.cpp process died."""


@dataclass(frozen=True, slots=True, eq=False)
class LLMSite:
    """The language models of a site, ready to be started.

    Attributes:
        llms: The models, by name.
        aliases: Names of models by alias.
        meter: Charges their requests.
        grid: The carbon intensity.
        notes: Notes about meters and devices, one sentence each.
        devices: Devices of this machine that run each model (``cpu``, ``gpu:0``); none for a remote one.
        families: Several models behind one name each.
    """

    llms: dict[str, LLMService]
    aliases: dict[str, str]
    meter: RequestMeter
    grid: LiveIntensity
    notes: tuple[str, ...]
    devices: dict[str, tuple[str, ...]]
    families: tuple[LanguageFamily, ...] = ()


def llm_engine(config: LanguageModelConfig, stderr: int | None = None) -> LLMEngine:
    """Create the engine of a language model, without starting it.

    Raises:
        CapabilityError: The bundled model is not installed.
        ConfigError: A token file cannot be read.
    """
    engine = config.engine
    if isinstance(engine, LlamaEngineConfig):
        from joulery.adapters.engines.remote.llama import LlamaEngine, LlamaSettings

        path = engine.path or smollm2.weights()
        name = smollm2.NAME if engine.path is None else engine.path.stem
        settings = LlamaSettings(
            path,
            name,
            threads=engine.threads,
            max_num_seqs=engine.max_num_seqs,
            context_tokens=engine.context_tokens,
            stderr=stderr,
        )
        return LlamaEngine(settings)
    from joulery.adapters.engines.remote.openai import OpenAiEngine

    return OpenAiEngine(upstream_of(config, engine))


def upstream_of(config: LanguageModelConfig, engine: UpstreamConfig) -> Upstream:
    """Address and settings of the server of a language model.

    Raises:
        ConfigError: A token file cannot be read.
    """
    token = ""
    if engine.token_file is not None:
        try:
            token = engine.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token cannot be read: {error}", file=str(engine.token_file)) from error
    from joulery.adapters.engines.remote.openai import Upstream

    return Upstream(
        engine.url.removesuffix("/").removesuffix("/v1"),
        engine.model,
        dialect=engine.dialect,
        token=token,
        connect_s=engine.connect_s,
        stall_s=engine.stall_s,
        answer_s=config.deadline_s,
    )


def open_llm_site(
    site: Site, *, stderr: int | None = None, stack: AsyncExitStack, now_s: Callable[[], float] = unix_s
) -> LLMSite:
    """Create the site's language models without starting them; the stack closes the opened resources.

    Raises:
        JouleryError: A meter, a predictor or a model of the site cannot be opened.
    """

    def opened(section: CarbonConfig) -> CarbonSource:
        return live_carbon_source(section, cache_folder())

    grid = LiveIntensity(site.carbon, opened, now_s)
    found = open_meters(meter_specs(site.meters))
    times = open_cpu_times()
    stack.callback(times.close)
    meter = RequestMeter(found.meters, lambda: sum(times.read()), grid.at, pue=site.pue)
    stack.callback(meter.close)
    llms = {config.name: _llm(config, meter, stderr, stack) for config in site.language_models}
    for llm in llms.values():
        stack.push_async_callback(llm.close)
    devices = {config.name: _devices(config) for config in site.language_models}
    notes = (*_notes(found), *_unmetered(meter, llms))
    families = tuple(_family(site, config, llms, grid) for config in site.language_families)
    return LLMSite(llms, _aliases(site), meter, grid, notes, devices, families)


def _family(
    site: Site, config: LanguageFamilyConfig, llms: Mapping[str, LLMService], grid: LiveIntensity
) -> LanguageFamily:
    """Create a family of the site's language models."""
    policy = LanguageFamilyPolicy(
        config.name,
        {one.model: one.accuracy_ratio for one in config.variants},
        ServiceObjectives(config.lambda_ratio, config.slo.as_slo(), config.minimum_accuracy_ratio),
        config.base_g_per_kwh,
        None if config.ttft is None else Slo(config.ttft.latency_s, config.ttft.quantile_ratio),
    )
    models = {one.model: llms[one.model] for one in config.variants}
    return LanguageFamily(policy, models, grid.at, acts=site.mode is Mode.ACT)


def upstream_boards(site: Site) -> tuple[str, ...]:
    """GPUs of this machine on which servers of the site's language models run, as processes outside joulery."""
    named = (device for config in site.language_models for device in _devices(config))
    return tuple(device for device in named if device.startswith("gpu:"))


def _devices(config: LanguageModelConfig) -> tuple[str, ...]:
    return config.engine.device or () if isinstance(config.engine, UpstreamConfig) else ("cpu",)


def _aliases(site: Site) -> dict[str, str]:
    """Names of models by alias.

    Raises:
        ConfigError: Two models share a name.
    """
    taken = {config.name for config in site.language_models}
    found: dict[str, str] = {}
    for index, config in enumerate(site.language_models):
        for alias in config.aliases:
            if alias in taken:
                raise ConfigError(
                    "two language models have one name", pointer=f"language_models.{index}.aliases", got=alias
                )
            taken.add(alias)
            found[alias] = config.name
    return found


def _unmetered(meter: RequestMeter, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        for device in meter.unmetered(name):
            yield f"{name}: no meter reads {device}, so the energy of its requests is unknown"


def _aging(order: OrderConfig) -> Aging | None:
    """Aging rules of an order; None for first come, first served, and for an order with reranking."""
    if order.kind in ("fcfs", "rerank"):
        return None
    return Aging(order.aging_ratio, order.grace_s) if order.decay_s is None else Aging.boost(order.decay_s)


def _reranking(order: OrderConfig) -> Reranking | None:
    """Reranking rules of an order; None for an order without reranking."""
    if order.kind != "rerank":
        return None
    return Reranking(None if order.decay_s is None else Aging.boost(order.decay_s))


def _llm(config: LanguageModelConfig, meter: RequestMeter, stderr: int | None, stack: AsyncExitStack) -> LLMService:
    from joulery.app.wiring.length_predictor import length_predictor

    engine = llm_engine(config, stderr)
    predictor = (
        None
        if config.order.kind == "fcfs"
        else length_predictor(config.predictor.path, config.predictor.head or config.name)
    )
    cache = SemanticCache(config.predictor.cache) if predictor is not None and config.predictor.cache else None
    own = isinstance(config.engine, LlamaEngineConfig)
    settings = LLMSettings(
        max_num_seqs=config.engine.max_num_seqs,
        aging=_aging(config.order),
        reranking=_reranking(config.order),
        queue=config.queue,
        deadline_s=config.deadline_s,
        retries=_OWN_RETRIES if own else 0,
        slo=None if config.slo is None else config.slo.as_slo(),
    )
    devices = config.engine.device if isinstance(config.engine, UpstreamConfig) else None
    meter.join(config.name, engine.cpu_s, devices or ())
    forecaster = Forecaster(config.name, predictor, cache)
    keep = _keeper(config, stack)
    return LLMService(config.name, engine, forecaster, settings, meter, owner=config.owner, keep=keep)


def _keeper(config: LanguageModelConfig, stack: AsyncExitStack) -> Callable[[GenerationRequest, int], None]:
    """Create the function that logs answers, if the site has a log; a full disk ends the log but not the answers."""
    if config.log is None:
        return lambda request, tokens: None
    log = AnswerLog(config.log)
    stack.callback(log.close)
    refused: list[str] = []

    def keep(request: GenerationRequest, tokens: int) -> None:
        if refused:
            return
        try:
            cut = request.max_tokens is not None and tokens >= request.max_tokens
            log.add(config.name, request.prompt, tokens, cut=cut)
        except CapabilityError as error:
            refused.append(str(error))
            sys.stderr.write(f"{config.name}: logging of answers has stopped: {error}\n")

    return keep


def _notes(found: OpenMeters) -> tuple[str, ...]:
    """Notes of the meters, and meters that lack a permission."""
    notes: Sequence[str] = [note for meter in found.meters for note in meter.notes()]
    return (*notes, *(str(error) for error in found.refused))
