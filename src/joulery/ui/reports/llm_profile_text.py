"""Predictions of language models on the terminal, each beside its error."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from joulery.app.profiling.llm.first_tokens import FirstTokenProfile
from joulery.app.profiling.llm.prediction import LlmProfile
from joulery.domain.format import percent, si
from joulery.perf.llm.errors import Band
from joulery.perf.llm.predictor import LlmPrediction

_FIGURES = {
    "energy_per_token": "J a token",
    "throughput": "tokens/s",
    "power": "W",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
}

_LEFT_OUT = {
    "between measured loads": "a load between measured ones",
    "beyond measured loads": "the first or the last loads",
    "another configuration": "a configuration and task",
    "another model": "a model",
    "another architecture": "an architecture and size",
    "another GPU type": "a GPU type",
}

_LEFT_OUT_POINTS = {
    **_LEFT_OUT,
    "between measured loads": "a load",
    "another configuration": "a pair of lengths",
    "another model": "a configuration",
}


def llm_profile_view(profile: LlmProfile) -> list[RenderableType]:
    """The requested rows, and the errors of rows left out of the fit."""
    parts: list[RenderableType] = []
    if profile.answers:
        parts += [_answers(profile), Text()]
        parts += _notes(profile.answers)
    parts += [
        Text(f"cross-validation on {len(profile.runs)} measured runs: median error (nine of ten within)", "bold"),
        _validation(profile),
    ]
    return parts


def _answers(profile: LlmProfile) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    left = ("model", "GPUs", "task", "basis")
    for heading in ("model", "GPUs", "task", "in flight", "tokens/s", "W", "J a token", "ITL p50", "ITL p99", "basis"):
        table.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    for answer in profile.answers:
        point, bands = answer.point, answer.bands
        table.add_row(
            f"{point.model_id.rpartition('/')[2]} {point.precision}",
            f"{point.num_gpus} × {point.gpu.name}",
            point.task or "–",
            f"{point.batch:g}",
            _with_error(answer.throughput_tps, bands.get("throughput"), ".0f"),
            _with_error(answer.power_w, bands.get("power"), ".0f"),
            _with_error(answer.energy_per_token_j, bands.get("energy_per_token"), ".3g"),
            "–" if answer.itl_p50_s is None else si(answer.itl_p50_s, "s"),
            "–" if answer.itl_p99_s is None else si(answer.itl_p99_s, "s"),
            answer.basis if answer.fits_memory else f"{answer.basis}, does not fit",
        )
    return table


def _with_error(value: float | None, band: Band | None, form: str) -> str:
    """A figure, and the error within which two of three left-out rows lie."""
    if value is None:
        return "–"
    return format(value, form) + ("" if band is None else f" ±{percent(band.typical_ratio, 0)}")


def _notes(answers: tuple[LlmPrediction, ...]) -> list[RenderableType]:
    parts: list[RenderableType] = [
        Text(
            "± holds two of three rows left out alike; fitted: its configuration was measured at other loads; ", "dim"
        ),
        Text("transferred: from other models, GPU types, numbers of GPUs, precisions or tasks", "dim"),
    ]
    if any(not answer.fits_memory for answer in answers):
        parts.append(
            Text("does not fit: weights and the KV cache of one request exceed the memory of the GPUs", "yellow")
        )
    return [*parts, Text()]


def _validation(profile: LlmProfile) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("what was left out", "rows", *_FIGURES.values()):
        table.add_column(heading, justify="left" if heading == "what was left out" else "right")
    by_way = dict.fromkeys(each.left_out for each in profile.cross_validation)
    found = {(each.left_out, each.figure): each for each in profile.cross_validation}
    for way in by_way:
        cells = [found.get((way, figure)) for figure in _FIGURES]
        rows = next((each.rows for each in cells if each is not None), 0)
        table.add_row(
            _LEFT_OUT.get(way, way),
            str(rows),
            *("–" if e is None else f"{percent(e.median_ratio)} ({percent(e.p90_ratio, 0)})" for e in cells),
        )
    return table


def first_token_view(profile: FirstTokenProfile) -> list[RenderableType]:
    """The requested times to first token, and the errors of points left out of the fit."""
    parts: list[RenderableType] = []
    if profile.answers:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("model", "GPUs", "engine", "prompt", "answer", "in flight", "TTFT", "basis"):
            table.add_column(heading, justify="left" if heading in ("model", "engine", "basis") else "right")
        for cells, answer in zip(profile.asked, profile.answers, strict=True):
            table.add_row(
                cells["model_path"].rpartition("/")[2],
                f"{cells['tp_size']} × {cells['system']}",
                cells.get("backend", "–"),
                *(cells[name] for name in ("isl", "osl", "batch_size")),
                f"{si(answer.ttft_s, 's')} ±{percent(answer.band.typical_ratio, 0)}",
                answer.basis,
            )
        parts += [table, Text("± holds two of three points left out alike", "dim"), Text()]
    parts.append(Text(f"cross-validation of TTFT on {profile.measured} load points", "bold"))
    found = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("what was left out", "points", "median error (nine of ten within)"):
        found.add_column(heading, justify="left" if heading == "what was left out" else "right")
    for way, (points, median, p90) in profile.cross_validation.items():
        found.add_row(_LEFT_OUT_POINTS.get(way, way), str(points), f"{percent(median)} ({percent(p90, 0)})")
    return [*parts, found]
