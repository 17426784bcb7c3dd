"""Which source operation an instruction of a compiled XLA program comes from, and its qualified name.

XLA keeps ``op_name`` (``jit(f)/transpose(jvp(bert))/encoder/layer_0/output/dense/dot_general``) in the metadata of its
instructions; a fusion keeps that of one of the operations it fused. The program comes as text
(``jax.jit(f).lower(x).compile().as_text()``) or inside the profile itself.
"""

from __future__ import annotations

import re

from joulery.adapters.hlo_text import hlo_modules
from joulery.adapters.tracers.xla.protobuf import fields, number, sub, text
from joulery.domain.trace.events import UNNAMED, qualified

_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"')
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_WRAPPED = re.compile(r"^(?:jvp|transpose|vmap|remat|checkpoint|rematted_computation|custom_jvp|custom_vjp)\((.*)\)$")
_DROPPED = re.compile(r"^(?:p?jit\(.*\)|rematted_computation|checkpoint|remat\d*|)$")
_RECOMPUTED = re.compile(r"(^|/)rematted_computation(/|$)")


def names_in_text(program: str) -> dict[tuple[str, str], str]:
    """``op_name`` by (module, instruction) of programs in HLO text; several may follow one another."""
    names: dict[tuple[str, str], str] = {}
    for module in hlo_modules(program):
        roots: dict[str, str] = {}
        calls: dict[str, str] = {}
        for computation, instructions in module.computations.items():
            for each in instructions:
                if found := _OP_NAME.search(each.text):
                    names[module.name, each.name] = found[1]
                    if each.root:
                        roots[computation] = found[1]
                elif called := _CALLS.search(each.text):
                    calls[each.name] = called[1]
        for instruction, called_computation in calls.items():
            if called_computation in roots:
                names.setdefault((module.name, instruction), roots[called_computation])
    return names


def names_in_proto(program: memoryview) -> dict[tuple[str, str], str]:
    """``op_name`` by (module, instruction) of a serialised ``HloProto``.

    Raises:
        WireError: The bytes are no such message.
    """
    names: dict[tuple[str, str], str] = {}
    for field, value in fields(program):
        if field == 1:
            names |= _names_in_module(sub(value))
    return names


def _names_in_module(message: memoryview) -> dict[tuple[str, str], str]:
    module = ""
    names: dict[str, str] = {}
    roots: dict[int, str] = {}
    calls: dict[str, int] = {}
    for field, value in fields(message):
        if field == 1:
            module = text(value)
        elif field == 3:
            _names_in_computation(sub(value), names, roots, calls)
    for instruction, computation in calls.items():
        if computation in roots:
            names.setdefault(instruction, roots[computation])
    return {(module, instruction): name for instruction, name in names.items()}


def _names_in_computation(
    message: memoryview, names: dict[str, str], roots: dict[int, str], calls: dict[str, int]
) -> None:
    own: dict[int, str] = {}
    ident = root = -1
    for field, value in fields(message):
        if field == 5:
            ident = number(value)
        elif field == 6:
            root = number(value)
        elif field == 2:
            name = op_name = ""
            key, called = -1, -1
            for part, content in fields(sub(value)):
                if part == 1:
                    name = text(content)
                elif part == 35:
                    key = number(content)
                elif part == 7:
                    op_name = next((text(meta) for tag, meta in fields(sub(content)) if tag == 2), "")
                elif part == 38:
                    called = content if isinstance(content, int) else content[0] if len(content) else -1
            if op_name:
                names[name] = own[key] = op_name
            elif called >= 0:
                calls[name] = called
    if root in own:
        roots[ident] = own[root]


def qualified_op(op_name: str) -> tuple[str, str]:
    """Qualified name and phase of an ``op_name``.

    >>> qualified_op("jit(f)/transpose(jvp(bert))/encoder/layer_0/dot_general")
    ('bert/encoder/layer_0/dot_general', 'backward')
    """
    op_name = op_name.partition(";")[0]  # of operations that were merged, the first gives the name
    backward = "transpose(" in op_name
    phase = "recompute" if _RECOMPUTED.search(op_name) else "backward" if backward else "forward"
    parts = [part for wrapped in _components(op_name) for part in _unwrapped(wrapped).split("/")]
    kept = [part for part in parts if not _DROPPED.match(part)]
    return (qualified(*kept) if len(kept) > 1 else qualified(UNNAMED, *kept)), phase


def _components(op_name: str) -> list[str]:
    """Parts between slashes outside parentheses: ``jvp(net/layer_0)``, of a scope ``net/layer_0``, is one."""
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
