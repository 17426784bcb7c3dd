"""Origins of the kernels in XLA's command buffers: CUDA graphs, which a profile names only as a whole.

XLA records most of a program as CUDA graphs. A kernel of a graph then has the annotation of the graph's launch, which
names no instruction of the program. Three facts identify the instruction:

- A graph's nodes are numbered in the order of the schedule, one node for each instruction. A node's number gives its
  instruction once the graph's beginning in the schedule is known. The names give that: kernels that XLA generates have
  the name of their instruction (``loop_add_fusion_1`` of ``loop_add_fusion.1``), or of the first of several similar
  ones.
- A library call is one node that contains its own graph. The nodes inside it are numbered after all others; they run
  between the neighbours of the call.
- Where the numbers do not fit the names, the names alone decide, in the order in which the kernels ran. A name that
  would step back in the schedule is that of an earlier, similar instruction: the name is then ignored.
"""

from __future__ import annotations

import os.path
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from joulery.adapters.tracers.xla.origins import Origin, Origins, Sequences

_OTHER = re.compile(r"\W")
COUNTED = re.compile(r"([_.]\d+)+$")
"""Count at the end of a name that several instructions or kernels share."""
_CLEARED = re.compile(r"^memset\b", re.IGNORECASE)
"""Memory that a library clears before its kernel."""
_FITTING_RATIO = 0.9
"""Share of the generated kernels that have to be at their numbers before the numbers are used."""
_SHIFTS = 16
"""Number of beginnings of a graph in the schedule that are tried, those that most names support first."""
Place = tuple[int, int]
"""Computation and position of an instruction."""


class GraphKernel(Protocol):
    """A kernel or another interval on a GPU."""

    name: str
    device: str
    lane: tuple[str, int]
    start_ps: int
    stats: dict[str, Any]


def from_graphs(events: Sequence[GraphKernel], origins: Origins, sequences: Sequences) -> dict[int, Origin | None]:
    """The origins of events that ran in graphs, by index of the event; None where the origin is not known.

    An origin that stands for several instructions has the scopes and the place that they share, and is ``added``.
    """
    if not any(event.device.startswith("GPU") for event in events):
        return {}
    instructions = {module: {name for each in found for name in each} for module, found in sequences.items()}
    graphs: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for at, event in enumerate(events):
        module, op = (str(event.stats.get(key, "")) for key in ("hlo_module", "hlo_op"))
        module = module if module in sequences else module.partition("(")[0]
        if event.device.startswith("GPU") and op not in instructions.get(module, (op,)):
            graphs[module, event.device, str(event.stats.get("correlation_id", ""))].append(at)
    places = {module: _places(sequences[module]) for module in {module for module, _, _ in graphs}}
    found: dict[int, Origin | None] = {}
    seen: dict[tuple[str, tuple[str, ...], tuple[int, ...]], list[Origin | None]] = {}
    for (module, _, _), kernels in graphs.items():
        ordered = sorted(kernels, key=lambda each: (events[each].start_ps, _node(events[each])))
        names, nodes = tuple(events[each].name for each in ordered), tuple(_node(events[each]) for each in ordered)
        if (module, names, nodes) not in seen:  # a graph is launched once a step
            known = numbered(names, nodes, sequences[module], places[module])
            spans = spread(names, sequences[module], places[module], known)
            seen[module, names, nodes] = [
                _shared([origins[module, op] for op in span if (module, op) in origins]) for span in spans
            ]
        found |= dict(zip(ordered, seen[module, names, nodes], strict=True))
    return found


def _node(event: GraphKernel) -> int:
    """The number of a kernel's node in its graph: the low 32 bits of CUPTI's id; the high bits number the graph."""
    return int(event.stats.get("cuda_graph_node_id") or 0) & 0xFFFF_FFFF


def _places(computations: Sequence[Sequence[str]]) -> dict[str, Place]:
    """The place of each instruction, by the kernel name that XLA would generate for it."""
    return {
        _OTHER.sub("_", name): (number, at)
        for number, instructions in enumerate(computations)
        for at, name in enumerate(instructions)
    }


def numbered(
    kernels: Sequence[str], nodes: Sequence[int], computations: Sequence[Sequence[str]], places: Mapping[str, Place]
) -> dict[int, Place]:
    """The places of the kernels whose node number gives their instruction; empty where numbers and names disagree.

    Args:
        kernels: Names of the kernels.
        nodes: The number of each kernel's node in its graph.
        computations: Instructions of each computation, in the order of their schedule.
        places: Places of the instructions, by the names of their generated kernels.
    """
    named = [(at, places[name]) for at, name in enumerate(kernels) if name in places]
    if len(named) < 2 or len(set(nodes)) < len(nodes):
        return {}
    shifts = Counter((number, position - nodes[at]) for at, (number, position) in named)
    for (number, shift), _ in shifts.most_common(_SHIFTS):
        instructions = dict(enumerate(computations[number], start=-shift))
        found = {at for at, _ in named if _alike(kernels[at], instructions.get(nodes[at], ""))}
        if len(found) >= max(2, _FITTING_RATIO * len(named)):
            last = max(nodes[at] for at in found)
            found |= {at for at, name in enumerate(kernels) if name not in places and nodes[at] < last}
            return {at: (number, nodes[at] + shift) for at in found if nodes[at] in instructions}
    return {}


def _alike(kernel: str, instruction: str) -> bool:
    """Whether a kernel's name matches an instruction's, apart from the counts at their ends."""
    return COUNTED.sub("", kernel) == _OTHER.sub("_", COUNTED.sub("", instruction))


def spread(
    kernels: Sequence[str],
    computations: Sequence[Sequence[str]],
    places: Mapping[str, Place],
    known: Mapping[int, Place] | None = None,
) -> list[Sequence[str]]:
    """The instructions that may have run each kernel: one where its name or position decides, none where unknown.

    Args:
        kernels: Names of the kernels, in the order in which they ran.
        computations: Instructions of each computation, in the order of their schedule.
        places: Places of the instructions, by the names of their generated kernels.
        known: Certain places of kernels; without them the names decide.
    """
    anchors = sorted(known.items()) if known else _by_names(kernels, places)
    result: list[Sequence[str]] = [()] * len(kernels)
    for at, (number, position) in anchors:
        result[at] = (computations[number][position],)
    if not anchors:
        return result
    taken = {place for _, place in anchors}
    starts = [(-1, None), *anchors]
    ends = [*anchors, (len(kernels), None)]
    for (low, before), (high, after) in zip(starts, ends, strict=True):
        if high - low < 2:
            continue
        between = _between(computations, before, after, high - low - 1, taken)
        calls = _calls(kernels[low + 1 : high])
        both = before is not None and after is not None
        for at in range(low + 1, high):
            if both and len(between) == high - low - 1:
                result[at] = (between[at - low - 1],)
            else:
                result[at] = (between[calls[at - low - 1]],) if both and len(between) == calls[-1] + 1 else between
    return result


def _by_names(kernels: Sequence[str], places: Mapping[str, Place]) -> list[tuple[int, Place]]:
    """The kernels whose names follow the order of the schedule, and their places."""
    anchors: list[tuple[int, Place]] = []
    for at, name in enumerate(kernels):
        place = places.get(name)
        if place is not None and (not anchors or place[0] != anchors[-1][1][0] or place > anchors[-1][1]):
            anchors.append((at, place))
    return anchors


def _calls(kernels: Sequence[str]) -> list[int]:
    """The number of each kernel's library call, if each call runs one kernel, after it has cleared memory."""
    numbers, number = [], 0
    for at in range(len(kernels)):
        if at and not _CLEARED.match(kernels[at - 1]):
            number += 1
        numbers.append(number)
    return numbers


def _between(
    computations: Sequence[Sequence[str]],
    before: Place | None,
    after: Place | None,
    number: int,
    taken: Collection[Place],
) -> Sequence[str]:
    """The instructions between two places of one computation; with only one place known, at most ``number`` of them.

    An instruction runs one kernel or several, so the instructions of ``number`` kernels are among ``number`` ones.
    Instructions that ran as another kernel are left out.
    """
    if before is None and after is not None:
        computation, low, high = after[0], max(0, after[1] - number), after[1]
    elif before is not None and after is None:
        computation, low, high = before[0], before[1] + 1, before[1] + 1 + number
    elif before is None or after is None or before[0] != after[0]:
        return ()
    else:
        computation, low, high = before[0], before[1] + 1, after[1]
    whole = computations[computation][low:high]
    return [name for at, name in enumerate(whole, start=low) if (computation, at) not in taken]


def _shared(origins: Sequence[Origin]) -> Origin | None:
    """Merge several origins of one pass: keep the scopes and the place that they have in common; None across passes."""
    if len(set(origins)) < 2:
        return origins[0] if origins else None
    scopes = [origin.op_name.split("/")[:-1] for origin in origins]
    depth = next(
        (at for at, parts in enumerate(zip(*scopes, strict=False)) if len(set(parts)) > 1), min(map(len, scopes))
    )
    shared = scopes[0][:depth]
    backward = {"transpose(" in origin.op_name for origin in origins}
    if len(backward) > 1:
        return None
    if backward == {True} and not any("transpose(" in part for part in shared):
        shared = [*shared, "transpose(jvp())"]
    places = [origin.place for origin in origins]
    return Origin("/".join((*shared, "")), os.path.commonpath(places) if all(places) else "", added=True)
