"""Modules of kernel calls in code that ``torch.compile`` generated.

The recorder stores Dynamo's graphs and the calls of the generated code
(:mod:`joulery.adapters.tracers.inject.compiled`). Generated code names the source nodes of a call where the compiler
has them, and the program line of the last operation of each loop. Several modules may share that line (the layers of a
stack). The parameters passed to the call, the kind of its operations, and the order of the calls decide between them.
Code is scheduled in the order of the graph, backward code against it, so the walk through the graph with the fewest
steps in the other direction explains the calls best. Dynamic programming finds it.

A fused kernel belongs to the module of its last operation, whose result it writes. A kernel of several loops belongs
to the lowest module that its loops have in common.

Code that the compiler splits for CUDA graphs has no lines. Its backward pass still names the operations of the forward
pass that it recomputes or reads, and the kind of the last operation of a call; the walk decides the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from joulery.adapters.tracers.inject.compiled import CALL
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import DataError

_AGAINST = 4.0
"""Cost of a step against the order of the graph, with that of one along it as unit."""
_OTHER_KIND = 50.0
"""Cost of an operation that is of another kind than those of the call."""
_FARTHER = 25.0
"""Cost of an operation that is not the nearest before those that its gradient came through, or was had already."""
_AGAIN = 3.0
"""Cost of the same operation for two loops of one kernel."""
_MOST = 500
"""Operations that a stack may stand for; of more, none is chosen."""
_EARLY = 1e-6
"""Cost of being one step further: of walks that cost the same, the one that goes on last."""
_ADDED = re.compile(r"\s*Gradient addition node due to.*", re.DOTALL)
_PLACE = re.compile(r'^\s*File "[^"]*", line \d+, ', re.MULTILINE)
_KINDS = {
    "linear": ("mm", "sum"),
    "matmul": ("mm",),
    "relu": ("relu", "threshold_backward"),
    "scaled_dot_product_attention": ("scaled_dot_product",),
    "dropout": ("native_dropout", "rand", "bernoulli"),
    "conv1d": ("convolution", "sum"),
    "conv2d": ("convolution", "sum"),
    "conv3d": ("convolution", "sum"),
}
"""Names in generated code of functions of the program that have another name there."""


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A call of a kernel in generated code.

    Attributes:
        leaf: The called kernel, or the called operation outside the compiler.
        module: Path of its module: ``.layers.0`` below the module that called the compiled region, or a full path
            ``Net/layers.0``; None where the module is not known.
    """

    leaf: str
    module: str | None


def read_compiled(file: Path) -> dict[str, CompiledCall]:
    """The recorded calls of generated code by the names of their ranges; empty without the file.

    Raises:
        DataError: The file is damaged.
    """
    if not file.exists():
        return {}
    try:
        noted = json.loads(file.read_text(encoding="utf-8"))
        texts = noted["texts"]
        graphs = [DynamoGraph.of(graph, texts) for graph in noted["graphs"] if graph["calls"]]
        found = {}
        for number, fields in enumerate(noted["codes"]):
            for at, call in enumerate(named_calls(GeneratedCode.of(fields, texts), graphs)):
                found[f"{CALL}{number}:{at}"] = call
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the notes about compiled code are damaged: {type(error).__name__}: {error}", file=str(file)
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class DynamoGraph:
    """Dynamo's graph of a compiled region: its operations in order.

    Attributes:
        modules: Path of the module of each operation.
        kinds: What each operation becomes in generated code.
        inputs: Path of the module of each input that is a parameter; empty for others.
        by_name: Operation by the name of its node.
        by_stack, by_text: Operations by the program's stack, with and without its files and line numbers.
    """

    modules: list[str]
    kinds: list[tuple[str, ...]]
    inputs: list[str]
    by_name: Mapping[str, int]
    by_stack: Mapping[str, list[int]]
    by_text: Mapping[str, list[int]]

    @classmethod
    def of(cls, graph: Mapping[str, Any], texts: Sequence[str]) -> DynamoGraph:
        """Build a graph from a recorder's notes, in which a text is an index into ``texts``."""
        rows = graph["calls"]
        by_stack: dict[str, list[int]] = {}
        by_text: dict[str, list[int]] = {}
        for at, row in enumerate(rows):
            text = texts[row[1]].strip()
            by_stack.setdefault(text, []).append(at)
            by_text.setdefault(_PLACE.sub("", text), []).append(at)
        return cls(
            [texts[row[2]] for row in rows],
            [_KINDS.get(texts[row[3]], (texts[row[3]].strip("_"),)) for row in rows],
            [texts[path] for path in graph["inputs"]],
            {row[0]: at for at, row in enumerate(rows)},
            by_stack,
            by_text,
        )

    def candidates(self, stack: str) -> list[int]:
        """The operations that a stack may stand for; line numbers may differ in code from the compiler's cache."""
        stack = _ADDED.sub("", stack).strip()
        return self.by_stack.get(stack) or self.by_text.get(_PLACE.sub("", stack), [])

    def named(self, call: GeneratedCall) -> int | None:
        """The operation of the last known source node of a call; None without one."""
        return next((self.by_name[name] for name in reversed(call.sources) if name in self.by_name), None)

    def recomputed(self, call: GeneratedCall) -> list[int]:
        """Operations of the forward pass among the source nodes of a call of the backward pass."""
        return [self.by_name[name] for name in dict.fromkeys(call.sources) if name in self.by_name]

    def ended(self, call: GeneratedCall) -> list[int]:
        """The operations of the same kind as the last operation of a call."""
        return (
            [at for at, kinds in enumerate(self.kinds) if any(kind in call.last for kind in kinds)] if call.last else []
        )

    def given(self, call: GeneratedCall) -> set[str]:
        """The modules of the parameters that are passed to a call."""
        return {self.inputs[at] for at in call.inputs if 0 <= at < len(self.inputs)} - {""}


@dataclass(frozen=True, slots=True)
class GeneratedCall:
    """A call in generated code: line, called kernel or operation, whether it is a fused kernel, source nodes, kinds of
    operations, numbers of the graph's inputs, the kind of its last operation."""

    line: int
    leaf: str
    fused: bool
    sources: list[str]
    kinds: str
    inputs: list[int]
    last: str = ""


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """Generated code of one compiled graph.

    Attributes:
        backward: Whether the code computes gradients.
        calls: Its calls, in order.
        stacks: Program stack of the last operation of each loop or call, in order.
        owned: Positions in ``stacks`` of each call.
        lined: Whether the code has program lines; else ``stacks`` are empty texts, one for each call.
    """

    backward: bool
    calls: list[GeneratedCall]
    stacks: list[str]
    owned: list[list[int]]
    lined: bool = True

    def again(self) -> dict[int, float]:
        """The cost of choosing the same operation as before, by position in ``stacks``.

        It applies to another loop of the same kernel, or to a convolution, which has one call in each pass.
        """
        if self.lined:
            return {at: _AGAIN for own in self.owned for at in own[1:]}
        return {at: _FARTHER for at, call in enumerate(self.calls) if call.leaf == "convolution_backward"}

    @classmethod
    def of(cls, fields: Mapping[str, Any], texts: Sequence[str]) -> GeneratedCode:
        """Build the code from a recorder's notes, in which a text is an index into ``texts``."""
        calls = [
            # A call of something else is also said to be of the operations that lead to what it is given.
            GeneratedCall(
                line,
                leaf,
                fused,
                sources,
                " ".join((leaf, *kinds)) if fused else leaf,
                inputs,
                _last(kinds) if fused else leaf,
            )
            for line, leaf, fused, sources, kinds, inputs in fields["calls"]
        ]
        lines = [line for line, _ in fields["contexts"]]
        if not lines:
            return cls(fields["backward"], calls, [""] * len(calls), [[at] for at in range(len(calls))], lined=False)
        return cls(fields["backward"], calls, [texts[stack] for _, stack in fields["contexts"]], _owned(calls, lines))


def _last(kinds: Sequence[str]) -> str:
    """The last operation of a fused kernel of the backward pass; operations that only read its result do not count."""
    backward = [kind for kind in kinds if kind.endswith("_backward") and "convolution" not in kind]
    return next(reversed(backward or kinds), "")


def named_calls(code: GeneratedCode, graphs: Sequence[DynamoGraph]) -> list[CompiledCall]:
    """The calls of generated code, with their modules from the graph that fits best."""
    best, score = None, 0
    for graph in graphs:
        fits = sum(bool(graph.candidates(stack)) for stack in code.stacks if stack.strip())
        fits += sum(graph.named(call) is not None for call in code.calls)
        if fits >= max(score, 1):  # of graphs that fit alike, the one compiled last
            best, score = graph, fits
    if best is None and len(graphs) == 1:  # nothing says which graph it is of, and there is one
        best = graphs[0]
    if best is None:
        return [CompiledCall(call.leaf, None) for call in code.calls]
    places = _places(code, best)
    whole = None if code.lined else common(best.modules)
    result = []
    for call, own in zip(code.calls, code.owned, strict=True):
        named = None if code.backward else best.named(call)
        found = [named] if named is not None else [at for at in (places[context] for context in own) if at is not None]
        if code.backward and not code.lined and call.fused:
            found = best.recomputed(call) or found
        result.append(CompiledCall(call.leaf, common([best.modules[at] for at in found]) or whole))
    return result


def _places(code: GeneratedCode, graph: DynamoGraph) -> list[int | None]:
    """The operation of a graph for each stack of generated code; None where none is found."""
    candidates = [graph.candidates(stack) for stack in code.stacks]
    extra: list[FloatArray] = [np.zeros(len(places)) for places in candidates]
    for call, own in zip(code.calls, code.owned, strict=True):
        named = None if code.backward else graph.named(call)
        given = graph.given(call)
        lines = any(code.stacks[context].strip() for context in own)
        again = [] if code.lined or not code.backward else graph.recomputed(call)
        if not code.lined and named is None:
            candidates[own[0]] = (again[-1:] if call.fused else []) or graph.ended(call)
        for context in own:
            # Beside loops with a line, one without is of none: the state of a norm that is counted up.
            places = candidates[context] if code.stacks[context].strip() or not lines else []
            candidates[context] = places
            if named is not None and len(own) == 1:
                candidates[context] = [named]
            elif given:
                candidates[context] = [at for at in places if graph.modules[at] in given] or places
            kinds = [any(kind in call.kinds for kind in graph.kinds[at]) for at in candidates[context]]
            if not code.stacks[context].strip() and any(kinds):  # called by modules of PyTorch alone: no line is known
                candidates[context] = [at for at, same in zip(candidates[context], kinds, strict=True) if same]
                kinds = [True] * len(candidates[context])
            if len(candidates[context]) > _MOST:
                candidates[context], kinds = [], []
            extra[context] = np.where(kinds, 0.0, _OTHER_KIND)
            if again and not call.fused:  # its gradient comes through them: it stands before them in the forward pass
                nearest = max((at for at in candidates[context] if at < again[-1]), default=None)
                extra[context] = extra[context] + np.array([_FARTHER * (at != nearest) for at in candidates[context]])
    most = (
        np.inf if code.lined else _FARTHER
    )  # few calls have lines or names: one that came late must not bend the walk
    return _walk(candidates, extra, code.again(), -1 if code.backward else 1, most)


def _owned(calls: Sequence[GeneratedCall], lines: Sequence[int]) -> list[list[int]]:
    """The stacks of each call, by their lines: the last one before the call; for a fused kernel those of all its loops.

    On a CPU the compiler writes the call of a fused kernel after the stack of the next call: that stack belongs to the
    call that follows.
    """
    result: list[list[int]] = []
    pending: list[int] = []
    at = 0
    for number, call in enumerate(calls):
        while at < len(lines) and lines[at] <= call.line:
            pending.append(at)
            at += 1
        if not call.fused:
            result.append(pending[-1:])
            pending = []
            continue
        follows = calls[number + 1] if number + 1 < len(calls) else None
        next_owns = follows is not None and not follows.fused and (at >= len(lines) or lines[at] > follows.line)
        cut = len(pending) - 1 if next_owns and len(pending) > 1 else len(pending)
        result.append(pending[:cut])
        pending = pending[cut:]
    return result


def _walk(
    candidates: Sequence[Sequence[int]],
    extra: Sequence[FloatArray],
    again: Mapping[int, float],
    direction: int,
    most: float,
) -> list[int | None]:
    """Choose one candidate for each stack, so that the walk through the graph costs least; None without candidates.

    Args:
        candidates: Operations that each stack may stand for.
        extra: Cost of each candidate beside the step to it.
        again: Cost of the same operation as for the stack before, by stack.
        direction: 1 along the graph, -1 against it.
        most: Largest cost of a step in the other direction.
    """
    known = [at for at, places in enumerate(candidates) if places]
    result: list[int | None] = [None] * len(candidates)
    if not known:
        return result
    tables = [np.array(candidates[at], np.int64) for at in known]
    cost = extra[known[0]]
    back: list[IntArray] = []
    for at, (before, here) in zip(known[1:], pairwise(tables), strict=True):
        step = (here[None, :] - before[:, None]) * direction
        total = (
            cost[:, None]
            + np.where(step >= 0, step, np.minimum(-_AGAINST * step, most))
            + (extra[at] + _EARLY * direction * here)
        )
        if at in again:
            total = total + again[at] * (step == 0)
        back.append(np.argmin(total, axis=0).astype(np.int64))
        cost = np.min(total, axis=0)
    chosen = int(np.argmin(cost))
    for position in range(len(known) - 1, -1, -1):
        result[known[position]] = int(tables[position][chosen])
        if position:
            chosen = int(back[position - 1][chosen])
    return result


def common(modules: Iterable[str]) -> str | None:
    """The lowest module that contains all of the modules; None where none is given."""
    split = [re.split(r"([./])", module) for module in dict.fromkeys(filter(None, modules))]
    if len(split) < 2:
        return "".join(split[0]) if split else None
    shared = 0
    while all(len(parts) > shared and parts[shared] == split[0][shared] for parts in split):
        shared += 1
    text = "".join(split[0][:shared])
    return text if text == "." else text.rstrip("./")
