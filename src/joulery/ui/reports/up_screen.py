"""The screen of ``joulery up``: facts, a live line, the summary. On a terminal the line is updated in place."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from joulery.app.doctor import Check
from joulery.app.profiling.service_profile import Obtained
from joulery.app.serving.view import APPLIED, PlanInForce, ServiceSetup, ServingSession, announced
from joulery.domain.format import UNKNOWN, count, duration, grams, latency, number, percent, si
from joulery.domain.serving.timeline import DecisionRecord, ServiceLabel, ServiceTick, Tick
from joulery.ui.reports.messages import accuracy_basis_text, requests_text, saving_text, upstreams_text
from joulery.ui.reports.up_facts import (
    machine_facts,
    plan_facts,
    profile_facts,
    profile_warning,
    service_facts,
    serving_facts,
)

PLAIN_EVERY_S = 5.0
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue")
_BAR = 12
_INDENT = 12
_WIDE = 120


class Silent:
    """Shows nothing: for ``--json``. Implements :class:`joulery.app.serving.view.ServeView`."""

    def machine(self, machine: Mapping[str, str], checks: Sequence[Check]) -> None:
        """Show nothing."""

    def service(self, setup: ServiceSetup) -> None:
        """Show nothing."""

    def profile(self, obtained: Obtained, setup: ServiceSetup) -> None:
        """Show nothing."""

    def fact(self, name: str, text: str) -> None:
        """Show nothing."""

    def plan(self, plan: PlanInForce) -> None:
        """Show nothing."""

    def serving(self, session: ServingSession, url: str, grpc: str = "") -> None:
        """Show nothing."""

    def progress(self, done: int, of: int, what: str) -> None:
        """Show nothing."""

    def begin(self, services: Sequence[ServiceLabel], duration_s: float | None) -> None:
        """Show nothing."""

    def relabel(self, services: Sequence[ServiceLabel]) -> None:
        """Show nothing."""

    def tick(self, tick: Tick, now_s: float) -> None:
        """Show nothing."""

    def decision(self, record: DecisionRecord) -> None:
        """Show nothing."""

    def warn(self, text: str) -> None:
        """Show nothing."""


class AddressOnly(Silent):
    """Reports the address once requests are answered, and nothing else.

    Args:
        report: Called with the address, that of gRPC and the language models: ``model``, ``engine`` and ``variant``
            of each.
    """

    def __init__(self, report: Callable[[str, str, Sequence[Mapping[str, str]]], None]) -> None:
        self._report = report

    def serving(self, session: ServingSession, url: str, grpc: str = "") -> None:
        """Report the address."""
        self._report(url, grpc, () if session.models is None else session.models.engines)


class ConsoleScreen:
    """Prints the run to a console. A context manager, which ends the live line.

    Args:
        console: The console.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._services: Sequence[ServiceLabel] = ()
        self._duration_s: float | None = None
        self._said_s = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_live()

    def machine(self, machine: Mapping[str, str], checks: Sequence[Check]) -> None:
        """Print the machine and its meters."""
        self._facts(machine_facts(machine, checks))

    def service(self, setup: ServiceSetup) -> None:
        """Print a service."""
        self._facts(service_facts(setup))

    def profile(self, obtained: Obtained, setup: ServiceSetup) -> None:
        """Print a profile, with a warning where the machine was busy."""
        self._facts(profile_facts(obtained, setup))
        if warning := profile_warning(obtained):
            self.warn(warning)

    def plan(self, plan: PlanInForce) -> None:
        """Print a plan."""
        self._facts(plan_facts(plan))

    def serving(self, session: ServingSession, url: str, grpc: str = "") -> None:
        """Print the demand, the first plans, their remarks and the address."""
        self._facts(serving_facts(session, url, grpc))
        for one in session.services.values():
            if one.chosen is not None and one.chosen.remark:
                self.warn(one.chosen.remark)

    def _facts(self, facts: Iterable[tuple[str, str]]) -> None:
        for name, text in facts:
            self.fact(name, text)

    def fact(self, name: str, text: str) -> None:
        """Print a name and a text, wrapped."""
        room = max(20, self._console.width - _INDENT - 1)
        lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        self._console.print(Text(f"  {name:<{_INDENT - 2}}", style="bold") + Text(lines[0], style="not bold"))
        for line in lines[1:]:
            self._console.print(Text(" " * _INDENT + line), soft_wrap=True)

    def progress(self, done: int, of: int, what: str) -> None:
        """Show progress: one updated line on a terminal, one line per step elsewhere."""
        text = f"  profiling {done}/{of} {what}".rstrip()
        if self._console.is_terminal:
            self._show(Text(text, style="dim"))
            if done == of:
                self._end_live()
        elif what:
            self._console.print(text)

    def begin(self, services: Sequence[ServiceLabel], duration_s: float | None) -> None:
        """Set the services and the duration that the live line shows."""
        self._services, self._duration_s = services, duration_s
        self._console.print()

    def relabel(self, services: Sequence[ServiceLabel]) -> None:
        """Replace the services that the live line shows."""
        self._services = services

    def tick(self, tick: Tick, now_s: float) -> None:
        """Update the line; print it every few seconds where it cannot be updated."""
        if not self._services:
            return
        line = live_line(tick, now_s, self._services, self._duration_s, wide=self._console.width >= _WIDE)
        if self._console.is_terminal:
            self._show(line)
        elif now_s - self._said_s >= PLAIN_EVERY_S:
            self._said_s = now_s
            self._console.print(line, soft_wrap=True)

    def decision(self, record: DecisionRecord) -> None:
        """Print changes and trials above the line; layouts kept without a trial are in the report only."""
        if announced(record):
            decision = record.decision
            what = "→" if record.outcome == APPLIED else f"{record.outcome}:"
            who = f"{decision.target}: " if len(self._services) > 1 else ""
            self._console.print(Text(f"  {what} {who}{decision.reason}", style="dim"), soft_wrap=True)

    def summary(self, report: Mapping[str, Any]) -> None:
        """Print the summary, each figure with its quality."""
        self._end_live()
        self._console.print()
        for name, text in summary_lines(report):
            self.fact(name, text)

    def warn(self, text: str) -> None:
        """Print a warning in yellow."""
        self._console.print(Text(f"  ! {text}", style="yellow"), soft_wrap=True)

    def _show(self, line: Text) -> None:
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._live.update(line)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def live_line(
    tick: Tick, now_s: float, services: Sequence[ServiceLabel], duration_s: float | None, *, wide: bool = True
) -> Text:
    """Seconds, the grid's clock and intensity, watts, mix, latency against the SLO, grams; shorter unless ``wide``.

    Of several services each has its latency and its SLO; the mix of variants is in the report.
    """
    line = Text("  ")
    line.append(f"{now_s:3.0f}" + (f"/{duration_s:.0f} s" if duration_s is not None else " s"), style="dim")
    if math.isfinite(tick.grid_s):
        line.append(f" {datetime.fromtimestamp(tick.grid_s, UTC):%H:%M}", style="dim")
    line.append(f" {number(tick.g_per_kwh, 'g/kWh'):>9} {si(tick.power_w, 'W'):>6} {tick.quality} ")
    seen = {one.service: one for one in tick.services}
    if len(services) == 1:
        return line.append_text(_one(tick, seen.get(services[0].name), services[0], wide=wide))
    for service in services:
        line.append_text(_brief(seen.get(service.name), service))
    return line.append(f"  {grams(tick.carbon_g)}") if wide else line


def _brief(seen: ServiceTick | None, service: ServiceLabel) -> Text:
    """Latency and SLO of one of several services."""
    latency_s = math.nan if seen is None else seen.latency_s
    text = Text(f"  {service.name} ").append(latency(latency_s), style="bold red" if latency_s > service.slo_s else "")
    return text.append(f"/{latency(service.slo_s)}", style="dim")


def _one(tick: Tick, seen: ServiceTick | None, service: ServiceLabel, *, wide: bool) -> Text:
    """Mix, latency and, if wide, SLO, rate and grams of the only service."""
    line = Text()
    if seen is None:
        return line
    line.append_text(_mix(dict(seen.mix), [name for name, _ in service.variants], wide=wide))
    keeps = not seen.latency_s > service.slo_s
    line.append(f" p{100 * service.quantile_ratio:g} ")
    line.append(latency(seen.latency_s), style="" if keeps else "bold red")
    if wide:
        line.append(f" of {latency(service.slo_s)}  {seen.requests / tick.period_s:.0f} /s  {grams(tick.carbon_g)}")
    return line


def _mix(shares: Mapping[str, float], names: Sequence[str], *, wide: bool) -> Text:
    """The variants that answer, least accurate first, with their shares; as a bar too where there is room."""
    bar, text = Text(), Text()
    for index, name in enumerate((*names, *sorted(set(shares) - set(names)))):
        share = shares.get(name, 0.0)
        if share > 0:
            colour = _COLOURS[index % len(_COLOURS)]
            bar.append("█" * round(share * _BAR), style=colour)
            text.append(f" {name} {100 * share:.0f} %", style=colour)
    return Text(" ") + bar + Text(" " * max(0, _BAR - len(bar))) + text + Text(" ") if wide else text


def summary_lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of the summary: name and text of each."""
    lines = [("requests", _requests(report))]
    services = report.get("services") or ()
    if len(services) > 1:
        lines += [(str(entry["service"]), _service(entry)) for entry in services]
    lines += [(str(entry["model"]), _text(entry)) for entry in report.get("language_models") or ()]
    lines += [(str(entry["family"]), _family(entry)) for entry in report.get("language_families") or ()]
    if report.get("p95_s") is not None:
        lines += [("latency", _latency(report)), ("accuracy", _accuracy(report)), ("variants", _variants(report))]
    lines += [("energy", _energy(report)), ("carbon", _carbon(report))]
    lines += [("node", node_text(entry)) for entry in report.get("nodes") or ()]
    if report.get("saving_ratio") is not None:
        lines.append(("saving", _saving(report)))
    if report.get("calibration") is not None:
        lines.append(("model", _calibration(report)))
    lines += [("limit", _limit(entry)) for entry in report.get("power_limits") or ()]
    changes = report["layout_changes"]
    lines.append(("plans", f"{report['plans']}, {changes} change{'' if changes == 1 else 's'} of layout"))
    lines += [(name, str(report[name])) for name in ("html", "run") if report.get(name)]
    return lines


def node_text(entry: Mapping[str, Any]) -> str:
    """A node of a cluster in one line: its answers, its whole machine's joules and its grams."""
    answered = f"{entry['node']}: {entry['answered']:,} answered"
    if entry["asleep_s"]:
        answered += f", asleep for {duration(entry['asleep_s'])}"
    if entry["energy_j"] is None:
        return f"{answered}; NOT METERED: {entry['refusal'] or 'its meter was read once'}"
    text = f"{answered}; {si(entry['energy_j'], 'J')} {entry['quality']}, {si(entry['ray_j'], 'J')} by Ray's processes"
    text += f", {grams(entry['carbon_g'])} CO2e" if entry["carbon_g"] is not None else ", grams not known"
    if entry["coverage_ratio"] < 0.99:
        text += f"; METERED FOR {percent(entry['coverage_ratio'], 0)} OF THE RUN"
    return f"{text}; {entry['refusal']}" if entry["refusal"] else text


def _limit(entry: Mapping[str, Any]) -> str:
    """Facts learned of the power limit of a device."""
    device, compared = entry["device"], entry["limits"]
    kept = next((one for one in compared if one["ratio"] == entry["best_ratio"]), None)
    if not compared:
        return f"{device}: full power; no limit was compared"
    if kept is None:
        return f"{device}: full power; {len(compared)} compared, none within the bound is known to cost less"
    slower, most = 100 * (kept["slowdown"] - 1), 100 * (kept["slowdown_high"] - 1)
    return (
        f"{device}: {si(entry['best_w'], 'W')} of {si(entry['full_w'], 'W')}, service time {slower:+.1f} % (at most "
        f"{most:+.1f} %, 95 %), {100 * (1 - kept['energy_ratio']):.1f} % fewer joules for the same work, measured in "
        f"{kept['comparisons']} comparisons"
    )


def _family(entry: Mapping[str, Any]) -> str:
    """Models that answered the requests of a family of language models."""
    if not entry["answered"]:
        return "nothing answered"
    names = ", ".join(f"{name} {percent(share, 0)}" for name, share in entry["variants"].items())
    text = f"{entry['answered']:,} answered: {names}; accuracy {percent(entry['accuracy_ratio'])} declared"
    if entry.get("ttft_attainment_ratio") is None:
        return text
    verdict = "within" if entry["ttft_slo_met"] else "BEYOND"
    kept, refused = percent(entry["ttft_attainment_ratio"]), count(entry["refused"])
    bound = f"p{100 * entry['ttft_quantile']:g} {verdict} {latency(entry['ttft_slo_s'])}"
    return f"{text}; first token: {bound}, which {kept} kept; {refused} refused for it"


def _requests(report: Mapping[str, Any]) -> str:
    return _requests_of(report, f" in {duration(report['duration_s'])}")


def _requests_of(report: Mapping[str, Any], when: str = "") -> str:
    requests, text = requests_text(report) or ("0", "none failed")
    return f"{requests}{when}, {text}"


def _service(entry: Mapping[str, Any]) -> str:
    """One of several services in one line."""
    if entry["p95_s"] is None:
        return f"{_requests_of(entry)}; nothing answered"
    variants = ", ".join(f"{name} {percent(share, 0)}" for name, share in entry["variants"].items() if share > 0)
    verdict = "within" if entry["slo_met"] else "BEYOND"
    return (
        f"{_requests_of(entry)}; p95 {latency(entry['p95_s'])}, p{100 * entry['slo_quantile']:g} {verdict} "
        f"{latency(entry['slo_s'])}; {variants}; {si(entry['charged_j'], 'J')} in all"
    )


def _text(entry: Mapping[str, Any]) -> str:
    """A language model in one line."""
    if not entry["requests"]:
        return "nothing was asked"
    text = _requests_of(entry)
    if entry["p95_s"] is None:
        return f"{text}; nothing answered"
    text += f"; p95 {latency(entry['p95_s'])}, p50 {latency(entry['p50_s'])}"
    text += f"; {count(entry['completion_tokens'])} tokens written"
    if entry["energy_per_request_j"] is None:
        return f"{text}; joules not known"
    a_token = entry["energy_per_token_j"]
    more = "" if a_token is None else f", {si(a_token, 'J')} a token"
    return f"{text}; {si(entry['energy_per_request_j'], 'J')} a request{more}, {entry['quality']}"


def _latency(report: Mapping[str, Any]) -> str:
    verdict = "within" if report["slo_met"] else "BEYOND"
    return (
        f"p95 {latency(report['p95_s'])}, p50 {latency(report['p50_s'])}; "
        f"p{100 * report['slo_quantile']:g} {verdict} the SLO of {latency(report['slo_s'])}, "
        f"which {percent(report['attainment_ratio'])} of the answers kept"
    )


def _accuracy(report: Mapping[str, Any]) -> str:
    floor = report.get("minimum_accuracy_ratio")
    least = "" if floor is None else f" (at least {percent(floor, 2)} asked for)"
    text = f"{percent(report['accuracy_ratio'], 2)}{least} {accuracy_basis_text(report)}"
    return text if report.get("accuracy_basis") == "observed" else f"{text}; not measured here"


def _variants(report: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {percent(share)}" for name, share in report["variants"].items())


def _energy(report: Mapping[str, Any]) -> str:
    if report.get("energy_j") is None:
        return f"{UNKNOWN}: nothing was metered"
    band = f" ± {percent(report['band_j'] / report['energy_j'], 0)}" if report["band_j"] > 0 else ""
    parts = ", ".join(
        f"{name} {si(report[key], 'J')}"
        for name, key in (
            ("requests", "requests_j"),
            ("serving", "serving_j"),
            ("load generator", "load_generator_j"),
            ("idle", "idle_j"),
            ("unattributed", "unattributed_j"),
        )
    )
    upstreams = upstreams_text(report)
    beside = f"; beside it {upstreams}" if upstreams else ""
    others = f"; other processes' {si(report['other_j'], 'J')} left out" if report.get("other_j") else ""
    return f"{si(report['energy_j'], 'J')} {report['quality']}{band} = {parts}{others}{beside}"


def _carbon(report: Mapping[str, Any]) -> str:
    if report.get("carbon_g") is None:
        return f"{UNKNOWN}: {report.get('carbon_reason') or 'no intensity is known'}"
    text = f"{grams(report['carbon_g'])} CO2e {report['carbon_quality']}, {report['carbon_source']}"
    if (unknown_s := report.get("carbon_unknown_s") or 0.0) >= 0.5:
        text += f", unknown for {duration(unknown_s)}"
    if (held_s := report.get("carbon_held_s") or 0.0) >= 0.5:
        text += f", the last value held for {duration(held_s)}"
    return text + (f", PUE {report['pue']:.2f} included" if report["pue"] > 1.0005 else "")


def _saving(report: Mapping[str, Any]) -> str:
    text = " ".join(saving_text(report) or ())
    if not report["baseline_keeps_slo"] and report.get("baseline_p95_s") is not None:
        text += f"; that would have missed the SLO (p95 {latency(report['baseline_p95_s'])})"
    return text


def _calibration(report: Mapping[str, Any]) -> str:
    errors = report["calibration"]
    if errors["cpu_error_ratio"] is None:
        steered = percent(errors["steered_ratio"])
        return f"not judged: {steered} of the answers were steered to other variants than those of the layout"
    return (
        f"on what really ran, the replay was off by {100 * errors['cpu_error_ratio']:+.1f} % in CPU time and "
        f"{100 * errors['latency_error_ratio']:+.0f} % in p{100 * report['slo_quantile']:g}"
    )
