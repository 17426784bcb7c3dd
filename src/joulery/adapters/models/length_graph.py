"""A trained length predictor as one ONNX file: encoder in 8-bit integers where it has one, kernel ridge, every head.

Inputs: ``surface`` float32[features] and, with an encoder, ``tokens`` int64[n]. Outputs: ``raw`` float32[heads], the
normal score of the length that each head predicts, and with an encoder ``embedding`` float32[width], the encoder's
output minus its mean over the training prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from joulery.adapters.models.minilm import HOW, word_pieces
from joulery.domain.arrays import FloatArray
from joulery.domain.errors import CapabilityError, DataError

_OPSET, _IR = 18, 9


def build(arrays: Mapping[str, FloatArray], width: float, surface: int, encoder: bytes | None) -> bytes:
    """Build the predictor's graph.

    Args:
        arrays: ``shift``, ``factor``, ``limit``, ``points``, ``norms``, ``weights`` and ``offset`` of the length model.
        width: Factor of the squared distance in the kernel's exponent.
        surface: Number of features from the prompt's surface; the others are the encoder's.
        encoder: The encoder's own graph, ``tokens`` to one output; None for none.

    Raises:
        CapabilityError: The package onnx is not installed.
    """
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        raise CapabilityError("onnx is not installed", hint=HOW) from None
    nodes: list[Any] = []
    inputs = [helper.make_tensor_value_info("surface", TensorProto.FLOAT, [surface])]
    outputs = [helper.make_tensor_value_info("raw", TensorProto.FLOAT, [arrays["weights"].shape[1]])]
    held = [
        numpy_helper.from_array(value.astype(np.float32), f"length.{name}") for name, value in _scaled(arrays).items()
    ]
    features = "surface"
    base = None if encoder is None else onnx.load_from_string(encoder)
    if base is not None:
        inputs.append(base.graph.input[0])
        nodes += base.graph.node
        held += base.graph.initializer
        meaning = base.graph.output[0].name
        held.append(numpy_helper.from_array(arrays["shift"][surface:].astype(np.float32), "length.mean"))
        nodes.append(helper.make_node("Sub", [meaning, "length.mean"], ["embedding"]))
        nodes.append(helper.make_node("Concat", ["surface", meaning], ["length.features"], axis=0))
        outputs.append(helper.make_tensor_value_info("embedding", TensorProto.FLOAT, [len(arrays["shift"]) - surface]))
        features = "length.features"
    held.append(numpy_helper.from_array(np.float32(width), "length.width"))
    nodes += _kernel(features)
    graph = helper.make_graph(nodes, "length predictor", inputs, outputs, held)
    imports = [helper.make_opsetid("", _OPSET)] if base is None else list(base.opset_import)
    model = helper.make_model(graph, opset_imports=imports, ir_version=_IR)
    return bytes(model.SerializeToString())


def _scaled(arrays: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    names = ("shift", "factor", "limit", "points", "norms", "weights", "offset")
    scaled = {name: np.asarray(arrays[name]) for name in names}
    # A row times a matrix of constants: onnxruntime packs the matrix once, and is ten times as fast as the other way.
    return {**scaled, "points": np.ascontiguousarray(scaled["points"].T), "floor": -scaled["limit"]}


def _kernel(features: str) -> list[Any]:
    """Nodes of ``exp(width * (2 points x - norms - x x)) weights + offset`` with x the scaled and clipped features."""
    from onnx import helper

    def add(operation: str, inputs: str, output: str, **attributes: Any) -> Any:
        names = [name if name in (features, "raw") else f"length.{name}" for name in inputs.split()]
        return helper.make_node(operation, names, [output if output == "raw" else f"length.{output}"], **attributes)

    return [
        add("Sub", f"{features} shift", "centred"),
        add("Mul", "centred factor", "spread"),
        add("Max", "spread floor", "above"),
        add("Min", "above limit", "x"),
        add("MatMul", "x points", "near"),
        add("Add", "near near", "twice"),
        add("ReduceSumSquare", "x", "square", keepdims=0),
        add("Sub", "twice norms", "less"),
        add("Sub", "less square", "distance"),
        add("Mul", "distance width", "exponent"),
        add("Exp", "exponent", "kernel"),
        add("MatMul", "kernel weights", "sum"),
        add("Add", "sum offset", "raw"),
    ]


class LengthGraph:
    """Length predictor of an ONNX file, run on the calling thread.

    Args:
        file: The ``.onnx`` file, or its content.
        vocabulary: The encoder's word pieces, one a line, as a file or its content; None where it has no encoder.
        max_tokens: Most tokens of a prompt that are read.
        last_tokens: Number of these that are read from the end of a longer prompt.

    Raises:
        CapabilityError: onnxruntime is not installed.
        DataError: The file is not such a graph.
    """

    def __init__(
        self, file: Path | bytes, vocabulary: Path | bytes | None, max_tokens: int, last_tokens: int = 0
    ) -> None:
        try:
            import onnxruntime
            from onnxruntime.capi import onnxruntime_pybind11_state as states
        except ImportError:
            raise CapabilityError("onnxruntime is not installed", hint="pip install 'joulery[llm]'") from None
        where = None if isinstance(file, bytes) else str(file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            content = file if isinstance(file, bytes) else file.read_bytes()
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            words = vocabulary.read_bytes() if isinstance(vocabulary, Path) else vocabulary or b""
            lines = words.decode().split("\n")
        except (
            OSError,
            ValueError,
            states.Fail,
            states.InvalidGraph,
            states.InvalidProtobuf,
            states.NoSuchFile,
        ) as error:
            raise DataError(f"the length predictor cannot be run: {error}", file=where) from error
        names = {each.name for each in self._session.get_inputs()}
        if "surface" not in names or ("tokens" in names) is (vocabulary is None):
            raise DataError(f"not a length predictor: it takes {sorted(names)}", file=where)
        self._vocabulary = None if vocabulary is None else {word: number for number, word in enumerate(lines)}
        self._most_tokens, self._last_tokens = max_tokens, last_tokens

    def __call__(self, prompt: str, surface: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """The raw score of each head, float64[heads], and the prompt's embedding; None without an encoder."""
        fed: dict[str, Any] = {"surface": surface.astype(np.float32)}
        if self._vocabulary is None:
            return np.asarray(self._session.run(["raw"], fed)[0], np.float64), None
        fed["tokens"] = np.array(word_pieces(prompt, self._vocabulary, self._most_tokens, self._last_tokens), np.int64)
        raw, embedding = self._session.run(["raw", "embedding"], fed)
        return np.asarray(raw, np.float64), np.asarray(embedding, np.float64)
