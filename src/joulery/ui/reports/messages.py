"""The sentences that text and HTML reports share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from joulery.domain.energy.footprint import Footprint
from joulery.domain.format import UNKNOWN, count, duration, grams, percent, si
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import CarbonBasis, CarbonLabel
from joulery.runtime.runs.recorded import RunView

BEYOND = "beyond"
"""The word for a latency that violates its SLO."""


def energy_note(footprint: Footprint) -> str:
    """Quality and coverage of the energy: ``modelled ± 30 %, 99.8 % of the time covered``."""
    words = str(footprint.quality)
    if footprint.band_j > 0 and footprint.energy_j > 0:
        words += f" ± {percent(footprint.band_j / footprint.energy_j, 0)}"
    return f"{words}, {percent(footprint.coverage_ratio)} of the time covered"


def energy_text(footprint: Footprint) -> str:
    """The energy; unknown if readings cover no time."""
    known = footprint.covered_s > 0 or not footprint.duration_s > 0
    return si(footprint.energy_j, "J") if known else UNKNOWN


def carbon_text(footprint: Footprint) -> str:
    """The grams; unknown without a carbon source."""
    return grams(footprint.carbon_g) if footprint.signal is not None else UNKNOWN


def carbon_note(footprint: Footprint, label: CarbonLabel | None, reason: str | None = None) -> str:
    """What the grams include (``CO2e, GB average lifecycle intensity, live: ...``), or why they are unknown."""
    if footprint.signal is None:
        return reason or "no carbon source was given"
    where = f"{label.zone} " if label else ""
    words = f"CO2e, {where}{footprint.signal} {footprint.scope} intensity"
    if footprint.carbon_quality is not Quality.MEASURED and (label is None or label.basis is CarbonBasis.LIVE):
        words += f" ({footprint.carbon_quality})"
    if label:
        words += f", {basis_text(label)}: {label.source}"
    if footprint.carbon_coverage_ratio < 0.9995:
        words += f"; intensity known for {percent(footprint.carbon_coverage_ratio)} of the energy"
    if footprint.pue >= 1.005:
        words += f"; PUE {footprint.pue:.2f} included"
    return words


def interruption(view: RunView) -> str:
    """What an interrupted run's numbers cover."""
    if view.report:
        return "interrupted: these numbers cover the run until then"
    return "interrupted: metered until the last record, charged to no owner"


def notes_of(view: RunView) -> tuple[str, ...]:
    """The run's notes."""
    notes = view.report.get("notes")
    return tuple(str(note) for note in notes) if isinstance(notes, list) else ()


def basis_text(label: CarbonLabel) -> str:
    """``live``, ``assumed`` or ``replayed 960×``."""
    if label.basis is CarbonBasis.REPLAYED and label.speed != 1:
        return f"replayed {label.speed:g}×"
    return str(label.basis)


def saving_text(report: Mapping[str, Any]) -> tuple[str, str] | None:
    """The saving and its baseline; None when none was computed."""
    ratio = _number(report.get("saving_ratio"))
    if ratio is None:
        return None
    low, high = _number(report.get("saving_low_ratio")), _number(report.get("saving_high_ratio"))
    band = ""
    if low is not None and high is not None:
        band = f"between {percent(low)} and {percent(high)}, "
    against = report.get("baseline") or "the same requests on the largest variant"
    return percent(ratio), f"of the grams, {band}against {against}"


def requests_text(report: Mapping[str, Any]) -> tuple[str, str] | None:
    """How many requests and how many failed; None when the run served nothing."""
    requests, failed = _number(report.get("requests")), _number(report.get("failed")) or 0
    if requests is None:
        return None
    return count(requests), "none failed" if not failed else f"{count(failed)} failed"


def latency_text(report: Mapping[str, Any]) -> tuple[str, str] | None:
    """The p95 and the SLO; None when the run served nothing."""
    p95_s, slo_s = _number(report.get("p95_s")), _number(report.get("slo_s"))
    if p95_s is None:
        return None
    if slo_s is None:
        return duration(p95_s), "95 % of the answers were faster"
    verdict = "within" if p95_s <= slo_s else BEYOND
    return duration(p95_s), f"p95, {verdict} the SLO of {duration(slo_s)}"


def variants_text(report: Mapping[str, Any]) -> str | None:
    """The share of the answers of each variant; None when the run served nothing."""
    variants = report.get("variants")
    if not isinstance(variants, dict) or not variants:
        return None
    return ", ".join(f"{name} {percent(_number(share))}" for name, share in variants.items())


def _number(value: Any) -> float | None:
    """A number of a report, None for anything else."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def accuracy_text(report: Mapping[str, Any]) -> tuple[str, str] | None:
    """The request-weighted accuracy and its source; None when there is none."""
    ratio = _number(report.get("accuracy_ratio"))
    if ratio is None:
        return None
    return percent(ratio, 2), str(report.get("accuracy_source") or "request-weighted")
