"""Save and load a trained length predictor in a folder: its description, its numbers and its ONNX graph."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.perf.lengths.classes import OrdinalQuality
from joulery.perf.lengths.kernel_ridge import LengthModel, LengthRecipe, ordinal
from joulery.perf.lengths.prompt_features import FEATURES, prompt_features
from joulery.perf.lengths.word_vectors import WordVectors
from joulery.runtime.llm.predictor_training import Encoder, TrainedPredictor, TrainingAnswers
from joulery.store.files import disk_errors, write_atomically

SCHEMA = "joulery.length-predictor/1"
LICENCE = "that of the files above; a predictor trained on non-commercial data stays non-commercial"
DEFAULT = Path(__file__).parent / "default_predictor"
"""The predictor that is shipped: surface features and word vectors, trained on prompts of our own."""
_WORDS = "words.npz"


class Runner(Protocol):
    """Evaluates the graph of a saved predictor."""

    def __call__(self, prompt: str, surface: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Raw score of each head, float64[heads], and the prompt's embedding; None where there is none."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GraphPredictor:
    """A saved predictor whose graph another engine runs.

    Attributes:
        models: Models on whose answers it was trained, in the order of the heads.
        cuts: Class limits of the raw scores of each head, float64[models + 1, 4].
        class_tokens: Class boundaries of each trained model, tokens, float64[models, 4].
        run: The graph.
    """

    models: tuple[str, ...]
    cuts: FloatArray
    class_tokens: FloatArray
    run: Runner

    def look(self, prompt: str) -> tuple[FloatArray, FloatArray | None]:
        """Ordinal score of each head, float64[models + 1], and the prompt's embedding."""
        raw, embedding = self.run(prompt, prompt_features(prompt))
        return ordinal(raw, self.cuts), embedding

    def head(self, model: str) -> int:
        """Index of the head of a model; the shared one for a model never seen."""
        return self.models.index(model) if model in self.models else len(self.models)


@dataclass(frozen=True, slots=True)
class Graph:
    """A predictor as one ONNX file.

    Attributes:
        content: The file.
        words: Word pieces of its encoder, one a line; None without one.
        max_tokens: Tokens of a prompt that the encoder reads; 0 without one.
        last_tokens: How many of them, of a longer prompt, are its last.
    """

    content: bytes
    words: bytes | None
    max_tokens: int
    last_tokens: int = 0


def save(
    folder: Path,
    predictor: TrainedPredictor,
    log: TrainingAnswers,
    files: Sequence[Path],
    graph: Graph | None = None,
    *,
    licence: str = LICENCE,
) -> None:
    """Write ``predictor.json`` (what it is and was trained on), ``predictor.npz`` (its numbers) and ``predictor.onnx``.

    No prompt is kept. If the graph has an encoder, its vocabulary is in ``vocab.txt``; word vectors in ``words.npz``.

    Args:
        folder: Where to write; made if missing.
        predictor: The fitted predictor.
        log: The answers that it was trained on; their digest is kept.
        files: The files of that log, for the description.
        graph: The ONNX graph; without it there is no ``predictor.onnx``.
        licence: Licence of the training data, for the description.

    Raises:
        CapabilityError: The folder cannot be written.
    """
    model = predictor.model
    document = {
        "schema": SCHEMA,
        "models": list(model.models),
        "recipe": asdict(model.recipe),
        "blocks": list(model.blocks),
        "features": list(FEATURES),
        "encoder": None if predictor.encoder is None else predictor.encoder.name,
        "words": isinstance(predictor.encoder, WordVectors),
        "left_out": asdict(model.left_out),
        "graph": None if graph is None else {"max_tokens": graph.max_tokens, "last_tokens": graph.last_tokens},
        "trained_on": {
            "prompts": len(log.prompts),
            "answers": int(np.sum(~np.isnan(log.answers.tokens))),
            "files": [{"name": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()} for file in files],
            "licence": licence,
        },
    }
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "predictor.npz", lambda file: _write_arrays(file, model.arrays))
    if isinstance(predictor.encoder, WordVectors):
        kept = _words_as_arrays(predictor.encoder)
        write_atomically(folder / _WORDS, lambda file: _write_arrays(file, kept))
    if graph is not None:
        content, words = graph.content, graph.words
        write_atomically(folder / "predictor.onnx", lambda file: file.write(content))
        if words is not None:
            write_atomically(folder / "vocab.txt", lambda file: file.write(words))
    text = json.dumps(document, indent=1) + "\n"
    write_atomically(folder / "predictor.json", lambda file: file.write(text.encode()))


def _words_as_arrays(encoder: WordVectors) -> dict[str, npt.NDArray[Any]]:
    words = np.frombuffer("\n".join(encoder.words).encode(), np.uint8)
    return {"words": words, "vectors": encoder.vectors}


def _write_arrays(file: IO[bytes], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as kept:
        for name, array in arrays.items():
            with kept.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def needs_encoder(folder: Path) -> bool:
    """Whether a predictor was trained with an encoder that is not in its folder.

    Raises:
        DataError: There is no predictor, or it is damaged.
    """
    document = _described(folder)
    return document["encoder"] is not None and not document.get("words", False)


def kept_words(folder: Path) -> WordVectors | None:
    """The word vectors of a predictor; None where it was trained without.

    Raises:
        DataError: There is no predictor, or it is damaged.
    """
    document = _described(folder)
    if not document.get("words", False):
        return None
    try:
        with (folder / _WORDS).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            words = arrays["words"].tobytes().decode().split("\n")
            return WordVectors(str(document["encoder"]), words, arrays["vectors"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, DataError) as error:
        raise DataError(f"its word vectors cannot be read: {error}", file=str(folder / _WORDS)) from error


def _described(folder: Path) -> dict[str, Any]:
    described = folder / "predictor.json"
    try:
        document = json.loads(described.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA or document["features"] != list(FEATURES):
            raise DataError(
                f"made by another version: {document['schema']}", file=str(described), hint="train it again"
            )
    except FileNotFoundError as error:
        raise DataError("there is no length predictor", file=str(folder)) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the length predictor cannot be read: {error}", file=str(folder)) from error
    return dict(document)


def kept_graph(folder: Path) -> tuple[Path, Path | None, int, int] | None:
    """The ONNX file of a predictor, its encoder's words, the tokens that it reads, and how many of them are the last.

    None where it has no such file.

    Raises:
        DataError: There is no predictor, or it is damaged.
    """
    document = _described(folder)
    graph = document.get("graph")
    if graph is None:
        return None
    words = None if document["encoder"] is None else folder / "vocab.txt"
    return folder / "predictor.onnx", words, int(graph["max_tokens"]), int(graph.get("last_tokens", 0))


def load_graph(folder: Path, run: Runner) -> GraphPredictor:
    """Load a predictor that :func:`save` wrote; ``run`` evaluates its graph.

    Raises:
        DataError: There is no predictor, or it is damaged.
    """
    document = _described(folder)
    numbers = _numbers(folder, ("cuts", "class_tokens"))
    return GraphPredictor(tuple(document["models"]), numbers["cuts"], numbers["class_tokens"], run)


def _numbers(folder: Path, names: Sequence[str] = ()) -> dict[str, FloatArray]:
    """Arrays of a kept predictor: those named, or all."""
    try:
        with (folder / "predictor.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: np.array(arrays[name], np.float64) for name in names or arrays.files}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"the length predictor cannot be read: {error}", file=str(folder)) from error


def load(folder: Path, encoder: Encoder | None) -> TrainedPredictor:
    """Load a predictor that :func:`save` wrote.

    Args:
        folder: Where it is.
        encoder: The one it was trained with; see ``encoder`` in its predictor.json, and :func:`kept_words`.

    Raises:
        DataError: There is no predictor, it is damaged or of another version, or it needs another encoder.
    """
    document = _described(folder)
    numbers = _numbers(folder)
    try:
        model = LengthModel(
            tuple(document["models"]),
            LengthRecipe(**document["recipe"]),
            tuple(document["blocks"]),
            numbers,
            OrdinalQuality(**document["left_out"]),
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"the length predictor cannot be read: {error}", file=str(folder)) from error
    name = None if encoder is None else encoder.name
    if document["encoder"] != name:
        raise DataError(f"trained with encoder {document['encoder']}, not {name}", file=str(folder))
    return TrainedPredictor(model, encoder)
