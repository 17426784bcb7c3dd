"""The extra of joulery that installs each package, and the error for a missing package."""

from __future__ import annotations

from collections.abc import Mapping

from joulery.domain.errors import CapabilityError

EXTRA_OF: Mapping[str, str] = {
    "google": "grpc",
    "grpc": "grpc",
    "highspy": "plan",
    "httptools": "serve",
    "prometheus_client": "export",
    "psutil": "serve",
    "pyarrow": "parquet",
    "scipy": "plan",
    "starlette": "serve",
    "uvicorn": "serve",
    "uvloop": "serve",
}
"""Package as imported, to the smallest extra that has it. Packages with their own adapter state it there."""


SERVING = frozenset(("monitor", "profile", "serve", "train-length-predictor", "up"))
"""Commands that need the whole extra ``serve``, whichever of its packages is missed first."""


def missing_extra(error: ModuleNotFoundError, command: str = "") -> CapabilityError | None:
    """The error for a user whose installation lacks a package; None when no extra brings it, which is a bug.

    Args:
        error: The exception of the import.
        command: The command that was called on the command line.
    """
    package = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    if extra is None:
        return None
    if command in SERVING:
        extra = "serve"
    return CapabilityError(f"{package} is not installed", resource=package, grant=f"pip install 'joulery[{extra}]'")
