"""``joulery when``: find the start of a job that causes the least carbon."""

from __future__ import annotations

import json
import math
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from joulery.ui.cli.options import Time, carbon_flags

if TYPE_CHECKING:
    from joulery.app.planning.start_time import StartTime

LONGEST_S = 30 * 86_400.0
"""The longest value of ``--within``, seconds."""


@click.command("when")
@click.option("--duration", "duration_s", required=True, type=Time("4 h"), help="Length of the job, such as 4 h.")
@click.option(
    "--within",
    "within_s",
    type=Time("24 h"),
    default=86_400.0,
    help="The job ends within this time from its earliest start (24 h).",
)
@click.option("--power", metavar="WATTS", help="Power of the job, such as 300 W: shows its grams, too.")
@click.option("--at", "at", metavar="WHEN", help="Start no earlier than this moment (now).")
@carbon_flags
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    duration_s: float, within_s: float, power: str | None, at: str | None, as_json: bool, **flags: str | None
) -> None:
    """Find when to start a job so that it causes the least carbon, by the forecast of --zone or --carbon.

    Prints the start, what waiting saves, and the line for sbatch. Nothing is submitted.
    """
    from joulery.app.measuring import moment_s
    from joulery.app.planning.start_time import open_carbon, when_to_start
    from joulery.config.parsing.quantity import POWER, flag_quantity
    from joulery.domain.errors import ConfigError
    from joulery.domain.format import duration

    power_w = None if power is None else flag_quantity(power, POWER, "--power")
    if within_s > LONGEST_S:
        raise ConfigError(
            "is too long for any forecast", pointer="--within", got=duration(within_s), expected="at most 30 d"
        )
    if duration_s > within_s:
        raise ConfigError(
            "does not fit into --within",
            pointer="--duration",
            got=duration(duration_s),
            expected=f"at most {duration(within_s)}",
        )
    source = open_carbon({name: value for name, value in flags.items() if value is not None})
    if source is None:
        raise ConfigError(
            "no source of carbon intensity is named",
            pointer="--zone",
            expected="--zone or --carbon",
            hint="such as --zone GB, or a forecast of your own: --carbon FILE (joulery when --help)",
        )
    now_s = time.time() if at is None else moment_s(at)
    best, series = when_to_start(source, now_s, duration_s, within_s)
    about = {
        "zone": series.zone,
        "signal": series.signal.value,
        "scope": series.scope.value,
        "quality": series.quality.value,
        "source": series.source,
    }
    if as_json:
        click.echo(json.dumps({"schema": "joulery.when/1", **_figures(best, now_s, power_w), **about}))
        return
    _print(best, now_s, within_s, power_w, about)


def _figures(best: StartTime, now_s: float, power_w: float | None) -> dict[str, Any]:
    ratio = best.saving_ratio
    found: dict[str, Any] = {
        "start": datetime.fromtimestamp(best.start_s, UTC).isoformat(timespec="seconds"),
        "start_s": best.start_s,
        "wait_s": best.start_s - now_s,
        "duration_s": best.duration_s,
        "g_per_kwh": best.g_per_kwh,
        "now_g_per_kwh": best.now_g_per_kwh,
        "worst_g_per_kwh": best.worst_g_per_kwh,
        "saving_ratio": None if math.isnan(ratio) else ratio,
        "judged_until_s": best.judged_until_s,
        "sbatch": _begin(best, now_s),
    }
    if power_w is not None:
        found |= {"carbon_g": _carbon_g(best, best.g_per_kwh, power_w)}
        found |= {"now_carbon_g": _carbon_g(best, best.now_g_per_kwh, power_w)}
    return found


def _print(best: StartTime, now_s: float, within_s: float, power_w: float | None, about: dict[str, str]) -> None:
    from joulery.domain import format as text

    waits = best.start_s - now_s >= 1.0
    start = _local(best.start_s)
    click.echo(f"start {start}" + (f", in {text.duration(best.start_s - now_s)}" if waits else ": now is best"))
    mean = f"{best.g_per_kwh:.0f} g/kWh over {text.duration(best.duration_s)}"
    click.echo(f"  {mean}; now {best.now_g_per_kwh:.0f}, at worst {best.worst_g_per_kwh:.0f}")
    if waits and not math.isnan(best.saving_ratio):
        grams = ""
        if power_w is not None:
            saved_g = _carbon_g(best, best.now_g_per_kwh - best.g_per_kwh, power_w)
            grams = f", {text.grams(saved_g)} of a job of {power_w:g} W (assumed constant)"
        click.echo(f"  saves {text.percent(best.saving_ratio)} of its grams against starting now{grams}")
    click.echo(f"  sbatch {_begin(best, now_s)} ...")
    click.echo(
        f"  {about['signal']} {about['scope']} intensity of {about['zone']}, {about['quality']}: {about['source']}"
    )
    if best.judged_until_s < now_s + within_s - 1.0:
        click.echo(f"  the forecast ends: jobs that end after {_local(best.judged_until_s)} were not judged")


def _carbon_g(best: StartTime, g_per_kwh: float, power_w: float) -> float:
    from joulery.domain.energy.carbon import JOULES_PER_KWH

    return power_w * best.duration_s / JOULES_PER_KWH * g_per_kwh


def _begin(best: StartTime, now_s: float) -> str:
    """The flag of ``sbatch``, in the local time of this machine, as Slurm reads it."""
    if best.start_s - now_s < 1.0:
        return "--begin=now"
    return f"--begin={datetime.fromtimestamp(math.ceil(best.start_s)).astimezone():%Y-%m-%dT%H:%M:%S}"


def _local(t_s: float) -> str:
    return f"{datetime.fromtimestamp(t_s).astimezone():%Y-%m-%d %H:%M %Z}"
