"""Overhead of measuring a training step of BERT-base on CPU: the sampler; the profiler and the hooks of a tracer."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks import NotRun, Result
from benchmarks.sampler import half_interval, powercap, sampling
from joulery.domain.trace.tracing import Steps

ROUNDS = int(os.environ.get("JOULERY_BENCH_PAIRS", "12"))
BATCH, TOKENS, VOCABULARY = 4, 128, 30_522
NOISY = 3
"""Factor on the number of rounds where the number of page faults varies."""
TINY_STEPS = 20
"""Steps of the tiny model timed together: one is too short for the clock."""
RUN_STEPS = 100
"""Length of the run in which the default schedule records some steps."""
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt."""
Cost = Callable[[], AbstractContextManager[Callable[[], None]]]
"""Makes a context manager that adds the cost; it yields a function to call when the step is done."""


@dataclass(frozen=True, slots=True)
class Took:
    """Cost of a step itself and of the work around it: CPU and wall seconds, page faults."""

    cpu_s: float
    wall_s: float
    around_cpu_s: float
    around_wall_s: float
    faults: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """Relative extra cost of a condition, round by round."""

    cpu: list[float]
    wall: list[float]

    @classmethod
    def of(cls, took: list[Took], plain: list[Took], *, around: bool = False) -> Ratio:
        """Extra cost of steps over the plain steps of the same rounds; ``around`` includes the work around them."""
        pairs = list(zip(took, plain, strict=True))
        return cls(
            [(one.cpu_s + around * one.around_cpu_s) / other.cpu_s - 1 for one, other in pairs],
            [(one.wall_s + around * one.around_wall_s) / other.wall_s - 1 for one, other in pairs],
        )

    def mixed(self, other: Ratio, weight: float) -> Ratio:
        """Extra cost of a run in which a share ``weight`` of the steps costs this, and the rest the other."""

        def mix(ones: list[float], others: list[float]) -> list[float]:
            return [weight * one + (1 - weight) * two for one, two in zip(ones, others, strict=True)]

        return Ratio(mix(self.cpu, other.cpu), mix(self.wall, other.wall))

    def cells(self) -> list[str]:
        """CPU and wall time, each with its interval, and the upper end of the first."""
        shown = [f"{statistics.fmean(v):+.2%} ± {half_interval(v):.2%}" for v in (self.cpu, self.wall)]
        return [*shown, f"{self.bound():+.2%}"]

    def bound(self) -> float:
        """Upper end of the interval of the CPU time."""
        return statistics.fmean(self.cpu) + half_interval(self.cpu)


def run() -> Result:
    """Measure in a process of its own, so that its memory settings do not affect other benchmarks."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured).result()


def measured() -> Result:
    """Measure all figures; needs PyTorch and transformers."""
    title = "What measuring costs a training step"
    columns = ["what", "CPU time", "time", "CPU time, upper end"]
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotRun(f"{' and '.join(missing)} not installed (pip install)")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    base = training_step(12, 768, VOCABULARY)
    as_it_is = rounds(base, {"plain": nothing, "recorded": recorded}, NOISY * ROUNDS)
    keep_memory()
    with tempfile.TemporaryDirectory(prefix="joulery-bench-") as folder, stopped_sampler(Path(folder)) as sampler:
        costs = {"plain": nothing, "sampler": lambda: awake(sampler), "recorded": recorded, "idle": idle}
        kept = rounds(base, costs, ROUNDS)
    del base
    big, figures = _base(kept, as_it_is)
    small = _tiny()
    rows = [[what, *ratio.cells()] for what, ratio in (big | small).items()] + figures
    checks = [
        ("sampler at most 1 %, upper end", big["sampler every 4 ms, BERT-base"].bound() <= 0.01),
        ("profiler and hooks at most 3 % of a recorded step of BERT-base, upper end", big[RECORDED].bound() <= 0.03),
        ("with starting, stopping and writing, upper end", big[WRITTEN].bound() <= 0.03),
        ("with memory as it is, upper end", big[AS_IT_IS].bound() <= 0.03),
        ("profiler and hooks at most 15 % of the tiny model's steps, upper end", small[TINY_RECORDED].bound() <= 0.15),
    ]
    faults = {name: statistics.median(one.faults for one in took) for name, took in as_it_is.items()}
    return Result(title, columns, rows, _notes(faults), checks)


def _notes(faults: Mapping[str, float]) -> list[str]:
    """Notes on the method and on the effect of memory."""
    schedule = Steps()
    return [
        f"`BertForPreTraining` of transformers, random weights, training mode, batch {BATCH}, {TOKENS} tokens, AdamW, "
        f"one thread. {ROUNDS} rounds in one process (`JOULERY_BENCH_PAIRS`); in each, one step under every condition, "
        "in random order, against the plain step of the same round. Figures are mean and 95 % interval of the "
        "ratio, less one; CPU time is that of the process. The sampler reads four counters every 4 ms, in a process of "
        "its own, stopped and let go in turn. *A recorded step* is the step itself, under the profiler and between "
        "hooks; *starting, stopping and writing* is what the recorder does around it, here once for each step. The "
        f"default schedule (skip={schedule.skip}, warmup={schedule.warmup}, active={schedule.active}, "
        f"repeat={schedule.repeat}) records {recorded_steps()} of {RUN_STEPS} steps and leaves idle hooks on the "
        "others: computed for BERT-base, measured for the tiny model (2 layers of width 128, its steps timed "
        f"{TINY_STEPS} together).",
        "A step of BERT-base takes and returns a gigabyte of memory. In all rows but two glibc keeps what it got "
        "(mallopt), for the plain step too, so that they show the work of sampler and tracer alone. In the rows "
        f"*memory as it is*, {NOISY} times as many rounds, it returns memory to the kernel and asks for it again, page "
        "by page; how much depends on the holes "
        f"that earlier steps left. Page faults, median: {faults['plain']:,.0f} in a plain step, "
        f"{faults['recorded']:,.0f} in a recorded one, where the profiler's records lie among the tensors.",
    ]


RECORDED = "a recorded step, BERT-base"
WRITTEN = "a recorded step with starting, stopping and writing, BERT-base"
AS_IT_IS = "a recorded step, BERT-base, memory as it is"
TINY_RECORDED = "a recorded step, tiny model"


def _base(
    kept: Mapping[str, list[Took]], as_it_is: Mapping[str, list[Took]]
) -> tuple[dict[str, Ratio], list[list[str]]]:
    """The ratios of BERT-base, and rows with the times of a plain step and around a recorded one."""
    plain = kept["plain"]
    whole, waiting = Ratio.of(kept["recorded"], plain, around=True), Ratio.of(kept["idle"], plain)
    ratios = {
        "sampler every 4 ms, BERT-base": Ratio.of(kept["sampler"], plain),
        RECORDED: Ratio.of(kept["recorded"], plain),
        WRITTEN: whole,
        "idle hooks, BERT-base": waiting,
        "a run in the default schedule, BERT-base (computed)": whole.mixed(waiting, recorded_steps() / RUN_STEPS),
        AS_IT_IS: Ratio.of(as_it_is["recorded"], as_it_is["plain"]),
        f"{WRITTEN}, memory as it is": Ratio.of(as_it_is["recorded"], as_it_is["plain"], around=True),
    }
    step_ms = [1e3 * statistics.fmean(getattr(t, name) for t in plain) for name in ("cpu_s", "wall_s")]
    around_ms = [
        1e3 * statistics.fmean(getattr(t, name) for t in kept["recorded"]) for name in ("around_cpu_s", "around_wall_s")
    ]
    return ratios, [
        ["a plain step, BERT-base", *(f"{ms:,.0f} ms" for ms in step_ms), ""],
        ["starting, stopping and writing a recorded step, BERT-base", *(f"{ms:.1f} ms" for ms in around_ms), ""],
    ]


def _tiny() -> dict[str, Ratio]:
    """The ratios of the tiny model."""
    step = training_step(2, 128, 1000)
    many = rounds(repeated(step, TINY_STEPS), {"plain": nothing, "recorded": recorded}, ROUNDS)
    run = rounds(repeated(step, RUN_STEPS), {"plain": nothing, "scheduled": scheduled}, ROUNDS)
    return {
        TINY_RECORDED: Ratio.of(many["recorded"], many["plain"]),
        "a recorded step with starting, stopping and writing, tiny model": Ratio.of(
            many["recorded"], many["plain"], around=True
        ),
        f"{RUN_STEPS} steps in the default schedule, tiny model": Ratio.of(run["scheduled"], run["plain"], around=True),
    }


def recorded_steps() -> int:
    """Number of steps of a run that the default schedule records."""
    steps = Steps()
    return steps.active * min(steps.repeat, RUN_STEPS // (steps.skip + steps.warmup + steps.active))


def keep_memory() -> None:
    """Make glibc keep freed memory, so that pages are not returned to the kernel and requested again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def training_step(
    layers: int, hidden: int, vocabulary: int, *, batch: int = BATCH, place: str = "cpu", attention: str = "eager"
) -> Callable[[], None]:
    """A training step of a BERT with random weights.

    Args:
        layers, hidden, vocabulary: Sizes of the model.
        batch: Sequences in a step, of 128 tokens.
        place: Device of PyTorch.
        attention: ``eager`` or ``sdpa``.
    """
    import torch
    from transformers import BertConfig, BertForPreTraining

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    config = BertConfig(**sizes, num_attention_heads=hidden // 64, vocab_size=vocabulary)
    model = BertForPreTraining._from_config(config, attn_implementation=attention).to(place).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens, labels = (torch.randint(0, vocabulary, (batch, TOKENS), device=place) for _ in range(2))
    following = torch.zeros(batch, dtype=torch.long, device=place)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels, next_sentence_label=following).loss.backward()
        optimizer.step()

    return step


def repeated(step: Callable[[], None], times: int) -> Callable[[], None]:
    """A function that runs ``times`` steps."""

    def steps() -> None:
        for _ in range(times):
            step()

    return steps


def rounds(step: Callable[[], None], costs: Mapping[str, Cost], count: int) -> dict[str, list[Took]]:
    """Time a step under each condition, round by round in random order; the first round does not count."""
    found: dict[str, list[Took]] = {name: [] for name in costs}
    for number in range(count + 1):
        for name in random.sample(list(costs), len(costs)):
            took = _timed(step, costs[name])
            if number:
                found[name].append(took)
    return found


def _timed(step: Callable[[], None], cost: Cost) -> Took:
    import resource

    def now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    entering = now()
    with cost() as finish:
        faults, begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, now()
        step()
        end, faulted = now(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        finish()
        left = now()
    cpu_s, wall_s = (
        (end[clock] - begin[clock], begin[clock] - entering[clock] + left[clock] - end[clock]) for clock in (0, 1)
    )
    return Took(cpu_s[0], wall_s[0], cpu_s[1], wall_s[1], faulted - faults)


def nothing() -> AbstractContextManager[Callable[[], None]]:
    """Condition without a cost: the plain step."""
    return nullcontext(lambda: None)


def recorded() -> AbstractContextManager[Callable[[], None]]:
    """Condition in which every step is recorded; the yielded function writes the trace."""
    return recording(Steps(skip=0, warmup=0, active=2**62, repeat=1))


def idle() -> AbstractContextManager[Callable[[], None]]:
    """Condition with hooks in which no step is recorded."""
    return recording(Steps(skip=2**62))


def scheduled() -> AbstractContextManager[Callable[[], None]]:
    """Condition with the default schedule of ``joulery measure``."""
    return recording(Steps())


@contextmanager
def recording(steps: Steps) -> Iterator[Callable[[], None]]:
    """Install hooks and record some steps in the block; the yielded function writes what is not written yet."""
    from joulery.adapters.tracers.inject.torch_recorder import TorchRecorder

    with tempfile.TemporaryDirectory(prefix="joulery-bench-") as folder:
        recorder = TorchRecorder(Path(folder), steps.skip, steps.warmup, steps.active, steps.repeat)
        recorder.install()
        if not steps.skip:
            recorder.begin()
        try:
            yield recorder.finish
        finally:
            recorder.finish()


@contextmanager
def stopped_sampler(root: Path) -> Iterator[int]:
    """Start a sampler and stop it (SIGSTOP); yields its process id."""
    with sampling(root, powercap(root / "powercap")) as (sampler, _):
        os.kill(sampler.pid, signal.SIGSTOP)
        try:
            yield sampler.pid
        finally:
            os.kill(sampler.pid, signal.SIGCONT)


@contextmanager
def awake(sampler: int) -> Iterator[Callable[[], None]]:
    """Let a stopped sampler run in the block."""
    os.kill(sampler, signal.SIGCONT)
    try:
        yield lambda: None
    finally:
        os.kill(sampler, signal.SIGSTOP)
