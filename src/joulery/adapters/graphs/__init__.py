"""Readers of the operator lists of models: ONNX files, programs of ``torch.export``, HLO text."""

from __future__ import annotations

from collections.abc import Mapping

from joulery.domain.trace.operators import OperatorKind

Rule = tuple[OperatorKind, float]
"""Rule that gives the work of an operator; for elementwise ones, the operations of an element."""


def rules(words: Mapping[Rule, str]) -> dict[str, Rule]:
    """The rule of each operator, from lists of names separated by blanks."""
    return {name: rule for rule, names in words.items() for name in names.split()}
