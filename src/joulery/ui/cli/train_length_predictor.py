"""``joulery train-length-predictor``: train a predictor of answer lengths from a log, and score it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.ui.cli.options import NearChoice

if TYPE_CHECKING:
    from joulery.app.profiling.lengths import Evaluation, TrainedPredictor

_FILE = click.Path(path_type=Path)


@click.command("train-length-predictor")
@click.option(
    "--data",
    required=True,
    multiple=True,
    type=_FILE,
    metavar="FILE",
    help="Parquet log: model, instruction_id, out_tokens; or the gateway's own log (.jsonl). Repeatable.",
)
@click.option(
    "--instructions",
    multiple=True,
    type=_FILE,
    metavar="FILE",
    help="Parquet: instruction_id, instruction (the prompt's text); a .jsonl log needs none. Repeatable.",
)
@click.option("--evaluate", required=True, type=_FILE, metavar="FILE", help="Log of other prompts to score it on.")
@click.option("--out", type=_FILE, metavar="DIR", help="Keep the predictor in this folder.")
@click.option(
    "--encoder",
    type=NearChoice(["auto", "minilm", "distilled", "none"]),
    default="auto",
    help="Add a small language model's embedding of the prompt (auto: minilm where it is installed; "
    "distilled: a version with three layers, needs PyTorch and a few minutes).",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the distillation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    data: tuple[Path, ...],
    instructions: tuple[Path, ...],
    evaluate: Path,
    out: Path | None,
    encoder: str,
    seed: int,
    as_json: bool,
) -> None:
    """Train a predictor of output lengths and score it on the prompts of --evaluate.

    Classes are the quartiles and the 99th percentile of each model's own answers. Nothing is downloaded.
    """
    import json

    from joulery.app.profiling.lengths import LengthRequest, train_predictor
    from joulery.ui.kit.console import progress_bar

    with progress_bar("distilling", quiet=encoder != "distilled") as progress:
        request = LengthRequest(data, instructions, evaluate, out, encoder, seed)
        predictor, found = train_predictor(request, progress)
    document = _document(predictor, found)
    if as_json:
        click.echo(json.dumps(document))
    else:
        _print(document)
    if found.seen_prompts:
        click.echo(
            f"{found.seen_prompts} of the evaluated prompts were trained on: these figures are too good", err=True
        )
    if out is not None:
        click.echo(f"kept in {out}", err=True)


def _document(predictor: TrainedPredictor, found: Evaluation) -> dict[str, Any]:
    from dataclasses import asdict

    rest = asdict(found)
    quality = rest.pop("quality")
    return {
        **quality,
        **rest,
        "encoder": None if predictor.encoder is None else predictor.encoder.name,
        "trained_on": {"prompts": len(predictor.model.arrays["points"]), "models": len(predictor.model.models)},
        "left_out": asdict(predictor.model.left_out),
    }


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="length predictor, mean over models", title_justify="left")
    for name in ("", "evaluated", "left out of the fit"):
        table.add_column(name, justify="right" if name else "left")
    for key, kept in document["left_out"].items():
        table.add_row(key, f"{document[key]:.3f}", f"{kept:.3f}")
    for key in ("p50_ms", "p99_ms"):
        table.add_row(f"CPU time {key}", f"{document[key]:.2f}", "")
    console = Console(highlight=False)
    console.print(table)
    trained = document["trained_on"]
    console.print(f"trained on {trained['prompts']} prompts and {trained['models']} models")
    console.print(
        f"evaluated on {document['prompts']} prompts, {document['answers']} answers of {document['models']} models"
    )
    console.print(f"encoder: {document['encoder'] or 'none'}")
