"""Labels of answers where there are several gateways: the engine server counts them for all."""

from __future__ import annotations

import orjson

from joulery.gateway.body import RefusedError
from joulery.gateway.feedback import Feedback


class SharedLabels:
    """Labels at the engine server. Implements :class:`joulery.adapters.engines.shared.server.AnswerLabels`."""

    def __init__(self) -> None:
        self._feedback = Feedback()

    def answered(self, service: str, request: str, variant: str) -> None:
        """A request with an id was answered."""
        self._feedback.answered(service, request, variant)

    def label(self, service: str, body: bytes) -> tuple[int, bytes]:
        """Take in labels; HTTP status and body of the answer."""
        try:
            return 200, orjson.dumps(self._feedback.label(service, body))
        except RefusedError as error:
            return error.status, orjson.dumps({"error": str(error)})

    def tally(self, service: str) -> dict[str, tuple[int, int]]:
        """Right and labelled answers by variant."""
        return self._feedback.tally(service)


class LatestCall(Feedback):
    """Remembers the id of the request that is being recorded, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._latest = ""

    def answered(self, service: str, request: str, variant: str) -> None:
        """A request with an id was answered; its record follows at once."""
        self._latest = request

    def take(self) -> str:
        """The id of the request whose record this is; empty for none."""
        latest, self._latest = self._latest, ""
        return latest
