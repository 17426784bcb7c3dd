"""Operators of the fifteen models of μ-Serve's Table 1 (ATC'24), from their public architectures.

The paper does not state the inputs of its latencies; these inputs reach them on the emulated V100: 32-bit floats;
models that do not generate take a batch of 8 (512 tokens, or images of 224 × 224); models that generate take one
prompt of 512 tokens (*prefill*) and generate 64 tokens with a key-value cache (*decode*). The encoder-decoder Switch
models have a dense block in every layer and experts in every other layer, run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from joulery.domain.errors import ConfigError
from joulery.domain.trace.operators import OperationCost, OperatorKind

_WORD = 4.0
_DECODE_STEPS = 64
_PROMPT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a transformer.

    Attributes:
        layers: Blocks (of the encoder and as many of the decoder, with experts).
        width: Size of a token's vector.
        heads: Attention heads.
        vocabulary: Tokens of its vocabulary; 0 where no logits are computed.
        hidden: Width of the inner layer of a block.
        batch: Sequences at once.
        experts: Experts of every other block; 0 for none.
        embeddings: Rows of an embedding table that is not also used for the logits.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    hidden: int
    batch: int = 1
    experts: int = 0
    embeddings: int = 0


TRANSFORMERS: Mapping[str, Transformer] = {
    "BERT-base": Transformer(12, 768, 12, 0, 3072, batch=8, embeddings=30522),
    "BERT-large": Transformer(24, 1024, 16, 0, 4096, batch=8, embeddings=30522),
    "RoBERTa-base": Transformer(12, 768, 12, 0, 3072, batch=8, embeddings=50265),
    "RoBERTa-large": Transformer(24, 1024, 16, 0, 4096, batch=8, embeddings=50265),
    "OPT-1.3b": Transformer(24, 2048, 32, 50272, 8192),
    "OPT-2.7b": Transformer(32, 2560, 32, 50272, 10240),
    "GPT2-large": Transformer(36, 1280, 20, 50257, 5120),
    "GPT2-xl": Transformer(48, 1600, 25, 50257, 6400),
    "CodeGen-350m": Transformer(20, 1024, 16, 51200, 4096, embeddings=51200),
    "CodeGen-2b": Transformer(32, 2560, 32, 51200, 10240, embeddings=51200),
    "Bloom-1b1": Transformer(24, 1536, 16, 250880, 6144),
    "Bloom-3b": Transformer(30, 2560, 32, 250880, 10240),
    "Switch-base-16": Transformer(12, 768, 12, 32128, 3072, experts=16),
    "Switch-base-32": Transformer(12, 768, 12, 32128, 3072, experts=32),
}

_LATENCY_S: Mapping[str, float] = {
    "ResNet-50": 0.051,
    "BERT-base": 0.123,
    "BERT-large": 0.365,
    "RoBERTa-base": 0.135,
    "RoBERTa-large": 0.382,
    "OPT-1.3b": 1.243,
    "OPT-2.7b": 2.351,
    "GPT2-large": 0.832,
    "GPT2-xl": 1.602,
    "CodeGen-350m": 0.357,
    "CodeGen-2b": 2.507,
    "Bloom-1b1": 0.523,
    "Bloom-3b": 1.293,
    "Switch-base-16": 0.348,
    "Switch-base-32": 0.402,
}
"""Latency on a V100 at 1380 MHz (Table 1)."""


_KINDS: Mapping[str, OperatorKind] = {
    "dot": OperatorKind.DOT,
    "convolution": OperatorKind.CONVOLUTION,
    "reduce": OperatorKind.REDUCE,
    "reduce-window": OperatorKind.REDUCE,
    "gather": OperatorKind.MOVE,
    "scatter": OperatorKind.MOVE,
    "sort": OperatorKind.MOVE,
    "transpose": OperatorKind.MOVE,
}


def architectures() -> tuple[str, ...]:
    """Names of the models in the catalog."""
    return tuple(_LATENCY_S)


def published_latency_s(name: str) -> float:
    """Latency of a model on a V100 at 1380 MHz, from the paper's Table 1.

    Raises:
        ConfigError: No such model.
    """
    _check(name)
    return _LATENCY_S[name]


def operations_of(name: str) -> tuple[OperationCost, ...]:
    """The operators of a model in topological order; those of decoding are listed once, with a count over all steps.

    Raises:
        ConfigError: No such model.
    """
    _check(name)
    if name == "ResNet-50":
        return tuple(_resnet50(batch=8))
    model = TRANSFORMERS[name]
    prefill = _pass(model, "prefill", tokens=_PROMPT_TOKENS, keys=float(_PROMPT_TOKENS))
    if not model.vocabulary:
        return tuple(replace(operation, phase="forward") for operation in prefill)
    middle = (_DECODE_STEPS - 1) / 2
    keys = middle + 1 if model.experts else _PROMPT_TOKENS + middle
    decode = _pass(model, "decode", tokens=1, keys=keys)
    own_weights = bool(model.experts)  # the decoder is a network of its own
    return (
        *prefill,
        *(
            replace(each, count=_DECODE_STEPS * each.count, parameter_bytes=own_weights * each.parameter_bytes)
            for each in decode
        ),
    )


def _check(name: str) -> None:
    if name not in _LATENCY_S:
        raise ConfigError("no such model in the catalog", got=name, expected=", ".join(_LATENCY_S))


def _pass(model: Transformer, phase: str, tokens: int, keys: float) -> Iterator[OperationCost]:
    """One pass over ``tokens`` new tokens a sequence, each of which attends to ``keys`` tokens on average."""
    rows, width = model.batch * tokens, model.width
    if not model.experts:
        yield _op("embed", "gather", phase, 0.0, 2.0 * rows * width, rows * width, model.embeddings * width)
    for layer in range(model.layers):
        block = chain(_attention(model, phase, rows, keys), _feed_forward(model, phase, rows))
        if model.experts and phase == "decode":
            block = chain(block, _cross_attention(model, phase, rows))
        if model.experts and layer % 2:
            block = chain(block, _experts(model, phase, rows))
        for operation in block:
            yield replace(operation, name=f"layer{layer}.{operation.name}")
    if model.vocabulary and (phase == "decode" or not model.experts):
        yield _dot("lm_head", phase, 1, width, model.vocabulary, 1.0)


def _attention(model: Transformer, phase: str, rows: int, keys: float) -> Iterator[OperationCost]:
    width, vectors, scores = model.width, rows * model.width, model.heads * rows * keys
    held = model.batch * keys * width
    yield from _norm("ln1", phase, vectors)
    yield _dot("qkv", phase, rows, width, 3 * width, 1.0)
    yield _op("qkv.bias", "add", phase, 3.0 * vectors, 6.0 * vectors, 3 * vectors, 3 * width)
    yield _op("qk", "dot", phase, 2.0 * rows * keys * width, vectors + held + scores, scores)
    yield _op("scale+mask", "add", phase, 2.0 * scores, 2.0 * scores, scores)
    yield from _softmax("sm", phase, scores)
    yield _op("av", "dot", phase, 2.0 * rows * keys * width, vectors + held + scores, vectors)
    yield _op("transpose", "transpose", phase, 0.0, 2.0 * vectors, vectors)
    yield _dot("proj", phase, rows, width, width, 1.0)
    yield _op("proj.bias", "add", phase, vectors, 2.0 * vectors, vectors, width)
    yield _op("resid1", "add", phase, vectors, 3.0 * vectors, vectors)


def _feed_forward(model: Transformer, phase: str, rows: int) -> Iterator[OperationCost]:
    vectors, inner = rows * model.width, rows * model.hidden
    yield from _norm("ln2", phase, vectors)
    yield _dot("fc1", phase, rows, model.width, model.hidden, 1.0)
    yield _op("act", "tanh", phase, 10.0 * inner, 2.0 * inner, inner)
    yield _dot("fc2", phase, rows, model.hidden, model.width, 1.0)
    yield _op("fc2.bias", "add", phase, vectors, 2.0 * vectors, vectors, model.width)
    yield _op("resid2", "add", phase, vectors, 3.0 * vectors, vectors)


def _cross_attention(model: Transformer, phase: str, rows: int) -> Iterator[OperationCost]:
    width, keys = model.width, _PROMPT_TOKENS
    vectors, scores = rows * width, model.heads * rows * keys
    yield _dot("xq", phase, rows, width, width, 1.0)
    yield _op("xqk", "dot", phase, 2.0 * rows * keys * width, vectors + keys * width + scores, scores)
    yield _op("xsm", "exponential", phase, 8.0 * scores, 2.0 * scores, scores)
    yield _op("xav", "dot", phase, 2.0 * rows * keys * width, vectors + keys * width + scores, vectors)
    yield _dot("xo", phase, rows, width, width, 1.0)


def _experts(model: Transformer, phase: str, rows: int) -> Iterator[OperationCost]:
    """The router and the experts: all experts in prefill, one expert for the token in decoding."""
    width, vectors, weights = model.width, rows * model.width, 2.0 * model.width * model.hidden
    choices = rows * model.experts
    run = model.experts if rows > 1 else 1
    each = max(rows // model.experts, 1)
    yield _dot("router", phase, rows, width, model.experts, 1.0)
    yield _op("topk", "sort", phase, 4.0 * choices, 2.0 * choices, choices)
    yield _op("dispatch", "scatter", phase, 0.0, 3.0 * vectors, vectors)
    held = weights * model.experts / run / 2.0
    yield replace(_dot("e.fc1", phase, each, width, model.hidden, run), parameter_bytes=held * _WORD)
    inner = each * model.hidden
    yield replace(_op("e.act", "maximum", phase, inner, 2.0 * inner, inner), count=float(run))
    yield replace(_dot("e.fc2", phase, each, model.hidden, width, run), parameter_bytes=held * _WORD)
    yield _op("combine", "gather", phase, vectors, 3.0 * vectors, vectors)


def _norm(name: str, phase: str, elements: float) -> Iterator[OperationCost]:
    yield _op(f"{name}.mean", "reduce", phase, 2.0 * elements, elements, 0.0)
    yield _op(f"{name}.var", "reduce", phase, 3.0 * elements, elements, 0.0)
    yield _op(f"{name}.norm", "multiply", phase, 4.0 * elements, 2.0 * elements, elements)


def _softmax(name: str, phase: str, elements: float) -> Iterator[OperationCost]:
    yield _op(f"{name}.max", "reduce", phase, elements, elements, 0.0)
    yield _op(f"{name}.exp", "exponential", phase, 8.0 * elements, 2.0 * elements, elements)
    yield _op(f"{name}.sum", "reduce", phase, elements, elements, 0.0)
    yield _op(f"{name}.div", "divide", phase, elements, 2.0 * elements, elements)


def _dot(name: str, phase: str, rows: int, inner: int, columns: int, count: float) -> OperationCost:
    """``[rows, inner] · [inner, columns]``, the second a weight."""
    words = rows * inner + inner * columns + rows * columns
    made = _op(name, "dot", phase, 2.0 * rows * inner * columns, words, rows * columns, inner * columns)
    return replace(made, count=float(count))


def _op(
    name: str, type_: str, phase: str, flops: float, words: float, output_words: float, parameters: float = 0.0
) -> OperationCost:
    kind = _KINDS.get(type_, OperatorKind.ELEMENTWISE)
    return OperationCost(name, flops, words * _WORD, 1.0, type_, phase, parameters * _WORD, output_words * _WORD, kind)


# (blocks, channels inside, side of the output) of ResNet-50 (He et al., CVPR 2016, Table 1).
_RESNET_STAGES = ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))


def _resnet50(batch: int) -> Iterator[OperationCost]:
    yield from _convolution("conv1", batch, 3, 64, 7, 112, 2)
    pooled = batch * 64 * 56**2
    yield _op("pool", "reduce-window", "forward", 9.0 * pooled, 5.0 * pooled, pooled)
    channels, side_in = 64, 56
    for stage, (blocks, width, side) in enumerate(_RESNET_STAGES, 1):
        for block in range(blocks):
            name, stride = f"stage{stage}.{block}", side_in // side
            yield from _convolution(f"{name}.conv1", batch, channels, width, 1, side_in, 1)
            yield from _convolution(f"{name}.conv2", batch, width, width, 3, side, stride)
            yield from _convolution(f"{name}.conv3", batch, width, 4 * width, 1, side, 1)
            if channels != 4 * width:
                yield from _convolution(f"{name}.downsample", batch, channels, 4 * width, 1, side, stride, relu=False)
            elements = float(batch * 4 * width * side**2)
            yield _op(f"{name}.add", "add", "forward", elements, 3.0 * elements, elements)
            channels, side_in = 4 * width, side
    yield _op("mean", "reduce", "forward", batch * channels * 49.0, batch * channels * 50.0, batch * channels)
    yield _dot("fc", "forward", batch, channels, 1000, 1.0)


def _convolution(
    name: str, batch: int, inputs: int, outputs: int, kernel: int, side: int, stride: int, *, relu: bool = True
) -> Iterator[OperationCost]:
    """A convolution to ``side × side``, its normalisation and its rectifier."""
    elements, weights = float(batch * outputs * side**2), float(inputs * outputs * kernel**2)
    words = batch * inputs * (side * stride) ** 2 + weights + elements
    yield _op(name, "convolution", "forward", 2.0 * elements * inputs * kernel**2, words, elements, weights)
    yield _op(f"{name}.bn", "multiply", "forward", 2.0 * elements, 2.0 * elements, elements, 4.0 * outputs)
    if relu:
        yield _op(f"{name}.relu", "maximum", "forward", elements, 2.0 * elements, elements)
