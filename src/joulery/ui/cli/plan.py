"""``joulery plan``: which model, on which share of which GPU, at what cost, and how far from the cheapest possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.domain.errors import ConfigError
from joulery.ui.cli.options import option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from joulery.app.planning.plans import SitePlan
    from joulery.config.site import Site


@click.command("plan")
@click.argument("file", metavar="SITE", type=click.Path(), required=False)
@click.option("--preset", metavar="P", help="best, igniter, muserve, columns, clover, joint, language or a baseline.")
@click.option(
    "--compare",
    metavar="P[,P]",
    help="Also plan with these: ffd, ffd++, gpulets, gslice, igniter, best; joint: knobs, each by itself and in turn.",
)
@click.option("--objective", metavar="O", help="For joint: energy, carbon or cost; else the site's.")
@click.option("--lock", metavar="K[,K]", help="For joint: leave alone variant, share, batch, clock, type, count.")
@click.option("--running", type=click.Path(path_type=Path), metavar="FILE", help="Compare with this running plan.")
@click.option("--follow", is_flag=True, help="With --running: keep its processes where they are, within the SLOs.")
@option(
    "--max-migrations",
    old="--moves",
    type=click.IntRange(min=0),
    default=0,
    help="With --follow, --series: processes that may migrate to release GPUs (0).",
)
@click.option(
    "--max-moves",
    type=click.IntRange(min=0),
    metavar="R",
    help="For joint with --running: instances that may be started, stopped or changed (the site's plan.moves).",
)
@click.option(
    "--series",
    is_flag=False,
    flag_value="",
    metavar="[LOADS]",
    help="A plan for each step of the services' rates, or of a CSV file of loads; with joint at its switching costs.",
)
@click.option("--intensity", metavar="G", help="For columns, clover, joint: carbon intensity, such as '300 g/kWh'.")
@click.option("--explain", is_flag=True, help="Print why: what binds, and what neighbours cost each process.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the plan as JSON.")
@click.option(
    "--html", "page_file", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with a picture."
)
@click.option(
    "--triton",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write Triton's configuration of every instance, and scripts that launch them with their shares.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    file: str | None,
    preset: str | None,
    compare: str | None,
    objective: str | None,
    lock: str | None,
    running: Path | None,
    follow: bool,
    max_migrations: int,
    max_moves: int | None,
    intensity: str | None,
    series: str | None,
    explain: bool,
    out: Path | None,
    page_file: Path | None,
    triton: Path | None,
    as_json: bool,
) -> None:
    """Plan how many GPUs the services of SITE need, which services share one, with which shares and batches.

    With preset columns or clover: which variants of each service on which MIG slices of how many GPUs, by joules and
    accuracy within the SLO. With plan.language: which language model on how many GPUs of which type, how many requests
    at once, joules a token, dollars and grams an hour. With preset muserve: models cut into pipeline stages, and a
    clock for each GPU. With preset joint: variant, share, batch, clock, GPU type and count at once, for the least
    watts, grams or dollars, with a bound.

    Exits with 3 if infeasible, or if the plan of the policy is predicted to violate an SLO.
    """
    from joulery.app.planning.plans import PlanOptions, plan_site
    from joulery.config import load

    if file is None and series:  # `joulery plan --series SITE`
        file, series = series, ""
    if file is None:
        raise click.UsageError("Missing argument 'SITE'.")
    if (follow or (max_migrations and series is None)) and running is None:
        raise ConfigError("there is no running plan to follow", pointer="--follow", hint="name one with --running FILE")
    site, g_per_kwh, locked = load(file), _g_per_kwh(intensity), _names(lock)
    if series is not None:
        _refuse_single(
            {"--running": running, "--compare": compare, "--html": page_file, "--triton": triton}
            | {"--objective": objective, "--lock": lock, "--intensity": intensity, "--max-moves": max_moves}
        )
        _plan_series(site, preset, max_migrations, Path(series) if series else None, out, as_json)
        return
    options = PlanOptions(
        preset, _names(compare), running, follow, max_migrations, max_moves, g_per_kwh, objective, locked
    )
    made = plan_site(site, options)
    _keep(document := made.document(), out)
    if page_file is not None:
        _write(page_file, _page(made, site, Path(file).stem))
    if triton is not None:
        _triton(site, made, triton)
    if as_json:
        click.echo(json.dumps(document))
    else:
        _show(made, explain, triton)
    if made.violates:
        raise click.exceptions.Exit(3)


def _refuse_single(given: dict[str, Any]) -> None:
    """Refuse flags of one plan beside --series.

    Raises:
        ConfigError: One is given.
    """
    if beside := next((flag for flag, value in given.items() if value is not None), None):
        raise ConfigError(f"{beside} goes with one plan, --series makes several", pointer=beside)


def _show(made: SitePlan, explain: bool, triton: Path | None) -> None:
    """Print a plan, why its preset where joulery chose it, and where Triton's files are."""
    if made.why_preset:
        click.echo(made.why_preset)
    _print(_shown(made, explain))
    if triton is not None:
        click.echo(f"\nTriton's files are in {triton}; put each model's file into gpuN/NAME/1/, then run launch-mps.sh")


def _plan_series(
    site: Site, preset: str | None, max_migrations: int, loads: Path | None, out: Path | None, as_json: bool
) -> None:
    """Plan for rates that change."""
    from joulery.app.planning.plans import DayPlan, plan_site_series, series_document
    from joulery.ui.reports.plan.joint_day_text import day_view
    from joulery.ui.reports.plan.shares_text import series_view

    made = plan_site_series(site, preset, max_migrations, loads)
    document = series_document(made)
    _keep(document, out)
    if as_json:
        click.echo(json.dumps(document))
    else:
        _print([day_view(made) if isinstance(made, DayPlan) else series_view(made)])
    if document["violations"]:
        raise click.exceptions.Exit(3)


def _names(listed: str | None) -> tuple[str, ...]:
    """The names of a flag that lists them with commas."""
    return tuple(name.strip() for name in listed.split(",") if name.strip()) if listed else ()


def _g_per_kwh(intensity: str | None) -> float | None:
    from joulery.config.parsing.quantity import INTENSITY, flag_quantity

    return None if intensity is None else flag_quantity(intensity, INTENSITY, "--intensity")


def _shown(made: SitePlan, explain: bool) -> list[RenderableType]:
    """The parts to print, by the kind of plan."""
    from joulery.domain.gpu.language_plan import LanguagePlan
    from joulery.domain.gpu.layout_plan import LayoutPlan
    from joulery.domain.gpu.pipeline_plan import PipelinePlan
    from joulery.domain.gpu.provisioning import ProvisionPlan
    from joulery.ui.reports.plan import joint_text, language_text, layouts_text, shares_text, stages_text

    plan, shown = made.plan, list[Any]()
    if isinstance(plan, LanguagePlan):
        return language_text.language_view(plan, explain)
    if isinstance(plan, ProvisionPlan) and plan.certificate is not None:
        return joint_text.joint_view(made, plan, explain)
    if isinstance(plan, LayoutPlan):
        return layouts_text.layouts_view(plan, explain)
    if isinstance(plan, PipelinePlan):
        shown.append(stages_text.pipeline_view(plan))
        if plan.violations:
            shown.append(stages_text.pipeline_violations(plan))
        if explain:
            shown.append(stages_text.pipeline_explanation(plan))
        if made.others:
            shown.append(stages_text.pipeline_comparison([o for o in made.others if isinstance(o, PipelinePlan)]))
    else:
        shown.append(shares_text.plan_view(plan))
        if made.uncovered_ratio > 0:
            shown.append(shares_text.uncovered(made.uncovered_ratio))
        if plan.violations:
            shown.append(shares_text.violations_view(plan.violations))
        if explain:
            shown.append(shares_text.explanation(plan))
        if made.others:
            shown.append(shares_text.comparison([o for o in made.others if isinstance(o, ProvisionPlan)]))
        if made.difference is not None:
            shown.append(shares_text.difference_view(made.difference))
    return [part for each in shown for part in ("", each)][1:]


def _page(made: SitePlan, site: Site, stem: str) -> str:
    """The plan as one HTML page, by its kind."""
    from joulery.domain.gpu.language_plan import LanguagePlan
    from joulery.domain.gpu.layout_plan import LayoutPlan
    from joulery.domain.gpu.pipeline_plan import PipelinePlan
    from joulery.ui.reports.plan import language_page, layouts_page, shares_page, stages_page

    if isinstance(made.plan, LanguagePlan):
        return language_page.language_page(made.plan, site.name)
    if isinstance(made.plan, LayoutPlan):
        return layouts_page.layouts_page(made.plan, site.name)
    if isinstance(made.plan, PipelinePlan):
        return stages_page.pipeline_page(made.plan, site.name)
    if made.plan.certificate is None:
        return shares_page.shares_page(made.plan, stem)
    from joulery.ui.reports.plan.joint_text import joint_facts

    return shares_page.shares_page(made.plan, stem, *joint_facts(made, made.plan))


def _triton(site: Site, made: SitePlan, folder: Path) -> None:
    """Write Triton's configuration of every instance.

    Raises:
        ConfigError: The plan has no shares of GPUs.
    """
    from joulery.app.wiring.triton import write_triton
    from joulery.domain.gpu.provisioning import ProvisionPlan

    if not isinstance(made.plan, ProvisionPlan):
        raise ConfigError("--triton goes with plans of shares", pointer="--triton", hint="plan with preset best")
    if any(gpu.sliced for gpu in made.plan.gpus):
        raise ConfigError(
            "--triton writes shares of GPUs, and this plan puts services on MIG slices",
            pointer="--triton",
            hint="leave measurements out, or plan with --lock share",
        )
    write_triton(site, made.plan.gpus, folder, {service.name: service.slo.as_slo() for service in site.services})


def _keep(document: dict[str, Any], out: Path | None) -> None:
    """Write a plan as JSON, where there is a file for it."""
    if out is not None:
        _write(out, json.dumps(document, indent=1) + "\n")


def _write(file: Path, text: str) -> None:
    from joulery.store.files import disk_errors, write_named

    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_named(file, text)


def _print(parts: list[RenderableType]) -> None:
    from joulery.ui.kit.console import table_console

    console = table_console(150)
    for part in parts:
        console.print(part)
