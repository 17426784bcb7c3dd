"""Points of language models as inputs of the Gaussian process."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from joulery.perf.llm.gaussian_process import KernelInputs
from joulery.perf.llm.models import precision_bytes
from joulery.perf.llm.runs import LlmPoint

SMOOTH = ("active parameters", "parameters", "KV bytes", "GPUs", "precision")
"""The smooth features, logarithms each."""


def inputs_of(points: Sequence[LlmPoint]) -> KernelInputs:
    """Where points lie: their load, sizes, labels, and what the engine's limit leaves waiting."""
    smooth = [
        (
            math.log(point.facts.active_parameters),
            math.log(point.facts.parameters),
            math.log(point.facts.kv_bytes),
            math.log(point.num_gpus),
            math.log(precision_bytes(point.precision)),
        )
        for point in points
    ]
    labels = {
        "gpu": [point.gpu.name for point in points],
        "task": [point.task for point in points],
        "backbone": [point.facts.backbone for point in points],
        "configuration": [
            "|".join((point.facts.backbone, point.precision, point.gpu.name, str(point.num_gpus))) for point in points
        ],
        "series": ["|".join(map(str, point.series)) for point in points],
    }
    return KernelInputs(
        np.array([math.log(point.batch) for point in points], np.float64),
        np.array(smooth, np.float64).reshape(len(points), len(SMOOTH)),
        {name: np.array(values, dtype=np.str_) for name, values in labels.items()},
        np.array([math.log(max((point.max_num_seqs or 0) / point.batch, 1.0)) for point in points], np.float64),
    )
