"""The bursts of :mod:`benchmarks.bursts` with dynamic batches, beside Proteus's rule with the same batches, simulated.

The plant forms batches as the embedded engine does; queue limits, weights and layouts of the live policy object are
computed from the times of batches. A sixth trace, a flood, exceeds what the leanest variant serves in batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks import Result, data_folder
from benchmarks import _burst_world as world
from benchmarks.bursts import CARRIED, Played, ours, played, predictor, proteus
from joulery.perf.layouts import Predictor

MAX_BATCH = 8
TRACES = (*CARRIED, "flash", "flood")
CARRIED_BATCHED = TRACES[:-1]
"""Traces that the leanest layout can carry in batches; without batches it cannot carry the flash crowd."""


def run() -> Result:
    """Simulate all traces with and without batches.

    Raises:
        NotRun: The recorded trace is not here.
    """
    data_folder("muserve")
    known, plain = predictor(MAX_BATCH), predictor()
    found = {name: (played(known, name, ours), played(known, name, proteus)) for name in TRACES}
    alone = {name: played(plain, name, ours) for name in TRACES}
    return Result(
        "Bursts with dynamic batches",
        (
            *("trace", "requests", "within the SLO", "refused", "violations: ours / Proteus"),
            *("accuracy: ours / Proteus / ours without batches", "mean batch", "J a request, against none"),
            "reaction, median / longest",
        ),
        [_row(name, *found[name], alone[name]) for name in TRACES],
        notes=(
            f"Simulated, as the bursts above, with `max_batch: {MAX_BATCH}` and `batch_delay: "
            f"{1e3 * world.BATCH_DELAY_S:g} ms`: a batch spends {world.FIXED_PART:.0%} of a request's time once and "
            "the rest for each request (made up); a batch takes at most 30 % of the SLO, which leaves batches of "
            f"{_sizes(known)}. The leanest layout serves {_capacity_rps(known):.0f} requests/s in batches; the flood "
            f"brings {world.FLOOD_RPS:.0f} /s for eight seconds. The version before (commit ef7be44) had no batches. A "
            "more accurate answer costs more joules.",
        ),
        checks=_checks(found),
        figures={
            name: {"violations": pair[0].violations, "refused": pair[0].refused, "proteus": pair[1].violations}
            for name, pair in found.items()
        },
    )


def _sizes(known: Predictor) -> str:
    """The largest batch of each variant on one core."""
    entries = [entry for entry in known.profile.entries if entry.slice.cores == 1]
    return ", ".join(f"{entry.max_batch} ({entry.variant})" for entry in entries)


def _capacity_rps(known: Predictor) -> float:
    """Requests a second that the leanest variant serves on two cores."""
    return float(max(2.0 / entry.each_s for entry in known.profile.entries if entry.slice.cores == 1))


def _row(name: str, mine: Played, theirs: Played, alone: Played) -> list[str]:
    reactions = mine.reactions_s
    return [
        name,
        f"{mine.requests:,}",
        f"{mine.attainment_ratio:.2%}",
        f"{mine.refused:,}",
        f"{mine.violations:,} / {theirs.violations:,}",
        f"{mine.accuracy_ratio:.2%} / {theirs.accuracy_ratio:.2%} / {alone.accuracy_ratio:.2%}",
        f"{mine.mean_batch:.2f}",
        f"{mine.energy_j / alone.energy_j - 1:+.1%}",
        f"{np.median(reactions):.1f} / {max(reactions):.1f} s" if reactions else "–",
    ]


def _checks(found: dict[str, tuple[Played, Played]]) -> Sequence[tuple[str, bool]]:
    """The bars."""
    attained = min(mine.attainment_ratio for mine, _ in found.values())
    refused = sum(found[name][0].refused for name in CARRIED_BATCHED)
    longest_s = max(max(mine.reactions_s, default=0.0) for mine, _ in found.values())
    mine, theirs = (sum(pair[k].violations for pair in found.values()) for k in (0, 1))
    worse = [name for name, (one, other) in found.items() if one.violations > other.violations]
    return (
        (f"at least 99 % of the answers of every trace within the SLO: {attained:.2%}", attained >= 0.99),
        (f"none refused where the leanest layout can carry the load: {refused}", refused == 0),
        (f"reaction within 2 s: {longest_s:.1f} s", longest_s <= 2.0),
        (f"on each trace at most Proteus's violations: {mine:,} against {theirs:,}", not worse),
    )
