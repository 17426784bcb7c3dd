"""The run's share of a CPU socket's energy.

``[{"name", "socket_energy_J", "app_ticks_per_cpu", "busy_ticks_per_cpu", "total_ticks_per_cpu",
"expected_app_J_busy_share", "expected_app_J_capacity_share"}…]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from joulery.accounting.charge import ShareRule, split
from tests.golden.kinds import Case, Kind

TICKS_PER_S = 100.0


def _recognises(document: Any) -> bool:
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(each, dict) and {"socket_energy_J", "app_ticks_per_cpu"} <= each.keys() for each in document)
    )


def _cases(document: Any) -> Iterable[Case]:
    for case in document:
        for share in ShareRule:
            yield Case(f"{case['name']} ({share} share)", partial(_check, case, share))


def _check(case: Any, share: ShareRule) -> str | None:
    app_s, busy_s, all_s = (sum(case[f"{kind}_ticks_per_cpu"]) / TICKS_PER_S for kind in ("app", "busy", "total"))
    energy_j = float(case["socket_energy_J"])
    parts = [float(part) for part in split(energy_j, app_s, busy_s, by=share, capacity_s=all_s)]
    expected = case[f"expected_app_J_{share}_share"]
    if not math.isclose(parts[0], expected, rel_tol=1e-9, abs_tol=1e-9 * energy_j):
        return f"got {parts[0]!r} J, expected {expected!r} J"
    if not math.isclose(sum(parts), energy_j, rel_tol=1e-9):
        return f"the parts {parts} add up to {sum(parts)!r} J, not to {energy_j!r} J"
    return None


KIND = Kind("virtualization", _recognises, _cases)
