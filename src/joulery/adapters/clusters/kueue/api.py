"""Client of the API server of Kubernetes: lists page by page, changes under optimistic concurrency.

An answer about one object (not found, conflict, gone, refused) is returned. A failure of the server itself (no
connection, no access, overload, internal errors) raises a :class:`~joulery.domain.errors.CapabilityError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from joulery.adapters.clusters.kueue.access import KubernetesAccess
from joulery.domain.errors import CapabilityError, DataError

if TYPE_CHECKING:
    import httpx

GRANT = "kubectl apply -k deploy/kubernetes/kueue"
"""Gives the service account joulery the rights that the scheduler needs."""
PAGE_OBJECTS = 500
"""Objects of a page of a list."""
_MERGE_PATCH = "application/merge-patch+json"
_LISTS = 2
"""A list that became too old between two of its pages is restarted once."""


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """An answer about one object.

    Attributes:
        status: HTTP status.
        document: The object, or the API server's ``Status``.
    """

    status: int
    document: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.status < HTTPStatus.BAD_REQUEST

    @property
    def message(self) -> str:
        """The API server's message, in one line."""
        return " ".join(str(self.document.get("message") or f"HTTP {self.status}").split())[:300]


class KubernetesApi:
    """Client of one API server.

    Args:
        access: Address and credentials of the server.
        timeout_s: Time limit of an answer, seconds.
        transport: HTTP transport that replaces the network.
    """

    def __init__(
        self, access: KubernetesAccess, timeout_s: float = 30.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._access, self._timeout_s, self._transport = access, timeout_s, transport
        self._client: httpx.Client | None = None

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def get(self, path: str, **parameters: str) -> ApiAnswer:
        """Get one object.

        Raises:
            CapabilityError: The server does not answer, or refuses access.
            DataError: Its answer is not a JSON object.
        """
        return self._ask("GET", path, parameters)

    def patch(self, path: str, change: Mapping[str, Any]) -> ApiAnswer:
        """Merge a change into an object. If it has a ``metadata.resourceVersion``, a newer object gives status 409.

        Raises:
            CapabilityError, DataError: As :meth:`get`.
        """
        return self._ask("PATCH", path, {}, change, _MERGE_PATCH)

    def create(self, path: str, document: Mapping[str, Any]) -> ApiAnswer:
        """Create an object.

        Raises:
            CapabilityError, DataError: As :meth:`get`.
        """
        return self._ask("POST", path, {}, document, "application/json")

    def objects(self, path: str) -> list[Mapping[str, Any]]:
        """All objects of a kind, read in pages.

        Raises:
            CapabilityError, DataError: As :meth:`get`; also where the kind does not exist.
        """
        for _ in range(_LISTS):
            items: list[Mapping[str, Any]] = []
            token = ""
            while True:
                answer = self.get(path, limit=str(PAGE_OBJECTS), **({"continue": token} if token else {}))
                if answer.status == HTTPStatus.GONE:
                    break
                if not answer.ok:
                    raise CapabilityError(f"{path} cannot be listed: {answer.message}", resource=path)
                items += _items(answer.document, path)
                token = str((answer.document.get("metadata") or {}).get("continue") or "")
                if not token:
                    return items
        raise CapabilityError(f"{path} changes faster than it can be listed", resource=path, hint="poll less often")

    def _ask(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
        content_type: str = "",
        *,
        again: bool = True,
    ) -> ApiAnswer:
        import httpx

        token = self._access.token()
        headers = {"Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        headers |= {"Content-Type": content_type} if content_type else {}
        content = None if body is None else json.dumps(body).encode()
        try:
            answer = self._open().request(method, path, params=parameters or None, headers=headers, content=content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CapabilityError(
                f"the API server at {self._access.url} does not answer: {type(error).__name__} {error}".rstrip(),
                resource="Kubernetes",
                hint=f"access is from {self._access.source}" if self._access.source else "",
            ) from error
        if answer.status_code == HTTPStatus.UNAUTHORIZED and again and self._access.token() != token:
            return self._ask(method, path, parameters, body, content_type, again=False)
        raise_if_unusable(answer.status_code, answer.text, method, path, self._access)
        return ApiAnswer(answer.status_code, _document(answer.text, path))

    def _open(self) -> httpx.Client:
        if self._client is None:
            import httpx

            self._client = httpx.Client(
                base_url=self._access.url,
                verify=True if self._access.tls is None else self._access.tls,
                proxy=self._access.proxy or None,
                timeout=self._timeout_s,
                transport=self._transport,
                trust_env=False,
            )
        return self._client


def raise_if_unusable(status: int, text: str, method: str, path: str, access: KubernetesAccess) -> None:
    """Raise an error if the API server cannot be used now.

    Raises:
        CapabilityError: The server refuses access, is overloaded, or fails.
    """
    message = " ".join(text.split())[:300]
    if status == HTTPStatus.UNAUTHORIZED:
        raise CapabilityError(
            f"the API server at {access.url} does not know this user (HTTP 401)",
            resource="Kubernetes",
            grant="kubectl create token joulery --namespace joulery",
        )
    if status == HTTPStatus.FORBIDDEN:
        reason = _document(text, path).get("message") if text.lstrip().startswith("{") else message
        raise CapabilityError(
            f"Kubernetes does not let this user {method} {path}: {reason}", resource=path, grant=GRANT
        )
    if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise CapabilityError(
            f"the API server at {access.url} answers HTTP {status} to {method} {path}: {message}", resource="Kubernetes"
        )


def _document(text: str, path: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DataError(f"the API server's answer to {path} is not JSON: {text[:80]!r}") from error
    if not isinstance(document, dict):
        raise DataError(f"the API server's answer to {path} is not an object: {text[:80]!r}")
    return document


def _items(document: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
    items = document.get("items")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise DataError(f"the API server's answer to {path} has no list of items")
    return items
