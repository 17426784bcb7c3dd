"""Counts and sums over the requests of one service of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.serving.engine import Outcome
from joulery.runtime.session.requests import OK, OUTCOMES, RequestColumns, Rows


@dataclass(frozen=True, slots=True, eq=False)
class Totals:
    """Counts and sums over the requests of one service.

    Attributes:
        requests, answered: How many ended, and how many of them were answered.
        refused, abandoned: How many were refused because the queue was full, and how many their client gave up.
        cpu_s: CPU seconds of all of them, in the replicas.
        answered_cpu_s: CPU seconds of the answered ones.
        answered_cpu_g: Of the answered ones, CPU seconds times intensity, s g/kWh.
        spent_s, spent_g: By variant, CPU seconds of all requests, and those times intensity, s g/kWh.
        variants: Answers by variant.
        latency_s: Latencies of the answered requests, float64[answered].
    """

    requests: int
    answered: int
    refused: int
    abandoned: int
    cpu_s: float
    answered_cpu_s: float
    answered_cpu_g: float
    spent_s: Mapping[str, float]
    spent_g: Mapping[str, float]
    variants: Mapping[str, int]
    latency_s: FloatArray


def totals_of(requests: RequestColumns, service: str, carbon: CarbonSeries | None) -> Totals:
    """Counts and sums over the requests of a service.

    Args:
        requests: Requests of any service.
        service: The service.
        carbon: The intensity; None where it is not known.
    """
    count, latency_s, sums, answered_cpu_s, weighted = 0, [], [], 0.0, 0.0
    counts = np.zeros(len(requests.variants), np.int64)
    outcomes = np.zeros(len(OUTCOMES), np.int64)
    spent = np.zeros((2, len(counts)))
    for block in requests.blocks(service):
        fine = block[block["outcome"] == OK]
        count += len(block)
        outcomes += np.bincount(block["outcome"], minlength=len(OUTCOMES))
        latency_s.append(fine["end_s"] - fine["arrival_s"])
        sums.append(math.fsum(block["cpu_s"]))
        answered_cpu_s += math.fsum(fine["cpu_s"])
        weighted += float(fine["cpu_s"] @ np.nan_to_num(intensities(carbon, fine)))
        counts += np.bincount(fine["variant"], minlength=len(counts))
        for row, weight in zip(spent, (1.0, np.nan_to_num(intensities(carbon, block))), strict=True):
            row += np.bincount(block["variant"], block["cpu_s"] * weight, minlength=len(counts))
    latencies = np.concatenate(latency_s) if latency_s else np.empty(0)
    names = {name: int(count) for name, count in zip(requests.variants, counts, strict=True) if count}
    refused, abandoned = (int(outcomes[OUTCOMES.index(each)]) for each in (Outcome.OVERLOADED, Outcome.CANCELLED))
    spent_s, spent_g = (dict(zip(requests.variants, row.tolist(), strict=True)) for row in spent)
    return Totals(
        count,
        len(latencies),
        refused,
        abandoned,
        math.fsum(sums),
        answered_cpu_s,
        weighted,
        spent_s,
        spent_g,
        names,
        latencies,
    )


def intensities(carbon: CarbonSeries | None, rows: Rows) -> FloatArray:
    """The intensity when each request was answered, g/kWh, float64[n]; NaN where it is not known."""
    if carbon is None or not len(rows):
        return np.full(len(rows), np.nan)
    return carbon.at(rows["end_s"])
