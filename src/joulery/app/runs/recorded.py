"""Load a recorded run, complete or interrupted, to report it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from joulery.app.measuring import open_carbon
from joulery.domain.energy.footprint import Footprint
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.ports import CarbonSource
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import CarbonBasis, CarbonLabel, DecisionRecord, SiteLabel, Tick
from joulery.store.run.directory import Run, open_run
from joulery.store.run.footprints import footprint_from_dict
from joulery.store.run.timeline import read_decisions, read_site, read_ticks


@dataclass(frozen=True, slots=True)
class RunView:
    """A run to report.

    Attributes:
        path: Its folder.
        manifest: ``manifest.json``.
        footprint: Joules and grams of the run.
        report: ``report.json``, or a new report of an interrupted run; empty where that is not possible.
        site: Labels of the run's numbers; None where it has none.
        ticks: Its timeline.
        decisions: Decisions of its policies.
    """

    path: Path
    manifest: Mapping[str, Any]
    footprint: Footprint
    report: Mapping[str, Any]
    site: SiteLabel | None = None
    ticks: tuple[Tick, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()

    @property
    def name(self) -> str:
        """The run's identifier, or its folder."""
        return str(self.manifest.get("id") or self.path.name)

    @property
    def kind(self) -> str:
        """Kind of the run: ``measure``, ``up`` ..."""
        return str(self.manifest.get("kind", "run"))

    @property
    def owner(self) -> str:
        """Owner of the run; ``unknown`` when none was named."""
        return str(self.manifest.get("owner") or "unknown")

    @property
    def interrupted(self) -> bool:
        """Whether the run is not closed: it is still running, or its writer was killed."""
        return self.manifest.get("state") == "running"

    @property
    def charges(self) -> tuple[tuple[str, str, Footprint], ...]:
        """``(workload, owner, footprint)`` as far as the run separates them; the whole run otherwise.

        Raises:
            DataError: The charges are damaged.
        """
        charges = self.report.get("charges")
        if not charges:
            workload = self.site.name if self.site else self.kind
            return ((workload, self.owner, self.footprint),)
        try:
            return tuple((str(c["workload"]), str(c["owner"]), footprint_from_dict(c["footprint"])) for c in charges)
        except (KeyError, TypeError) as error:
            raise DataError(f"charges: {type(error).__name__} {error}", file=str(self.path / "report.json")) from error


def load_run(path: str | Path, *, with_timeline: bool = False, carbon: CarbonSource | None = None) -> RunView:
    """Load a run to report it.

    Args:
        path: Its folder.
        with_timeline: Whether to load the timeline too; that of a measured run is computed from its readings.
        carbon: Another intensity than the run's own for the grams of a measured run.

    Raises:
        ConfigError: ``carbon`` is given and the run was not measured: its decisions followed its own grid.
        DataError: The path is not a run, or the run is damaged, was written by a newer joulery, or was interrupted
            before anything was recorded.
    """
    run = open_run(path)
    report = run.report
    if run.manifest.get("kind") != "measure":
        if carbon is not None:
            raise ConfigError(
                "only the grams of a measured run can be counted again",
                got=f"{run.path}, a run of kind {run.manifest.get('kind')}",
                hint="what a site did followed the grid it saw: leave --zone and --carbon out",
            )
        site, ticks = read_site(run), read_ticks(run)
        footprint = _of_ticks(run, site, ticks) if report is None else footprint_from_dict(report)
        return RunView(run.path, run.manifest, footprint, report or {}, site, ticks, read_decisions(run))
    ticks, manifest = (), run.manifest
    if carbon is not None:
        report, ticks, grid = _on_another_grid(run, carbon)
        manifest = {**run.manifest, "carbon": grid}
    elif report is None or with_timeline:
        report, ticks = _measured(run, report)
    footprint = footprint_from_dict(report)
    return RunView(run.path, manifest, footprint, report, measured_label(manifest, footprint), ticks)


def _on_another_grid(run: Run, source: CarbonSource) -> tuple[dict[str, Any], tuple[Tick, ...], dict[str, str] | None]:
    """Report of a measured run with another intensity, its timeline, and the zone and source of that intensity."""
    from joulery.runtime.measuring.account import account_again

    if "power" not in run.series_names:
        raise DataError("the run keeps no readings, so its grams cannot be counted again", file=str(run.path))
    with _readings(run):
        made = account_again(run, source, regardless=True)
    series = made.basis.carbon
    grid = None if series is None else {"zone": series.zone, "source": series.source}
    return made.report, made.basis.power_timeline(), grid


@contextmanager
def _readings(run: Run) -> Iterator[None]:
    """Turn damage to the readings of a run into one error that names the run."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"the readings of the run: {type(error).__name__} {error}", file=str(run.path)) from error


def _measured(run: Run, report: dict[str, Any] | None) -> tuple[dict[str, Any], tuple[Tick, ...]]:
    """Report of a measured run, computed where there is none, and its timeline."""
    from joulery.runtime.measuring.account import account_again

    if report is not None and "power" not in run.series_names:
        return report, ()
    with _readings(run):
        source = open_carbon(run.manifest["terms"]["carbon"]) if report is None else None
        made = account_again(run, source)
    return report or made.report, made.basis.power_timeline()


def measured_label(manifest: Mapping[str, Any], footprint: Footprint) -> SiteLabel:
    """Labels of a measured run: its command, and its stored intensity."""
    argv = manifest.get("argv")
    name = Path(str(argv[0])).name if isinstance(argv, list) and argv else "measure"
    kept, carbon = manifest.get("carbon"), None
    if isinstance(kept, Mapping) and footprint.signal is not None and footprint.scope is not None:
        basis = CarbonBasis.ASSUMED if footprint.carbon_quality is Quality.ASSUMED else CarbonBasis.LIVE
        zone, source = str(kept.get("zone")), str(kept.get("source"))
        carbon = CarbonLabel(zone, source, basis, footprint.signal, footprint.scope)
    return SiteLabel(name, "measure", carbon=carbon)


def _of_ticks(run: Run, site: SiteLabel | None, ticks: tuple[Tick, ...]) -> Footprint:
    """Footprint of an interrupted site: all its energy is unattributed."""
    known = [tick for tick in ticks if not math.isnan(tick.energy_j)]
    if not known and run.manifest.get("kind") == "serve":
        raise DataError(
            "a run of language models keeps the log of its clocks alone, no energy",
            file=str(run.path),
            hint="see log.jsonl in it; joules of requests are in their answers and under /metrics",
        )
    if not known:
        raise DataError(
            "the run was interrupted before anything was summed up",
            file=str(run.path),
            hint="if it is still running, wait for its first report",
        )
    last = known[-1]
    footprint = Footprint(
        unattributed_j=last.energy_j,
        facility_j=last.energy_j,
        start_s=ticks[0].t_s - ticks[0].period_s,
        end_s=ticks[-1].t_s,
        duration_s=math.fsum(tick.period_s for tick in ticks),
        covered_s=math.fsum(tick.period_s for tick in ticks if not math.isnan(tick.power_w)),
        idle_quality=last.quality,
    )
    carbon = site.carbon if site else None
    if carbon is None or math.isnan(last.carbon_g):
        return footprint
    quality = Quality.ASSUMED if carbon.basis is CarbonBasis.ASSUMED else Quality.MEASURED
    return replace(
        footprint,
        carbon_g=last.carbon_g,
        unattributed_g=last.carbon_g,
        carbon_covered_j=last.energy_j,
        signal=carbon.signal,
        scope=carbon.scope,
        carbon_quality=quality,
    )
