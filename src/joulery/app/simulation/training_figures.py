"""``kind: training-figures``: GREEN's evaluation and the frontier, in a terminal, as JSON and as a page of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from joulery.app.simulation import Overrides, Played, Progress
from joulery.app.simulation.training_study import jobs_of
from joulery.app.wiring.hourly_intensity import hourly_series
from joulery.config.carbon import CarbonFile, CarbonTypical, carbon_from_flags
from joulery.config.scenarios.training_figures import TrainingFiguresScenario
from joulery.config.scenarios.training_study import RecordedTrace, SyntheticTrace
from joulery.domain.errors import ConfigError
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.figures import Figures, Outcome, Part, figures, in_region
from joulery.sim.training.study import Setting
from joulery.sim.training.workload import Jobs
from joulery.ui.reports.papers.claim import Claim
from joulery.ui.reports.papers.green_claims import claims
from joulery.ui.reports.papers.green_page import Source, page

ACCEPTS = frozenset({"data", "days"})
_DATA = (
    ("US-CAL-CISO", "US-CAL-CISO_2023.csv"), ("GB", "GB_2023.csv"), ("SE", "SE_2023.csv"), ("PL", "PL_2023.csv"),
    ("CA-ON", "CA-ON_2023.csv"),
)  # fmt: skip
_DAY_REGIONS = 4


def play(scenario: TrainingFiguresScenario, overrides: Overrides, progress: Progress) -> Played:
    """Run everything.

    Raises:
        ConfigError: A file is missing, or a flag makes no sense.
        DataError: A trace or a grid cannot be used.
    """
    source = _source(scenario, overrides)
    made = figures(*_parts(scenario, overrides, source), progress)
    found = claims(made)
    document = {
        "scenario": scenario.name,
        "kind": scenario.kind,
        "quality": "simulated",
        "source": source.text,
        "claims": [claim.as_dict() for claim in found],
        "results": [_row(part, one) for part, ones in _outcomes(made) for one in ones],
        "bound": [{"mean_jct_s": p.mean_jct_s, "cluster_carbon_kg": p.cluster_kg} for p in made.bound],
        "bound_without_waiting": [
            {"mean_jct_s": p.mean_jct_s, "cluster_carbon_kg": p.cluster_kg} for p in made.bound_at_once
        ],
    }
    return Played(document, _view(found, source), page=lambda: page(made, found, source))


def _source(scenario: TrainingFiguresScenario, overrides: Overrides) -> Source:
    """Where traces and grids come from, in words, and the files of ``--data``."""
    folder = overrides.path("data")
    if folder is None:
        words = (
            "synthetic jobs with the published mix of sizes; " if isinstance(scenario.day.trace, SyntheticTrace) else ""
        )
        return Source(words + "grids: " + ", ".join(grid.name for grid in scenario.regions), None)
    needed = ["green/testbed_day_791.csv", "green/pai_year_146k.csv", *(f"carbon/{name}" for _, name in _DATA)]
    missing = [name for name in needed if not (folder / name).exists()]
    if missing:
        raise ConfigError(f"{folder} lacks {missing[0]}", pointer="--data", expected=", ".join(needed))
    return Source("Alibaba PAI jobs; direct intensity of 2023, Electricity Maps", folder)


def _parts(scenario: TrainingFiguresScenario, overrides: Overrides, source: Source) -> tuple[Part, Part, Part]:
    folder, year = source.folder, scenario.year
    day_trace: SyntheticTrace | RecordedTrace = scenario.day.trace
    year_trace: SyntheticTrace | RecordedTrace = year.trace
    grids: dict[str, CarbonFile | CarbonTypical] = {grid.name: grid.carbon for grid in scenario.regions}
    if folder is not None:
        day_trace = _recorded(folder / "green/testbed_day_791.csv")
        year_trace = _recorded(folder / "green/pai_year_146k.csv")
        grids = {region: _direct(folder / "carbon" / name) for region, name in _DATA}
    days = overrides.inputs.get("days")
    if days is not None and (not days.isdecimal() or int(days) < 1):
        raise ConfigError("--days needs a whole number", got=days, expected="1 or more")
    cluster = scenario.cluster
    setting = Setting(
        nodes=cluster.nodes, restart_s=cluster.restart_s, sleep_after_s=cluster.sleep_after_s, wake_s=cluster.wake_s
    )
    until = int(days) if days is not None else None
    year_jobs = jobs_of(year_trace, Streams(0), until)
    burst = [jobs_of(day_trace, Streams(seed), 1) for seed in range(scenario.seeds)]
    month = {name: Intensity.of(hourly_series(config, scenario.day.month)) for name, config in grids.items()}
    hours = {name: Intensity.of(hourly_series(config)) for name, config in grids.items()}
    month = dict(list(month.items())[:_DAY_REGIONS])
    first = "GB" if "GB" in hours else next(iter(hours))
    month = {first: month[first], **month} if first in month else month
    year_part = Part([year_jobs], {first: hours[first], **hours}, setting)
    day_part = Part(burst, month, replace(setting, window_s=scenario.day.window_s))
    frontier = Part([_first_days(year_jobs, year.frontier_days)], year_part.grids, setting)
    return day_part, year_part, in_region(frontier, first)


def _first_days(jobs: Jobs, days: int) -> Jobs:
    rows = jobs.submit_s < days * 86_400.0
    return Jobs(jobs.submit_s[rows], jobs.work_s[rows], jobs.kind[rows], jobs.requested[rows], jobs.max_gpus[rows])


def _recorded(path: Path) -> RecordedTrace:
    return RecordedTrace.model_construct(kind="file", file=path)


def _direct(path: Path) -> CarbonFile:
    config = carbon_from_flags(file=str(path), column="ci_direct")
    assert isinstance(config, CarbonFile)
    return config


def _outcomes(made: Figures) -> list[tuple[str, Sequence[Outcome]]]:
    return [
        ("fig8", made.day), ("fig11", made.small), ("fig12", made.year), ("fig13a", made.mus),
        ("fig13b", [one for _, one in made.quanta]), ("table4", made.ablations), ("frontier", made.frontier),
    ]  # fmt: skip


def _row(part: str, one: Outcome) -> dict[str, Any]:
    return {
        "figure": part,
        "policy": one.policy,
        "region": one.region,
        "mean_jct_s": one.mean_jct_s,
        "p99_jct_s": one.p99_jct_s,
        "job_carbon_kg": one.job_kg,
        "cluster_carbon_kg": one.cluster_kg,
        "cluster_energy_kwh": one.cluster_kwh,
        "peak_power_w": one.peak_w,
    }


def _view(found: Sequence[Claim], source: Source) -> list[RenderableType]:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("figure", "claim", "paper", "ours", ""):
        table.add_column(title)
    for claim in found:
        table.add_row(claim.figure, claim.what, claim.paper, claim.ours, claim.verdict)
    said = "every number of ours is simulated; joulery simulate ... --html green.html draws the pictures"
    return [Text(source.text, style="dim"), table, Text(said, style="dim")]
