"""A multilayer perceptron whose weights do not fit the cache of a core."""

from typing import Any

import numpy as np

WIDTH, LAYERS = 2048, 4


class Perceptron:
    """Four layers of 2048 units in float32, 64 MB of weights."""

    inputs = (("x", "FP32", (-1, WIDTH)),)
    outputs = (("y", "FP32", (-1, WIDTH)),)

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._weights = [rng.normal(0.0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)]

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        found = inputs["x"]
        for weights in self._weights:
            found = np.maximum(found @ weights, 0.0)
        return {"y": found}
