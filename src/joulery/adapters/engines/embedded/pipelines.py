"""Hugging Face pipelines inside a worker.

Text tasks take ``text``, a string a row; image tasks take ``image``, RGB pictures of one size. Classifiers answer
``label`` and ``score``, ``feature-extraction`` answers ``embedding`` (the mean over the tokens of a text), all other
tasks ``json``: what the pipeline returned for a row, as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from joulery.adapters.engines.embedded.models import LoadedModel, one_line, only, options_of
from joulery.adapters.engines.embedded.torch_models import on_cuda, require_torch
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.serving.engine import ModelRef, Outcome, RequestError
from joulery.domain.serving.tensors import Tensor, TensorSpec

GRANT = "pip install 'joulery[transformers]'"
TEXT_TASKS = (
    "feature-extraction",
    "fill-mask",
    "ner",
    "sentiment-analysis",
    "text-classification",
    "token-classification",
    "zero-shot-classification",
)
IMAGE_TASKS = ("image-classification", "object-detection")
_CLASSIFIERS = ("image-classification", "sentiment-analysis", "text-classification")
_EMBEDDING = "feature-extraction"


def load_pipeline(model: ModelRef, threads: int) -> LoadedModel:
    """A pipeline, ready to run with ``threads`` threads inside an operator.

    Raises:
        ConfigError: No such task, or no such folder.
        DataError: The folder holds no model of that task.
        CapabilityError: Transformers or PyTorch is not installed, or a package that the task needs.
    """
    options = options_of(model)
    task = str(options.pop("task", ""))
    if task not in (*TEXT_TASKS, *IMAGE_TASKS):
        raise ConfigError(
            "no task that can be served this way",
            pointer=model.location,
            got=task,
            expected=", ".join((*TEXT_TASKS, *IMAGE_TASKS)),
            hint="models that write text are served under language_models" if "generation" in task else "",
        )
    require_torch(threads)
    pipe = _pipeline(task, model.location, options)
    takes = TensorSpec("text", "BYTES", (-1,)) if task in TEXT_TASKS else TensorSpec("image", "UINT8", (-1, -1, -1, 3))
    read, write = (_texts if task in TEXT_TASKS else _pictures), _writer(task)

    def run(inputs: dict[str, Tensor], wanted: tuple[str, ...]) -> Mapping[str, Any]:
        if takes.name not in inputs:
            raise RequestError(f"input {takes.name!r} is missing", Outcome.INVALID)
        rows = read(inputs[takes.name])
        # Rows of unequal length are padded when they run together, which an embedding's mean would count.
        together = len(rows) if task in _CLASSIFIERS and _pads(pipe) else 1
        return only(write(pipe(rows, batch_size=together) if rows else []), wanted)

    return LoadedModel(run, (takes,), _gives(task, options), f"transformers_{task.replace('-', '_')}")


def _pipeline(task: str, location: str, options: Mapping[str, Any]) -> Any:
    """The pipeline of Transformers.

    Raises:
        ConfigError, DataError, CapabilityError: As :func:`load_pipeline`.
    """
    try:
        import transformers
    except ImportError as error:
        raise CapabilityError(
            "Hugging Face pipelines need Transformers", resource="transformers", grant=GRANT
        ) from error
    transformers.logging.disable_progress_bar()
    device = "cuda" if on_cuda() else "cpu"
    try:
        return transformers.pipeline(task, model=location, device=device, **options)
    except ImportError as error:
        raise CapabilityError(
            f"{task} needs another package: {one_line(error)[:300]}", resource="transformers", grant=GRANT
        ) from error
    except TypeError as error:
        raise ConfigError(f"the pipeline refuses its options: {one_line(error)}", pointer=location) from error
    except Exception as error:  # transformers and the code of a model raise anything
        if not Path(location).exists():
            raise ConfigError(
                f"there is no such model: {one_line(error)[:300]}",
                pointer=location,
                hint="name a folder of save_pretrained, or a model that can be downloaded from the hub",
            ) from error
        raise DataError(f"not a model of {task} that can be run: {one_line(error)[:300]}", file=location) from error


def _pads(pipe: Any) -> bool:
    """Whether rows can run together: pictures can, texts where the tokenizer pads them."""
    return pipe.tokenizer is None or pipe.tokenizer.pad_token is not None


def _texts(array: Tensor) -> list[Any]:
    if array.ndim != 1 or array.dtype != object:
        raise RequestError("input 'text' is BYTES of shape [N]: a text a row", Outcome.INVALID)
    try:
        return [element.decode() if isinstance(element, bytes) else str(element) for element in array.tolist()]
    except UnicodeDecodeError as error:
        raise RequestError(f"input 'text' holds bytes that are not text: {error}", Outcome.INVALID) from error


def _pictures(array: Tensor) -> list[Any]:
    if array.ndim != 4 or array.shape[3] != 3 or array.dtype != np.uint8 or 0 in array.shape[1:]:
        raise RequestError("input 'image' is UINT8 of shape [N, height, width, 3]", Outcome.INVALID)
    from PIL import Image

    return [Image.fromarray(picture) for picture in array]


def _writer(task: str) -> Callable[[Sequence[Any]], dict[str, Tensor]]:
    if task in _CLASSIFIERS:
        return _classes
    return _embeddings if task == _EMBEDDING else _as_json


def _gives(task: str, options: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    if task in _CLASSIFIERS:
        shape = (-1, -1) if _several(task, options) else (-1,)
        return (TensorSpec("label", "BYTES", shape), TensorSpec("score", "FP32", shape))
    return (TensorSpec("embedding", "FP32", (-1, -1)),) if task == _EMBEDDING else (TensorSpec("json", "BYTES", (-1,)),)


def _several(task: str, options: Mapping[str, Any]) -> bool:
    """Whether a row is answered with several labels; classifiers of pictures give five by default."""
    return "top_k" in options or task == "image-classification"


def _classes(results: Sequence[Any]) -> dict[str, Tensor]:
    rows = [result if isinstance(result, list) else [result] for result in results]
    labels = _objects([[entry["label"].encode() for entry in row] for row in rows])
    scores = np.array([[entry["score"] for entry in row] for row in rows], np.float32)
    if results and not isinstance(results[0], list):
        return {"label": labels[:, 0], "score": scores[:, 0]}
    return {"label": labels, "score": scores}


def _objects(rows: list[list[bytes]]) -> Tensor:
    found = np.empty((len(rows), len(rows[0]) if rows else 0), object)
    for at, row in enumerate(rows):
        found[at, :] = row
    return found


def _embeddings(results: Sequence[Any]) -> dict[str, Tensor]:
    return {"embedding": np.array([np.mean(result[0], axis=0) for result in results], np.float32)}


def _as_json(results: Sequence[Any]) -> dict[str, Tensor]:
    texts = np.empty(len(results), object)
    texts[:] = [orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY) for result in results]
    return {"json": texts}
