"""The operators of a named model: a file, a built-in model, or one of the published catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from joulery.adapters.graphs.hlo import read_hlo
from joulery.adapters.graphs.onnx import read_onnx
from joulery.adapters.graphs.torch_export import read_torch_export
from joulery.adapters.models.efficientnet_lite import LITE_VARIANTS
from joulery.app.wiring.models import cache_folder, lite_file
from joulery.domain.errors import DataError
from joulery.domain.trace.operators import GraphOperator, OperationCost, OperatorKind
from joulery.perf.catalog.architectures import architectures, operations_of, published_latency_s
from joulery.perf.power.operator_costs import operator_costs


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model and its operators.

    Attributes:
        name: What it is called.
        operations: Its operators in topological order.
        published_s: Published latency on a V100 at 1380 MHz; None where there is none.
        notes: What a reader should know, one sentence each.
        file: Where its graph is; None for the catalog.
    """

    name: str
    operations: tuple[OperationCost, ...]
    published_s: float | None = None
    notes: tuple[str, ...] = ()
    file: Path | None = None


def named_model(what: str, dimensions: Mapping[str, int]) -> NamedModel:
    """The model a person means: a graph file, ``lite0`` to ``lite2``, or a model of the published catalog.

    Raises:
        CapabilityError: A package that reads the file is missing.
        DataError: There is no such file or model, or it cannot be read.
        ConfigError: A dimension that makes no sense.
    """
    file = Path(what)
    if file.is_file():
        return read_model(file, dimensions)
    if what in {variant.name for variant in LITE_VARIANTS}:
        return replace(read_model(lite_file(what, cache_folder()), dimensions), name=what)
    if what in architectures():
        return NamedModel(what, operations_of(what), published_latency_s(what))
    known = ", ".join((*(variant.name for variant in LITE_VARIANTS), *architectures()))
    raise DataError(
        f"no such file or model: {what}",
        hint=f"name an ONNX file, a .pt2 file of torch.export, a file of HLO text, or one of {known}",
    )


def read_model(file: Path, dimensions: Mapping[str, int]) -> NamedModel:
    """The model in a graph file: ONNX, ``torch.export`` (``.pt2``) or HLO text, recognised by its content.

    Raises:
        CapabilityError, DataError: As :func:`named_model`.
    """
    graph = _read(file, dimensions)
    unknown: dict[str, int] = {}
    for operator in _all(graph):
        if operator.kind is OperatorKind.OTHER:
            unknown[operator.type] = unknown.get(operator.type, 0) + 1
    notes: tuple[str, ...] = ()
    if unknown:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(unknown.items()))
        notes = (f"no rule for the arithmetic of {listed}: counted by their memory traffic alone",)
    name = file.name.removesuffix(".txt").removesuffix(file.suffix if file.suffix != ".txt" else "")
    return NamedModel(name, operator_costs(graph), notes=notes, file=file)


def with_decoding(model: NamedModel, step: NamedModel, steps: int) -> NamedModel:
    """A generative model of two graphs: a prefill, and one decoding step that runs ``steps`` times.

    The weights are counted once, with the prefill.
    """
    prefill = tuple(replace(each, phase="prefill") for each in model.operations)
    decode = tuple(
        replace(each, phase="decode", count=steps * each.count, parameter_bytes=0.0) for each in step.operations
    )
    return replace(model, operations=(*prefill, *decode), notes=(*model.notes, *step.notes))


def _read(file: Path, dimensions: Mapping[str, int]) -> tuple[GraphOperator, ...]:
    try:
        with file.open("rb") as handle:
            start = handle.read(4096)
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", file=str(file)) from None
    if not start:
        raise DataError("the file is empty", file=str(file), hint="name a file with a graph")
    if start.startswith(b"PK"):
        return read_torch_export(file, dimensions)
    if b"HloModule" in start or file.suffix in (".hlo", ".txt"):
        return read_hlo(file)
    return read_onnx(file, dimensions)


def _all(graph: tuple[GraphOperator, ...]) -> list[GraphOperator]:
    found: list[GraphOperator] = []
    for operator in graph:
        found += [operator, *_all(operator.inner)]
    return found
