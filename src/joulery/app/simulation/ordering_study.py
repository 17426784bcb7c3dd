"""``kind: ordering``: simulate orders of serving with the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from joulery.app.simulation import BLANK, Overrides, Paragraph, Progress, ResultTable, ScenarioResult, paragraph
from joulery.config.scenario import OrderingScenario
from joulery.sim.core.comparison import paired
from joulery.sim.core.streams import Streams
from joulery.sim.queues.ordering_study import (
    ORDERS,
    Lengths,
    OrderingSetting,
    OrderOutcome,
    simulate_orders,
    synthetic_lengths,
)
from joulery.store.columns import read_parquet_columns

ACCEPTS = frozenset({"requests"})
_COARSE_CLASSES = 3

Found = Mapping[str, Sequence[OrderOutcome]]


def run(scenario: OrderingScenario, overrides: Overrides, progress: Progress) -> ScenarioResult:
    """Serve every seed's requests in every order.

    Raises:
        ConfigError: No such order.
        DataError: The log cannot be used.
    """
    names = overrides.policies or scenario.policies
    setting = OrderingSetting(
        constant_s=scenario.constant_s,
        per_token_s=scenario.per_token_s,
        load_ratio=scenario.load_ratio,
        cv=scenario.cv,
        requests=scenario.count,
    )
    file = overrides.path("requests") or scenario.requests
    recorded = None if file is None else _recorded(file)
    found: dict[str, list[OrderOutcome]] = {name: [] for name in names}
    seeds = overrides.seeds or scenario.seeds
    for seed in range(seeds):
        streams = Streams(seed)
        lengths = recorded if recorded is not None else synthetic_lengths(streams)
        for name, outcome in simulate_orders(names, lengths, setting, streams).items():
            found[name].append(outcome)
        progress(seed + 1, seeds)
    return ScenarioResult(_document(scenario, file, found), _view(scenario, file, found))


def _recorded(file: Path) -> Lengths:
    """Answer lengths of a log with the predicted class of each, paired with a coarser class where it is predicted."""
    columns = read_parquet_columns(file, ("output_tokens", "pred_cls5"), optional=("pred_cls3",))
    predicted = columns["pred_cls5"].astype(np.int64)
    if "pred_cls3" in columns:
        predicted = predicted * _COARSE_CLASSES + columns["pred_cls3"].astype(np.int64)
    return Lengths(columns["output_tokens"], predicted)


def _document(scenario: OrderingScenario, file: Path | None, found: Found) -> dict[str, Any]:
    first = next(iter(found))
    return {
        "scenario": scenario.name,
        "kind": scenario.kind,
        "quality": "simulated",
        "requests": "made up" if file is None else file.name,
        "results": [
            {"policy": name, "seeds": len(rows), **_means(rows), "against": first, **_changes(rows, found[first])}
            for name, rows in found.items()
        ],
    }


def _means(rows: Sequence[OrderOutcome]) -> dict[str, float]:
    return {key: float(np.mean([asdict(row)[key] for row in rows])) for key in asdict(rows[0])}


def _changes(rows: Sequence[OrderOutcome], first: Sequence[OrderOutcome]) -> dict[str, Any]:
    base_s = float(np.mean([row.mean_jct_s for row in first]))
    change = paired([row.mean_jct_s / base_s for row in rows], [row.mean_jct_s / base_s for row in first])
    return {"mean_jct_change": change.as_dict()}


def _view(scenario: OrderingScenario, file: Path | None, found: Found) -> list[Paragraph | ResultTable]:
    first = _means(next(iter(found.values())))
    seeds = len(next(iter(found.values())))
    what = "made-up requests" if file is None else f"requests of {file.name}"
    heading = paragraph(
        (f"{scenario.name}: ", "bold"),
        f"{what}, load {100 * scenario.load_ratio:g} %, {seeds} seed{'s' if seeds > 1 else ''} of {scenario.count}",
    )
    titles = ("order", "mean JCT", "", "p99 JCT", "", "longest wait", "", "throughput")
    table = ResultTable(titles, left=("order",))
    for name, rows in found.items():
        mean = _means(rows)
        cells: list[str] = []
        for key in ("mean_jct_s", "p99_jct_s", "max_wait_s"):
            cells += [f"{mean[key]:.4g} s", f"{100 * (mean[key] / first[key] - 1):+.1f} %" if mean != first else ""]
        table.add(name, *cells, f"{mean['throughput_rps']:.4g} /s")
    about = "\n".join(f"{name}: {ORDERS[name]}" for name in found)
    return [heading, BLANK, table, paragraph((f"\n{about}", "dim")), paragraph(("every number is simulated", "dim"))]
