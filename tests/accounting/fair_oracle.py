"""Two straightforward readings of the definition, slow on purpose and independent of the product's code.

``exact``: rational arithmetic over elementary intervals, scanning every event at each. ``ticks``: Algorithm 2 of the
paper tick by tick, with its slips mended (half-open events, power times time, adding instead of overwriting).
Both know nothing of sorting tricks, clocks or numpy.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Event:
    op: str
    start: int
    end: int
    device: str = "CPU:0"
    lane: int = -1


@dataclass(frozen=True)
class Answer:
    """Energies are watts times ticks."""

    energy: dict[tuple[str, str], Fraction]
    unattributed: dict[str, Fraction]
    total: dict[str, Fraction]
    uncovered: dict[str, int]


def running(events: Sequence[Event]) -> list[tuple[Event, frozenset[int]]]:
    """Each event with the ticks at which it is the innermost of its lane."""
    result = []
    lanes: dict[tuple[str, int], list[int]] = defaultdict(list)
    alone = []
    for i, event in enumerate(events):
        if event.lane < 0 or event.device.startswith("GPU"):
            alone.append(i)
        else:
            lanes[event.device, event.lane].append(i)
    for rows in lanes.values():
        rows.sort(key=lambda i: (events[i].start, -events[i].end, i))
        open_ends: list[int] = []
        owner: dict[int, int] = {}
        for i in rows:
            event = events[i]
            while open_ends and open_ends[-1] <= event.start:
                open_ends.pop()
            if event.end == event.start:
                continue
            if open_ends and event.end > open_ends[-1]:
                alone.append(i)
                continue
            open_ends.append(event.end)
            for tick in range(event.start, event.end):
                owner[tick] = i
        mine: dict[int, set[int]] = defaultdict(set)
        for tick, i in owner.items():
            mine[i].add(tick)
        result += [(events[i], frozenset(ticks)) for i, ticks in mine.items()]
    result += [(events[i], frozenset(range(events[i].start, events[i].end))) for i in alone]
    return result


def exact(
    events: Sequence[Event],
    power: dict[str, Sequence[tuple[int, float | None]]],
    window: tuple[int, int],
    distinct: bool = False,
) -> Answer:
    """``power`` holds (tick, watts) steps; the last reaches to the end of the window; None is unknown."""
    t0, t1 = window
    energy: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    unattributed: dict[str, Fraction] = defaultdict(Fraction)
    total: dict[str, Fraction] = defaultdict(Fraction)
    uncovered: dict[str, int] = defaultdict(int)
    pieces = running(events)
    for device, steps in power.items():
        here = [(event.op, ticks) for event, ticks in pieces if event.device == device]
        cuts = {t0, t1} | {t for t, _ in steps if t0 < t < t1}
        for _, ticks in here:
            cuts |= {t for t in ticks if t0 < t < t1 and t - 1 not in ticks}
            cuts |= {t + 1 for t in ticks if t0 < t + 1 < t1 and t + 1 not in ticks}
        edges = sorted(cuts)
        for a, b in itertools.pairwise(edges):
            watts = None
            for t, w in steps:
                if t <= a:
                    watts = w
            if watts is None:
                uncovered[device] += b - a
                continue
            spent = Fraction(watts) * (b - a)
            total[device] += spent
            active = [op for op, ticks in here if a in ticks]
            if distinct:
                active = sorted(set(active))
            if not active:
                unattributed[device] += spent
            for op in active:
                energy[op, device] += spent / len(active)
    return Answer(energy, unattributed, total, uncovered)


def ticks(
    events: Sequence[Event], power: dict[str, Sequence[tuple[int, float | None]]], window: tuple[int, int]
) -> dict[tuple[str, str], Fraction]:
    """Energy by (op, device), one tick at a time."""
    flat: dict[tuple[str, int], list[str]] = defaultdict(list)
    for event, when in running(events):
        for tick in when:
            flat[event.device, tick].append(event.op)
    energy: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for device, steps in power.items():
        for tick in range(*window):
            known = [w for t, w in steps if t <= tick]
            if known and known[-1] is not None:
                for op in flat.get((device, tick), []):
                    energy[op, device] += Fraction(known[-1]) / len(flat[device, tick])
    return energy
