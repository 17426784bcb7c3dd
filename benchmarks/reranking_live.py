"""The live queue of a language model in virtual time, compared with the simulator on the same requests.

``LLMService`` runs with its forecaster and its slots, as in ``joulery serve``, in front of an engine whose tokens take
20 ms of an event loop's virtual time. So the order, the learning from ended answers, and interruptions are the live
ones; HTTP and llama.cpp are left out. The forecaster starts with only the mean length of five classes.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet

from benchmarks import Result, data_folder
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.serving.generation import (
    Dialect,
    EngineLoad,
    GenerationEvent,
    GenerationKind,
    GenerationRequest,
    TokenUsage,
)
from joulery.perf.lengths.remaining import LengthDistribution
from joulery.policies.ordering import Aging
from joulery.policies.reranking import Reranking
from joulery.runtime.llm.length_prediction import Forecaster, LengthScore
from joulery.runtime.llm.service import LLMService, LLMSettings
from joulery.sim.queues.interrupted_server import Interruptions, reranked
from joulery.sim.queues.single_server import fcfs

REQUESTS, SEEDS, LOAD = 3000, range(100, 104), 0.9
READ_S, TOKEN_S, RESUME_S, TOKENS_A_MESSAGE = 0.1, 0.02, 0.03, 16
BOOST_ANSWERS = 30.0
ORDERS = ("fcfs", "ssjf", "boost", "rerank")
VARIABILITY = {"Poisson": 1.0, "bursts (variability 3)": 3.0}
_MEAN_POINTS, _P99_APART, _P99_RATIO = 2.0, 0.05, 1.15
"""Largest distance from the simulator of the live mean, in points of the change, and of p99, over that of first come
first served; and the bar of p99."""


class Trace(NamedTuple):
    """Requests: their arrivals, the tokens of their answers, and the predicted scores, 0 (short) to 4."""

    arrival_s: FloatArray
    tokens: IntArray
    scores: FloatArray
    class_tokens: FloatArray
    lengths_of: dict[float, LengthDistribution]

    @property
    def mean_s(self) -> float:
        """Mean time of an answer."""
        return READ_S + TOKEN_S * float(self.tokens.mean())


class Played(NamedTuple):
    """One order on one trace: mean and p99 over those of first come first served, and interruptions a request."""

    mean_ratio: float
    p99_ratio: float
    interruptions_ratio: float


def run() -> Result:
    """Run the orders live, and first come first served and ``rerank`` in the simulator."""
    rows: list[list[str]] = []
    checks: list[tuple[str, bool | None]] = []
    figures: dict[str, object] = {}
    for name, cv in VARIABILITY.items():
        played: dict[str, list[Played]] = {}
        for seed in SEEDS:
            for order, one in _orders(_trace(cv, seed)).items():
                played.setdefault(order, []).append(one)
        rows += [[name, order, *_cells(each)] for order, each in played.items()]
        figures[name] = played
        live, theory = (np.array(played[f"rerank, {where}"]).mean(axis=0) for where in ("live", "simulated"))
        points, apart = 100 * abs(live[0] - theory[0]), abs(live[1] - theory[1])
        checks += [
            (f"{name}: rerank's mean is the simulator's within 2 points ({points:.1f})", points <= _MEAN_POINTS),
            (f"{name}: rerank's p99 is the simulator's within 0.05 x ({apart:.2f})", apart <= _P99_APART),
            (f"{name}: rerank's live p99 at most 1.15 x ({live[1]:.2f} x)", live[1] <= _P99_RATIO),
        ]
    return Result(
        title="The live queue in virtual time beside the simulator",
        columns=("arrivals", "order", "mean completion", "p99", "p99 of each trace", "interruptions a request"),
        rows=rows,
        checks=checks,
        notes=[
            f"LMSYS lengths and their two predictions; one slot, load {100 * LOAD:.0f} %; means of {len(SEEDS)} traces "
            f"of {REQUESTS} requests, seeds {SEEDS[0]} to {SEEDS[-1]}, over first come first served on the same trace.",
        ],
        figures=figures,
    )


def _orders(trace: Trace) -> dict[str, Played]:
    """Results of every order on one trace."""
    live = {order: _live(trace, order) for order in ORDERS}
    first_s, _ = live["fcfs"]
    found = {f"{order}, live": _played(took_s, first_s, pauses) for order, (took_s, pauses) in live.items()}
    simulated_first_s, took_s, pauses = _simulated(trace)
    return found | {"rerank, simulated": _played(took_s, simulated_first_s, pauses)}


def _trace(cv: float, seed: int) -> Trace:
    names = ["output_tokens", "pred_cls5", "pred_cls3"]
    table = pyarrow.parquet.read_table(data_folder("muserve") / "lmsys_vicuna13b_predictions.parquet", columns=names)
    tokens, five, three = (table[name].to_numpy() for name in names)
    scores = (five + 2.0 * three) / 2.0
    class_tokens = [float(tokens[np.round(scores) == each].mean()) for each in range(5)]
    lengths_of = {
        float(each): LengthDistribution.of(READ_S + TOKEN_S * tokens[scores == each]) for each in np.unique(scores)
    }
    rng = np.random.default_rng(seed)
    taken = rng.integers(0, len(tokens), REQUESTS)
    mean_s = READ_S + TOKEN_S * float(tokens.mean())
    gaps_s = rng.gamma(1 / cv**2, cv**2, REQUESTS) * mean_s / LOAD
    classes = np.maximum.accumulate(np.array(class_tokens))
    return Trace(np.cumsum(gaps_s), tokens[taken].astype(np.int64), scores[taken], classes, lengths_of)


def _simulated(trace: Trace) -> tuple[FloatArray, FloatArray, int]:
    """Completion times first come first served and under ``rerank``, and its interruptions."""
    service_s = READ_S + TOKEN_S * trace.tokens
    expected = [trace.lengths_of[float(score)] for score in trace.scores]
    interruptions = Interruptions(TOKENS_A_MESSAGE * TOKEN_S, RESUME_S)
    served, count = reranked(
        trace.arrival_s, service_s, expected, Reranking(), average_s=trace.mean_s, interruptions=interruptions
    )
    return fcfs(trace.arrival_s, service_s).sojourn_s, served.sojourn_s, count


def _live(trace: Trace, order: str) -> tuple[FloatArray, int]:
    """Completion times of the live service in virtual time, and how often an answer was interrupted."""
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    aging = {"ssjf": Aging(), "boost": Aging.boost(BOOST_ANSWERS * trace.mean_s)}.get(order)
    revised = Reranking() if order == "rerank" else None
    settings = LLMSettings(aging=aging, reranking=revised, queue=REQUESTS, deadline_s=1e9)
    forecaster = Forecaster("m", _Classes(trace.class_tokens))
    llm = LLMService("m", _Engine(), forecaster, settings, clock=lambda: selector.now_s)
    took_s = np.zeros(REQUESTS)

    async def one(number: int) -> None:
        body = {"messages": [], "n": int(trace.tokens[number])}
        prompt = f"{trace.scores[number]} request {number}"
        task, began_s = llm.accept(GenerationRequest("m", GenerationKind.CHAT, body, prompt)), selector.now_s
        async for _ in task.events():
            pass
        took_s[number] = selector.now_s - began_s

    async def play() -> None:
        async with asyncio.TaskGroup() as group:
            for number, at_s in enumerate(trace.arrival_s.tolist()):
                await asyncio.sleep(max(0.0, at_s - selector.now_s))
                group.create_task(one(number))

    try:
        loop.run_until_complete(play())
    finally:
        loop.close()
    if forecaster.failures:  # the service goes on without predictions, and the figures would be of another order
        raise RuntimeError(f"the predictor failed: {dict(forecaster.failures)}")
    return took_s, llm.slots.pauses


class _JumpingSelector(selectors.SelectSelector):
    """Selector that never waits: virtual time jumps to the next timer instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now_s += timeout or 0.0
        return []


class _Classes:
    """Predictor that reads the score from the beginning of the prompt."""

    def __init__(self, class_tokens: FloatArray) -> None:
        self.class_tokens = class_tokens

    def predict(self, prompt: str) -> LengthScore:
        return LengthScore(float(prompt.split()[0]))


class _Engine:
    """Engine that writes answers of the requested length, and pauses and continues as llama.cpp does."""

    name = variant = "virtual"
    dialect, ready, pauses = Dialect.PLAIN, True, True

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None

    async def load(self) -> EngineLoad | None:
        return None

    def cpu_s(self) -> float:
        return math.nan

    async def generate(
        self, request: GenerationRequest, priority: int | None, pause: Callable[[], bool] | None = None, /
    ) -> AsyncGenerator[GenerationEvent, None]:
        left = tokens = int(request.body["n"])
        await asyncio.sleep(READ_S)
        while left:
            made = min(TOKENS_A_MESSAGE, left)
            await asyncio.sleep(TOKEN_S * made)
            left -= made
            yield GenerationEvent({"choices": [{}]}, made)
            if left and pause is not None and pause():
                yield GenerationEvent({}, paused=True)
                await asyncio.sleep(RESUME_S)
        yield GenerationEvent({"choices": []}, 0, TokenUsage(1, tokens, reported=True))


def _played(took_s: FloatArray, first_s: FloatArray, pauses: int) -> Played:
    tail = float(np.quantile(took_s, 0.99) / np.quantile(first_s, 0.99))
    return Played(float(took_s.mean() / first_s.mean()), tail, pauses / REQUESTS)


def _cells(played: Sequence[Played]) -> list[str]:
    mean, tail, pauses = np.array(played).mean(axis=0)
    each = ", ".join(f"{one.p99_ratio:.2f}" for one in played)
    return [f"{100 * (mean - 1):+.1f} %", f"{tail:.2f} x", each, f"{pauses:.2f}"]
