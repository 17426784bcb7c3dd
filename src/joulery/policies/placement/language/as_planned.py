"""Comparison of running engines with those of a plan, as far as the engines report their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from joulery.domain.gpu.language_plan import PlannedEngine, ServedModel, vllm_command

_PRECISIONS = frozenset({"bfloat16", "float16", "float32", "fp8"})
"""Precisions that plans and engines call by the same name."""


class EngineCheck(NamedTuple):
    """Comparison of one engine with a plan.

    Attributes:
        name: Name of the engine in the site.
        differences: Differences from the plan, one sentence each.
        unread: Settings that the engine does not report.
        planned: The plan's entry for its model; None where the plan has none.
    """

    name: str
    differences: tuple[str, ...]
    unread: tuple[str, ...]
    planned: PlannedEngine | None


def check_engines(planned: Sequence[PlannedEngine], served: Mapping[str, ServedModel]) -> tuple[EngineCheck, ...]:
    """Compare each engine with the plan for its model; :func:`missing` finds the replicas that the site lacks.

    Args:
        planned: The plan's engines.
        served: Report of each engine, by its name in the site.
    """
    return tuple(_check(name, planned, says) for name, says in served.items())


def missing(planned: Sequence[PlannedEngine], checks: Sequence[EngineCheck]) -> tuple[str, ...]:
    """The models of which the site names fewer replicas than planned, one sentence each."""
    found = []
    for model in dict.fromkeys(each.model for each in planned):
        wanted = sum(each.replicas for each in planned if each.model == model)
        there = sum(each.planned is not None and each.planned.model == model for each in checks)
        if there < wanted:
            found.append(f"the plan has {wanted} replicas of {model}, the site names {there}")
    return tuple(found)


def _check(name: str, planned: Sequence[PlannedEngine], says: ServedModel) -> EngineCheck:
    if not says.models:
        return EngineCheck(name, (), ("its model",), None)
    mine = [each for each in planned if each.model in says.models]
    if not mine:
        models = ", ".join(dict.fromkeys(each.model for each in planned))
        return EngineCheck(name, (f"runs {says.models[-1]}, the plan has {models}",), (), None)
    alike = min(mine, key=lambda each: sum(bool(word) for word in _differences(each, says)))
    differences = [word for word in _differences(alike, says) if word]
    if differences:
        line = vllm_command(alike.model, alike.precision, alike.gpus, alike.max_num_seqs)
        differences.append(f"planned: {line}")
    unread = [
        label
        for label, known in (
            ("--tensor-parallel-size", says.gpus),
            ("--max-num-seqs", says.max_num_seqs),
            ("precision", says.precision),
        )
        if not known
    ]
    return EngineCheck(name, tuple(differences), tuple(unread), alike)


def _differences(each: PlannedEngine, says: ServedModel) -> tuple[str, ...]:
    """Differences from the plan; empty strings for settings that are as planned or unknown."""
    differs = says.precision and says.precision != each.precision and says.precision in _PRECISIONS
    return (
        f"spreads over {says.gpus} GPUs, planned {each.gpus}" if says.gpus not in (None, each.gpus) else "",
        f"runs {says.max_num_seqs} requests at once, planned {each.max_num_seqs}"
        if says.max_num_seqs not in (None, each.max_num_seqs)
        else "",
        f"has weights in {says.precision}, planned {each.precision}"
        if differs and each.precision in _PRECISIONS
        else "",
    )
