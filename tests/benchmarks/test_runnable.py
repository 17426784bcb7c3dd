"""Benchmarks follow the names of what they measure: each can be imported, and the live queue in virtual time runs."""

import importlib
from pathlib import Path

import numpy as np
import pytest

import benchmarks
from benchmarks import reranking_live
from joulery.perf.lengths.remaining import LengthDistribution

MODULES = sorted(file.stem for file in Path(benchmarks.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}")


def test_the_live_queue_in_virtual_time_uses_its_predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reranking_live, "REQUESTS", 40)
    tokens = np.tile([20, 400], 20)
    scores = np.where(tokens > 100, 4.0, 0.0)
    served_s = reranking_live.READ_S + reranking_live.TOKEN_S * tokens
    lengths = {score: LengthDistribution.of(served_s[scores == score]) for score in (0.0, 4.0)}
    arrivals = np.linspace(0.0, 60.0, 40)
    trace = reranking_live.Trace(arrivals, tokens, scores, np.array([20.0, 100.0, 200.0, 300.0, 400.0]), lengths)
    first, ranked = (reranking_live._live(trace, order)[0] for order in ("fcfs", "rerank"))
    assert ranked.mean() < 0.9 * first.mean(), "short answers go first"
