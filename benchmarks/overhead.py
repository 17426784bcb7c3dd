"""What measuring costs a training step of BERT-base on CPU: the sampler; the profiler and the hooks of a tracer."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks import Result
from benchmarks.sampler import half_interval, powercap, sampling

PAIRS = int(os.environ.get("JOULERY_BENCH_PAIRS", "12"))
BATCH, TOKENS, VOCABULARY = 4, 128, 30_522
TINY_STEPS = 20
"""Steps of the tiny model timed together: one is too short for the clock."""
NOTE = (
    f"`BertForPreTraining` of transformers, random weights, training mode, batch {BATCH}, {TOKENS} tokens, AdamW, one "
    f"thread; {PAIRS} pairs, a step with beside a step without, the order of each pair drawn by lot "
    "(`JOULERY_BENCH_PAIRS` for more). Figures are mean and 95 % interval of the ratio of the two, less one; CPU time "
    "is that of the process. The sampler reads four counters every 4 ms and is stopped and let go in turn. With the "
    "tracer, the step runs between hooks and under the profiler, and starting, stopping and writing the trace count "
    "too; steps outside the schedule run with idle hooks alone. The tiny model has 2 layers of width 128; it is timed "
    f"{TINY_STEPS} steps at a time, without the writing of the trace in the first line and with it in the second."
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much more something costs, pair by pair."""

    cpu: list[float]
    wall: list[float]

    def cells(self) -> list[str]:
        """CPU and wall time, each with its interval."""
        return [f"{statistics.fmean(v):+.2%} ± {half_interval(v):.2%}" for v in (self.cpu, self.wall)]

    def bound(self) -> float:
        """Upper end of the interval of the CPU time."""
        return statistics.fmean(self.cpu) + half_interval(self.cpu)


def run() -> Result:
    """Measure all of it, where PyTorch and transformers are installed."""
    title, columns = "What measuring costs a training step", ["what", "CPU time", "time"]
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return Result(title, columns, [], [f"Not measured: {' and '.join(missing)} not installed (pip install)."])
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    base, tiny = _step(12, 768, VOCABULARY), _step(2, 128, 1000)
    with tempfile.TemporaryDirectory(prefix="joulery-bench-") as folder, stopped_sampler(Path(folder)) as sampler:
        sampled = compared(base, lambda: awake(sampler))
    traced = compared(base, recorded)
    idle = compared(base, lambda: recorded(skip=2**62))
    many = _repeated(tiny, TINY_STEPS)
    short = compared(many, lambda: recorded(timed=False))
    whole = compared(many, recorded)
    rows = [
        ["sampler every 4 ms, beside BERT-base", *sampled.cells()],
        ["profiler and hooks on every step, BERT-base", *traced.cells()],
        ["idle hooks, BERT-base", *idle.cells()],
        ["profiler and hooks, a tiny model, the steps alone", *short.cells()],
        ["profiler and hooks, a tiny model, writing the trace too", *whole.cells()],
    ]
    checks = [
        ("sampler at most 1 %, upper end of the interval", sampled.bound() <= 0.01),
        ("profiler and hooks at most 3 % of BERT-base, upper end", traced.bound() <= 0.03),
        ("profiler and hooks at most 15 % of the tiny model's steps, upper end", short.bound() <= 0.15),
    ]
    return Result(title, columns, rows, [NOTE], checks)


def _step(layers: int, hidden: int, vocabulary: int) -> Callable[[], None]:
    """A training step of a BERT."""
    import torch
    from transformers import BertConfig, BertForPreTraining

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    config = BertConfig(**sizes, num_attention_heads=hidden // 64, vocab_size=vocabulary)
    model = BertForPreTraining._from_config(config, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens, labels = (torch.randint(0, vocabulary, (BATCH, TOKENS)) for _ in range(2))
    following = torch.zeros(BATCH, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels, next_sentence_label=following).loss.backward()
        optimizer.step()

    return step


def _repeated(step: Callable[[], None], times: int) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(times):
            step()

    return steps


def compared(step: Callable[[], None], cost: Callable[[], AbstractContextManager[Callable[[], None]]]) -> Ratio:
    """A step with and without something, pair by pair.

    Args:
        step: What is timed.
        cost: Enters what costs; answers what to call when the step is done, timed too.
    """
    step()
    found = Ratio([], [])
    for _ in range(PAIRS):
        took: dict[bool, tuple[float, float]] = {}
        for with_it in random.sample([True, False], 2):
            took[with_it] = _timed(step, cost if with_it else lambda: nullcontext(lambda: None))
        found.cpu.append(took[True][0] / took[False][0] - 1)
        found.wall.append(took[True][1] / took[False][1] - 1)
    return found


def _timed(
    step: Callable[[], None], cost: Callable[[], AbstractContextManager[Callable[[], None]]]
) -> tuple[float, float]:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    with cost() as finish:
        step()
        finish()
        return time.process_time() - cpu_s, time.perf_counter() - wall_s


@contextmanager
def recorded(*, skip: int = 0, timed: bool = True) -> Iterator[Callable[[], None]]:
    """Everything below is recorded; calling what it answers writes the trace."""
    from joulery.adapters.tracers.inject.torch_recorder import Recorder

    with tempfile.TemporaryDirectory(prefix="joulery-bench-") as folder:
        recorder = Recorder(Path(folder), skip, 0, 2**62, 1)
        recorder.install()
        recorder.begin()
        try:
            yield recorder.finish if timed else (lambda: None)
        finally:
            recorder.finish()


@contextmanager
def stopped_sampler(root: Path) -> Iterator[int]:
    """A sampler that sleeps; its process."""
    with sampling(root, powercap(root / "powercap")) as (sampler, _):
        os.kill(sampler.pid, signal.SIGSTOP)
        try:
            yield sampler.pid
        finally:
            os.kill(sampler.pid, signal.SIGCONT)


@contextmanager
def awake(sampler: int) -> Iterator[Callable[[], None]]:
    """A sleeping sampler reads below."""
    os.kill(sampler, signal.SIGCONT)
    try:
        yield lambda: None
    finally:
        os.kill(sampler, signal.SIGSTOP)
