"""Lets one service at a time try layouts: two on trial at once would disturb one another's measurements."""

from __future__ import annotations

from collections.abc import Mapping


class TrialArbiter:
    """One service tries at a time, from its first trial to what it settles on; the others in the order they asked."""

    def __init__(self) -> None:
        self._line: list[str] = []

    def ahead_of(self, service: str, wants: Mapping[str, bool]) -> str:
        """The service that another has to wait for; empty when it may try.

        Args:
            service: The service that wants to try.
            wants: Of each service whether it is on trial or waits to be.
        """
        self._line = [name for name in self._line if wants.get(name, False)]
        self._line += [name for name, waits in wants.items() if waits and name not in self._line]
        return self._line[0] if self._line and self._line[0] != service else ""
