"""Parser of a Prometheus exposition that reads only samples of given names: engines print thousands of lines."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from joulery.domain.errors import DataError

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True, slots=True)
class ScrapedSample:
    """One sample of an exposition.

    Attributes:
        name: Its name, as it is exposed.
        labels: Its labels.
        value: Its value.
    """

    name: str
    labels: dict[str, str]
    value: float


def samples(exposition: str, names: Collection[str]) -> Iterator[ScrapedSample]:
    """The samples of ``names``, in order; comments and types are not read.

    Raises:
        DataError: One of these lines is malformed.
    """
    wanted = set(names)
    lines = [line for line in exposition.splitlines() if (m := _NAME.match(line)) and m[0] in wanted]
    try:
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                yield ScrapedSample(sample.name, dict(sample.labels), float(sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise DataError(f"not a Prometheus exposition: {error}") from error


def names_of(exposition: str) -> set[str]:
    """Names of all samples."""
    return {m[0] for line in exposition.splitlines() if (m := _NAME.match(line))}
