"""The model of the gateway's benchmark: as little work as a model can do."""

from typing import Any


def model(inputs: dict[str, Any]) -> dict[str, Any]:
    """Twice the input."""
    return {"y": inputs["x"] * 2}


model.inputs = [("x", "FP32", (-1, 2))]  # type: ignore[attr-defined]
model.outputs = [("y", "FP32", (-1, 2))]  # type: ignore[attr-defined]
