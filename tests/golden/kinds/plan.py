"""Plans of preset ``igniter`` on the published V100, GPU for GPU, in order.

``{"sets": [{"workloads": [{"id", "model", "slo_ms", "rate_rps"}…], "plan": [[["W1", share_percent, batch]…]…]}]}``
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from joulery.domain.gpu.provisioning import Workload
from joulery.domain.serving.service import Slo
from joulery.perf.catalog import profile
from joulery.policies.placement.provisioning.igniter import plan
from tests.golden.kinds import Case, Kind


def _recognises(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and isinstance(document.get("sets"), list)
        and all(isinstance(each, dict) and {"workloads", "plan"} <= each.keys() for each in document["sets"])
    )


def _cases(document: Any) -> Iterable[Case]:
    for index, each in enumerate(document["sets"]):
        yield Case(f"set {index} ({len(each['workloads'])} workloads)", partial(_check, each))


def _check(case: Any) -> str | None:
    workloads = [
        Workload(str(each["id"]), each["model"], Slo(each["slo_ms"] / 1e3, 0.99), float(each["rate_rps"]))
        for each in case["workloads"]
    ]
    expected = [[(str(name), float(share), int(batch)) for name, share, batch in gpu] for gpu in case["plan"] if gpu]
    got = [
        [(workloads[each.part.workload].id, each.share_percent, each.batch) for each in gpu]
        for gpu in plan(workloads, profile("v100"))
        if gpu
    ]
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=False)):
        if mine != theirs:
            return f"GPU {index + 1}: got {mine}, expected {theirs}"
    return None if len(got) == len(expected) else f"got {len(got)} GPUs, expected {len(expected)}"


KIND = Kind("plan", _recognises, _cases)
