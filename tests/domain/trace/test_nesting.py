"""Call stacks out of intervals, against a plain stack walked tick by tick."""

import random

import numpy as np

from joulery.domain.trace.nesting import exclusive_pieces, nesting


def plain(rows: list[tuple[int, int, int]]) -> tuple[list[int], list[bool], dict[int, set[int]]]:
    """Parent, crossing, and ticks at which each (start, end, lane) is innermost."""
    parent, crossing, owner = [-1] * len(rows), [False] * len(rows), {}
    for lane in {lane for _, _, lane in rows}:
        stack: list[int] = []
        here = [i for i, row in enumerate(rows) if row[2] == lane]
        for i in sorted(here, key=lambda i: (rows[i][0], -rows[i][1], i)):
            start, end, _ = rows[i]
            while stack and rows[stack[-1]][1] <= start:
                stack.pop()
            parent[i] = stack[-1] if stack else -1
            if end == start:
                continue
            if stack and end > rows[stack[-1]][1]:
                crossing[i] = True
                continue
            stack.append(i)
            owner.update({(lane, tick): i for tick in range(start, end)})
    ticks: dict[int, set[int]] = {}
    for (_, tick), i in owner.items():
        ticks.setdefault(i, set()).add(tick)
    for i, (start, end, _) in enumerate(rows):
        if crossing[i]:
            ticks[i] = set(range(start, end))
    return parent, crossing, ticks


def columns(rows):
    table = np.array(rows, np.int64).reshape(len(rows), 3)
    return table[:, 0], table[:, 1], table[:, 2]


def test_random_lanes_equal_a_plain_stack() -> None:
    rng = random.Random(11)
    for _ in range(1500):
        rows = []
        for _ in range(rng.randint(0, 12)):
            start = rng.randint(0, 14)
            rows.append((start, start + rng.choice([0, 1, 3, 7]), rng.choice([0, 5, 10**12])))
        parent, crossing, ticks = plain(rows)
        stacks = nesting(*columns(rows))
        assert stacks.crossing.tolist() == crossing
        assert [p for p, c in zip(stacks.parent.tolist(), crossing, strict=True) if not c] == [
            p for p, c in zip(parent, crossing, strict=True) if not c
        ]
        got: dict[int, set[int]] = {}
        pieces = exclusive_pieces(*columns(rows))
        for event, start, end in zip(
            pieces.event.tolist(), pieces.start_ns.tolist(), pieces.end_ns.tolist(), strict=True
        ):
            assert got.setdefault(event, set()).isdisjoint(range(start, end)) and end > start
            got[event] |= set(range(start, end))
        assert got == ticks


def test_times_too_wide_for_one_key_are_ranked() -> None:
    far = 2**61
    rows = [(-far, far, lane) for lane in range(8)] + [(0, 10, 3)]
    stacks = nesting(*columns(rows))
    assert stacks.parent.tolist() == [-1] * 8 + [3]
    pieces = exclusive_pieces(*columns(rows))
    assert sorted(pieces.start_ns[pieces.event == 3].tolist()) == [-far, 10]
