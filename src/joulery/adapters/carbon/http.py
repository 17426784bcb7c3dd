"""HTTP client of carbon services: bounded timeouts, bounded retries, one clear error.

Tests replace the transport (``httpx.BaseTransport``, one method). Each request has a client of its own, so a source
holds no socket between requests and needs no closing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from joulery.domain.errors import CapabilityError, DataError

RETRIED = frozenset({429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and retries of a request.

    Attributes:
        timeout_s: For each of connecting, sending and reading.
        tries: Attempts in all, at least 1.
        backoff_s: Least wait before the second attempt; doubles with each further one. Up to as much again is added at
            random, so that many nodes do not retry at once.
        longest_wait_s: Longest wait a service may ask for (``Retry-After``); beyond it the request fails.
    """

    timeout_s: float = 10.0
    tries: int = 4
    backoff_s: float = 0.5
    longest_wait_s: float = 60.0


class RequestRefusedError(CapabilityError):
    """The service refuses the credentials of a request.

    Args:
        status_code: 401 (not authenticated) or 403 (not allowed).
    """

    def __init__(self, message: str, *, status_code: int, resource: str) -> None:
        super().__init__(
            message,
            resource=resource,
            hint="check the credentials, and whether your plan covers this zone and question",
        )
        self.status_code = status_code


class UnknownError(DataError):
    """The service does not have the requested resource (404): as a rule, the zone."""


@dataclass(frozen=True, slots=True)
class CarbonService:
    """Client of a JSON service.

    Attributes:
        name: Its name in messages (``Electricity Maps``).
        base_url: Its address, without a slash at the end.
        patience: Timeouts and retries.
        transport: Replaces the network in tests; None for the network.
        sleep: Waits for a number of seconds.
        now_s: Unix seconds.
        spread: Draws a random number from 0 to 1, by which the random part of a wait is scaled.
    """

    name: str
    base_url: str
    patience: Patience = field(default_factory=Patience)
    transport: httpx.BaseTransport | None = None
    sleep: Callable[[float], None] = time.sleep
    now_s: Callable[[], float] = time.time
    spread: Callable[[], float] = random.random

    def get(
        self,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        auth: tuple[str, str] | None = None,
    ) -> Any:
        """The JSON answer to a GET.

        Args:
            path: Path below the service's address.
            params: Query parameters.
            headers: Request headers, a token among them.
            auth: User name and password of basic authentication.

        Raises:
            RequestRefusedError: 401 or 403: the credentials do not allow this.
            UnknownError: 404.
            DataError: No answer after all tries, another error status, or an answer that is not JSON.
        """
        answer = self._answer(path, params, headers, auth)
        if answer.status_code in {401, 403}:
            raise RequestRefusedError(
                f"{self.name} refused ({answer.status_code}): {_reason(answer)}",
                status_code=answer.status_code,
                resource=self.base_url,
            )
        if answer.status_code != 200:
            kind = UnknownError if answer.status_code == 404 else DataError
            raise kind(f"{self.name} answered {answer.status_code} to {path}: {_reason(answer)}")
        try:
            return answer.json()
        except ValueError as error:
            raise DataError(f"{self.name} answered no JSON to {path}: {answer.text[:80]!r}") from error

    def _answer(
        self,
        path: str,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        auth: tuple[str, str] | None,
    ) -> httpx.Response:
        trouble = ""
        with httpx.Client(timeout=self.patience.timeout_s, transport=self.transport, trust_env=True) as client:
            for attempt in range(self.patience.tries):
                least_s = self.patience.backoff_s * 2.0**attempt
                wait_s, more_s = least_s, least_s * self.spread()
                try:
                    answer = client.get(
                        self.base_url + path, params=dict(params or {}), headers=dict(headers or {}), auth=auth
                    )
                except httpx.TransportError as error:
                    trouble = f"{type(error).__name__}: {error}".rstrip(": ")
                else:
                    if answer.status_code not in RETRIED:
                        return answer
                    trouble = f"{answer.status_code}: {_reason(answer)}"
                    wait_s = max(wait_s, self._asked_wait_s(answer))
                if attempt + 1 < self.patience.tries:
                    self._wait(wait_s, more_s, trouble)
        raise DataError(
            f"{self.name} at {self.base_url} gave no answer in {self.patience.tries} tries ({trouble})",
            hint="try again later, or account from a file (--carbon FILE)",
        )

    def _wait(self, wait_s: float, more_s: float, trouble: str) -> None:
        if wait_s > self.patience.longest_wait_s:
            raise DataError(
                f"{self.name} asks to wait {wait_s:.0f} s ({trouble})",
                hint="its rate limit is used up: try again later, or account from a file (--carbon FILE)",
            )
        self.sleep(wait_s + more_s)

    def _asked_wait_s(self, answer: httpx.Response) -> float:
        """Seconds of a ``Retry-After`` header, which holds seconds or a date; 0 without one that can be read."""
        text = answer.headers.get("retry-after", "").strip()
        if text.isascii() and text.isdigit():
            return float(text[:9])
        try:
            return max(0.0, parsedate_to_datetime(text).timestamp() - self.now_s())
        except ValueError:
            return 0.0


def _reason(answer: httpx.Response) -> str:
    """The service's error message, in a line."""
    try:
        body = answer.json()
    except ValueError:
        body = answer.text
    while isinstance(body, dict):
        body = next((body[key] for key in ("error", "message", "detail", "msg") if body.get(key)), str(body))
    return " ".join(str(body or answer.reason_phrase).split())[:200]
