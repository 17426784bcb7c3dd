"""Profiles on the terminal: fitted interference, calibrated costs, measured variants."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from joulery.app.profiling.calibration import Calibration, totals
from joulery.domain.format import percent, si
from joulery.domain.serving.profile import Profile
from joulery.perf.interference.model import InterferenceProfile, ModelFit


def interference_view(profile: InterferenceProfile) -> list[RenderableType]:
    """Errors of an interference profile, and its notes."""
    return [_fits(profile), *(Text(note, "yellow") for note in profile.notes)]


def _fits(profile: InterferenceProfile) -> Table:
    """Errors of each model and of all: on the data of the fit, and on held-out data."""
    table = Table(box=None, pad_edge=False)
    for heading in ("data", "model", "points", "mean error", "95th percentile", "largest", "bias"):
        table.add_column(heading, justify="left" if heading in ("data", "model") else "right")
    for data in dict.fromkeys(fit.data for fit in profile.fits):
        fits = [fit for fit in profile.fits if fit.data == data]
        everything = ModelFit("all", data, tuple(error for fit in fits for error in fit.error_ratio))
        for fit in (*fits, everything):
            table.add_row(
                data,
                fit.model,
                str(len(fit.error_ratio)),
                percent(fit.mape_ratio, 2),
                percent(fit.quantile_ratio(0.95), 1),
                percent(fit.max_ratio, 1),
                f"{100 * fit.bias_ratio:+.1f} %",
                style="bold" if fit is everything else None,
            )
    return table


def calibration_view(found: Sequence[Calibration]) -> list[RenderableType]:
    """Every measured point beside the prediction of the fitted costs."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("service", "on each GPU", "gap", "accuracy", "off", "J a request", "off", "p95", "off"):
        table.add_column(name, justify="left" if name in ("service", "on each GPU") else "right")
    for each in found:
        for number, error in enumerate(each.errors):
            point = error.point
            table.add_row(
                each.costs.name if number == 0 else "",
                "+".join(variant for variant, _ in point.instances),
                si(point.interarrival_s, "s"),
                percent(point.accuracy_ratio, 2),
                f"{error.accuracy_points + 0.0:+.3f}",
                f"{point.energy_j:.1f}",
                f"{100 * error.energy_ratio:+.1f} %",
                si(point.p95_s, "s"),
                f"{100 * error.p95_ratio:+.1f} %",
            )
    total = totals(found)
    fit = (
        f"accuracy within {total['worst_accuracy_points']:.3f} points, joules within "
        f"{percent(total['worst_energy_ratio'])}, p95 within 10 % on {total['p95_within_10_percent']} of "
        f"{total['points']} points and within {percent(total['worst_p95_ratio'])} on all"
    )
    idle = "; ".join(f"{each.costs.name} {each.costs.gpus * each.costs.idle_w:.1f} W" for each in found)
    return [
        table,
        Text(),
        Text(fit),
        Text(f"idle power of all its GPUs: {idle}"),
        Text("calibrated by simulation on these very points: a fit, not a validation", style="dim"),
    ]


def service_profile_view(profile: Profile) -> list[RenderableType]:
    """Latency, CPU time and joules of each variant on each slice."""
    table = Table(box=None, pad_edge=False)
    for heading in ("variant", "slice", "p50", "p95", "± of mean", "beside others", "CPU", "J a request", "start"):
        table.add_column(heading, justify="left" if heading in ("variant", "slice") else "right")
    batched = any(entry.batches for entry in profile.entries)
    if batched:
        table.add_column("in batches", justify="right")
    for entry in sorted(profile.entries, key=lambda e: (e.slice.cores, e.variant)):
        table.add_row(
            entry.variant,
            str(entry.slice),
            si(entry.alone.quantile_s(0.5), "s"),
            si(entry.alone.quantile_s(0.95), "s"),
            percent(entry.alone.mean_error_ratio),
            si(entry.loaded.mean_s, "s") if entry.loaded is not entry.alone else "",
            si(entry.alone.mean_cpu_s, "s"),
            si(entry.energy_j, "J"),
            si(entry.startup_s, "s"),
            *([f"{si(entry.each_s, 's')} each, up to {entry.max_batch}" if entry.batches else "no"] if batched else []),
        )
    band = f" ±{percent(profile.band_ratio, 0)}" if profile.band_ratio else ""
    watts = profile.entries[0].active_w
    parts: list[RenderableType] = [table]
    joules = (
        f"joules {profile.quality.value} ({profile.meter}{band}): {si(watts, 'W')} a busy core above "
        f"{si(profile.idle_w, 'W')} idle"
    )
    parts.append(Text(joules, "dim"))
    others = profile.machine.get("others_busy_cores")
    if others is not None and others > 0.2:
        slow = f"other processes kept {others:.1f} cores busy meanwhile: latencies are longer than on a quiet machine"
        parts.append(Text(slow, "yellow"))
    return parts
