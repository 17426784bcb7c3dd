"""The length predictor of a language model: the one it names, or the default; and a predictor as one ONNX file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from joulery.adapters.models import length_graph, minilm
from joulery.perf.prompt_features import FEATURES
from joulery.runtime.compose.prompt_encoder import prompt_encoder
from joulery.runtime.text.guess import PredictorGuesser
from joulery.runtime.text.length_files import (
    DEFAULT,
    Graph,
    GraphPredictor,
    kept_graph,
    load,
    load_graph,
    needs_encoder,
)
from joulery.runtime.text.length_training import TrainedPredictor


def length_guesser(folder: Path | None, head: str) -> PredictorGuesser:
    """The head that speaks for a model; the shared one where none was trained for it.

    Args:
        folder: Where ``joulery train-length-predictor --out`` wrote; None for the default predictor.
        head: Name of the model.

    Raises:
        DataError: There is no predictor there, or it is damaged.
        CapabilityError: It needs an encoder that is not installed.
    """
    trained = kept_predictor(DEFAULT if folder is None else folder)
    return PredictorGuesser(trained, trained.head(head))


def kept_predictor(folder: Path) -> TrainedPredictor | GraphPredictor:
    """A kept predictor: its ONNX file where there is one and something to run it with, else its numbers.

    Raises:
        DataError: There is no predictor there, or it is damaged.
        CapabilityError: It needs an encoder that is not installed.
    """
    kept = kept_graph(folder)
    if kept is not None and importlib.util.find_spec("onnxruntime") is not None:
        return load_graph(folder, length_graph.LengthGraph(*kept))
    return load(folder, prompt_encoder("minilm") if needs_encoder(folder) else None)


def predictor_graph(predictor: TrainedPredictor) -> Graph | None:
    """The predictor as one ONNX file; None where the package onnx is not installed to write it with."""
    if importlib.util.find_spec("onnx") is None:
        return None
    encoder, words, most_tokens = None, None, 0
    if isinstance(predictor.encoder, minilm.PromptEncoder):
        encoder, most_tokens = predictor.encoder.graph, predictor.encoder.most_tokens
        words = predictor.encoder.words.read_bytes()
    model = predictor.model
    content = length_graph.build(model.arrays, model.recipe.width, len(FEATURES), encoder)
    return Graph(content, words, most_tokens)
