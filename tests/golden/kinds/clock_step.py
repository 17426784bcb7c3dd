"""One period of μ-Serve's Alg. 3 on one device (ATC'24, section 4.3): as it is meant, and as the pseudo-code says.

A list of ``{"freq_mhz", "step_mhz", "min_mhz", "max_mhz", "guard", "partitions": [{"slo_ms", "latency_ms", "weight"}…],
"action", "new_freq_mhz"[, "action_paper_literal", "new_freq_paper_literal_mhz"]}``: one case, or two with the literal
outcome.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from joulery.policies.clocks.lowest_clock import ClockRange, PartitionLatency, miad_step
from tests.golden.kinds import Case, Kind, list_of


def _cases(document: Any) -> Iterable[Case]:
    for index, each in enumerate(document):
        yield Case(f"step {index}", partial(_check, each, ("action", "new_freq_mhz"), False))
        if "action_paper_literal" in each:
            keys = ("action_paper_literal", "new_freq_paper_literal_mhz")
            yield Case(f"step {index} (literal)", partial(_check, each, keys, True))


def _check(case: Any, keys: tuple[str, str], literal: bool) -> str | None:
    limits = ClockRange(case["min_mhz"], case["max_mhz"], case["step_mhz"], case["guard"])
    # Only ratios of latency and target count; in the unit of the case a slack equal to the guard stays equal to it.
    partitions = [PartitionLatency(p["slo_ms"], p["latency_ms"], p["weight"]) for p in case["partitions"]]
    action, clock_mhz = miad_step(case["freq_mhz"], partitions, limits, literal=literal)
    expected = (case[keys[0]], case[keys[1]])
    return None if (action, clock_mhz) == expected else f"got {(action.value, clock_mhz)}, expected {expected}"


KIND = Kind("clock_step", list_of("freq_mhz", "step_mhz", "guard", "partitions", "action", "new_freq_mhz"), _cases)
