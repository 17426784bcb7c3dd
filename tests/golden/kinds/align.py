"""Energy shared among concurrent events, against exact rational answers.

``{"cases": [{"name", "time_unit", "window": [start, end], "events": [{"start", "end", "op"[, "device"][, "lane"]}…],
"power": [[time, watts]…], "expected": {"event": {"energy_J": {op: [fraction, float]}, "unattributed_J", "total_J",
"uncovered_us"}, "set": …}}…]}``. The last power sample holds to the end of the window, an event without a lane nests in
nothing. Energies are compared with the fraction, relative 1e-9.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import partial
from typing import Any

from joulery.accounting.operations.align import align
from joulery.accounting.steps import PowerSteps
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.quality import Quality
from joulery.domain.trace.events import NO_LANE, EventTrace
from tests.golden.kinds import Case, Kind

UNIT_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
MODES = {"event": "events", "events": "events", "set": "set"}
DEVICE = "CPU:0"
TOLERANCE = Fraction(1, 10**9)


def _recognises(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and isinstance(document.get("cases"), list)
        and all(isinstance(each, dict) and {"window", "events", "power"} <= each.keys() for each in document["cases"])
    )


def _cases(document: Any) -> Iterable[Case]:
    for case in document["cases"]:
        for mode in case["expected"]:
            yield Case(f"{case['name']} ({mode})", partial(_check, case, mode))


def _check(case: Any, mode: str) -> str | None:
    got = account(case, MODES[mode])
    expected = case["expected"][mode]
    (device,) = got.devices
    energies = got.energy_by_op
    pairs = [(f"energy of {op}", energies.pop(op, 0.0), exact(value)) for op, value in expected["energy_J"].items()]
    pairs += [(f"energy of {op}", value, Fraction(0)) for op, value in energies.items()]
    pairs.append(("unattributed", device.unattributed_j, exact(expected["unattributed_J"])))
    pairs.append(("total", device.total_j, exact(expected["total_J"])))
    pairs.append(("uncovered s", device.uncovered_s, Fraction(expected["uncovered_us"]) / 10**6))
    scale = exact(expected["total_J"])
    for what, value, right in pairs:
        if abs(Fraction(value) - right) > TOLERANCE * (right or scale or 1):
            return f"{what}: got {value!r}, expected {float(right)!r}"
    return None


def account(case: Any, multiplicity: Any) -> TensorFootprint:
    """The product's answer to one case."""
    unit = UNIT_NS[case.get("time_unit", "us")]
    events, (begin, end) = case["events"], (int(t * unit) for t in case["window"])
    ops = sorted({event["op"] for event in events})
    trace = EventTrace(
        ops,
        [DEVICE],
        [""],
        op=[ops.index(event["op"]) for event in events],
        start_ns=[round(event["start"] * unit) for event in events],
        dur_ns=[round((event["end"] - event["start"]) * unit) for event in events],
        device=[0] * len(events),
        lane=[event.get("lane", NO_LANE) for event in events],
        phase=[0] * len(events),
    )
    channel = Channel(DEVICE, "package", ReadingKind.POWER, "case", Quality.MEASURED)
    last = {round(time * unit): watts for time, watts in sorted(case["power"], key=lambda sample: sample[0])}
    edges = [*last, max(end, max(last) + 1)] if last else []
    steps = PowerSteps(channel, edges, list(last.values()))
    return align(trace, {DEVICE: [steps]}, (begin, end), multiplicity=multiplicity)


def exact(value: Any) -> Fraction:
    """``[fraction, float]`` or a bare number as a fraction."""
    return Fraction(value[0]) if isinstance(value, list) else Fraction(value)


KIND = Kind("align", _recognises, _cases)
