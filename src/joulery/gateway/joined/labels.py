"""Labels of answers with several gateways: the engine server counts them for all gateways."""

from __future__ import annotations

import orjson

from joulery.gateway.body import RefusedError
from joulery.gateway.feedback import Feedback


class SharedLabels:
    """Counts labels at the engine server. Implements :class:`joulery.adapters.engines.shared.server.AnswerLabels`."""

    def __init__(self) -> None:
        self._feedback = Feedback()

    def answered(self, service: str, request: str, variant: str) -> None:
        """Keep the variant that answered a request with an id."""
        self._feedback.answered(service, request, variant)

    def label(self, service: str, body: bytes) -> tuple[int, bytes]:
        """Count labels; return HTTP status and body of the answer."""
        try:
            return 200, orjson.dumps(self._feedback.label(service, body))
        except RefusedError as error:
            return error.status, orjson.dumps({"error": str(error)})

    def tally(self, service: str) -> dict[str, tuple[int, int]]:
        """Numbers of correct and of labelled answers, by variant."""
        return self._feedback.tally(service)


class LatestCall(Feedback):
    """Keeps only the id of the request that is being recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._latest = ""

    def answered(self, service: str, request: str, variant: str) -> None:
        """Keep the id of a request that was answered, until its record follows."""
        self._latest = request

    def take(self) -> str:
        """Return and clear the id of the request that is being recorded; empty for none."""
        latest, self._latest = self._latest, ""
        return latest
