"""What a report knows about one run, whatever became of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulery.domain.errors import DataError
from joulery.domain.footprint import Footprint
from joulery.domain.timeline import DecisionRecord, SiteLabel, Tick
from joulery.store.footprints import footprint_from_dict
from joulery.store.run import Run, open_run
from joulery.store.timeline import read_decisions, read_site, read_ticks


@dataclass(frozen=True, slots=True)
class RunView:
    """One run, ready to be rendered.

    Attributes:
        path: Its folder.
        manifest: What ``manifest.json`` says.
        footprint: Its joules and grams.
        report: What ``report.json`` says; empty when the run was interrupted before it was written.
        site: The labels of a site; None for other runs.
        ticks: Its course over time.
        decisions: What was decided.
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
        """``measure``, ``up`` ..."""
        return str(self.manifest.get("kind", "run"))

    @property
    def owner(self) -> str:
        """Whom the run is charged to; ``unknown`` when nobody was named."""
        return str(self.manifest.get("owner") or "unknown")

    @property
    def interrupted(self) -> bool:
        """True while it runs, and for ever when its writer was killed."""
        return not self.report

    @property
    def charges(self) -> tuple[tuple[str, str, Footprint], ...]:
        """``(workload, owner, footprint)`` as far as the run told them apart; the whole run otherwise."""
        charges = self.report.get("charges")
        if not charges:
            workload = self.site.name if self.site else self.kind
            return ((workload, self.owner, self.footprint),)
        try:
            return tuple((str(c["workload"]), str(c["owner"]), footprint_from_dict(c["footprint"])) for c in charges)
        except (KeyError, TypeError) as error:
            raise DataError(f"charges: {type(error).__name__} {error}", file=str(self.path / "report.json")) from error


def load_run(path: str | Path) -> RunView:
    """Everything there is to report of the run at ``path``.

    Raises:
        DataError: No run, damaged, written by a newer joulery, or interrupted before anything was recorded.
    """
    run = open_run(path)
    report = run.report
    site, ticks = read_site(run), read_ticks(run)
    footprint = _of_ticks(run, site, ticks) if report is None else footprint_from_dict(report)
    return RunView(run.path, run.manifest, footprint, report or {}, site, ticks, read_decisions(run))


def _of_ticks(run: Run, site: SiteLabel | None, ticks: tuple[Tick, ...]) -> Footprint:
    """The footprint of an interrupted run: all it metered, given to nobody."""
    known = [tick for tick in ticks if not math.isnan(tick.energy_j)]
    if not known:
        raise DataError(
            "the run was interrupted before anything was summed up",
            file=str(run.path),
            hint="if it is still running, wait for its first report",
        )
    last = known[-1]
    carbon = site.carbon if site and not math.isnan(last.carbon_g) else None
    return Footprint(
        unattributed_j=last.energy_j,
        carbon_g=last.carbon_g if carbon else 0.0,
        carbon_covered_j=last.energy_j if carbon else 0.0,
        facility_j=last.energy_j,
        start_s=ticks[0].t_s - ticks[0].period_s,
        end_s=ticks[-1].t_s,
        duration_s=math.fsum(tick.period_s for tick in ticks),
        covered_s=math.fsum(tick.period_s for tick in ticks if not math.isnan(tick.power_w)),
        idle_quality=last.quality,
        signal=carbon.signal if carbon else None,
        scope=carbon.scope if carbon else None,
    )
