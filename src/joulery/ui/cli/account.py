"""``joulery account``: joules by operation, from a recorded trace and recorded power."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from joulery.ui.cli.options import NearChoice, Time, carbon_flags

# joulery.adapters.tracers.files.FORMATS, repeated here so that --help imports nothing heavy; a test compares the two.
FORMATS = ("kineto", "tf1", "jax", "xplane", "csv")


@click.command("account")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--events", type=click.Path(path_type=Path), metavar="FILE", help="The recorded events.")
@click.option("--power", type=click.Path(path_type=Path), metavar="FILE", help="t_ns,device,power_w ...")
@click.option("--window", nargs=2, type=int, metavar="START END", help="The session, nanoseconds of the files' clock.")
@click.option("--estimator", type=NearChoice(["recency", "regression"]), help="Power of short operations (recency).")
@click.option(
    "--multiplicity",
    type=NearChoice(["events", "set"]),
    default="events",
    help="Share power among events (default) or operations.",
)
@click.option("--format", "form", type=NearChoice(FORMATS), help="Format of the events (detected).")
@click.option(
    "--hlo", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="Compiled program, for JAX."
)
@click.option(
    "--period",
    "period_s",
    type=Time("10 ms", bare="s"),
    help="Sampling period of the power, such as 10 ms; a plain number is seconds (detected).",
)
@click.option(
    "--offset", "offset_ns", type=int, default=0, metavar="NS", help="Nanoseconds to add to the power's timestamps."
)
@carbon_flags
@click.option("--out", type=click.Path(path_type=Path), metavar="RUN", help="Keep it as a run, for joulery report.")
@click.option("--top", type=click.IntRange(min=1), default=20, metavar="N", help="Operations to print (20).")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def command(
    run: Path | None,
    events: Path | None,
    power: Path | None,
    window: tuple[int, int] | None,
    estimator: str | None,
    multiplicity: str,
    form: str | None,
    hlo: tuple[Path, ...],
    period_s: float | None,
    offset_ns: int,
    out: Path | None,
    top: int,
    as_json: bool,
    **flags: str | None,
) -> None:
    """Account recorded events with recorded power: joules by operation, device and phase; idle and unknown apart.

    Events: PyTorch profiler (Kineto) JSON, TensorFlow 1 timeline, JAX trace, XLA profile (.xplane.pb), or CSV
    op,start_ns,dur_ns,device,lane,phase. Power: CSV t_ns,device and power_w or counter_j. Files may be gzipped.

    Or name a traced RUN whose measuring process was killed, to account for its recordings.
    """
    from joulery.app.measuring import open_carbon
    from joulery.app.runs.accounts import AccountSettings, account_files, account_run, keep

    given = {name: value for name, value in flags.items() if value is not None}
    if run is not None:
        if events or power or window or form or hlo or period_s or offset_ns or multiplicity != "events" or given:
            raise click.UsageError("a RUN has its own events, power, window and terms: leave those flags out")
        accounted, origin = account_run(run, estimator), {"run": str(run)}  # type: ignore[arg-type]
    elif events is None or power is None:
        raise click.UsageError("name --events FILE and --power FILE, or a RUN")
    else:
        how: Any = AccountSettings(
            window,
            estimator or "recency",  # type: ignore[arg-type]
            multiplicity,  # type: ignore[arg-type]
            form,
            hlo,
            period_s,
            offset_ns,
            open_carbon(given),
        )
        accounted, origin = account_files(events, power, how), {"events": str(events), "power": str(power)}
    if out is not None:
        keep(accounted, out, origin)
    if as_json:
        from joulery.store.run.tensors import tensor_footprint_to_dict

        click.echo(json.dumps(tensor_footprint_to_dict(accounted.footprint)))
        return
    from joulery.ui.reports.anatomy.text import as_text, print_footprint

    click.echo(as_text(lambda console: print_footprint(accounted.footprint, console, top=top)), nl=False)
