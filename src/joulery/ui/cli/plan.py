"""``joulery plan``: place services on GPUs, with their shares, costs and the distance to the optimum."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.domain.errors import ConfigError
from joulery.ui.cli.native_output import without_solver_lines
from joulery.ui.cli.options import KeyList, NearChoice, Time, option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from joulery.app.planning.plans import PlanOptions, SitePlan
    from joulery.config.site import Site

# joulery.app.planning.plans.PRESETS and COMPARED, repeated here so that --help imports nothing heavy; a test compares.
PRESETS = (
    *("best", "igniter", "muserve", "columns", "clover", "joint", "language"),
    *("ffd", "ffd++", "gslice", "gpulets"),
)
COMPARED = ("best", "igniter", "ffd", "ffd++", "gslice", "gpulets", "muserve", "joint", "knobs")

_NOT_WITH_SERIES = (
    *("running", "compare", "page_file", "triton", "objective", "lock", "intensity", "max_moves"),
    *("envelope", "at", "as_kept", "limit", "slo_prices"),
)
_NOT_WITH_ENVELOPE = (
    *("compare", "objective", "lock", "running", "follow", "max_moves", "explain", "triton"),
    "slo_prices",
)
"""Flags that apply to a single plan only."""


@click.command("plan")
@click.argument("file", metavar="SITE", type=click.Path(), required=False)
@click.option(
    "--preset",
    type=NearChoice(PRESETS),
    metavar="P",
    help="best, igniter, muserve, columns, clover, joint, language, or a baseline: ffd, ffd++, gslice, gpulets.",
)
@click.option(
    "--compare",
    type=KeyList(COMPARED, repeats=True),
    metavar="P[,P]",
    help="Also plan with these: ffd, ffd++, gpulets, gslice, igniter, best; pipelines: muserve, best; joint: knobs, "
    "each by itself and in turn.",
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
@click.option(
    "--envelope",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="For joint: plans over price and load, kept with --out; with FILE, the plan of it that --at asks for.",
)
@click.option("--at", metavar="LOAD[,PRICE]", help="With --envelope FILE: a ratio of the rates, and USD/kg (or /kWh).")
@click.option("--as-kept", is_flag=True, help="With --at: use a plan of the envelope as it is; never plan again.")
@click.option("--limit", type=Time("20 min"), help="With --envelope: CPU time it may take, such as '20 min' (10 min).")
@click.option("--intensity", metavar="G", help="For columns, clover, joint: carbon intensity, such as '300 g/kWh'.")
@click.option("--explain", is_flag=True, help="Print why: what binds, and what neighbours cost each process.")
@click.option("--slo-prices", is_flag=True, help="For joint: what longer SLOs would save, by plans made again.")
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
    envelope: str | None,
    at: str | None,
    as_kept: bool,
    limit: float | None,
    explain: bool,
    slo_prices: bool,
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
    watts, grams or dollars, with a bound; with --envelope for every price and load at once.

    Exits with 3 if infeasible, or if the plan of the policy is predicted to violate an SLO.
    """
    from joulery.app.planning.plans import PlanOptions
    from joulery.config import load
    from joulery.config.parsing.located import located

    file, series, envelope = _site_of(file, series, envelope)
    if (follow or (max_migrations and series is None)) and running is None:
        raise ConfigError("there is no running plan to follow", pointer="--follow", hint="name one with --running FILE")
    options = PlanOptions(
        preset,
        _names(compare),
        running,
        follow,
        max_migrations,
        max_moves,
        _g_per_kwh(intensity),
        objective,
        _names(lock),
        slo_prices,
    )
    with located(file):
        given = click.get_current_context().params | {"series": series, "envelope": envelope}
        _plan(load(file), Path(file).stem, options, given)


def _plan(site: Site, name: str, options: PlanOptions, given: Mapping[str, Any]) -> None:
    """Make what the flags request: one plan, plans for each step of a series, or an envelope."""
    series = given["series"]
    if series is not None:
        _plan_series(site, Path(series) if series else None, given)
        return
    if any(given[flag] not in (None, False) for flag in ("envelope", "at", "limit", "as_kept")):
        _plan_envelope(site, options.g_per_kwh, given)
        return
    made, out = _planned(site, options), given["out"]
    _keep(document := made.document() if given["as_json"] or out is not None else {}, out)
    if given["page_file"] is not None:
        _write(given["page_file"], _page(made, site, name))
    _triton(site, made, given["triton"])
    if given["as_json"]:
        click.echo(json.dumps(document))
    else:
        _show(made, given["explain"], given["triton"])
    if made.violates:
        raise click.exceptions.Exit(3)


def _planned(site: Site, options: PlanOptions) -> SitePlan:
    """The plan of a site."""
    from joulery.app.planning.plans import plan_site

    with without_solver_lines():
        return plan_site(site, options)


def _site_of(file: str | None, series: str | None, envelope: str | None) -> tuple[str, str | None, str | None]:
    """The site file, also where an optional flag before it took it as its value: ``joulery plan --series SITE``.

    Raises:
        UsageError: There is no site file.
    """
    if file is None and series:
        return series, "", envelope
    if file is None and envelope:
        return envelope, series, ""
    if file is None:
        raise click.UsageError("Missing argument 'SITE'.")
    return file, series, envelope


def _plan_envelope(site: Site, g_per_kwh: float | None, given: Mapping[str, Any]) -> None:
    """Make plans over price and load, or find one of them in the file that an earlier run kept.

    Raises:
        ConfigError: A flag of one plan is given, or another preset.
    """
    from joulery.app.planning.envelope import LIMIT_S, look_up, point_of, site_envelope
    from joulery.app.planning.envelope_files import envelope_document
    from joulery.store.plan_documents import document_of
    from joulery.ui.reports.plan.envelope_view import envelope_page, envelope_view, found_view

    preset, kept, at, limit = given["preset"] or site.plan.preset, given["envelope"], given["at"], given["limit"]
    if kept is None:
        flag = next(flag for flag in ("limit", "at", "as_kept") if given[flag] not in (None, False))
        raise ConfigError("--at, --as-kept and --limit go with --envelope", pointer=f"--{flag.replace('_', '-')}")
    if preset != "joint":
        raise ConfigError(f"--envelope goes with preset joint, not {preset}", pointer="--envelope")
    _refuse_beside(given, _NOT_WITH_ENVELOPE, "goes with one plan, --envelope makes many")
    out, as_json = given["out"], given["as_json"]
    if kept:
        if at is None:
            raise ConfigError("which plan of the envelope?", pointer="--at", expected="LOAD or LOAD,PRICE")
        _refuse_beside(given, ("limit", "page_file"), "goes with making an envelope, not with a look-up")
        with without_solver_lines():
            found = look_up(site, Path(kept), *point_of(at), as_kept=given["as_kept"])
        _keep(document := document_of(found.plan), out)
        _print_result(document, found_view(found.plan, found.name, found.regret, found.saved_ratio), as_json)
        return
    if at is not None or given["as_kept"]:
        flag = "--as-kept" if at is None else "--at"
        raise ConfigError(f"{flag} looks up an envelope that is made already", pointer=flag, hint="--envelope FILE")
    limit_s = LIMIT_S if limit is None else limit
    with without_solver_lines():
        made = site_envelope(site, g_per_kwh, limit_s=limit_s, progress=_progress)
    _keep(document := envelope_document(made), out)
    if given["page_file"] is not None:
        _write(given["page_file"], envelope_page(made, site.name))
    _print_result(document, [envelope_view(made)], as_json)


def _progress(loads: int, error_ratio: float) -> None:
    """Show on standard error the number of planned loads, if it is a terminal."""
    if sys.stderr.isatty():
        left = "" if error_ratio == float("inf") else f", look-ups up to {100 * error_ratio:.1f} % off"
        click.echo(f"\rplanned for {loads} loads{left}  ", nl=False, err=True)


def _print_result(document: dict[str, Any], shown: list[RenderableType], as_json: bool) -> None:
    """Print a result, as JSON or as text."""
    if as_json:
        click.echo(json.dumps(document))
    else:
        _print(shown)


def _refuse_beside(given: Mapping[str, Any], flags: Sequence[str], why: str) -> None:
    """Refuse flags that do not apply.

    Raises:
        ConfigError: One of them is given.
    """
    if beside := next((flag for flag in flags if given[flag] not in (None, False)), None):
        flag = "--" + {"page_file": "html"}.get(beside, beside).replace("_", "-")
        raise ConfigError(f"{flag} {why}", pointer=flag)


def _show(made: SitePlan, explain: bool, triton: Path | None) -> None:
    """Print a plan, why its preset where joulery chose it, and where Triton's files are."""
    if made.why_preset:
        click.echo(made.why_preset)
    _print(_shown(made, explain))
    if triton is not None:
        click.echo(f"\nTriton's files are in {triton}; put each model's file into gpuN/NAME/1/, then run launch-mps.sh")


def _plan_series(site: Site, loads: Path | None, given: Mapping[str, Any]) -> None:
    """Plan for rates that change."""
    from joulery.app.planning.plans import SeriesPlan, plan_site_series, series_document
    from joulery.ui.reports.plan.joint_day_text import day_view
    from joulery.ui.reports.plan.shares_text import series_view

    _refuse_beside(given, _NOT_WITH_SERIES, "goes with one plan, --series makes several")
    with without_solver_lines():
        made = plan_site_series(site, given["preset"], given["max_migrations"], loads)
    document = series_document(made)
    _keep(document, given["out"])
    if given["as_json"]:
        click.echo(json.dumps(document))
    else:
        _print([series_view(made) if isinstance(made, SeriesPlan) else day_view(made)])
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
    from joulery.ui.reports.plan import shares_text

    plan, shown = made.plan, list[Any]()
    if isinstance(plan, LanguagePlan):
        from joulery.ui.reports.plan.language_text import language_view

        return language_view(plan, explain)
    if isinstance(plan, ProvisionPlan) and plan.certificate is not None:
        from joulery.ui.reports.plan.joint_text import joint_view

        return joint_view(made, plan, explain)
    if isinstance(plan, LayoutPlan):
        from joulery.ui.reports.plan.layouts_text import layouts_view

        return layouts_view(plan, explain)
    if isinstance(plan, PipelinePlan):
        from joulery.ui.reports.plan import stages_text

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


def _triton(site: Site, made: SitePlan, folder: Path | None) -> None:
    """Write Triton's configuration of every instance, where there is a folder for it.

    Raises:
        ConfigError: The plan has no shares of GPUs.
    """
    if folder is None:
        return
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
