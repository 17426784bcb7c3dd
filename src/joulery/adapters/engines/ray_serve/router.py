"""The router of joulery's Ray Serve deployments: a request goes to the replica it names.

joulery's own queue chooses the replica (the one idle longest); Ray has nothing left to decide. Ray imports this module
by name, in the process that holds the handle.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter


class ToReplica(RequestRouter):  # type: ignore[misc]
    """Router to the replica that a request names; Ray Serve's extension point for routing (alpha)."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """The replica that the request names, else all: another one sends the request back, which ends the search."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.kwargs.get("replica")
        named = [each for each in candidate_replicas if each.replica_id.unique_id == wanted]
        return [named or candidate_replicas]
