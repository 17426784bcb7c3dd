"""``kind: variants``: simulate schemes that choose variants and partitions as the carbon intensity changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from joulery.app.simulation import BLANK, Overrides, Paragraph, Progress, ResultTable, ScenarioResult, paragraph
from joulery.config.parsing.quantity import RATIO, flag_quantity
from joulery.config.scenario import VariantsScenario
from joulery.domain.errors import ConfigError, DataError, InfeasibleError
from joulery.domain.format import UNKNOWN, percent
from joulery.domain.gpu.mig import A100_40GB
from joulery.domain.serving.variant_table import VariantTable
from joulery.perf.catalog.clover_services import CLOVER_SERVICES
from joulery.perf.queues.pull_costs import ServiceCosts, VariantCosts
from joulery.sim.core.comparison import MeanInterval, interval
from joulery.sim.core.streams import Streams
from joulery.sim.serving.mixed_table import mixed
from joulery.sim.serving.outcome import SchemeOutcome, StudySettings
from joulery.sim.serving.schemes import SCHEMES, SEARCHING, run_variants
from joulery.sim.serving.trial_table import Bench, bench, exhaustive_table
from joulery.store.columns import CsvRow, read_column, read_rows
from joulery.store.files import require_json
from joulery.store.variant_tables import model_number, read_tables

ACCEPTS = frozenset({"profile", "carbon", "column", "loss"})


_COST_NOTE = (
    "same: saved % on the same GPUs, all of them powered; pts, rel: accuracy lost, points and %; kept: trials within "
    "the limit; time: % of it that trials really take, a thousand requests and the changes between them; cuts: GPUs "
    "partitioned again for them"
)


@dataclass(frozen=True, slots=True)
class _Row:
    """One run of one scheme, and the best possible outcome."""

    service: str
    trace: str
    settings: StudySettings
    seed: int
    outcome: SchemeOutcome
    oracle: SchemeOutcome


def run(scenario: VariantsScenario, overrides: Overrides, progress: Progress) -> ScenarioResult:
    """Simulate every scheme on every service, grid and weight; schemes that search once per seed.

    Raises:
        ConfigError: A scheme or service is unknown, or a column is given without a file.
        DataError: A profile or a grid cannot be used.
    """
    schemes = overrides.policies or scenario.schemes
    for scheme in schemes:
        if scheme not in SCHEMES:
            raise ConfigError("no scheme of that name", got=scheme, expected=", ".join(SCHEMES))
    grids = grids_of(scenario, overrides)
    seeds = overrides.seeds or scenario.seeds
    benches = benches_of(scenario, overrides, all_loads=False)
    if not scenario.gpus_alike:
        benches = {name: mixed(one) for name, one in benches.items()}
    tables = {name: made.table for name, made in benches.items()}
    studies = studies_of(scenario, overrides)
    each = sum(seeds if scheme in SEARCHING else 1 for scheme in schemes)
    total = len(benches) * len(grids) * len(studies) * each
    rows = []
    for row in _rows(studies, benches, grids, schemes, seeds):
        rows.append(row)
        progress(len(rows), total)
    document = {**_document(scenario, tables, rows), "pools": _pools(benches, rows)}
    return ScenarioResult(document, _view(scenario, tables, rows, schemes, seeds))


def studies_of(scenario: VariantsScenario, overrides: Overrides) -> list[StudySettings]:
    """Studies of a scenario: one for each weight, or for each loss of accuracy allowed."""
    common = StudySettings(
        base_g_per_kwh=scenario.base_g_per_kwh,
        pue=scenario.pue,
        replan_ratio=scenario.replan_ratio,
        trial_s=scenario.trial_s,
        period_s=scenario.period_s,
        replan_of_previous=scenario.replan_of == "previous",
    )
    loss_text = overrides.inputs.get("loss")
    losses = scenario.loss_ratios
    if loss_text is not None:
        losses = tuple(_loss(word.strip()) for word in loss_text.split(","))
    if losses:
        return [replace(common, lambda_ratio=1.0, max_loss_ratio=loss) for loss in losses]
    return [replace(common, lambda_ratio=weight) for weight in scenario.lambda_ratios]


def _loss(word: str) -> float:
    ratio = flag_quantity(word, RATIO, "--loss")
    if ratio >= 1:
        raise ConfigError("a loss of all accuracy is not a limit", pointer="--loss", got=word, expected="such as 0.8 %")
    return ratio


def grids_of(scenario: VariantsScenario, overrides: Overrides) -> dict[str, list[float]]:
    """Intensities (g/kWh, one per period) by name of the grid, from the scenario or from ``--carbon``.

    Raises:
        ConfigError: ``--column`` without ``--carbon``.
        DataError: A file cannot be read, lacks a column, or has a missing or negative intensity.
    """
    file, column = overrides.path("carbon"), overrides.inputs.get("column", "g_per_kwh")
    if file is not None:
        if "column" not in overrides.inputs:
            return {file.stem: read_column(file, column).tolist()}
        return {name: read_column(file, name).tolist() for name in column.split(",")}
    if "column" in overrides.inputs:
        raise ConfigError("--column names a column of --carbon", hint="give the file with --carbon")
    return {grid.name: read_column(grid.file, grid.column).tolist() for grid in scenario.carbon}


def benches_of(scenario: VariantsScenario, overrides: Overrides, *, all_loads: bool) -> dict[str, Bench]:
    """The services, with the cost of their requests where it is known.

    Args:
        scenario: The scenario.
        overrides: Values of the command line.
        all_loads: Whether built-in services are simulated under every load, or only the lightest and the heaviest.
    """
    folder = overrides.path("profile") or scenario.profile
    if folder is not None:
        tables = read_tables(folder)
        costs = read_costs(folder, tables)
        return {name: bench(tables[name], A100_40GB, costs=costs.get(name)) for name in _names(scenario, tables)}
    made = {}
    for name in _names(scenario, CLOVER_SERVICES):
        one = CLOVER_SERVICES[name]
        loads_s = one.loads_s if all_loads else (one.loads_s[0], one.loads_s[-1])
        made[name] = bench(exhaustive_table(one, A100_40GB, Streams(0), loads_s), A100_40GB, costs=one)
    return made


def _names(scenario: VariantsScenario, known: Mapping[str, Any]) -> tuple[str, ...]:
    names = scenario.services or tuple(known)
    for name in names:
        if name not in known:
            raise ConfigError("the profile has no service of that name", got=name, expected=", ".join(known))
    return names


def _rows(
    studies: Sequence[StudySettings],
    benches: Mapping[str, Bench],
    grids: Mapping[str, Sequence[float]],
    schemes: Sequence[str],
    seeds: int,
) -> Iterator[_Row]:
    for service, made in benches.items():
        for trace, intensities in grids.items():
            for settings in studies:
                best = run_variants("oracle", made, trace, intensities, settings, Streams(0))
                for scheme in schemes:
                    for seed in range(seeds if scheme in SEARCHING else 1):
                        outcome = run_variants(scheme, made, trace, intensities, settings, Streams(seed))
                        yield _Row(service, trace, settings, seed, outcome, best)


def _document(scenario: VariantsScenario, tables: Mapping[str, VariantTable], rows: Sequence[_Row]) -> dict[str, Any]:
    return {
        "scenario": scenario.name,
        "kind": scenario.kind,
        "quality": "simulated",
        "profiles": {name: table.quality for name, table in tables.items()},
        "limits_s": {name: table.base_latency_s for name, table in tables.items()},
        "results": [
            {
                "service": row.service,
                "trace": row.trace,
                "scheme": row.outcome.scheme,
                "lambda": row.settings.lambda_ratio,
                "max_loss_ratio": row.settings.max_loss_ratio,
                "seed": row.seed,
                "saving_ratio": row.outcome.saving_ratio,
                "saving_same_gpus_ratio": row.outcome.saving_same_gpus_ratio,
                "loss_points": row.outcome.loss_points,
                "loss_ratio": row.outcome.loss_ratio,
                "objective": row.outcome.objective,
                "objective_oracle": row.oracle.objective,
                "trials": row.outcome.trials,
                "trials_meeting_sla_ratio": row.outcome.trials_meeting_limit_ratio,
                "settled_violations": row.outcome.settled_violations,
                "fallbacks": row.outcome.fallbacks,
                "invocations": row.outcome.invocations,
                "optimise_time_ratio": row.outcome.optimise_time_ratio,
                "optimise_time_true_ratio": row.outcome.optimise_time_true_ratio,
                "trial_energy_j": row.outcome.cost.energy_j,
                "reslices": row.outcome.cost.reslices,
                "infeasible": _why(row.outcome.infeasible),
            }
            for row in rows
        ],
    }


def _why(error: InfeasibleError | None) -> dict[str, Any] | None:
    """JSON-ready: the reason of infeasibility, the binding limit, and the nearest feasible values."""
    return None if error is None else {"why": error.message, "binding": error.binding, "nearest": error.nearest}


def _pools(benches: Mapping[str, Bench], rows: Sequence[_Row]) -> list[dict[str, Any]]:
    """Results of all services together, one GPU group each: savings weighted by baseline power, losses by requests."""
    watts = {name: made.table.base_energy_j / made.interarrival_s for name, made in benches.items()}
    rates = {name: 1.0 / made.interarrival_s for name, made in benches.items()}
    found: dict[tuple[str, StudySettings, str, int], list[_Row]] = {}
    for row in rows:
        found.setdefault((row.trace, row.settings, row.outcome.scheme, row.seed), []).append(row)
    return [
        {
            "trace": trace,
            "scheme": scheme,
            "lambda": settings.lambda_ratio,
            "max_loss_ratio": settings.max_loss_ratio,
            "seed": seed,
            "services": [row.service for row in mine],
            "saving_ratio": _weighted(mine, watts, "saving_ratio"),
            "saving_same_gpus_ratio": _weighted(mine, watts, "saving_same_gpus_ratio"),
            "loss_points": _weighted(mine, rates, "loss_points"),
            "trials": sum(row.outcome.trials for row in mine),
            "settled_violations": sum(row.outcome.settled_violations for row in mine),
        }
        for (trace, settings, scheme, seed), mine in found.items()
    ]


def _weighted(rows: Sequence[_Row], weights: Mapping[str, float], name: str) -> float:
    total = math.fsum(weights[row.service] for row in rows)
    return math.fsum(weights[row.service] * getattr(row.outcome, name) for row in rows) / total


def _view(
    scenario: VariantsScenario,
    tables: Mapping[str, VariantTable],
    rows: Sequence[_Row],
    schemes: Sequence[str],
    seeds: int,
) -> list[Paragraph | ResultTable]:
    heading = paragraph(
        (f"{scenario.name}: ", "bold"),
        f"{len(tables)} services, {seeds} seed{'s' if seeds > 1 else ''}; savings against the most accurate variant on "
        "all GPUs",
    )
    parts: list[Paragraph | ResultTable] = [heading]
    for trace in dict.fromkeys(row.trace for row in rows):
        for settings in dict.fromkeys(row.settings for row in rows):
            chosen = [row for row in rows if row.trace == trace and row.settings == settings]
            loss = settings.max_loss_ratio
            rule = f"lambda {settings.lambda_ratio:g}" if loss is None else f"at most {percent(loss)} of accuracy lost"
            parts += [BLANK, paragraph((f"{trace}, {rule}", "bold")), _table(chosen, schemes)]
            parts += [paragraph((reason, "yellow")) for reason in dict.fromkeys(_infeasible(chosen))]
    notes = "; ".join(dict.fromkeys(table.quality for table in tables.values()))
    parts += [BLANK, paragraph((_COST_NOTE, "dim"))] if any(row.outcome.trials for row in rows) else []
    over = sum(row.outcome.settled_violations for row in rows)
    if over:
        parts.append(paragraph((f"{over} periods ran a configuration above the latency limit", "red")))
    parts += [BLANK, paragraph((f"every number is simulated, on: {notes}", "dim"))]
    return parts


def _infeasible(rows: Sequence[_Row]) -> Iterator[str]:
    """A message for each scheme that found no feasible configuration: the reason, and that the baseline runs."""
    for row in rows:
        if row.outcome.infeasible is not None:
            yield f"{row.service}, {row.outcome.scheme}: {row.outcome.infeasible.message}; the baseline runs"


def _table(rows: Sequence[_Row], schemes: Sequence[str]) -> ResultTable:
    titles = ("service", "scheme", "saved %", "same", "pts", "rel", "gap %", "tried", "kept", "time", "cuts")
    table = ResultTable(titles, left=("service", "scheme"))
    for service in dict.fromkeys(row.service for row in rows):
        for number, scheme in enumerate(schemes):
            mine = [row for row in rows if row.service == service and row.outcome.scheme == scheme]
            outcomes = [row.outcome for row in mine]
            table.add(
                service if number == 0 else "",
                scheme,
                _percent(interval([one.saving_ratio for one in outcomes])),
                _one_digit(100 * interval([one.saving_same_gpus_ratio for one in outcomes]).mean),
                f"{round(interval([one.loss_points for one in outcomes]).mean, 2) + 0.0:.2f}",
                _one_digit(100 * interval([one.loss_ratio for one in outcomes]).mean),
                _gap(mine),
                f"{interval([float(one.trials) for one in outcomes]).mean:.0f}",
                percent(interval([one.trials_meeting_limit_ratio for one in outcomes]).mean, 0),
                f"{100 * interval([one.optimise_time_true_ratio for one in outcomes]).mean:.1f}",
                f"{interval([float(one.cost.reslices) for one in outcomes]).mean:.0f}",
            )
    return table


def _gap(rows: Sequence[_Row]) -> str:
    """Gap of the objective below the best configuration's; unknown for the baseline."""
    best = rows[0].oracle.objective
    if rows[0].outcome.scheme == "base" or best <= 0 or rows[0].oracle.infeasible is not None:
        return UNKNOWN
    return _percent(interval([1 - row.outcome.objective / best for row in rows]))


def _percent(value: MeanInterval) -> str:
    half = f" ± {100 * value.half_width:.1f}" if value.half_width >= 5e-4 else ""
    return _one_digit(100 * value.mean) + half


def _one_digit(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}"


_FILE = "profile.csv"
_COLUMNS = ("service", "char", "slice", "allowed", "host_s", "gpu_s", "dynamic_energy_j_per_request")


def read_costs(folder: Path, tables: Mapping[str, VariantTable]) -> dict[str, ServiceCosts]:
    """Read the costs of services from ``profile.csv`` and ``model.json`` of a folder; empty without these files.

    The columns are those of the calibrated model of the Clover services: per variant and slice whether it fits
    (``allowed``), its host and device time and its dynamic joules. The noise of service times, contention and idle
    power are in ``model.json``. Accuracies are those of the exhaustive table's pure configurations.

    Raises:
        DataError: A file lacks a column or has an invalid cost; file and row are named.
    """
    file, path = folder / _FILE, folder / "model.json"
    if not file.exists():
        return {}
    model, rows = require_json(path), read_rows(file, _COLUMNS)
    found = {}
    for name, table in tables.items():
        mine = [row for row in rows if row["service"] == name]
        if mine:
            found[name] = _service(name, table, model, mine, path)
    return found


def _service(
    name: str,
    table: VariantTable,
    model: Mapping[str, Any],
    rows: Sequence[CsvRow],
    path: Path,
) -> ServiceCosts:
    noise = model["per_service"][name]
    numbers = {key: model_number(noise, key, path) for key in ("kappa", "cv", "sd_s")}
    accuracy = {
        entry.instances[0][0]: entry.accuracy_ratio
        for entry in table.entries
        if len({variant for variant, _ in entry.instances}) == 1
    }
    letters = dict.fromkeys(row["char"] for row in rows)
    variants = [_variant(letter, accuracy[letter], rows) for letter in letters if letter in accuracy]
    return ServiceCosts(
        name=name,
        variants=tuple(sorted(variants, key=lambda variant: (variant.accuracy_ratio, variant.name))),
        contention=numbers["kappa"],
        size_cv=numbers["cv"],
        jitter_s=numbers["sd_s"],
        idle_w=model_number(model, "p_idle_w_per_gpu", path),
        gpus=table.gpus,
        loads_s=table.loads_s,
        source=f"{_FILE} of {path.parent.name}",
    )


def _variant(letter: str, accuracy: float, rows: Sequence[CsvRow]) -> VariantCosts:
    sizes = {profile.size: profile.name for profile in A100_40GB.profiles}
    mine = [row for row in rows if row["char"] == letter and row["allowed"] != "0"]
    device = {}
    for row in mine:
        if row["slice"] not in sizes:
            raise row.wrong(f"no slice {row['slice']!r} on a {A100_40GB.gpu}")
        device[sizes[row["slice"]]] = row.positive("gpu_s")
    whole = A100_40GB.profiles[0].name
    if whole not in device:
        raise DataError(f"variant {letter!r} has no row for the whole GPU", file=str(rows[0].file))
    row = mine[0]
    return VariantCosts(
        name=letter,
        accuracy_ratio=accuracy,
        host_s=row.positive("host_s"),
        gpu_s=device[whole],
        dynamic_j=row.positive("dynamic_energy_j_per_request"),
        slowdown={profile: gpu_s / device[whole] for profile, gpu_s in device.items()},
    )
