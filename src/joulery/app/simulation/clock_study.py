"""``kind: clocks``: simulate clock governors on emulated devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from joulery.app.simulation import Overrides, Paragraph, Progress, ResultTable, ScenarioResult, paragraph
from joulery.config.scenario import ClocksScenario
from joulery.domain.errors import ConfigError
from joulery.sim.clocks.governor_study import SCHEMES, ClockCase, ClockOutcome, run_schemes, workload
from joulery.sim.core.streams import Streams
from joulery.store.columns import read_parquet_columns
from joulery.store.plans import read_plan

ACCEPTS = frozenset({"arrivals", "plan", "seed"})


@dataclass(frozen=True, slots=True)
class _Row:
    """Result of one scheme under one load and seed."""

    scheme: str
    case: ClockCase
    seed: int
    outcome: ClockOutcome
    saving_ratio: float

    def as_dict(self) -> dict[str, Any]:
        """The result as a JSON-ready dictionary; ``saving_ratio`` is the first scheme's power over this one's."""
        return {
            "scheme": self.scheme,
            "rate_rps": self.case.rate_rps,
            "slo_scale": self.case.slo_scale,
            "seed": self.seed,
            **asdict(self.outcome),
            "saving_ratio": self.saving_ratio,
        }


def run(scenario: ClocksScenario, overrides: Overrides, progress: Progress) -> ScenarioResult:
    """Serve every load of every seed under every scheme.

    Raises:
        ConfigError: There is no such scheme, or a seed is not a number.
        DataError: The log cannot be used.
    """
    names = overrides.policies or scenario.policies
    file = overrides.path("arrivals") or scenario.arrivals
    recorded = None if file is None else read_parquet_columns(file, ("t_s",))["t_s"]
    seeds = _seeds(scenario, overrides)
    plan = overrides.path("plan") or scenario.plan
    hosts = () if plan is None else read_plan(plan).hosts()
    rows: list[_Row] = []
    total = len(names) * len(seeds) * len(scenario.loads)
    for load in scenario.loads:
        case = ClockCase(load.rate_rps, load.slo_scale, scenario.duration_s, scenario.devices, hosts)
        for seed in seeds:
            requests = workload(case, Streams(seed), recorded)
            done = len(rows)
            found = run_schemes(names, case, requests, lambda done=done: progress(done + 1, total))  # type: ignore[misc]
            base_w = found[names[0]].power_w
            rows += [_Row(name, case, seed, outcome, base_w / outcome.power_w) for name, outcome in found.items()]
            progress(len(rows), total)
    document = {
        "scenario": scenario.name,
        "kind": scenario.kind,
        "quality": "simulated",
        "arrivals": "poisson" if file is None else file.name,
        "placement": "balanced" if plan is None else plan.name,
        "results": [row.as_dict() for row in rows],
    }
    return ScenarioResult(document, _view(scenario, rows, names))


def _seeds(scenario: ClocksScenario, overrides: Overrides) -> Sequence[int]:
    text = overrides.inputs.get("seed")
    if text is None:
        return range(overrides.seeds or scenario.seeds)
    if not text.isdecimal():
        raise ConfigError("--seed needs a whole number", got=text, expected="0 or more")
    return [int(text)]


def _cells(rows: Sequence[_Row]) -> list[str]:
    """Cells of a table row: means over seeds."""
    power_w = float(np.mean([row.outcome.power_w for row in rows]))
    saving = float(np.mean([row.saving_ratio for row in rows]))
    in_time = float(np.mean([row.outcome.attainment_ratio for row in rows]))
    p99 = float(np.mean([row.outcome.p99_normalised for row in rows]))
    changes = float(np.mean([row.outcome.changes for row in rows]))
    return [f"{power_w:.1f} W", f"{saving:.2f} x", f"{100 * in_time:.2f} %", f"{p99:.2f}", f"{changes:.0f}"]


def _view(scenario: ClocksScenario, rows: Sequence[_Row], names: Sequence[str]) -> list[Paragraph | ResultTable]:
    parts: list[Paragraph | ResultTable] = [
        paragraph((f"{scenario.name}: ", "bold"), f"15 models on {scenario.devices} emulated V100s")
    ]
    for load in scenario.loads:
        titles = ("scheme", "power a GPU", "saving", "in time", "p99 / SLO", "clock changes")
        table = ResultTable(titles, left=("scheme",))
        for name in names:
            mine = [
                row
                for row in rows
                if row.scheme == name and (row.case.rate_rps, row.case.slo_scale) == (load.rate_rps, load.slo_scale)
            ]
            table.add(name, *_cells(mine))
        parts += [
            paragraph(f"\n{load.rate_rps:g} requests a second, SLO {load.slo_scale:g} x the fastest latency"),
            table,
        ]
    about = "\n".join(f"{name}: {SCHEMES[name]}" for name in names)
    return [
        *parts,
        paragraph((f"\n{about}", "dim")),
        paragraph(("every number is simulated on an emulated GPU", "dim")),
    ]
