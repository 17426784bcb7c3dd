"""Operator clusters of μ-Serve's Alg. 1 as it is meant (ATC'24, section 4.1).

A list of ``{"scores": [score…], "thres": threshold, "clusters": [[operator…]…]}``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from joulery.policies.placement.pipelines.partition import cluster_operators
from tests.golden.kinds import Case, Kind, list_of


def _cases(document: Any) -> Iterable[Case]:
    for index, each in enumerate(document):
        yield Case(f"model {index} ({len(each['scores'])} operators)", partial(_check, each))


def _check(case: Any) -> str | None:
    got = cluster_operators(case["scores"], case["thres"])
    return None if got == case["clusters"] else f"got {got}, expected {case['clusters']}"


KIND = Kind("clustering", list_of("scores", "thres", "clusters"), _cases)
