"""Facts of language models by id: parameters, active parameters, layers and the KV cache of a token.

Facts of the models' own published configuration files (``config.json`` on their model cards). An id that is not in
the table is parsed: ``Qwen3-30B-A3B`` has 30 thousand million parameters of which 3 are active for a token, ``8x7B`` is
a mixture of eight experts. Facts that an id does not state (layers, KV cache) are then estimated from the parameters.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from joulery.domain.errors import ConfigError

PRECISION_BYTES = {
    "float32": 4.0,
    "fp32": 4.0,
    "bfloat16": 2.0,
    "bf16": 2.0,
    "float16": 2.0,
    "fp16": 2.0,
    "half": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "w8a8": 1.0,
    "fp4": 0.5625,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
    "int4": 0.53125,
    "awq": 0.53125,
    "gptq": 0.53125,
}
"""Bytes a weight takes, scales of its block included."""
PRECISION_NAMES = {
    "bf16": "bfloat16",
    "float16": "bfloat16",
    "fp16": "bfloat16",
    "half": "bfloat16",
    "nvfp4": "fp4",
    "float32": "fp32",
    "int8": "fp8",
    "w8a8": "fp8",
    "awq": "int4",
    "gptq": "int4",
}
"""Precisions that cost the same to run, under one name."""


@dataclass(frozen=True, slots=True)
class LanguageModelFacts:
    """Facts of a language model known before anything is measured.

    Attributes:
        backbone: Name of its architecture and size; models of one backbone run the same operations a token.
        parameters: Number of parameters.
        active_parameters: Number of parameters that are active for one token.
        layers: Transformer (or hybrid) blocks.
        kv_bytes: KV cache of one token at two bytes a value, bytes; averaged over layers with a sliding window.
        known: Whether the facts are from the table or the user; False where they were parsed from the id.
        vision: Whether it accepts images.
    """

    backbone: str
    parameters: float
    active_parameters: float
    layers: float
    kv_bytes: float
    known: bool = True
    vision: bool = False

    def weights_bytes(self, precision: str) -> float:
        """Memory its weights take at a precision, bytes."""
        return self.parameters * precision_bytes(precision)

    def touched_ratio(self, batch: float) -> float:
        """Share of the weights that one step of ``batch`` requests reads: with experts, those some request picks.

        Each request picks experts independently, so an expert stays unread with probability (1 - a)^batch, ``a`` being
        the share of parameters at work on one token.
        """
        share = self.active_parameters / self.parameters
        return 1.0 if share >= 1.0 else float(1.0 - (1.0 - share) ** max(batch, 1.0))


def _kv(layers: float, heads: int, size: int) -> float:
    return layers * 2 * heads * size * 2


_TABLE = (
    # pattern, backbone, parameters and active (10^9), layers, KV bytes a token
    (r"qwen3(-vl)?-2b", "qwen3-2b", 2.0, 2.0, 28, _kv(28, 8, 128)),
    (r"qwen3(-vl)?-4b", "qwen3-4b", 4.0, 4.0, 36, _kv(36, 8, 128)),
    (r"qwen3(-vl)?-8b", "qwen3-8b", 8.2, 8.2, 36, _kv(36, 8, 128)),
    (r"qwen3-14b", "qwen3-14b", 14.8, 14.8, 40, _kv(40, 8, 128)),
    (r"qwen3(-vl)?-32b", "qwen3-32b", 32.8, 32.8, 64, _kv(64, 8, 128)),
    (r"qwen3.*30b-a3b", "qwen3-30b-a3b", 30.5, 3.3, 48, _kv(48, 4, 128)),
    (r"qwen3-next-80b-a3b", "qwen3-next-80b-a3b", 80.0, 3.0, 48, _kv(12, 2, 256)),
    (r"qwen3.*235b-a22b", "qwen3-235b-a22b", 235.0, 22.0, 94, _kv(94, 4, 128)),
    (r"qwen3.*480b-a35b", "qwen3-480b-a35b", 480.0, 35.0, 62, _kv(62, 8, 128)),
    (r"qwen2\.5.*72b", "qwen2.5-72b", 72.7, 72.7, 80, _kv(80, 8, 128)),
    (r"qwen2\.5.*32b", "qwen2.5-32b", 32.8, 32.8, 64, _kv(64, 8, 128)),
    (r"qwen2\.5.*14b", "qwen2.5-14b", 14.8, 14.8, 48, _kv(48, 8, 128)),
    (r"qwen2\.5.*7b", "qwen2.5-7b", 7.6, 7.6, 28, _kv(28, 4, 128)),
    (r"deepseek-(v3|r1)(?!.*distill)", "deepseek-v3", 671.0, 37.0, 61, 61 * 576 * 2),
    (r"kimi-k2", "kimi-k2", 1040.0, 32.0, 61, 61 * 576 * 2),
    (r"glm-5", "glm-5", 744.0, 40.0, 78, 78 * 576 * 2),
    (r"glm-4\.5-air", "glm-4.5-air", 106.0, 12.0, 46, _kv(46, 8, 128)),
    (r"glm-4\.[567]", "glm-4.5", 355.0, 32.0, 92, _kv(92, 8, 128)),
    (r"minimax-m2", "minimax-m2", 230.0, 10.0, 62, _kv(62, 8, 128)),
    (r"llama-3(\.\d)?-405b", "llama-405b", 405.0, 405.0, 126, _kv(126, 8, 128)),
    (r"llama-3(\.\d)?-70b", "llama-70b", 70.6, 70.6, 80, _kv(80, 8, 128)),
    (r"llama-3(\.\d)?-8b", "llama-8b", 8.0, 8.0, 32, _kv(32, 8, 128)),
    (r"llama-3\.2-3b", "llama-3b", 3.2, 3.2, 28, _kv(28, 8, 128)),
    (r"llama-3\.2-1b", "llama-1b", 1.24, 1.24, 16, _kv(16, 8, 64)),
    (r"llama-4-maverick", "llama-4-maverick", 400.0, 17.0, 48, _kv(48, 8, 128)),
    (r"llama-4-scout", "llama-4-scout", 109.0, 17.0, 48, _kv(48, 8, 128)),
    # Five of six layers of Gemma 3 look back 1,024 tokens only: about a third of the reads at two thousand tokens.
    (r"gemma-3-27b", "gemma-3-27b", 27.4, 27.4, 62, _kv(62, 16, 128) / 3),
    (r"gemma-3-12b", "gemma-3-12b", 12.2, 12.2, 48, _kv(48, 8, 256) / 3),
    (r"gemma-3-4b", "gemma-3-4b", 4.3, 4.3, 34, _kv(34, 4, 256) / 3),
    # Every other layer of gpt-oss looks back 128 tokens.
    (r"gpt-oss-120b", "gpt-oss-120b", 116.8, 5.1, 36, _kv(36, 8, 64) * 0.55),
    (r"gpt-oss-20b", "gpt-oss-20b", 20.9, 3.6, 24, _kv(24, 8, 64) * 0.55),
    # Six (or four) of the Nemotron Nano hybrids' blocks attend; the others carry a state of fixed size.
    (r"nemotron-nano-12b", "nemotron-nano-12b", 12.3, 12.3, 62, _kv(6, 8, 128)),
    (r"nemotron-nano-9b", "nemotron-nano-9b", 8.9, 8.9, 56, _kv(4, 8, 128)),
    (r"nemotron.*49b", "nemotron-super-49b", 49.9, 49.9, 80, _kv(49, 8, 128)),
    (r"mixtral-8x22b", "mixtral-8x22b", 141.0, 39.0, 56, _kv(56, 8, 128)),
    (r"mixtral-8x7b", "mixtral-8x7b", 46.7, 12.9, 32, _kv(32, 8, 128)),
    (r"mistral-small", "mistral-small-24b", 23.6, 23.6, 40, _kv(40, 8, 128)),
    (r"mistral-7b", "mistral-7b", 7.2, 7.2, 32, _kv(32, 8, 128)),
    (r"phi-4(?!-mini)", "phi-4", 14.7, 14.7, 40, _kv(40, 10, 128)),
)
_VISION = re.compile(r"(^|[-_/])(vl|omni|vision|llava|internvl|pixtral)([-_.]|$)|gemma-3-(4|12|27)b|llama-4")


def model_facts(model_id: str) -> LanguageModelFacts:
    """Find the facts of a model by its id, in the table or from the id itself.

    Raises:
        ConfigError: The id is not in the table and does not state the number of parameters.
    """
    name = model_id.strip().lower().rpartition("/")[2]
    vision = _VISION.search(name) is not None
    for pattern, backbone, parameters, at_work, layers, kv_bytes in _TABLE:
        if re.search(f"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", name):
            return LanguageModelFacts(backbone, parameters * 1e9, at_work * 1e9, layers, kv_bytes, vision=vision)
    total, active = _stated_parameters(name)
    if total is None:
        nearest = nearest_names(name, table_names())
        raise ConfigError(
            "the id of the model does not state its number of parameters",
            got=model_id,
            expected="an id such as Qwen/Qwen3-14B, or columns total_params_billions and activated_params_billions",
            hint=f"nearest known: {nearest}" if nearest else "",
        )
    return estimated_facts(name, total * 1e9, (active or total) * 1e9, vision=vision)


def estimated_facts(
    name: str, parameters: float, active_parameters: float, *, vision: bool = False
) -> LanguageModelFacts:
    """Estimate the facts of a model from its parameters alone; layers and KV cache follow models of that size.

    Layers grow with the cube root of the parameters (32 at 8 thousand million), the KV cache is that of eight heads of
    128 values, as most models with grouped queries have.
    """
    size = math.sqrt(parameters * active_parameters)
    layers = min(max(32.0 * (size / 8e9) ** (1 / 3), 12.0), 130.0)
    return LanguageModelFacts(name, parameters, active_parameters, layers, _kv(layers, 8, 128), False, vision)


def _stated_parameters(name: str) -> tuple[float | None, float | None]:
    """Parameters and active parameters that an id states, in 10^9."""
    if found := re.search(r"(\d+)x(\d+(?:\.\d+)?)b(?![a-z0-9])", name):
        experts, each = float(found[1]), float(found[2])
        # Attention and embeddings are shared: eight experts of 7 are 47, not 56; two of them work at a time.
        return 0.83 * experts * each, 0.23 * experts * each if experts > 2 else experts * each
    active = re.search(r"(?:^|[^a-z0-9])a(\d+(?:\.\d+)?)b(?![a-z0-9])", name)
    sizes = [
        (float(number) / (1e3 if unit == "m" else 1.0))
        for number, unit in re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])", name)
    ]
    if not sizes or max(sizes) <= 0:
        return None, None
    total = max(sizes)
    return total, min(float(active[1]), total) if active and float(active[1]) > 0 else None


def precision_bytes(precision: str) -> float:
    """Bytes a weight takes at a precision.

    Raises:
        ConfigError: There is no such precision.
    """
    try:
        return PRECISION_BYTES[precision.strip().lower()]
    except KeyError:
        nearest = nearest_names(precision.lower(), PRECISION_BYTES)
        raise ConfigError(
            "no such precision of weights",
            got=precision,
            expected=", ".join(PRECISION_BYTES),
            hint=f"nearest: {nearest}" if nearest else "",
        ) from None


def precision_name(precision: str) -> str:
    """The common name of the precisions that cost the same to run as a given one.

    Raises:
        ConfigError: There is no such precision.
    """
    precision_bytes(precision)
    name = precision.strip().lower()
    return PRECISION_NAMES.get(name, name)


def table_names() -> tuple[str, ...]:
    """Architectures and sizes in the table."""
    return tuple(dict.fromkeys(each[1] for each in _TABLE))


def nearest_names(name: str, known: Iterable[str], most: int = 3) -> str:
    """The known names nearest to one, with commas; empty where none is near."""
    names = {each.lower(): each for each in known}
    return ", ".join(names[found] for found in difflib.get_close_matches(name.lower(), names, n=most, cutoff=0.45))
