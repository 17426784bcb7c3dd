"""Live answers of variants that joined a service, kept for longer than a window because their share may be small."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from joulery.domain.serving.engine import RequestRecord

_MOST = 200
"""Largest number of answers that are kept of one variant."""
_LOADED_WITHIN_S = 60.0
"""Time after which a replica that has not loaded a joined variant is assumed not to keep it."""


@dataclass(slots=True)
class _Joined:
    """Answers of a service since variants with assumed times joined it."""

    since_s: float
    latest_s: float = -math.inf
    answers: dict[str, deque[RequestRecord]] = field(default_factory=dict)


class JoinedAnswers:
    """Keeps the answers of variants whose times are assumed, by service, until their times are known."""

    def __init__(self) -> None:
        self._services: dict[str, _Joined] = {}

    def of(
        self, service: str, variants: Collection[str], records: Sequence[RequestRecord], now_s: float
    ) -> list[RequestRecord]:
        """Return the latest answers of a service, including all kept answers of some variants since they joined.

        Args:
            service: The service.
            variants: Variants whose times are assumed; empty once all are known.
            records: Recent requests of the service; some may have been passed before.
            now_s: Unix seconds.
        """
        if not variants:
            self._services.pop(service, None)
            return list(records)
        joined = self._services.setdefault(service, _Joined(now_s))
        for record in records:
            if record.variant in variants and record.end_s > joined.latest_s:
                joined.answers.setdefault(record.variant, deque(maxlen=_MOST)).append(record)
        joined.latest_s = max((joined.latest_s, *(record.end_s for record in records)))
        kept = [record for name in sorted(variants) for record in joined.answers.get(name, ())]
        return [*(record for record in records if record.variant not in variants), *kept]

    def overdue(self, service: str, now_s: float) -> bool:
        """Whether replicas have had enough time to load the variants that joined a service."""
        joined = self._services.get(service)
        return joined is not None and now_s - joined.since_s >= _LOADED_WITHIN_S
