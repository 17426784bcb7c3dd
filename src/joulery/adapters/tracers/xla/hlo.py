"""Qualified names of the source operations of a compiled XLA program.

XLA stores ``op_name`` (``jit(f)/transpose(jvp(bert))/encoder/layer_0/output/dense/dot_general``) in the metadata of its
instructions; a fusion has the name of one of its fused operations. :mod:`origins` reads it.
"""

from __future__ import annotations

import re

from joulery.domain.trace.events import UNNAMED, qualified

_WRAPPED = re.compile(r"^(?:jvp|transpose|vmap|remat|checkpoint|rematted_computation|custom_jvp|custom_vjp)\((.*)\)$")
_DROPPED = re.compile(r"^(?:p?jit\(.*\)|rematted_computation|checkpoint|remat\d*|)$")
_STRUCTURE = re.compile(
    r"^(?:while|cond|scan|body|closed_call|core_call|switch|shard_map|pmap|custom_[jv][vj]p_call\w*|branch_\d+_fun|(?:body|cond)_fun)$"
)
"""Components that JAX adds for control flow and calls."""
_RECOMPUTED = re.compile(r"(^|/)rematted_computation(/|$)")


def qualified_op(op_name: str, place: str = "") -> tuple[str, str]:
    """The qualified name and the phase of an ``op_name``.

    Args:
        op_name: Scopes of the program and the operation.
        place: Path of the program's functions that called the operation; names an operation outside every scope.

    >>> qualified_op("jit(f)/transpose(jvp(bert))/encoder/layer_0/dot_general")
    ('bert/encoder/layer_0/dot_general', 'backward')
    >>> qualified_op("jit(f)/jvp()/while/body/tanh", "net.py:4 layer")
    ('net.py:4 layer/while/body/tanh', 'forward')
    """
    op_name = op_name.partition(";")[0]  # of operations that were merged, the first gives the name
    backward = "transpose(" in op_name
    phase = "recompute" if _RECOMPUTED.search(op_name) else "backward" if backward else "forward"
    parts = [part for wrapped in _components(op_name) for part in _unwrapped(wrapped).split("/")]
    kept = [part for part in parts if not _DROPPED.match(part)]
    if place and all(_STRUCTURE.match(part) for part in kept[:-1]):
        return f"{place}/{qualified(*kept)}", phase
    return (qualified(*kept) if len(kept) > 1 else qualified(UNNAMED, *kept)), phase


def _components(op_name: str) -> list[str]:
    """Split at slashes outside parentheses: ``jvp(net/layer_0)``, of a scope ``net/layer_0``, is one component."""
    parts, depth = [""], 0
    for letter in op_name:
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _unwrapped(part: str) -> str:
    while match := _WRAPPED.match(part):
        part = match[1]
    return part
