"""``joulery plan``: which model, on which share of which GPU, at what cost, and how far from the cheapest possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.domain.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from joulery.app.planning.request import Request
    from joulery.config.site import Site
    from joulery.domain.gpu.pipeline_plan import PipelinePlan
    from joulery.domain.gpu.provisioning import ProvisionPlan
    from joulery.policies.placement.provisioning.replan import Difference, RunningGpu


@click.command("plan")
@click.argument("file", metavar="SITE", type=click.Path())
@click.option("--preset", metavar="P", help="best, igniter, muserve, columns, clover or a baseline; else the site's.")
@click.option("--compare", metavar="P[,P]", help="Also plan with these: ffd, ffd++, gpulets, gslice, igniter, best.")
@click.option("--running", type=click.Path(path_type=Path), metavar="FILE", help="Compare with this running plan.")
@click.option("--follow", is_flag=True, help="With --running: keep its processes where they are, as far as can be.")
@click.option(
    "--moves", type=click.IntRange(min=0), default=0, help="With --follow, --series: moves for emptying GPUs."
)
@click.option("--series", is_flag=True, help="A plan for each step of the services' rates, few moves between them.")
@click.option("--intensity", metavar="G", help="For columns and clover: carbon intensity, such as '300 g/kWh'.")
@click.option("--explain", is_flag=True, help="Say why: what binds, and what every process pays for its neighbours.")
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
    file: str,
    preset: str | None,
    compare: str | None,
    running: Path | None,
    follow: bool,
    moves: int,
    intensity: str | None,
    series: bool,
    explain: bool,
    out: Path | None,
    page_file: Path | None,
    triton: Path | None,
    as_json: bool,
) -> None:
    """How many GPUs do the services of SITE need, which service beside which, how much of the GPU each, which batch?

    With preset columns or clover: which variants of each service on which MIG slices of how many GPUs, by joules and
    accuracy within the latency.

    Exits with 3 when a promise cannot be kept, or when the plan a policy makes is predicted to break one.
    """
    from joulery.app.planning.request import read_running, request_of
    from joulery.config import load

    if (follow or (moves and not series)) and running is None:
        raise ConfigError("there is no running plan to follow", pointer="--follow", hint="name one with --running FILE")
    site = load(file)
    policy = preset or site.plan.preset
    if policy in ("columns", "clover"):
        for flag, given in (("--compare", compare), ("--running", running)):
            if given is not None:
                raise ConfigError(f"plans of layouts take no {flag}", pointer=flag, hint="plan with preset best")
        _pool(site, policy, intensity, explain, out, page_file, as_json)
        return
    if policy == "muserve" or site.plan.pipelines is not None:
        if running is not None:
            raise ConfigError("plans of pipelines cannot be compared with a running one", pointer="--running")
        _pipelines(site, policy, compare, explain, out, page_file, as_json)
        return
    request = request_of(site)
    if series:
        named = {"--running": running, "--compare": compare, "--html": page_file, "--triton": triton}
        if beside := next((option for option, value in named.items() if value is not None), None):
            raise ConfigError(f"{beside} goes with one plan, --series makes several", pointer=beside)
        _plan_series(site, request, policy, moves, out, as_json)
        return
    old = None if running is None else read_running(running)
    plan = _planned(request, policy, old if follow else None, moves)
    others = _compared(request, plan, compare)
    changed = None if old is None else _difference(old, plan)
    document = _document(plan, others, changed)
    _keep(document, out)
    if page_file is not None:
        from joulery.ui.reports.plan.page import page

        _write(page_file, page(plan, Path(file).stem))
    if triton is not None:
        from joulery.app.wiring.triton import write_triton

        write_triton(site, plan.gpus, triton, {one.id: one.slo for one in request.workloads})
    if as_json:
        click.echo(json.dumps(document))
    else:
        _show(plan, others, changed, explain)
        if triton is not None:
            click.echo(
                f"\nTriton's files are in {triton}; put each model's file into gpuN/NAME/1/, then run launch-mps.sh"
            )
    if plan.violations:
        raise click.exceptions.Exit(3)


def _document(plan: ProvisionPlan, others: list[ProvisionPlan], changed: Difference | None) -> dict[str, Any]:
    """A plan as JSON, with what it is compared with."""
    from joulery.ui.reports.plan.document import comparison_document, difference_document, document_of

    document = document_of(plan)
    if others:
        document["compare"] = comparison_document(others)
    if changed is not None:
        document["difference"] = difference_document(changed)
    return document


def _plan_series(site: Site, request: Request, preset: str, moves: int, out: Path | None, as_json: bool) -> None:
    """Plan for rates that change."""
    from joulery.app.planning.series import planned_series, series_document, series_view

    planned = planned_series(site, request, preset, moves)
    document = series_document(planned)
    _keep(document, out)
    if as_json:
        click.echo(json.dumps(document))
    else:
        _console().print(series_view(planned))
    if document["violations"]:
        raise click.exceptions.Exit(3)


def _pipelines(
    site: Site,
    preset: str,
    compare: str | None,
    explain: bool,
    out: Path | None,
    page_file: Path | None,
    as_json: bool,
) -> None:
    """Plan models as pipelines, with a clock for each GPU."""
    from joulery.app.planning.pipelines import pipeline_request, planned_pipelines
    from joulery.ui.reports.plan.pipelines_document import pipeline_document

    request = pipeline_request(site)
    plan = planned_pipelines(request, preset)
    names = dict.fromkeys(name.strip() for name in (compare or "").split(",") if name.strip())
    others = [plan if name == plan.policy else planned_pipelines(request, name) for name in names]
    document = pipeline_document(plan)
    if others:
        document["compare"] = [
            {
                "policy": each.policy,
                "gpus": len(each.gpus),
                "power_w": each.power_w,
                "saving_ratio": each.saving_ratio,
                "violations": len(each.violations),
            }
            for each in others
        ]
    _keep(document, out)
    if page_file is not None:
        from joulery.ui.reports.plan.pipelines_page import pipeline_page

        _write(page_file, pipeline_page(plan, site.name))
    if as_json:
        click.echo(json.dumps(document))
    else:
        _show_pipelines(plan, others, explain)
    if plan.violations:
        raise click.exceptions.Exit(3)


def _show_pipelines(plan: PipelinePlan, others: list[PipelinePlan], explain: bool) -> None:
    from joulery.ui.reports.plan import pipelines_text as text

    console = _console()
    console.print(text.pipeline_view(plan))
    if plan.violations:
        console.print()
        console.print(text.pipeline_violations(plan))
    if explain:
        console.print()
        console.print(text.pipeline_explanation(plan))
    if others:
        console.print()
        console.print(text.pipeline_comparison(others))


def _pool(
    site: Site,
    preset: str,
    intensity: str | None,
    explain: bool,
    out: Path | None,
    page_file: Path | None,
    as_json: bool,
) -> None:
    """Which variants on which slices of how many GPUs."""
    from joulery.app.planning.pool_plan import document_of, planned, view
    from joulery.app.planning.pool_request import pool_request_of
    from joulery.config.parsing.quantity import INTENSITY, flag_quantity

    g_per_kwh = None if intensity is None else flag_quantity(intensity, INTENSITY, "--intensity")
    made = planned(preset, pool_request_of(site, g_per_kwh))
    document = document_of(made)
    _keep(document, out)
    if page_file is not None:
        from joulery.ui.reports.plan.pool_page import page

        _write(page_file, page(made, site.name))
    if as_json:
        click.echo(json.dumps(document))
        return
    console = _console()
    for part in view(made, explain):
        console.print(part)


def _planned(request: Request, preset: str, running: tuple[RunningGpu, ...] | None, moves: int) -> ProvisionPlan:
    from dataclasses import replace

    from joulery.policies.placement.provisioning.planner import followed, lower_bound, provision

    if running is not None:
        return followed(running, request.workloads, request.types, request.rules, moves)
    plan = provision(preset, request.workloads, request.types, request.rules)
    if plan.bound is None:
        plan = replace(plan, bound=lower_bound(request.workloads, request.types, request.rules))
    return plan


def _compared(request: Request, plan: ProvisionPlan, names: str | None) -> list[ProvisionPlan]:
    """The plans of the policies named, the one made already taken over."""
    from joulery.policies.placement.provisioning.planner import provision

    chosen = dict.fromkeys(name.strip() for name in (names or "").split(",") if name.strip())
    return [
        plan if name == plan.policy else provision(name, request.workloads, request.types, request.rules)
        for name in chosen
    ]


def _difference(old: tuple[RunningGpu, ...], plan: ProvisionPlan) -> Difference:
    from joulery.policies.placement.provisioning.replan import difference, running_of

    return difference(old, running_of(plan.gpus))


def _keep(document: dict[str, Any], out: Path | None) -> None:
    """Write a plan as JSON, where there is a file for it."""
    if out is not None:
        _write(out, json.dumps(document, indent=1) + "\n")


def _write(file: Path, text: str) -> None:
    from joulery.store.files import disk_errors, write_named

    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_named(file, text)


def _show(plan: ProvisionPlan, others: list[ProvisionPlan], changed: Difference | None, explain: bool) -> None:
    from joulery.ui.reports.plan import text

    console = _console()
    shown: list[Any] = [text.plan_view(plan)]
    if plan.violations:
        shown.append(text.violations_view(plan.violations))
    if explain:
        shown.append(text.explanation(plan))
    if others:
        shown.append(text.comparison(others))
    if changed is not None:
        shown.append(text.difference_view(changed))
    for at, part in enumerate(shown):
        if at:
            console.print()
        console.print(part)


def _console() -> Console:
    from joulery.ui.kit.console import table_console

    return table_console(150)
