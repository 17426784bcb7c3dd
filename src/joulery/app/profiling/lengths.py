"""``joulery train-length-predictor``: train an output-length predictor on logs of answers, evaluate it, and save it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from joulery.app.wiring.length_predictor import as_served, distilled_encoder, predictor_graph, prompt_encoder
from joulery.runtime.llm import predictor_files, predictor_training
from joulery.runtime.llm.predictor_training import Evaluation as Evaluation
from joulery.runtime.llm.predictor_training import TrainedPredictor as TrainedPredictor


@dataclass(frozen=True, slots=True)
class LengthRequest:
    """The flags of ``joulery train-length-predictor``.

    Attributes:
        data: Logs of answers.
        instructions: The prompts of Parquet logs.
        evaluate: A log of other prompts to evaluate on.
        out: Folder to save the predictor in; None to not save it.
        encoder: ``auto``, ``minilm``, ``distilled`` or ``none``.
        seed: Seed of the distillation.
    """

    data: tuple[Path, ...]
    instructions: tuple[Path, ...]
    evaluate: Path
    out: Path | None
    encoder: str
    seed: int


def train_predictor(
    request: LengthRequest, progress: Callable[[int, int, str], None]
) -> tuple[TrainedPredictor, Evaluation]:
    """Train a predictor of output lengths and score it; both as served, from one ONNX file where that can be written.

    Args:
        request: The data to train and evaluate on.
        progress: Receives ``(done, of, next step)`` of a distillation.

    Raises:
        DataError: A log cannot be used.
        CapabilityError: The encoder is not installed, or the folder cannot be written.
    """
    log = predictor_training.read_answers(request.data, request.instructions)
    judged = predictor_training.read_answers([request.evaluate], request.instructions)
    distilled = request.encoder == "distilled"
    encoder = distilled_encoder(log, request.seed, progress) if distilled else prompt_encoder(request.encoder)
    predictor = predictor_training.train(log, encoder)
    graph = predictor_graph(predictor)
    found = predictor_training.evaluate(predictor, judged, log.prompts, as_served(predictor, graph).look)
    if request.out is not None:
        predictor_files.save(request.out, predictor, log, [*request.data, *request.instructions], graph)
    return predictor, found
