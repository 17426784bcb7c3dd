"""``joulery export``: an always-on exporter of this node's energy, for Prometheus and OpenTelemetry."""

from __future__ import annotations

import sys

import click

from joulery.ui.cli.numpy_threads import keep_numpy_on_one_thread
from joulery.ui.cli.options import Time, carbon_flags, option


@click.command("export")
@click.option("--port", type=int, default=9107, metavar="P", help="Port to listen on; 0 for a free one (9107).")
@click.option("--listen", "host", default="127.0.0.1", metavar="HOST", help="Address to listen on (127.0.0.1).")
@click.option("--once", is_flag=True, help="Print one scrape, then end.")
@option("--period", "sample_s", old="--sample", type=Time("5 s"), help="Sampling period (5 s; 1 s with --once).")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="URL[@GPUS]",
    help="An inference engine's metrics page: http://localhost:8000, or http://localhost:8000@gpu:0,gpu:1. Repeatable.",
)
@click.option(
    "--engine-interval",
    "engine_s",
    type=Time("15 s"),
    default=15.0,
    help="Time between two readings of the engines (15 s).",
)
@click.option(
    "--meter",
    "meters",
    multiple=True,
    metavar="M",
    help="rapl, nvml, amd, jetson, dcgm:URL, ipmi, redfish:URL, slurm, cpu-model[:IDLE,MAX], replay:FILE, fake:WATTS. "
    "Repeatable (all that this machine has).",
)
@carbon_flags
@click.option("--pue", type=float, default=1.0, metavar="X", help="Facility energy per IT energy, for grams (1).")
@click.option("--otlp", default="", metavar="URL", help="Push to an OpenTelemetry collector: http://localhost:4318.")
@click.option("--otlp-interval", "otlp_s", type=Time("60 s"), default=60.0, help="Time between two pushes (60 s).")
@click.option("--user", default="", metavar="NAME", help="Become this user once the meters are open.")
@click.option("--beside", is_flag=True, help="Run beside another exporter of this node; sums over both count twice.")
@click.option("--json", "as_json", is_flag=True, help="Print startup details as one JSON object.")
@click.option("--configured", hidden=True, help="The checked configuration as JSON; the other flags are not read.")
def command(
    port: int,
    host: str,
    once: bool,
    sample_s: float | None,
    engines: tuple[str, ...],
    engine_s: float,
    meters: tuple[str, ...],
    pue: float,
    otlp: str,
    otlp_s: float,
    user: str,
    beside: bool,
    as_json: bool,
    configured: str | None,
    **carbon: str | None,
) -> None:
    """Export the energy of this node: watts and joules by device, workload and model; grams with a carbon intensity.

    Prometheus scrapes http://127.0.0.1:9107/metrics; /healthz answers probes. Nothing stands in the path of requests:
    engines (vLLM, SGLang, Triton, TensorRT-LLM, llama.cpp) are read through their own metrics pages.
    """
    keep_numpy_on_one_thread()
    from joulery.app.exporting import ExportConfig, check, replace_process, run_exporter

    if configured is not None:
        run_exporter(ExportConfig.from_json(configured), _say, _write)
        return
    config = ExportConfig(
        host=host,
        port=port,
        once=once,
        sample_s=sample_s or (1.0 if once else 5.0),
        engine_s=engine_s,
        meters=meters,
        engines=engines,
        carbon={name: value for name, value in carbon.items() if value is not None},
        pue=pue,
        otlp=otlp,
        otlp_s=otlp_s,
        user=user,
        beside=beside,
        as_json=as_json,
    )
    check(config)
    replace_process(config)


def _write(scrape: bytes) -> None:
    sys.stdout.buffer.write(scrape)
    sys.stdout.buffer.flush()


def _say(text: str) -> None:
    click.echo(f"joulery export: {text}", err=True)
