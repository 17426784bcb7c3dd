"""Models for benchmarks: one of almost no work, and one that uses a given CPU time."""

import time
from typing import Any


def model(inputs: dict[str, Any]) -> dict[str, Any]:
    """Twice the input."""
    return {"y": inputs["x"] * 2}


model.inputs = [("x", "FP32", (-1, 2))]  # type: ignore[attr-defined]
model.outputs = [("y", "FP32", (-1, 2))]  # type: ignore[attr-defined]


class Busy:
    """A model that burns CPU time.

    Args:
        ms: Milliseconds of CPU time a request.
    """

    inputs = (("x", "FP32", (-1, 1)),)
    outputs = (("y", "FP32", (-1, 1)),)

    def __init__(self, ms: float = 1.0) -> None:
        self._cpu_s = ms / 1e3

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        end_s = time.thread_time() + self._cpu_s
        while time.thread_time() < end_s:
            pass
        return {"y": inputs["x"]}
