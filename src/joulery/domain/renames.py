"""Old names that are still accepted, with one warning that names the new name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

DECISION_KINDS: Mapping[str, str] = {"activate_shadow": "activate_standby", "promise_broken": "slo_violated"}
"""Kinds of decisions in logs of joulery 0.1, and their present names."""
POLICY_NAMES: Mapping[str, str] = {"shadow": "standby"}
"""Policies in logs of joulery 0.1, and their present names."""


class RenamedWarning(FutureWarning):
    """An old key, flag or field was read, which the next release no longer accepts."""


def warn_renamed(old: str, new: str, where: str = "") -> None:
    """Issue one :class:`RenamedWarning`.

    The command line prints it as one line on standard error; under Python's own rules it is a ``FutureWarning``.

    Args:
        old: The name that was read, as written (``lanes``, ``--draws``).
        new: The name to write instead.
        where: File, line and key, for a name in a file (``site.yaml:15 services.0.lanes``).
    """
    prefix = f"{where}: " if where else ""
    warnings.warn(RenamedWarning(f"{prefix}{old} is now called {new}; the next release reads only {new}"), stacklevel=2)
