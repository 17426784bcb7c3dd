"""Open the length predictor of a language model, with its encoder and its ONNX file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np

from joulery.adapters.models import length_graph, minilm, minilm_distil
from joulery.perf.lengths.classes import QUANTILES
from joulery.perf.lengths.prompt_features import FEATURES
from joulery.runtime.llm.predictor_files import (
    DEFAULT,
    Graph,
    GraphPredictor,
    kept_graph,
    kept_words,
    load,
    load_graph,
    needs_encoder,
)
from joulery.runtime.llm.predictor_training import Encoder, TrainedPredictor, TrainingAnswers, scores_unseen
from joulery.runtime.llm.trained_predictor import PredictorHead


def length_predictor(folder: Path | None, head: str) -> PredictorHead:
    """Open the predictor with the head of a model; with the shared head where none was trained for it.

    Args:
        folder: Folder written by ``joulery train-length-predictor --out``; None for the default predictor.
        head: Name of the model.

    Raises:
        DataError: There is no predictor there, or it is damaged.
        CapabilityError: The predictor needs an encoder that is not installed.
    """
    trained = kept_predictor(DEFAULT if folder is None else folder)
    return PredictorHead(trained, trained.head(head))


def kept_predictor(folder: Path) -> TrainedPredictor | GraphPredictor:
    """Open a saved predictor: from its ONNX file if it exists and can be run, else from its numbers.

    Raises:
        DataError: There is no predictor there, or it is damaged.
        CapabilityError: The predictor needs an encoder that is not installed.
    """
    kept = kept_graph(folder)
    if kept is not None and importlib.util.find_spec("onnxruntime") is not None:
        return load_graph(folder, length_graph.LengthGraph(*kept))
    return load(folder, prompt_encoder("minilm") if needs_encoder(folder) else kept_words(folder))


def as_served(predictor: TrainedPredictor, graph: Graph | None) -> TrainedPredictor | GraphPredictor:
    """Return a predictor as :func:`kept_predictor` will run it: from its graph if it exists and can be run."""
    if graph is None or importlib.util.find_spec("onnxruntime") is None:
        return predictor
    run = length_graph.LengthGraph(graph.content, graph.words, graph.max_tokens, graph.last_tokens)
    arrays = predictor.model.arrays
    return GraphPredictor(predictor.model.models, arrays["cuts"], arrays["class_tokens"], run)


def predictor_graph(predictor: TrainedPredictor) -> Graph | None:
    """The predictor as one ONNX file; None where the package onnx is not installed to write it with."""
    if importlib.util.find_spec("onnx") is None:
        return None
    model, encoder = predictor.model, predictor.encoder
    if not isinstance(encoder, minilm.PromptEncoder):
        return Graph(length_graph.build(model.arrays, model.recipe.width, len(FEATURES), None), None, 0)
    content = length_graph.build(model.arrays, model.recipe.width, len(FEATURES), encoder.graph)
    return Graph(content, encoder.words.read_bytes(), encoder.max_tokens, encoder.last_tokens)


def prompt_encoder(choice: str) -> Encoder | None:
    """Open the prompt encoder ``minilm`` or ``none``; ``auto`` is minilm where it is installed.

    Raises:
        CapabilityError: ``minilm`` is asked for and not installed.
    """
    if choice == "none" or (choice == "auto" and not minilm.installed()):
        return None
    return minilm.PromptEncoder()


def distilled_encoder(
    log: TrainingAnswers, seed: int, progress: Callable[[int, int, str], None] | None = None
) -> Encoder:
    """Distil the installed encoder into three layers on the prompts of a log.

    Args:
        log: Training log of the predictor.
        seed: Random seed.
        progress: Receives the steps done, the steps in all and, after each epoch, its loss.

    Raises:
        CapabilityError: PyTorch or the encoder is not installed.
        DataError: The log is too small to learn from.
    """
    teacher = minilm.PromptEncoder()
    scores = scores_unseen(log, teacher)
    shared = scores[:, -1]
    classes = np.searchsorted(np.quantile(shared, QUANTILES), shared, "right")
    lesson = minilm_distil.Lesson(log.prompts, scores, classes)
    return minilm_distil.distil(teacher, lesson, minilm_distil.DistilRecipe(seed=seed), progress)
