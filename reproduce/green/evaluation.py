"""GREEN's evaluation: its workloads, its grids, and its results as a document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from joulery.app.simulation.training_study import jobs_of
from joulery.app.wiring.hourly_intensity import hourly_series
from joulery.config.carbon import CarbonFile, CarbonTypical, carbon_from_flags
from joulery.config.scenario import RecordedTrace, SyntheticTrace, TrainingCluster
from joulery.domain.errors import ConfigError
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.plant import Jobs
from joulery.sim.training.study import Setting
from reproduce.green.bound import BoundPoint
from reproduce.green.figures import Experiment, GreenFigures, PolicyOutcome, figures, in_region

_DATA = (
    ("US-CAL-CISO", "US-CAL-CISO_2023.csv"), ("GB", "GB_2023.csv"), ("SE", "SE_2023.csv"), ("PL", "PL_2023.csv"),
    ("CA-ON", "CA-ON_2023.csv"),
)  # fmt: skip
_FILES = ("green/testbed_day_791.csv", "green/pai_year_146k.csv", *(f"carbon/{name}" for _, name in _DATA))
_DAY_REGIONS = 4
_DAY = SyntheticTrace(kind="synthetic", jobs_per_day=791, days=1, mix="day")
_YEAR = SyntheticTrace(kind="synthetic", jobs_per_day=400, days=365)


@dataclass(frozen=True, slots=True)
class GreenEvaluation:
    """Settings of GREEN's evaluation.

    Attributes:
        seeds: Number of seeds of the testbed's day.
        cluster: The simulated cluster.
        day: Jobs of the testbed's day (Figs. 8 to 11 and 13, Tables 2 and 4).
        month: Month whose mean day is repeated as that day's grid, 1 to 12.
        window_s: Window whose mean separates green hours from dirty ones.
        year: Jobs of the long run (Fig. 12, Table 3, the frontier).
        frontier_days: First days of the year that the frontier covers.
        regions: Zones of the bundled typical days; runs in one region use GB where it is given, else the first.
        data: Folder with the paper's traces and grids instead; None for synthetic jobs and typical days.
        days: Number of days of the year to run, from its start; None for all.
    """

    seeds: int = 3
    cluster: TrainingCluster = field(default_factory=TrainingCluster)
    day: SyntheticTrace = _DAY
    month: int = 8
    window_s: float = 172_800.0
    year: SyntheticTrace = _YEAR
    frontier_days: int = 60
    regions: tuple[Literal["GB", "FR", "DE"], ...] = ("GB", "DE", "FR")
    data: Path | None = None
    days: int | None = None

    @property
    def source(self) -> str:
        """Sources of the jobs and the intensities, in one line."""
        if self.data is not None:
            return "Alibaba PAI jobs; direct intensity of 2023, Electricity Maps"
        return "synthetic jobs with the published mix of sizes; grids: " + ", ".join(self.regions)


def run(evaluation: GreenEvaluation, progress: Callable[[int, int], None]) -> GreenFigures:
    """Run the evaluation and return its figures.

    Raises:
        ConfigError: A file of ``data`` is missing.
        DataError: A trace or a grid cannot be used.
    """
    return figures(*_parts(evaluation), progress)


def document(evaluation: GreenEvaluation, made: GreenFigures) -> dict[str, Any]:
    """The results as one JSON object, without the claims."""
    return {
        "scenario": "green-figures",
        "kind": "training-figures",
        "quality": "simulated",
        "source": evaluation.source,
        "results": [_row(part, one) for part, ones in _outcomes(made) for one in ones],
        "bound": [_point(point) for point in made.bound],
        "bound_without_waiting": [_point(point) for point in made.bound_at_once],
    }


def _parts(evaluation: GreenEvaluation) -> tuple[Experiment, Experiment, Experiment]:
    """Build the experiments of the day, the year and the frontier."""
    folder, cluster = evaluation.data, evaluation.cluster
    day_trace: SyntheticTrace | RecordedTrace = evaluation.day
    year_trace: SyntheticTrace | RecordedTrace = evaluation.year
    grids: dict[str, CarbonFile | CarbonTypical] = {
        zone: CarbonTypical(kind="typical", zone=zone) for zone in evaluation.regions
    }
    if folder is not None:
        missing = [name for name in _FILES if not (folder / name).exists()]
        if missing:
            raise ConfigError(f"{folder} lacks {missing[0]}", pointer="--data", expected=", ".join(_FILES))
        day_trace, year_trace = _recorded(folder / _FILES[0]), _recorded(folder / _FILES[1])
        grids = {region: _direct(folder / "carbon" / name) for region, name in _DATA}
    setting = Setting(
        nodes=cluster.nodes, restart_s=cluster.restart_s, sleep_after_s=cluster.sleep_after_s, wake_s=cluster.wake_s
    )
    year_jobs = jobs_of(year_trace, Streams(0), evaluation.days)
    burst = [jobs_of(day_trace, Streams(seed), 1) for seed in range(evaluation.seeds)]
    month = {name: Intensity.of(hourly_series(config, evaluation.month)) for name, config in grids.items()}
    hours = {name: Intensity.of(hourly_series(config)) for name, config in grids.items()}
    month = dict(list(month.items())[:_DAY_REGIONS])
    first = "GB" if "GB" in hours else next(iter(hours))
    month = {first: month[first], **month} if first in month else month
    year_part = Experiment([year_jobs], {first: hours[first], **hours}, setting)
    day_part = Experiment(burst, month, replace(setting, window_s=evaluation.window_s))
    frontier = Experiment([_first_days(year_jobs, evaluation.frontier_days)], year_part.grids, setting)
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


def _outcomes(made: GreenFigures) -> list[tuple[str, Sequence[PolicyOutcome]]]:
    return [
        ("fig8", made.day), ("fig11", made.small), ("fig12", made.year), ("fig13a", made.mus),
        ("fig13b", [one for _, one in made.quanta]), ("table4", made.ablations), ("frontier", made.frontier),
    ]  # fmt: skip


def _row(part: str, one: PolicyOutcome) -> dict[str, Any]:
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


def _point(point: BoundPoint) -> dict[str, float]:
    return {"mean_jct_s": point.mean_jct_s, "cluster_carbon_kg": point.cluster_kg}
