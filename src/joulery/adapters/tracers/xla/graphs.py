"""Where the kernels of XLA's command buffers come from: CUDA graphs, of which a profile names the whole alone.

XLA records most of a program as CUDA graphs. A kernel of a graph then has the annotation of the graph's launch, which
names no instruction of the program. Kernels that XLA generates bear the names of their instructions
(``loop_add_fusion_1`` of ``loop_add_fusion.1``). The nodes of a graph are in the order of the schedule: a kernel of a
library is from one of the instructions between those of the kernels before and after it. Alike instructions may share
one kernel, under the name of the first of them: a name that would lead back in the schedule is read as any other.
"""

from __future__ import annotations

import os.path
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from joulery.adapters.tracers.xla.origins import Origin, Origins, Sequences

_OTHER = re.compile(r"\W")


class GraphKernel(Protocol):
    """An interval of a GPU."""

    name: str
    device: str
    lane: tuple[str, int]
    start_ps: int
    stats: dict[str, Any]


def from_graphs(events: Sequence[GraphKernel], origins: Origins, sequences: Sequences) -> dict[int, Origin | None]:
    """Origins of the work of graphs, by its index; None where they are not known.

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
    for (module, _, _), kernels in graphs.items():
        ordered = sorted(kernels, key=lambda each: (_node(events[each]), events[each].start_ps))
        spans = spread([events[each].name for each in ordered], sequences[module], places[module])
        for each, span in zip(ordered, spans, strict=True):
            found[each] = _shared([origins[module, op] for op in span if (module, op) in origins])
    return found


def _node(event: GraphKernel) -> int:
    return int(event.stats.get("cuda_graph_node_id") or 0)


def _places(computations: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """(computation, position) of each instruction, by the name of a kernel that would be its own."""
    return {
        _OTHER.sub("_", name): (number, at)
        for number, instructions in enumerate(computations)
        for at, name in enumerate(instructions)
    }


def spread(
    kernels: Sequence[str], computations: Sequence[Sequence[str]], places: Mapping[str, tuple[int, int]]
) -> list[Sequence[str]]:
    """Instructions that each kernel may be from: one where its name or its position decides, none where nothing does.

    Args:
        kernels: Names, in the order of the graph.
        computations: Instructions of each computation, in the order of their schedule.
        places: Where the instructions are, by the names of kernels of their own.
    """
    anchors: list[tuple[int, tuple[int, int]]] = []
    for at, name in enumerate(kernels):
        place = places.get(name)
        if place is not None and (not anchors or place[0] != anchors[-1][1][0] or place > anchors[-1][1]):
            anchors.append((at, place))
    result: list[Sequence[str]] = [()] * len(kernels)
    for at, (number, position) in anchors:
        result[at] = (computations[number][position],)
    if not anchors:
        return result
    starts = [(-1, None), *anchors]
    ends = [*anchors, (len(kernels), None)]
    for (low, before), (high, after) in zip(starts, ends, strict=True):
        between = _between(computations, before, after, high - low - 1)
        both = before is not None and after is not None
        for at in range(low + 1, high):
            result[at] = (between[at - low - 1],) if both and len(between) == high - low - 1 else between
    return result


def _between(
    computations: Sequence[Sequence[str]], before: tuple[int, int] | None, after: tuple[int, int] | None, number: int
) -> Sequence[str]:
    """Instructions between two of one computation; where one of them is not known, as many as there are kernels.

    An instruction runs one kernel or several: those of the kernels before the first known one are among as many.
    """
    if before is None and after is not None:
        return computations[after[0]][max(0, after[1] - number) : after[1]]
    if before is not None and after is None:
        return computations[before[0]][before[1] + 1 : before[1] + 1 + number]
    if before is None or after is None or before[0] != after[0]:
        return ()
    return computations[before[0]][before[1] + 1 : after[1]]


def _shared(origins: Sequence[Origin]) -> Origin | None:
    """One origin for several of one pass: the scopes and the place that they have in common."""
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
