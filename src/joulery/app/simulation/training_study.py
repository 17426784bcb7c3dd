"""``kind: training``: simulate schedulers of training jobs on one workload, region by region."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from joulery.app.simulation import Overrides, Paragraph, Progress, ResultTable, ScenarioResult, paragraph
from joulery.app.simulation.node_groups import mean_rows, node_groups, type_rows, type_table, with_groups
from joulery.app.wiring.hourly_intensity import forecast_hours, hourly_series
from joulery.config.carbon import CarbonFile, carbon_from_flags
from joulery.config.parsing.quantity import RATIO, flag_quantity
from joulery.config.scenario import CarbonForecastConfig, RecordedTrace, SyntheticTrace, TrainingScenario
from joulery.domain.arrays import FloatArray
from joulery.domain.energy.carbon import JOULES_PER_KWH, CarbonSeries
from joulery.domain.errors import ConfigError, DataError
from joulery.perf.power.training_power import RTX3090_CLASSES, JobClass, NodePower
from joulery.sim.core.comparison import MeanInterval, paired
from joulery.sim.core.hourly_intensity import Intensity, day_ahead, forecast, typical
from joulery.sim.core.streams import Streams
from joulery.sim.training.cluster import TrainingRun
from joulery.sim.training.plant import Jobs
from joulery.sim.training.site_machines import SiteMachines, classes_of, node_of
from joulery.sim.training.study import Setting, jobs_from_trace, run_scheme, scheme, synthetic_trace, with_slack
from joulery.store.columns import read_column
from joulery.tabular import csv_header, read_csv

ACCEPTS = frozenset({"trace", "carbon", "column", "days", "seed", "carbon_forecast", "slack_hours"})
_KNOWN_COLUMNS = ("gpu_w", "speedup")
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class _Row:
    """One run of one policy, with the numbers of jobs with a deadline and of those that end after it."""

    policy: str
    region: str
    seed: int
    jobs: int
    run: TrainingRun
    with_deadline: int
    late: int

    def as_dict(self) -> dict[str, Any]:
        """The row as a JSON-ready dictionary."""
        run = self.run
        return {
            "policy": self.policy,
            "region": self.region,
            "seed": self.seed,
            "jobs": self.jobs,
            "mean_jct_s": float(np.mean(run.jct_s)),
            "p99_jct_s": float(np.quantile(run.jct_s, 0.99)),
            "makespan_s": run.makespan_s,
            "job_carbon_kg": float(np.sum(run.job_kg)),
            "cluster_carbon_kg": run.cluster_kg,
            "job_energy_kwh": float(np.sum(run.job_j)) / JOULES_PER_KWH,
            "cluster_energy_kwh": run.cluster_kwh,
            "peak_power_w": run.peak_w,
            "preemptions": run.preemptions,
            "rescales": run.rescales,
            "most_gpus": run.most_gpus,
            "fragmented_gpu_s": run.fragmented_gpu_s,
            "by_type": type_rows(run),
            "with_deadline": self.with_deadline,
            "late": self.late,
            "digest": run.digest,
        }


def run(scenario: TrainingScenario, overrides: Overrides, progress: Progress) -> ScenarioResult:
    """Run every policy in every region under every seed.

    Raises:
        ConfigError: A policy is unknown, or a flag is invalid.
        DataError: A trace or a grid cannot be used, or a job can never start.
    """
    policies = overrides.policies or scenario.policies
    for policy in policies:
        scheme(policy)
    seeds = _seeds(scenario, overrides)
    grids = _grids(scenario, overrides)
    beliefs = believed(scenario, overrides, grids)
    rows: list[_Row] = []
    for row in _rows(scenario, overrides, policies, grids, beliefs, seeds):
        rows.append(row)
        progress(len(rows), len(policies) * len(grids) * len(seeds))
    slack_s = _slack_s(scenario, overrides)
    document = {**_document(scenario, grids, rows), "slack_hours": slack_s / 3600.0}
    return ScenarioResult(document, _view(scenario, grids, rows, policies, len(seeds), slack_s))


def _seeds(scenario: TrainingScenario, overrides: Overrides) -> Sequence[int]:
    if "seed" in overrides.inputs:
        return [_whole(overrides.inputs["seed"], "--seed", least=0)]
    return range(overrides.seeds or scenario.seeds)


def _whole(text: str, flag: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{flag} needs a whole number", got=text, expected=f"{least} or more")
    return int(text)


def _grids(scenario: TrainingScenario, overrides: Overrides) -> dict[str, CarbonSeries]:
    """Hourly carbon intensities by region, from the scenario or from ``--carbon``."""
    file = overrides.path("carbon")
    if file is None:
        if "column" in overrides.inputs:
            raise ConfigError("--column names a column of --carbon", hint="give the file with --carbon")
        return {grid.name: hourly_series(grid.carbon, scenario.month) for grid in scenario.regions}
    config = carbon_from_flags(file=str(file), column=overrides.inputs.get("column"))
    if not isinstance(config, CarbonFile):
        raise ConfigError("--carbon needs a file here", got=str(file))
    return {file.stem: hourly_series(config, scenario.month)}


def _trace_of(scenario: TrainingScenario, overrides: Overrides) -> SyntheticTrace | RecordedTrace:
    """The scenario's trace, or the file of ``--trace``."""
    file = overrides.path("trace")
    return scenario.trace if file is None else RecordedTrace.model_construct(kind="file", file=file)


def _trace(scenario: TrainingScenario, overrides: Overrides, streams: Streams) -> Jobs:
    days = _whole(overrides.inputs["days"], "--days", least=1) if "days" in overrides.inputs else None
    trace = _trace_of(scenario, overrides)
    return with_groups(jobs_of(trace, streams, days), trace, node_groups(scenario), streams)


def jobs_of(trace: SyntheticTrace | RecordedTrace, streams: Streams, days: int | None = None) -> Jobs:
    """The jobs of a trace; only those of its first ``days`` if given.

    Raises:
        DataError: The file cannot be used, or nothing is submitted in these days.
    """
    if isinstance(trace, SyntheticTrace):
        return jobs_from_trace(*synthetic_trace(days or trace.days, trace.jobs_per_day, trace.mix, streams), streams)
    file = trace.file
    submit_s, duration_s = read_column(file, "submit_s"), read_column(file, "duration_s")
    until_s = float("inf") if days is None else days * _DAY_S
    keep = int(np.searchsorted(submit_s, until_s, "left")) if bool(np.all(np.diff(submit_s) >= 0)) else len(submit_s)
    if keep == 0:
        raise DataError(f"no job is submitted in the first {days} days", file=str(file))
    requested = _requested(file)
    return jobs_from_trace(
        submit_s[:keep],
        duration_s[:keep],
        streams,
        requested=None if requested is None else np.maximum(requested[:keep], 1).astype(np.int64),
    )


def _requested(file: Path) -> FloatArray | None:
    """Requested GPUs, where the trace has ``num_gpus``; PAI's ``width`` is not a GPU count and is not used."""
    return read_column(file, "num_gpus") if "num_gpus" in csv_header(file) else None


def with_known(jobs: Jobs, file: Path | None, node: NodePower) -> tuple[Jobs, tuple[JobClass, ...]]:
    """Add to the jobs of a trace the power and speed in its file; return the jobs and all kinds of jobs.

    Args:
        jobs: The first jobs of the file, each of a drawn kind.
        file: The trace; None where it is generated.
        node: Power of the node, of which a job's power includes a share.

    Raises:
        DataError: A cell is not a valid power or speed-up.
    """
    wanted = () if file is None else tuple(name for name in _KNOWN_COLUMNS if name in csv_header(file))
    if file is None or not wanted:
        return jobs, RTX3090_CLASSES
    table = read_csv(file)
    places = {name: table.header.index(name) for name in wanted}
    watts = np.full(len(jobs), np.nan)
    rows, speedups = np.full(len(jobs), -1, np.int64), dict[str, int]()
    lines = [(number, cells) for number, cells in table.lines if cells][: len(jobs)]
    for at, (number, cells) in enumerate(lines):
        row = {name: cells[place].strip() if place < len(cells) else "" for name, place in places.items()}
        if text := row.get("gpu_w"):
            watts[at] = _above_zero(text, "gpu_w", file, number)
        if text := row.get("speedup"):
            if text not in speedups:
                _speedup(text, file, number)
                speedups[text] = len(speedups)
            rows[at] = speedups[text]
    known = tuple(_speedup(text, file, 0) for text in speedups)
    machines = SiteMachines(node, watts, speedups=known, speedup_of=rows)
    classes, kind = classes_of(jobs.kind, jobs.requested, machines, int(jobs.max_gpus.max(initial=1)))
    return replace(jobs, kind=kind), classes


def _speedup(text: str, file: Path, row: int) -> Mapping[int, float]:
    """Parse ``1:1 2:1.9 4:3.4``: speed by number of GPUs, relative to the smallest number."""
    found: dict[int, float] = {}
    for part in text.split():
        gpus, _, ratio = part.partition(":")
        if not gpus.isdecimal() or not int(gpus):
            raise DataError(f"speedup is {text!r}, expected such as '1:1 2:1.9 4:3.4'", file=str(file), row=row)
        found[int(gpus)] = _above_zero(ratio, "speedup", file, row)
    if found.get(min(found, default=0)) != 1.0:
        raise DataError(f"speedup is {text!r}, expected 1 for the fewest GPUs", file=str(file), row=row)
    return found


def _above_zero(text: str, column: str, file: Path, row: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise DataError(f"{column} is {text!r}, expected a number above 0", file=str(file), row=row)
    return value


def _rows(
    scenario: TrainingScenario,
    overrides: Overrides,
    policies: Sequence[str],
    grids: Mapping[str, CarbonSeries],
    beliefs: Mapping[str, Callable[[int], Intensity | None]],
    seeds: Sequence[int],
) -> Iterator[_Row]:
    setting = Setting(
        nodes=scenario.cluster.nodes,
        node=node_of(scenario.cluster.node_gpus or 2),
        placed=scenario.cluster.node_gpus is not None,
        groups=node_groups(scenario),
        restart_s=scenario.cluster.restart_s,
        window_s=scenario.window_s,
        sleep_after_s=scenario.cluster.sleep_after_s,
        wake_s=scenario.cluster.wake_s,
        quantum_s=scenario.quantum_s,
    )
    slack_s = _slack_s(scenario, overrides)
    trace = _trace_of(scenario, overrides)
    for seed in seeds:
        jobs = with_slack(_trace(scenario, overrides, Streams(seed)), slack_s, scenario.slack_over_s)
        jobs, classes = with_known(jobs, trace.file if isinstance(trace, RecordedTrace) else None, setting.node)
        for region, series in grids.items():
            carbon = Intensity.of(series)
            believing = replace(setting, belief=beliefs[region](seed), classes=classes)
            for policy in policies:
                run = run_scheme(policy, believing, jobs, carbon)
                yield _Row(policy, region, seed, len(jobs), run, *_deadlines(jobs, run))


def _deadlines(jobs: Jobs, run: TrainingRun) -> tuple[int, int]:
    """Number of jobs with a deadline, and of those that end after it."""
    if jobs.deadline_s is None:
        return 0, 0
    return int(np.sum(np.isfinite(jobs.deadline_s))), int(np.sum(run.finish_s > jobs.deadline_s))


def _slack_s(scenario: TrainingScenario, overrides: Overrides) -> float:
    """Slack of the jobs, from the scenario or from ``--slack-hours``."""
    text = overrides.inputs.get("slack_hours")
    if text is None:
        return scenario.slack_s
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours < float("inf"):
        raise ConfigError("--slack-hours needs a number of hours", got=text, expected="0 or more, such as 24")
    return hours * 3600.0


def _document(scenario: TrainingScenario, grids: Mapping[str, CarbonSeries], rows: Sequence[_Row]) -> dict[str, Any]:
    return {
        "scenario": scenario.name,
        "kind": scenario.kind,
        "quality": "simulated",
        "regions": [
            {
                "region": name,
                "source": series.source,
                "scope": series.scope.value,
                "signal": series.signal.value,
                "quality": series.quality.value,
            }
            for name, series in grids.items()
        ],
        "policies": {row.policy: {"runs_as": scheme(row.policy).runs_as or None} for row in rows},
        "changes": _summary(rows),
        "results": [row.as_dict() for row in rows],
    }


def _view(
    scenario: TrainingScenario,
    grids: Mapping[str, CarbonSeries],
    rows: Sequence[_Row],
    policies: Sequence[str],
    seeds: int,
    slack_s: float,
) -> list[Paragraph | ResultTable]:
    heading = paragraph(
        (f"{scenario.name}: ", "bold"),
        f"{rows[0].jobs} jobs on {_machines(scenario)}, "
        f"{seeds} seed{'s' if seeds > 1 else ''}; "
        f"changes are against {policies[0]}",
        f"; slack {slack_s / 3600.0:g} h for jobs over {scenario.slack_over_s / 3600.0:g} h" if slack_s else "",
    )
    parts: list[Paragraph | ResultTable] = [heading]
    for region, series in grids.items():
        parts.append(paragraph("\n", (region, "bold"), f"  {series.scope} intensity, {series.source}"))
        parts.append(_table(region, rows, policies))
        if scenario.cluster.groups:
            types = [(policy, mean_rows([row["by_type"] for row in _of(rows, region, policy)])) for policy in policies]
            parts.append(type_table(types))
    if slack_s:
        parts.append(paragraph("\n", _lateness(rows, policies)))
    about = [f"{policy}: {scheme(policy).about} ({scheme(policy).live})" for policy in policies]
    return [*parts, paragraph(("\n" + "\n".join(about), "dim")), paragraph(("every number is simulated", "dim"))]


def _machines(scenario: TrainingScenario) -> str:
    cluster = scenario.cluster
    if cluster.groups:
        return " and ".join(f"{group.nodes} nodes of {group.gpus} {group.type}" for group in cluster.groups)
    return f"{cluster.nodes} nodes of {cluster.node_gpus or 2} GPUs"


def _lateness(rows: Sequence[_Row], policies: Sequence[str]) -> str:
    counts = {policy: sum(row.late for row in rows if row.policy == policy) for policy in policies}
    total = sum(row.with_deadline for row in rows if row.policy == policies[0])
    late = ", ".join(f"{policy} {count}" for policy, count in counts.items())
    return f"jobs that end after their deadline, of {total}: {late}"


_SHOWN = (
    ("mean_jct_s", "mean JCT", 3600.0, "h"),
    ("p99_jct_s", "p99 JCT", 3600.0, "h"),
    ("cluster_carbon_kg", "CO2e", 1.0, "kg"),
    ("cluster_energy_kwh", "energy", 1e3, "MWh"),
)


def _table(region: str, rows: Sequence[_Row], policies: Sequence[str]) -> ResultTable:
    titles = [title for _, name, _, unit in _SHOWN for title in (f"{name}\n{unit}", "")]
    table = ResultTable(("policy", *titles), left=("policy",))
    first = _of(rows, region, policies[0])
    for policy in policies:
        mine = _of(rows, region, policy)
        cells = []
        for key, _, scale, _ in _SHOWN:
            change = _change(mine, first, key)
            cells += [f"{_mean(mine, key) / scale:.4g}", "" if policy == policies[0] else _percent(change.mean)]
        table.add(policy, *cells)
    return table


def _percent(ratio: float) -> str:
    return f"{100 * ratio:+.0f} %" if abs(ratio) >= 0.0995 else f"{100 * ratio:+.1f} %"


def _of(rows: Sequence[_Row], region: str, policy: str) -> list[dict[str, Any]]:
    return [row.as_dict() for row in rows if row.region == region and row.policy == policy]


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def _change(mine: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]], key: str) -> MeanInterval:
    """Change against the first policy, paired by seed, as a ratio of the first policy's mean."""
    base = _mean(first, key) or 1.0
    return paired([row[key] / base for row in mine], [row[key] / base for row in first])


def _summary(rows: Sequence[_Row]) -> list[dict[str, Any]]:
    """Compare every policy in every region with the first one, with intervals over seeds."""
    regions, policies = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("region", "policy"))
    return [
        {
            "region": region,
            "policy": policy,
            "against": policies[0],
            **{
                key: _change(_of(rows, region, policy), _of(rows, region, policies[0]), key).as_dict()
                for key, *_ in _SHOWN
            },
        }
        for region in regions
        for policy in policies[1:]
    ]


Belief = Callable[[int], Intensity | None]
"""Returns the forecast for a seed; None for the truth."""


def believed(scenario: TrainingScenario, overrides: Overrides, grids: Mapping[str, CarbonSeries]) -> dict[str, Belief]:
    """The forecast in each region.

    Raises:
        ConfigError: A region lacks a recorded forecast, or the flag is invalid.
        DataError: A forecast does not cover the hours of its region.
    """
    how, file = _wanted(scenario, overrides)
    truths = {region: Intensity.of(series) for region, series in grids.items()}
    if how.kind == "oracle":
        return dict.fromkeys(truths, lambda seed: None)
    if how.kind == "typical":
        return {region: partial(_always, typical(truth)) for region, truth in truths.items()}
    if how.kind == "error":
        return {region: partial(_synthetic, truth, how.error_ratio) for region, truth in truths.items()}
    by_name = {grid.name: grid.carbon for grid in scenario.regions}
    beliefs: dict[str, Belief] = {}
    for region, truth in truths.items():
        config = file if file is not None else by_name.get(region)
        if not isinstance(config, CarbonFile):
            hint = "give its file: --carbon-forecast forecast.csv"
            raise ConfigError(f"there is no recorded forecast for {region}", pointer="carbon_forecast.kind", hint=hint)
        hours = forecast_hours(config, grids[region], scenario.month)
        beliefs[region] = partial(_always, forecast(hours, truth))
    return beliefs


def _wanted(scenario: TrainingScenario, overrides: Overrides) -> tuple[CarbonForecastConfig, CarbonFile | None]:
    """The forecast settings of the scenario or of ``--carbon-forecast``: a kind, an error, or a file."""
    text = overrides.inputs.get("carbon_forecast")
    if text is None:
        return scenario.carbon_forecast, None
    if text in ("oracle", "typical", "recorded"):
        return CarbonForecastConfig.model_validate({"kind": text}), None
    path = overrides.path("carbon_forecast")
    if path is not None and path.exists():
        config = carbon_from_flags(file=str(path))
        assert isinstance(config, CarbonFile)
        return CarbonForecastConfig.model_validate({"kind": "recorded"}), config.model_copy(update={"forecast": path})
    try:
        error_ratio = flag_quantity(text, RATIO, "--carbon-forecast")
    except ConfigError as error:
        raise ConfigError(
            "is neither a file nor a kind of forecast",
            pointer="--carbon-forecast",
            got=text,
            expected='oracle, typical, recorded, an error such as "27 %", or a CSV file of the forecast',
        ) from error
    return CarbonForecastConfig.model_construct(kind="error", error_ratio=error_ratio), None


def _always(belief: Intensity, _seed: int) -> Intensity:
    return belief


def _synthetic(truth: Intensity, error_ratio: float, seed: int) -> Intensity:
    return day_ahead(truth, error_ratio, Streams(seed)("forecast"))
