"""Placements of μ-Serve's Alg. 2 as it is meant (ATC'24, section 4.2).

A list of ``{"capacity", "n_devices", "CT", "tau_empty", "partitions": [{"id", "model", "score", "mem", "weight"}…],
"assignment": {id: device} or null[, "within_device_scatter"]}``. Null means that the greedy finds no place for some
partition: the case passes when the placement is refused. Memory and the devices of a model are checked on their own,
from the case alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from joulery.domain.errors import InfeasibleError
from joulery.policies.placement.pipelines.by_sensitivity import Partition, PlacementLimits, place_partitions, scatter
from tests.golden.kinds import Case, Kind, list_of

ROUNDED = 1e-6  # the scatter of a case is written with six decimals


def _cases(document: Any) -> Iterable[Case]:
    for index, each in enumerate(document):
        yield Case(f"instance {index} ({len(each['partitions'])} partitions)", partial(_check, each))


def _check(case: Any) -> str | None:
    partitions = [Partition(p["id"], p["model"], p["score"], p["mem"], p["weight"]) for p in case["partitions"]]
    limits = PlacementLimits((float(case["capacity"]),) * case["n_devices"], case["CT"], case["tau_empty"])
    try:
        got = place_partitions(partitions, limits)
    except InfeasibleError as error:
        return None if case["assignment"] is None else f"refused: {error}"
    if broken := violation(case, got):
        return broken
    if case["assignment"] is None:
        return f"got {got}, expected a refusal"
    expected = {int(key): device for key, device in case["assignment"].items()}
    if got != expected:
        return f"got {got}, expected {expected}"
    right = case.get("within_device_scatter")
    if right is not None and abs(scatter(partitions, got) - right) > ROUNDED * (1 + right):
        return f"scatter: got {scatter(partitions, got)}, expected {right}"
    return None


def violation(case: Any, assignment: Mapping[Any, int]) -> str | None:
    """What the assignment breaks of memory and of the devices a model may use, or None."""
    used_bytes: dict[int, float] = defaultdict(float)
    devices: dict[Any, set[int]] = defaultdict(set)
    for part in case["partitions"]:
        device = assignment[part["id"]]
        used_bytes[device] += part["mem"]
        devices[part["model"]].add(device)
    if any(not 0 <= device < case["n_devices"] for device in used_bytes):
        return f"a device outside 0 to {case['n_devices'] - 1}: {sorted(used_bytes)}"
    if max(used_bytes.values(), default=0.0) > case["capacity"] * (1 + 1e-12):
        return f"memory: {dict(used_bytes)} of {case['capacity']}"
    if max((len(each) for each in devices.values()), default=0) > case["CT"]:
        return f"devices of a model: {dict(devices)}, at most {case['CT']}"
    return None


KIND = Kind("placement", list_of("capacity", "n_devices", "CT", "tau_empty", "partitions", "assignment"), _cases)
