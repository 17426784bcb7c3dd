"""Models for tests of a whole service: they burn a known number of CPU seconds."""

import time
from typing import Any

import numpy as np


class Sum:
    """Adds two numbers, slowly."""

    inputs = (("x", "FP32", (-1, 2)),)
    outputs = (("y", "FP32", (-1,)),)

    def __init__(self, busy_s: float) -> None:
        self.busy_s = busy_s

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        end_s = time.process_time() + self.busy_s
        while time.process_time() < end_s:
            pass
        return {"y": np.sum(inputs["x"], axis=-1)}
