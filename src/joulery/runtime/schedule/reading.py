"""Looks at the cluster: an error is logged once, and without the right to look there is a pause."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from joulery.domain.cluster import ClusterSnapshot
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.ports import ClusterBackend

PAUSE_S = 300.0
"""Without a right nothing is tried for this long."""


class SnapshotReader:
    """Reads snapshots of a cluster that may not answer.

    Args:
        backend: The cluster.
        log: Writes ``(kind, fields)`` to the log of the run.
    """

    def __init__(self, backend: ClusterBackend, log: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._backend, self._log = backend, log
        self._error, self._pause_end_s = "", -math.inf

    def read(self, now_s: float) -> ClusterSnapshot | None:
        """The cluster; None where it does not answer, which is logged once, and again where its error changes.

        Args:
            now_s: Unix seconds.
        """
        if 0 < self._pause_end_s - now_s <= PAUSE_S:  # a clock that was set back ends it
            return None
        try:
            snapshot = self._backend.snapshot()
        except (CapabilityError, DataError) as error:
            if str(error) != self._error:
                self._log("unreachable", {"text": str(error)})
            self._error = str(error)
            if isinstance(error, CapabilityError) and error.grant:
                self._pause_end_s = now_s + PAUSE_S
            return None
        if self._error:
            self._log("note", {"text": "the cluster answers again"})
            self._error = ""
        return snapshot
