"""``joulery profile``: measure the variants of a service, or fit and model profiles of GPUs and language models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from joulery.domain.errors import ConfigError
from joulery.ui.cli.options import Time, option

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import RenderableType

    from joulery.perf.interference.model import InterferenceProfile


@click.command("profile")
@click.argument("what", metavar="SERVICE|VARIANT|MODEL", required=False)
@click.argument("file", metavar="SITE", type=click.Path(path_type=Path), required=False)
@click.option(
    "--from",
    "measured",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Fit measured runs of language models; with --pairs, a GPU's interference. Repeatable.",
)
@click.option(
    "--predict", "asked", type=click.Path(path_type=Path), metavar="CSV", help="With --from: predict these rows."
)
@click.option("--pairs", "pairs_file", type=click.Path(path_type=Path), metavar="CSV", help="With --from: co-runs.")
@click.option(
    "--base", default="v100", metavar="NAME|JSON", help="With --from, --mps: the profile to start from (v100)."
)
@click.option(
    "--fit",
    "points",
    metavar="DIR|clover",
    help="Fit a service's costs on measured runs of it: a folder, or the 18 published points.",
)
@click.option(
    "--slices",
    "cuts",
    multiple=True,
    metavar="N,N…",
    help="A partition of the cores, such as 1,1. Repeatable.",
)
@click.option("--runs", type=click.IntRange(2, 100_000), default=100, help="Requests timed on each slice (100).")
@click.option("--warmup", type=click.IntRange(0, 100_000), default=10, help="Requests before them, not kept (10).")
@click.option("--colocate", is_flag=True, help="Measure models beside one another on CPU slices; fit for joulery plan.")
@click.option("--apart", is_flag=True, help="With --colocate: neighbours on whole cores of their own, not on quotas.")
@click.option("--clocks", is_flag=True, help="Profile MODEL against a GPU's clock: operators, scores, power.")
@click.option(
    "--gpu", metavar="NAME", help="With --clocks: emulated GPU (v100). With --from: the type it was measured on."
)
@click.option("--num-gpus", type=click.IntRange(1, 4096), metavar="N", help="With --from: GPUs of the replica.")
@click.option("--precision", metavar="NAME", help="With --from: precision of the weights, such as bfloat16 or fp8.")
@click.option("--model", metavar="ID", help="With --from: id of the model, where the file names it otherwise.")
@click.option("--device", metavar="NAME", help="With --clocks: measure on cpu or nvidia[:N] by setting its clock.")
@click.option("--run", metavar="M:F", help="With --device: a function that runs one pass, --runs times.")
@click.option(
    "--latency", "latency_s", type=Time("51 ms"), help="With --clocks: its latency at full clock, such as 51 ms."
)
@click.option(
    "--dim", "dimensions", multiple=True, metavar="NAME=N", help="With --clocks: a symbolic size. Repeatable."
)
@click.option("--decode", metavar="FILE", help="With --clocks: the graph of one decoding step.")
@click.option("--steps", type=click.IntRange(1, 1_000_000), help="With --decode: how many steps (64).")
@click.option(
    "--scores", type=click.Path(path_type=Path), metavar="FILE", help="With --clocks: database to keep the scores in."
)
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="With --clocks: write a page.")
@click.option("--mps", metavar="GPU", help="Profile NAME=MODEL on this GPU under MPS: index or UUID.")
@click.option("--inputs", type=click.Path(path_type=Path), metavar="NPZ", help="With --mps: one request, as arrays.")
@click.option(
    "--seconds",
    type=Time("2 s", bare="s"),
    default=2.0,
    help="With --mps: time of each run; a plain number is seconds (2).",
)
@click.option("--kernels", type=click.IntRange(0), default=0, help="With --mps: kernels of one inference, if known.")
@click.option("--ncu/--no-ncu", default=True, help="With --mps: count with Nsight Compute, where installed (yes).")
@click.option(
    "--launch", "launch_s", type=Time("32 us"), help="With --mps: launch delay of all of them, such as 32 us."
)
@option(
    *("-o", "--out", "output"),
    old="--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the profile to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as one JSON object.")
def command(what: str | None, file: Path | None, output: Path | None, as_json: bool, **flags: Any) -> None:
    """Measure latency, CPU time and joules of the variants of a service, or of one variant, and write a profile.

    Each variant runs in the worker that will serve it, on real inputs, alone and with every other slice busy. With
    --from and --pairs, nothing is measured here: the interference of models that share a GPU is fitted on your own
    measurements (columns model, batch, r_pct, latency_ms; and the same with 1 and 2 for pairs), for joulery plan.

    With --from alone, measured runs of language models are fitted: a CSV of runs, results of vLLM bench serve, AIPerf
    or Triton Model Analyzer. --predict CSV names rows (model_id, gpu_model, num_gpus, weight_precision, task,
    avg_batch_size) whose tokens a second, watts, joules a token and token latency are predicted, each with its error.

    With --clocks, MODEL is an ONNX file, a .pt2 file of torch.export, HLO text, or a model of the built-in catalog:
    its operators with their work, how much a lower clock slows each, and latency and power against the clock.

    With --colocate, every variant named (SERVICE[,SERVICE]) is timed alone and beside each other one on CPU slices, in
    batches; the interference of neighbours is fitted like a GPU's, for joulery plan and joulery up --plan.

    With --fit, host and device times, joules, contention and idle power of a service are fitted on a few measured runs
    of the whole service (measured_arrival_sweep.csv and variants.csv), for joulery plan and joulery simulate.

    With --mps, NAME=MODEL (an ONNX file or module:function) runs on a GPU of this machine in processes with shares of
    its SMs: nine solo runs, runs of two copies and, for a GPU that --base does not describe, of one to five. Power and
    clock are read through NVML; the profile says what was estimated. It serves joulery plan.
    """
    runs, clock = flags["runs"], {name: flags.pop(name) for name in _CLOCK_FLAGS}
    if flags["mps"] is not None:
        _under_mps(what, flags, output, as_json)
    elif flags["points"] is not None:
        _calibrate(flags["points"], output, as_json)
    elif flags["colocate"]:
        timed = runs if _given("runs") else _TIMED_TOGETHER
        _colocated(what, file, timed, flags["apart"], output, as_json)
    elif flags["clocks"]:
        _clocks(what, runs, output, as_json, clock)
    else:
        gpu = clock.pop("gpu") if flags["measured"] and flags["pairs_file"] is None else None
        _none_of(clock)
        if flags["pairs_file"] is not None:
            _fit(flags["measured"], flags["pairs_file"], flags["base"], output, as_json)
        elif flags["measured"] or flags["asked"] is not None:
            _language_models(gpu, flags, output, as_json)
        else:
            _on_slices(what, file, flags, output, as_json)


_CLOCK_FLAGS = ("gpu", "device", "run", "latency_s", "dimensions", "decode", "steps", "scores", "page")
"""Parameters that only ``--clocks`` uses."""


def _under_mps(what: str | None, flags: Mapping[str, Any], output: Path | None, as_json: bool) -> None:
    """Profile a model on a GPU of this machine, in processes with shares of its SMs."""
    from joulery.app.profiling.mps import MpsRequest, profile_mps

    names = ("mps", "inputs", "seconds", "warmup", "kernels", "launch_s", "ncu", "base")
    request = MpsRequest(what, *(flags[name] for name in names))
    with _progress("profiling", quiet=as_json) as progress:
        profile = profile_mps(request, progress, lambda text: click.echo(text, err=True))
    _hand_over(profile, output, as_json)


def _on_slices(
    what: str | None, file: Path | None, flags: Mapping[str, Any], output: Path | None, as_json: bool
) -> None:
    """Measure the variants of a service, or one of them, on slices of the cores."""
    if what is None or file is None:
        raise _without_site(what, "SERVICE|VARIANT SITE")
    from joulery.app.profiling.service_profile import write_profile
    from joulery.app.profiling.slice_profiles import profile_on_slices

    with _progress("profiling", quiet=as_json) as progress:
        profile = profile_on_slices(
            file, what, flags["cuts"], warmup=flags["warmup"], runs=flags["runs"], progress=progress
        )
    if output is not None:
        write_profile(output, profile)
    if as_json:
        click.echo(json.dumps(profile.as_dict()))
        return
    from joulery.ui.reports.profile_text import service_profile_view

    _print(service_profile_view(profile), output)


def _without_site(what: str | None, expected: str) -> ConfigError:
    """The error for a profile without a site, with the alternatives for models outside a site."""
    return ConfigError(
        "nothing to profile is named" if what is None else "no site is named that it belongs to",
        got=None if what is None else f"{what} alone",
        expected=expected,
        hint="a language model: joulery profile --from RUNS fits runs that vllm bench serve, AIPerf or your CSV "
        "measured; another model without a site: NAME=MODEL --mps GPU, or MODEL --clocks",
    )


def _calibrate(points: str, output: Path | None, as_json: bool) -> None:
    """Fit the costs of services on measured runs."""
    from joulery.app.profiling.calibration import calibrated, calibration_document
    from joulery.ui.reports.profile_text import calibration_view

    found = calibrated(points)
    document = calibration_document(found)
    _keep(document, output)
    if as_json:
        click.echo(json.dumps(document))
        return
    _print(calibration_view(found), output)


def _colocated(what: str | None, file: Path | None, runs: int, apart: bool, output: Path | None, as_json: bool) -> None:
    """Measure models beside one another."""
    if what is None or file is None:
        raise _without_site(what, "SERVICE[,SERVICE] SITE")
    from joulery.app.profiling.colocation import profile_together

    with _progress("measuring", quiet=as_json) as progress:
        profile = profile_together(file, what.split(","), apart=apart, runs=runs, output=output, progress=progress)
    _hand_over(profile, output, as_json, beside=", the measurements beside it")


_TIMED_TOGETHER = 12
"""Batches timed of each instance, unless ``--runs`` is given."""


def _given(option: str) -> bool:
    """Whether an option was given on the command line."""
    from click.core import ParameterSource

    return click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE


def _clocks(what: str | None, runs: int, output: Path | None, as_json: bool, options: Mapping[str, Any]) -> None:
    """Profile a model against the clock; ``options`` are the fields of :class:`ClockRequest`, and ``page``."""
    if what is None:
        raise ConfigError("name the model to profile", expected="MODEL --clocks")
    from joulery.app.profiling.clock_profile import ClockRequest, profile_clocks

    given = {name: value for name, value in options.items() if value is not None}
    if _given("runs"):
        given["passes"] = runs
    page = given.pop("page", None)
    profile, notes = profile_clocks(ClockRequest(model=what, **given))
    _keep(profile.as_dict(), output, indent=1)
    if page is not None:
        from joulery.store.files import write_named
        from joulery.ui.reports.clock_profile_page import clock_page

        write_named(page, clock_page(profile, notes))
    if as_json:
        click.echo(json.dumps({**profile.as_dict(), "notes": list(notes)}))
        return
    from joulery.ui.reports.clock_profile_text import clock_view

    _print(clock_view(profile, notes), width=120)
    for file, kept in ((given.get("scores"), "scores"), (output, "profile"), (page, "page")):
        if file is not None:
            click.echo(f"{kept} kept in {file}")


def _none_of(options: Mapping[str, Any]) -> None:
    """Raise at the first given option that only ``--clocks`` uses."""
    for name, value in options.items():
        if value:
            flag = "--" + {"dimensions": "dim", "page": "html", "latency_s": "latency"}.get(name, name)
            raise ConfigError(f"{flag} belongs to --clocks", pointer=flag, hint="add --clocks")


def _language_models(gpu: str | None, flags: Mapping[str, Any], output: Path | None, as_json: bool) -> None:
    """Fit measured runs of language models, and predict the requested rows."""
    if not flags["measured"]:
        raise ConfigError("there are no measured runs to predict from", pointer="--predict", hint="add --from RUNS.csv")
    from joulery.app.profiling.llm.first_tokens import first_token_profile, holds_load_points
    from joulery.app.profiling.llm.prediction import llm_profile
    from joulery.app.profiling.llm.tables import Given
    from joulery.ui.reports.llm_profile_text import first_token_view, llm_profile_view

    if all(holds_load_points(file) for file in flags["measured"]):
        first = first_token_profile(flags["measured"], flags["asked"])
        document, view = first.document(), first_token_view(first)
    else:
        given = Given(gpu, flags["num_gpus"], flags["precision"], flags["model"])
        profile = llm_profile(flags["measured"], flags["asked"], given)
        document, view = profile.document(), llm_profile_view(profile)
    _keep(document, output, indent=1)
    if as_json:
        click.echo(json.dumps(document))
        return
    _print(view, output, width=150)


def _fit(measured: Sequence[Path], pairs_file: Path, base: str, output: Path | None, as_json: bool) -> None:
    """Fit an interference profile on measurements in CSV files."""
    if len(measured) != 1:
        raise ConfigError(
            "a fit needs one file of solo latencies and one of pairs",
            pointer="--pairs",
            expected="--from CSV --pairs CSV",
        )
    from joulery.app.profiling.interference_fit import fitted

    _hand_over(fitted(measured[0], pairs_file, base), output, as_json)


def _progress(title: str, *, quiet: bool) -> AbstractContextManager[Callable[[int, int, str], None]]:
    from joulery.ui.kit.console import progress_bar

    return progress_bar(title, quiet=quiet)


def _hand_over(profile: InterferenceProfile, output: Path | None, as_json: bool, beside: str = "") -> None:
    """Write an interference profile to a file and print it; ``beside`` states as text what else was written there."""
    from joulery.app.profiling.interference_fit import profile_document
    from joulery.ui.reports.profile_text import interference_view

    document = profile_document(profile)
    _keep(document, output)
    if as_json:
        click.echo(json.dumps(document))
        return
    _print(interference_view(profile), output, beside)


def _keep(document: Mapping[str, Any], output: Path | None, indent: int | None = None) -> None:
    """Write a document as JSON, whole or not at all; nothing where there is no file."""
    from joulery.store.files import write_named

    if output is not None:
        write_named(output, json.dumps(document, indent=indent) + "\n")


def _print(parts: Sequence[RenderableType], output: Path | None = None, beside: str = "", width: int = 110) -> None:
    from joulery.ui.kit.console import table_console

    console = table_console(width)
    for part in parts:
        console.print(part)
    if output is not None:
        console.print(f"kept in {output}{beside}")
