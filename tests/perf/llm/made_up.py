"""Runs of a made-up engine: the physical form with factors of its own, for tests that need no data set."""

from joulery.perf.llm.roofline import step_times_s
from joulery.perf.llm.runs import LlmPoint, LlmRun, llm_point

FACTORS = (1.3, 2.0, 3.0, 1.2)
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B")
LOADS = (8, 16, 32, 64, 128)


def truth(point: LlmPoint) -> LlmRun:
    """What the made-up engine would measure at a point."""
    time_s = float(step_times_s([point], FACTORS)[0])
    power_w = point.gpu.tdp_w * point.num_gpus * (0.45 + 0.08 * (point.batch / 8) ** 0.25)
    return LlmRun(point, point.batch / time_s, power_w, 0.95 * time_s, 2.0 * time_s)


def point(model: str = MODELS[0], gpu: str = "H100", batch: float = 8, gpus: int = 1, task: str = "chat") -> LlmPoint:
    """A point of the made-up engine."""
    return llm_point(model, gpu, gpus, "bfloat16", batch, task=task, output_tokens=600)


def runs() -> list[LlmRun]:
    """Three models on two GPU types at five loads."""
    return [truth(point(model, gpu, load)) for model in MODELS for gpu in ("H100", "B200") for load in LOADS]
