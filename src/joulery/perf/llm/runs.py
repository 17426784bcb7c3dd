"""Measured runs of serving language models, and the points at which one is predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from joulery.domain.gpu.gpu_types import GpuTypeFacts, gpu_facts
from joulery.perf.llm.models import LanguageModelFacts, model_facts, precision_name


@dataclass(frozen=True, slots=True)
class LlmPoint:
    """A model on GPUs of one type with a number of requests in flight.

    Attributes:
        model_id: Its id, such as ``Qwen/Qwen3-14B``.
        facts: Facts of the model.
        gpu: Facts of the GPU type.
        num_gpus: Number of GPUs of the replica.
        precision: Precision of the weights, one name for those that cost the same.
        task: Kind of requests (``lm-arena-chat``); empty where unknown.
        batch: Requests in flight, mean.
        max_num_seqs: Most requests the engine runs at once; None where unknown.
        input_tokens: Tokens of a prompt, mean; None where unknown.
        output_tokens: Tokens of an answer, mean; None where unknown.
    """

    model_id: str
    facts: LanguageModelFacts
    gpu: GpuTypeFacts
    num_gpus: int
    precision: str
    task: str
    batch: float
    max_num_seqs: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None

    @property
    def configuration(self) -> tuple[str, str, str, int]:
        """Model, precision, GPU type and number of GPUs."""
        return (self.model_id, self.precision, self.gpu.name, self.num_gpus)

    @property
    def series(self) -> tuple[str, str, str, int, str]:
        """Key of its curve over requests in flight: its configuration and task."""
        return (*self.configuration, self.task)

    def at(self, batch: float, max_num_seqs: float | None = None) -> LlmPoint:
        """The same point with another number of requests in flight."""
        return replace(self, batch=batch, max_num_seqs=max_num_seqs)


def llm_point(
    model_id: str,
    gpu_model: str,
    num_gpus: int,
    precision: str,
    batch: float,
    *,
    task: str = "",
    max_num_seqs: float | None = None,
    input_tokens: float | None = None,
    output_tokens: float | None = None,
    facts: LanguageModelFacts | None = None,
) -> LlmPoint:
    """Create a point from names as users write them.

    Args:
        facts: Facts of the model; found by its id when None.

    Raises:
        ConfigError: The catalog lacks the GPU type, the precision, or the size of the model.
    """
    return LlmPoint(
        model_id,
        model_facts(model_id) if facts is None else facts,
        gpu_facts(gpu_model),
        num_gpus,
        precision_name(precision),
        task,
        batch,
        max_num_seqs,
        input_tokens,
        output_tokens,
    )


@dataclass(frozen=True, slots=True)
class LlmRun:
    """A measured steady run; a figure that was not measured is None.

    Attributes:
        point: The point of the run.
        throughput_tps: Output tokens a second, of the whole replica.
        power_w: Mean power of its GPUs together, W.
        itl_p50_s, itl_p99_s: Median and 99th percentile of the time between two tokens of a request, s.
        ttft_s: Mean time to first token, s.
        tpot_s: Mean time an output token after the first, s.
    """

    point: LlmPoint
    throughput_tps: float | None = None
    power_w: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def token_time_s(self) -> float | None:
        """Time a token takes a request, prompts of others included: requests in flight over tokens a second, s."""
        return None if self.throughput_tps is None else self.point.batch / self.throughput_tps

    @property
    def energy_per_token_j(self) -> float | None:
        """Joules of the GPUs an output token."""
        if self.power_w is None or self.throughput_tps is None:
            return None
        return self.power_w / self.throughput_tps
