"""The length predictor of a language model: the one it names, or the default."""

from __future__ import annotations

from pathlib import Path

from joulery.runtime.compose.prompt_encoder import prompt_encoder
from joulery.runtime.length_training import DEFAULT, load, needs_encoder
from joulery.runtime.text.guess import PredictorGuesser


def length_guesser(folder: Path | None, head: str) -> PredictorGuesser:
    """The head that speaks for a model; the shared one where none was trained for it.

    Args:
        folder: Where ``joulery train-length-predictor --out`` wrote; None for the default predictor.
        head: Name of the model.

    Raises:
        DataError: There is no predictor there, or it is damaged.
        CapabilityError: It needs an encoder that is not installed.
    """
    where = DEFAULT if folder is None else folder
    encoder = prompt_encoder("minilm") if needs_encoder(where) else None
    trained = load(where, encoder)
    return PredictorGuesser(trained, trained.head(head))
