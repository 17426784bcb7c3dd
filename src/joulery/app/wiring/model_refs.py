"""References from which an engine loads the variants of the site file."""

from __future__ import annotations

import json
from pathlib import Path

from joulery.app.wiring.models import lite_file
from joulery.config.services import (
    ModelConfig,
    OnnxModel,
    OpenInferenceModel,
    PythonModel,
    TorchExportModel,
    TorchScriptModel,
    TransformersModel,
)
from joulery.domain.serving.engine import ModelKind, ModelRef


def model_ref(config: ModelConfig, cache: Path) -> ModelRef:
    """Create the reference to a variant's model; a built-in model is built into ``cache`` the first time.

    Raises:
        CapabilityError, DataError: A built-in model cannot be built.
    """
    if isinstance(config, OnnxModel):
        return ModelRef(ModelKind.ONNX, str(config.path))
    if isinstance(config, PythonModel):
        options = json.dumps(config.options, sort_keys=True) if config.options else ""
        return ModelRef(ModelKind.PYTHON, config.target, options)
    if isinstance(config, TorchScriptModel):
        inputs = [[one.name, one.datatype, list(one.shape)] for one in config.inputs]
        return ModelRef(ModelKind.TORCHSCRIPT, str(config.path), json.dumps({"inputs": inputs}) if inputs else "")
    if isinstance(config, TorchExportModel):
        return ModelRef(ModelKind.TORCH_EXPORT, str(config.path))
    if isinstance(config, OpenInferenceModel):
        power = "" if config.power_w is None else json.dumps({"power_w": config.power_w})
        return ModelRef(ModelKind.REMOTE, config.url, power)
    if isinstance(config, TransformersModel):
        options = json.dumps({**config.options, "task": config.task}, sort_keys=True)
        return ModelRef(ModelKind.TRANSFORMERS, str(config.path or config.hub), options)
    return ModelRef(ModelKind.ONNX, str(lite_file(f"lite{config.size}", cache)))
