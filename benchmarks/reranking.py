"""Revising the order while answers are written: mean and p99 against first come first served and the other orders.

Lengths are real: those of the LMSYS log with its two predictions, and those that ML.ENERGY measured, by task. The
latter have no predictions; these are generated: the class of the true length, blurred until the stated share of pairs
is in order. One server at 90 % load; resuming an interrupted answer costs 30 ms (measured on llama.cpp: 10 to 76 ms).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pyarrow.parquet

from benchmarks import Result, data_folder
from joulery.domain.arrays import FloatArray
from joulery.perf.lengths.classes import QUANTILES
from joulery.policies.ordering import Aging
from joulery.sim.core.streams import Streams
from joulery.sim.queues.interrupted_server import Interruptions
from joulery.sim.queues.ordering_study import Lengths, OrderingSetting, OrderOutcome, simulate_orders

SEEDS = range(100, 106)
"""Those of check 6 of ``python -m benchmarks muserve``."""
ORDERS = ("fcfs", "ssjf", "boost", "rerank-waiting", "rerank")
CASES = (
    ("LMSYS, its predictions", "", 1.0),
    ("LMSYS, bursts (variability 3)", "", 3.0),
    ("ML.ENERGY, chat", "lm-arena-chat", 1.0),
    ("ML.ENERGY, reasoning", "gpqa", 1.0),
    ("ML.ENERGY, code completion", "sourcegraph-fim", 1.0),
)
"""Name, task of the measured lengths (none: the log's), and variability of the gaps between arrivals."""
BLUR = 0.25
"""Noise on the rank of a length before it is made a class: three of four pairs stay in order."""
_MEAN_RATIO, _P99_RATIO = 0.71, 1.15
_DRAWN = 30_000


def _recorded() -> Lengths:
    """Lengths of the LMSYS log; each pair of its predicted classes, of five and of three, is one class."""
    names = ["output_tokens", "pred_cls5", "pred_cls3"]
    table = pyarrow.parquet.read_table(data_folder("muserve") / "lmsys_vicuna13b_predictions.parquet", columns=names)
    tokens, five, three = (table[name].to_numpy() for name in names)
    return Lengths(tokens.astype(np.float64), 3 * five.astype(np.int64) + three.astype(np.int64))


def _measured(histograms: Mapping[str, Mapping[str, list[float]]], task: str, seed: int) -> Lengths:
    """Answers of all models to a task, equally many of each, and generated predictions."""
    rng = np.random.default_rng(seed)
    drawn: list[FloatArray] = []
    models = [key for key in histograms if key.endswith(f"|{task}")]
    for key in models:
        edges, counts = np.array(histograms[key]["bins"]), np.array(histograms[key]["counts"], np.float64)
        row = rng.choice(len(counts), _DRAWN // len(models), p=counts / counts.sum())
        drawn.append(np.maximum(np.round(rng.uniform(edges[row], edges[row + 1])), 1.0))
    tokens = rng.permutation(np.concatenate(drawn))
    blurred = _ranks(_ranks(tokens) + rng.normal(0.0, BLUR, len(tokens)))
    return Lengths(tokens, np.searchsorted(QUANTILES, blurred, "right").astype(np.int64))


def _ranks(values: FloatArray) -> FloatArray:
    return np.asarray((np.argsort(np.argsort(values)) + 0.5) / len(values), np.float64)


def _in_order(lengths: Lengths) -> float:
    """Share of pairs of different length that the predictions rank right, a tie counting half; of 20,000 drawn."""
    first, second = np.random.default_rng(0).integers(0, len(lengths.tokens), (2, 20_000))
    true = np.sign(lengths.tokens[first] - lengths.tokens[second])
    predicted_order = np.sign(lengths.predicted[first] - lengths.predicted[second])
    return float(np.mean(((true * predicted_order)[true != 0] + 1) / 2))


def _setting(lengths: Lengths, cv: float) -> OrderingSetting:
    """Setting with boost as documented, 30 mean answers, and ten checks of running answers in a mean answer."""
    mean_s = 0.1 + 0.02 * float(lengths.tokens.mean())

    return OrderingSetting(cv=cv, boost=Aging.boost(30.0 * mean_s), interruptions=Interruptions(mean_s / 10.0))


def run() -> Result:
    """Simulate every order on every kind of lengths."""
    histograms = json.loads((data_folder("llm") / "output_lengths.json").read_text())
    recorded = _recorded()
    rows: list[list[str]] = []
    checks: list[tuple[str, bool | None]] = []
    figures: dict[str, object] = {}
    for name, task, cv in CASES:
        played: list[dict[str, OrderOutcome]] = []
        pairs: list[float] = []
        for seed in SEEDS:
            lengths = _measured(histograms, task, seed) if task else recorded
            pairs.append(_in_order(lengths))
            played.append(simulate_orders(ORDERS, lengths, _setting(lengths, cv), Streams(seed)))
        found = {order: _against_first(played, order) for order in ORDERS[1:]}
        figures[name] = found
        for order, one in found.items():
            rows.append([name, f"{100 * float(np.mean(pairs)):.0f} %", order, *_cells(one)])
        mean, tail = found["rerank"]["mean_ratio"], found["rerank"]["p99_ratio"]
        better = mean <= found["ssjf"]["mean_ratio"] and tail <= found["ssjf"]["p99_ratio"]
        checks.append((f"{name}: p99 at most 1.15 x first come, first served ({tail:.2f} x)", tail <= _P99_RATIO))
        checks.append((f"{name}: mean and p99 no worse than ssjf ({100 * (mean - 1):+.1f} %)", better))
        if not task and cv == 1.0:
            checks.append((f"{name}: mean at least 29 % below first come, first served", mean <= _MEAN_RATIO))
    return Result(
        title="The order revised while answers are written",
        columns=("lengths", "pairs in order", "order", "mean completion", "p99", "longest wait", "interruptions"),
        rows=rows,
        checks=checks,
        notes=[
            f"Simulated: one server, load 90 %, 20,000 requests, seeds {SEEDS[0]} to {SEEDS[-1]}; ± is the standard "
            "error over the seeds. Predictions of the ML.ENERGY lengths are made up (the class of the true length, "
            "blurred). `rerank` interrupts running answers, `rerank-waiting` is the same order before an engine that "
            "cannot; `boost` has a decay of 30 mean answers.",
        ],
        figures=figures,
    )


def _against_first(played: list[dict[str, OrderOutcome]], order: str) -> dict[str, float]:
    mean = np.array([each[order].mean_jct_s / each["fcfs"].mean_jct_s for each in played])
    tail = np.array([each[order].p99_jct_s / each["fcfs"].p99_jct_s for each in played])
    wait = np.array([each[order].max_wait_s / each["fcfs"].max_wait_s for each in played])
    seeds = np.sqrt(len(played))
    return {
        "mean_ratio": float(mean.mean()),
        "mean_error": float(mean.std(ddof=1) / seeds),
        "p99_ratio": float(tail.mean()),
        "p99_error": float(tail.std(ddof=1) / seeds),
        "longest_wait_ratio": float(wait.mean()),
        "interruptions": float(np.mean([each[order].interruptions_ratio for each in played])),
    }


def _cells(one: Mapping[str, float]) -> list[str]:
    return [
        f"{100 * (one['mean_ratio'] - 1):+.1f} ± {100 * one['mean_error']:.1f} %",
        f"{one['p99_ratio']:.2f} ± {one['p99_error']:.2f} x",
        f"{one['longest_wait_ratio']:.2f} x",
        f"{one['interruptions']:.2f} a request",
    ]
