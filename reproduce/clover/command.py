"""``python -m reproduce clover``: the evaluation of Clover (SC'23, section 5)."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from joulery.app.simulation import Overrides
from joulery.app.simulation.variant_study import benches_of, grids_of, studies_of
from joulery.config.scenario import VariantsScenario, load_scenario
from reproduce.claim import output_options, print_claims, write_page
from reproduce.clover.claims import claims
from reproduce.clover.figures import CloverFigures, figures
from reproduce.clover.page import page

SCENARIO = Path(__file__).resolve().parents[2] / "examples" / "clover-48h.yaml"


@click.command("clover")
@click.option("--profile", metavar="DIR", help="Folder of exhaustive profiles (the built-in simulated A100 profile).")
@click.option("--carbon", metavar="FILE", help="CSV file of carbon intensity (a bundled grid).")
@click.option("--column", metavar="NAME[,NAME]", help="With --carbon: its columns in g/kWh, a grid each.")
@click.option("--seeds", type=click.IntRange(1, 10_000), default=20, help="Runs of each searching scheme (20).")
@click.option("--scenario", type=click.Path(path_type=Path), default=SCENARIO, metavar="FILE", help="Other settings.")
@output_options
def command(
    scenario: Path,
    seeds: int,
    html: Path | None,
    as_json: bool,
    **inputs: str | None,
) -> None:
    """Run Clover's evaluation (SC'23, section 5): Figs. 9 to 16. Every result is simulated."""
    settings = load_scenario(scenario)
    if not isinstance(settings, VariantsScenario):
        raise click.UsageError(f"{scenario} is of kind {settings.kind}, expected variants")
    overrides = Overrides(seeds=seeds, inputs={name: value for name, value in inputs.items() if value is not None})
    benches = benches_of(settings, overrides, all_loads=True)
    grids = grids_of(settings, overrides)
    made = figures(benches, grids, studies_of(settings, overrides)[0], seeds)
    qualities = {name: one.table.quality for name, one in benches.items()}
    if html is not None:
        write_page(html, page(made, qualities))
    notes = (f"detection / classification / language on {next(iter(grids))}; {seeds} seeds", *set(qualities.values()))
    print_claims(claims(made), _document(made, qualities, seeds), as_json=as_json, notes=notes)


def _document(made: CloverFigures, qualities: dict[str, str], seeds: int) -> dict[str, Any]:
    return {
        "paper": "clover",
        "quality": "simulated",
        "profiles": qualities,
        "seeds": seeds,
        "results": [{name: _known(value) for name, value in asdict(one).items()} for one in made.means],
    }


def _known(value: Any) -> Any:
    """The value, or None in place of NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value
