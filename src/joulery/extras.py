"""Extras of joulery by package: the error for a missing one names the command that installs it."""

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
"""Package, as it is imported, to the smallest extra that has it. Packages with an adapter of their own say it there."""


SERVING = frozenset(("monitor", "profile", "serve", "train-length-predictor", "up"))
"""Commands that need the whole extra ``serve``, whichever of its packages is missed first."""


def missing_extra(error: ModuleNotFoundError, command: str = "") -> CapabilityError | None:
    """The error for a user whose installation lacks a package; None when no extra brings it, which is a bug.

    Args:
        error: What Python said.
        command: The command of the command line that was called.
    """
    package = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    if extra is None:
        return None
    if command in SERVING:
        extra = "serve"
    return CapabilityError(f"{package} is not installed", resource=package, grant=f"pip install 'joulery[{extra}]'")
