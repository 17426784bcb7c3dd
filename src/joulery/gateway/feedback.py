"""Labels of answers: clients report by request id whether an answer was correct; accuracy is counted by variant."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import orjson

from joulery.gateway.body import RefusedError

MOST_ANSWERS = 100_000
"""Largest number of answers whose variant is kept until a label arrives; older ones are dropped."""
MOST_LABELS = 10_000
"""Largest number of labels of one call."""
_LONGEST_ID = 128


class Feedback:
    """Keeps the variant of each answer with a request id, and counts the labels that clients send for them.

    An answer is labelled once. Answers to requests without an id, or with one of more than 128 characters, are not
    kept.

    Attributes:
        right, labelled: Numbers of correct and of labelled answers, by service and variant.
    """

    def __init__(self) -> None:
        self.right: dict[tuple[str, str], int] = {}
        self.labelled: dict[tuple[str, str], int] = {}
        self._variant: OrderedDict[tuple[str, str], str] = OrderedDict()

    def answered(self, service: str, request: str, variant: str) -> None:
        """Keep the variant that answered a request with an id; a later request with the same id replaces it."""
        if len(request) > _LONGEST_ID:
            return
        self._variant[service, request] = variant
        self._variant.move_to_end((service, request))
        if len(self._variant) > MOST_ANSWERS:
            self._variant.popitem(last=False)

    def label(self, service: str, body: bytes) -> dict[str, int]:
        """Count the labels of ``{"labels": [{"id": "…", "correct": true}, …]}``.

        Returns:
            Numbers of ``accepted`` labels and of ``unknown`` ids: never answered, labelled before, or dropped.

        Raises:
            RefusedError: The body is not such an object; none of its labels was counted.
        """
        labels = _labels(body)
        accepted = 0
        for request, correct in labels:
            variant = self._variant.pop((service, request), None)
            if variant is not None:
                accepted += 1
                key = (service, variant)
                self.labelled[key] = self.labelled.get(key, 0) + 1
                self.right[key] = self.right.get(key, 0) + correct
        return {"accepted": accepted, "unknown": len(labels) - accepted}

    def tally(self, service: str) -> dict[str, tuple[int, int]]:
        """Numbers of correct and of labelled answers of each variant of a service."""
        return {
            variant: (self.right[name, variant], count)
            for (name, variant), count in self.labelled.items()
            if name == service
        }


def _labels(body: bytes) -> list[tuple[str, bool]]:
    try:
        content: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from error
    entries = content.get("labels") if isinstance(content, dict) else None
    if not isinstance(entries, list) or len(entries) > MOST_LABELS:
        raise RefusedError(400, f'expected {{"labels": [{{"id": "…", "correct": true}}]}}, at most {MOST_LABELS}')
    found = []
    for number, entry in enumerate(entries):
        right = isinstance(entry, dict) and isinstance(entry.get("id"), str) and isinstance(entry.get("correct"), bool)
        if not right:
            raise RefusedError(400, f"label {number} needs an id (text) and correct (true or false)")
        found.append((entry["id"], entry["correct"]))
    return found
