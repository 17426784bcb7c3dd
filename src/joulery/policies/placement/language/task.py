"""Input of a plan for language models: services, GPU types, and the rules of planning."""

from __future__ import annotations

from typing import NamedTuple

from joulery.domain.gpu.gpu_types import GpuTypeFacts
from joulery.domain.gpu.language_plan import TokenSlo
from joulery.perf.llm.models import LanguageModelFacts


class LanguageVariant(NamedTuple):
    """A model at a precision that may answer a service.

    Attributes:
        model, precision: Id of the model, and the precision of its weights.
        facts: Known facts of the model.
        quality_ratio: The user's quality score; None where none is stated.
        gpus: Numbers of GPUs that a replica may have.
    """

    model: str
    precision: str
    facts: LanguageModelFacts
    quality_ratio: float | None
    gpus: tuple[int, ...]


class LanguageService(NamedTuple):
    """A service to plan for.

    Attributes:
        name: Its name.
        rate_rps: Requests a second.
        prompt_tokens, answer_tokens: Mean lengths.
        ttft, itl: SLOs of the time to first token and between tokens; None for no bound.
        answer_s: Bound on the mean time of a whole answer, s; None for none.
        minimum_quality_ratio: Quality that each variant has to have.
        variants: The variants that may answer.
        task: Kind of requests in the measured runs; empty for any.
    """

    name: str
    rate_rps: float
    prompt_tokens: float
    answer_tokens: float
    ttft: TokenSlo | None
    itl: TokenSlo | None
    answer_s: float | None
    minimum_quality_ratio: float
    variants: tuple[LanguageVariant, ...]
    task: str = ""


class LanguageGpu(NamedTuple):
    """A GPU type of the fleet.

    Attributes:
        name: Its name in the fleet.
        facts: Known facts of the type.
        usd_per_hour: Price of one.
        host_w: Host power charged to one, W.
        idle_w: Power of one without requests, W; None to use the power with one request.
        available: How many there are; None for any number.
    """

    name: str
    facts: GpuTypeFacts
    usd_per_hour: float
    host_w: float
    idle_w: float | None
    available: int | None


class LanguageRules(NamedTuple):
    """Rules of planning.

    Attributes:
        objective: ``carbon``, ``energy`` or ``cost``.
        margin_ratio: Margin on latencies and token times; None for the errors of the predictions.
        most_seqs: Most requests a replica may run at once.
        g_per_kwh: Carbon intensity; None where there is none.
        pue: Facility energy per IT energy.
        extra_margin_ratio: Margin on top, after a simulation missed an SLO.
    """

    objective: str
    margin_ratio: float | None
    most_seqs: int
    g_per_kwh: float | None
    pue: float
    extra_margin_ratio: float = 0.0
