"""The sentences that text and HTML reports share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from joulery.app.runs.job_runs import missing_nodes
from joulery.app.runs.recorded import RunView
from joulery.domain.energy.footprint import Footprint
from joulery.domain.format import UNKNOWN, count, duration, grams, percent, si
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import CarbonBasis, CarbonLabel

BEYOND = "beyond"
"""The word for a latency that violates its SLO."""


def energy_note(footprint: Footprint) -> str:
    """Quality and coverage of the energy: ``modelled ± 30 %, 99.8 % of the time covered``."""
    text = str(footprint.quality)
    if footprint.band_j > 0 and footprint.energy_j > 0:
        text += f" ± {percent(footprint.band_j / footprint.energy_j, 0)}"
    return f"{text}, {percent(footprint.coverage_ratio)} of the time covered"


def energy_text(footprint: Footprint) -> str:
    """The energy; unknown if readings cover no time."""
    known = footprint.covered_s > 0 or not footprint.duration_s > 0
    return si(footprint.energy_j, "J") if known else UNKNOWN


def carbon_text(footprint: Footprint) -> str:
    """The grams; unknown without a carbon source."""
    return grams(footprint.carbon_g) if footprint.signal is not None else UNKNOWN


def carbon_note(footprint: Footprint, label: CarbonLabel | None, reason: str | None = None) -> str:
    """Basis of the grams (``CO2e, GB average lifecycle intensity, live: ...``), or why they are unknown."""
    if footprint.signal is None:
        return reason or "no carbon source was given"
    where = f"{label.zone} " if label else ""
    text = f"CO2e, {where}{footprint.signal} {footprint.scope} intensity"
    if footprint.carbon_quality is not Quality.MEASURED and (label is None or label.basis is CarbonBasis.LIVE):
        text += f" ({footprint.carbon_quality})"
    if label:
        text += f", {basis_text(label)}: {label.source}"
    if footprint.carbon_coverage_ratio < 0.9995:
        text += f"; intensity known for {percent(footprint.carbon_coverage_ratio)} of the energy"
    if footprint.pue >= 1.005:
        text += f"; PUE {footprint.pue:.2f} included"
    return text


def interruption(view: RunView) -> str:
    """Coverage of an interrupted run's numbers."""
    if view.report:
        return "interrupted: these numbers cover the run until then"
    return "interrupted: metered until the last record, charged to no owner"


def notes_of(view: RunView) -> tuple[str, ...]:
    """The run's notes."""
    notes = view.report.get("notes")
    return tuple(str(note) for note in notes) if isinstance(notes, list) else ()


def notes_together(views: Sequence[RunView]) -> tuple[str, ...]:
    """The notes of runs, each once, nodes of their jobs that are missing, and runs that contain the same idle power."""
    notes = dict.fromkeys(note for view in views for note in notes_of(view))
    return (*notes, *missing_nodes(view.manifest for view in views), *shared_idle(views))


def shared_idle(views: Sequence[RunView]) -> tuple[str, ...]:
    """A note for each machine on which runs that contain its whole idle power overlap in time."""
    sentences: dict[str, str] = {}
    whole = [view for view in views if view.footprint.idle_j > 0 and _idle_rule(view) == "whole"]
    latest: dict[str, RunView] = {}
    for view in sorted(whole, key=lambda one: one.footprint.start_s):
        host = str(view.manifest.get("host") or "")
        before = latest.get(host)
        if host and before is not None and view.footprint.start_s < before.footprint.end_s:
            sentences.setdefault(
                host,
                f"{before.name} and {view.name} ran on {host} at the same time, and each contains its whole idle "
                "power: the sum counts that twice (measure with --idle share)",
            )
        if before is None or view.footprint.end_s > before.footprint.end_s:
            latest[host] = view
    return tuple(sentences.values())


def _idle_rule(view: RunView) -> str:
    terms = view.manifest.get("terms")
    return str(terms.get("idle", "whole")) if isinstance(terms, dict) else "whole"


def basis_text(label: CarbonLabel) -> str:
    """Basis of the intensity: ``live``, ``assumed`` or ``replayed 960×``."""
    if label.basis is CarbonBasis.REPLAYED and label.speed != 1:
        return f"replayed {label.speed:g}×"
    return str(label.basis)


def saving_text(report: Mapping[str, Any]) -> tuple[str, str] | None:
    """The saving of the whole machine, then that above idle, and their basis; None when none was computed."""
    above_idle = _number(report.get("saving_ratio"))
    if above_idle is None:
        return None
    unit, against = (
        report.get("saving_of") or "grams",
        report.get("baseline") or "the same requests on the largest variant",
    )
    band = _band(report, "saving_low_ratio", "saving_high_ratio")
    upstreams = upstreams_text(report)
    tail = f"against {against}{baseline_basis_text(report)}" + (f"; {upstreams} included" if upstreams else "")
    machine = _number(report.get("saving_machine_ratio"))
    if machine is None:
        return percent(above_idle), f"of the {unit} above idle{band}, {tail}"
    whole = _band(report, "saving_machine_low_ratio", "saving_machine_high_ratio")
    text = f"of the {unit} of the whole machine, idle included{whole}; {percent(above_idle)}{band} above idle; {tail}"
    return percent(machine), text


def upstreams_text(report: Mapping[str, Any]) -> str:
    """Joules of other servers, which are not part of this machine's, and their quality; empty for none."""
    found = [one for one in report.get("services") or () if one.get("upstream_j") is not None]
    if not found:
        return ""
    quality = " and ".join(dict.fromkeys(one["upstream_quality"] for one in found))
    return f"{si(math.fsum(one['upstream_j'] for one in found), 'J')} of upstreams ({quality})"


def _band(report: Mapping[str, Any], low: str, high: str) -> str:
    """`` (5.1 % to 7.3 %)``; empty where no interval is known."""
    text = _ends(report, low, high)
    return f" ({text})" if text else ""


def _ends(report: Mapping[str, Any], low: str, high: str) -> str:
    ends = _number(report.get(low)), _number(report.get(high))
    if ends == (None, None):
        return ""
    return " to ".join("unbounded" if end is None else percent(end) for end in ends)


def baseline_basis_text(report: Mapping[str, Any]) -> str:
    """Basis of the baseline, and how often it could not be measured; empty where the report does not state it."""
    basis = report.get("baseline_basis")
    if basis is None:
        return ""
    audit = report.get("audit") or {}
    withheld = audit.get("withheld") or {}
    kept = ", ".join(f"{count(number)} x {why}" for why, number in withheld.items())
    missed = (
        f"; not measured in {count(sum(withheld.values()))} of {count(audit['blocks'])} blocks ({kept})" if kept else ""
    )
    if basis == "measured":
        how = (
            f"; baseline measured in {count(audit['periods'])} periods, {percent(audit['share_ratio'])} of the requests"
        )
        return (how if audit else "; baseline measured") + missed
    seen = report.get("baseline_seen_live")
    how = "its variants answered other requests" if seen else "baseline never observed"
    if replays := report.get("baseline_shadow_replays"):
        how = f"corrected by {count(replays)} shadow replays on idle capacity"
    return f"; modelled, {how}{missed}"


def requests_text(report: Mapping[str, Any]) -> tuple[str, str] | None:
    """Number of requests and their outcomes; None when the run served nothing."""
    requests, failed = _number(report.get("requests")), _number(report.get("failed")) or 0
    if requests is None:
        return None
    text = "none failed" if not failed else f"{count(failed)} failed"
    refused, abandoned, late = (_number(report.get(name)) or 0 for name in ("refused", "abandoned", "late"))
    text += f" ({count(refused)} refused)" if refused else ""
    text += f", {count(abandoned)} abandoned by their client" if abandoned else ""
    text += f", {count(late)} answered late by the gateway's clock" if late else ""
    sent = load_text(report)
    return count(requests), text + (f"; {sent}" if sent else "")


def load_text(report: Mapping[str, Any]) -> str:
    """Outcomes of the load's requests, as its client counts them; empty without a load.

    ``planned = sent + unsent``, ``sent = answered + failed + abandoned``.
    """
    client = report.get("client") or {}
    planned = _number(report.get("planned")) or 0
    if not planned:
        return ""
    if client.get("answered") == planned and not client.get("late") and not client.get("delayed"):
        return f"load: all {count(planned)} planned were sent and answered in time"
    text = f"load: {count(planned)} planned = {count(report['sent'])} sent + {count(report['unsent'])} unsent"
    if "answered" in client:
        parts = " + ".join(f"{count(client[name])} {name}" for name in ("answered", "failed", "abandoned"))
        text += f"; sent = {parts}"
        text += f"; {count(client['refused'])} of the failed refused" if client.get("refused") else ""
        # The gateway counts from the arrival, the client from when the request was due: it may see more late answers.
        text += f"; {count(client['late'])} of the answered late" + " for the client" * bool(client["late"])
    if client.get("delayed"):
        text += (
            f"; {count(client['delayed'])} sent up to {duration(client['delay_max_s'])} after they were due, "
            "where the load was not open-loop"
        )
    return text


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
    return percent(ratio, 2), accuracy_basis_text(report)


def accuracy_basis_text(report: Mapping[str, Any]) -> str:
    """Basis of the accuracy: observed labels with their interval, or the declaration of its authors."""
    source = str(report.get("accuracy_source") or "request-weighted")
    labels = count(report.get("accuracy_labels") or 0)
    if report.get("accuracy_basis") == "observed":
        return f"({_ends(report, 'accuracy_low_ratio', 'accuracy_high_ratio')}) observed with {labels} labels; {source}"
    text = f"declared: {source}" if "accuracy_basis" in report else source
    return f"{text}; {labels} labels, not of all variants" if labels != "0" else text
