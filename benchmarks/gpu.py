"""Smaragdine on an NVIDIA GPU: totals against four other readings, kernels, ranks, parts, anatomy and overhead.

These are the lines of the fourteenth check of docs/papers/smaragdine.md. The result of each part is printed on standard
error at once, with the seconds that the part took; ``JOULERY_BENCH_GPU=parts,totals`` runs only those parts.
``JOULERY_BENCH_REHEARSE=1`` runs every line on the CPU with a small model and any installed ``pynvml``: it shows that
the command works, and no bar counts as run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import joulery
from benchmarks import NotRun, Result, chosen
from benchmarks.overhead import ROUNDS, Ratio, nothing, recording, repeated, rounds, training_step
from benchmarks.sampler import half_interval
from joulery.accounting.steps import energy_by_bin, power_steps
from joulery.adapters.nvidia import open_driver
from joulery.adapters.tracers.kineto.names import kernel_time_ns, name_events
from joulery.adapters.tracers.kineto.reader import read_columns
from joulery.domain.errors import CapabilityError
from joulery.domain.trace.events import UNNAMED
from joulery.domain.trace.tracing import Steps
from joulery.store.run.directory import open_run
from joulery.store.run.readings import load_readings
from reproduce.smaragdine import RangeCheck, passes, shares

INSTANT_PERIOD_S = 0.02
SMI_PERIOD_MS = 100
RANKS = Path(__file__).with_name("_gpu_ranks.py")


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of the benchmark: devices, model and lengths.

    Attributes:
        place: Device of PyTorch.
        device: The device whose joules are attributed to its operations.
        layers, hidden, batch: Sizes of the model and its steps.
        steps: Steps of a run, ten of which are recorded.
        seconds: Seconds over which the totals are compared.
    """

    place: str = "cuda:0"
    device: str = "gpu:0"
    layers: int = 12
    hidden: int = 768
    batch: int = 32
    steps: int = 100
    seconds: float = 20.0

    @property
    def schedule(self) -> Steps:
        """A schedule that records ten steps in the middle of a run."""
        return Steps(skip=self.steps // 2 - 5, warmup=2, active=10, repeat=1)


REHEARSAL = Plan("cpu", "cpu:0", layers=3, hidden=128, batch=2, steps=20, seconds=2.0)


@dataclass(frozen=True, slots=True)
class Totals:
    """Joules of one board over the same seconds, by reader; None for a reader that is not available."""

    seconds: float
    joulery_j: float
    counter_j: float
    instant_j: float | None
    zeus_j: float | None
    smi_j: float | None = None


def run() -> Result:
    """Measure the chosen parts, on a GPU that PyTorch can use."""
    plan = REHEARSAL if os.environ.get("JOULERY_BENCH_REHEARSE") else Plan()
    title = "Smaragdine on a GPU" + (" (a rehearsal on the CPU: its figures mean nothing)" if plan is REHEARSAL else "")
    wanted = chosen("JOULERY_BENCH_GPU", PARTS)
    reason = missing(plan)
    if reason:
        raise NotRun(reason)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    lines = [line for part in wanted for line in reported(part, partial(PARTS[part], plan))]
    rows = [[line.name, f"{line.value:.4g}", f"{line.low:g} to {line.high:g}"] for line in lines]
    checks = [(line.name, None if plan is REHEARSAL else line.holds) for line in lines]
    left_out = [(f"part {part}", None) for part in PARTS if part not in wanted]
    return Result(title, ["what", "figure", "bar"], rows, [_note(plan)], [*checks, *left_out])


def reported(part: str, measure: Callable[[], list[RangeCheck]]) -> list[RangeCheck]:
    """Measure a part and print its lines on standard error at once, so that an interrupted run shows them too."""
    print(f"gpu: {part} …", file=sys.stderr, flush=True)
    start = time.monotonic()
    lines = measure()
    print(f"gpu: {part} took {time.monotonic() - start:.1f} s", file=sys.stderr)
    for line in lines:
        print(f"  {line.name}: {line.value:.4g} ({line.low:g} to {line.high:g})", file=sys.stderr)
    sys.stderr.flush()
    return lines


@cache
def trained(plan: Plan) -> Callable[[], None]:
    """A training step of the model after its warm-up, shared by the parts that train the model."""
    step = settled(
        training_step(plan.layers, plan.hidden, 30_522, batch=plan.batch, place=plan.place, attention="sdpa")
    )
    for _ in range(3):
        step()
    return step


def _note(plan: Plan) -> str:
    zeus = "" if importlib.util.find_spec("zeus") else " ZeusMonitor was not asked: zeus is not installed."
    return (
        f"`BertForPreTraining`, random weights, sdpa, {plan.layers} layers of {plan.hidden}, batch {plan.batch}, 128 "
        f"tokens, AdamW. Totals over {plan.seconds:g} s of steps, as ratios of joulery's joules to those of another "
        f"reader; kernels over 10 recorded steps; anatomy of 10 of {plan.steps} steps; overhead is the upper end of "
        f"the 95 % interval of time, runs of {plan.steps} steps with the profiler on 10 against runs without, in turn."
        f"{zeus}"
    )


def missing(plan: Plan) -> str:
    """The reason that nothing can be measured here; empty if measuring is possible."""
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed (pip install)"
    torch = importlib.import_module("torch")
    if plan.place.startswith("cuda") and not torch.cuda.is_available():
        return "no GPU that PyTorch can use here"
    try:
        open_driver().nvmlShutdown()
    except CapabilityError as error:
        return str(error)
    return ""


def settled(step: Callable[[], None]) -> Callable[[], None]:
    """A function that runs the step and waits for its kernels."""
    torch = importlib.import_module("torch")

    def whole() -> None:
        step()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    return whole


# ---- totals


def measured_totals(step: Callable[[], None], seconds: float, nvml: Any = None) -> Totals:
    """Joules of the first board while steps run for ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="joulery-bench-") as folder, board(nvml) as (driver, handle):
        run_folder = Path(folder) / "run"
        with joulery.measure(out=run_folder), instants(driver, handle) as watts, smi_averages() as averages:
            zeus = _zeus()
            begin, before_j = time.time_ns(), driver.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            while time.time_ns() - begin < seconds * 1e9:
                step()
            end, after_j = time.time_ns(), driver.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            zeus_j = zeus() if zeus else None
        traces = [trace for trace in load_readings(open_run(run_folder)).traces if trace.channel.device == "gpu:0"]
        ours = sum(float(energy_by_bin(power_steps(one), np.array([begin, end]))[0].sum()) for one in traces)
    return Totals(
        (end - begin) / 1e9,
        ours,
        after_j - before_j,
        integral_j(watts, begin, end),
        zeus_j,
        integral_j(averages, begin, end),
    )


@contextmanager
def board(nvml: Any = None) -> Iterator[tuple[Any, Any]]:
    """Open the driver; yields it and its first board."""
    driver = open_driver(nvml)
    try:
        yield driver, driver.nvmlDeviceGetHandleByIndex(0)
    finally:
        driver.nvmlShutdown()


@contextmanager
def instants(driver: Any, handle: Any) -> Iterator[list[tuple[int, float]]]:
    """Record a board's instantaneous power in the block, (Unix nanoseconds, watts); empty if it is not reported."""
    found: list[tuple[int, float]] = []
    over = threading.Event()
    field = [(driver.NVML_FI_DEV_POWER_INSTANT, driver.NVML_POWER_SCOPE_GPU)]

    def read() -> None:
        while not over.wait(INSTANT_PERIOD_S):
            (answer,) = driver.nvmlDeviceGetFieldValues(handle, field)
            if answer.nvmlReturn != driver.NVML_SUCCESS:
                return
            found.append((time.time_ns(), answer.value.uiVal / 1e3))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield found
    finally:
        over.set()
        reader.join()


@contextmanager
def smi_averages() -> Iterator[list[tuple[int, float]]]:
    """Record nvidia-smi's mean power of the first board in the block, (Unix nanoseconds, watts); empty without it."""
    found: list[tuple[int, float]] = []
    program = shutil.which("nvidia-smi")
    if program is None:
        yield found
        return
    asked = [program, "-i", "0", "--query-gpu=power.draw.average", "--format=csv,noheader,nounits"]
    with subprocess.Popen([*asked, "-lms", str(SMI_PERIOD_MS)], stdout=subprocess.PIPE, text=True) as smi:
        assert smi.stdout is not None
        lines = smi.stdout

        def read() -> None:
            found.extend((time.time_ns(), float(line)) for line in lines if line.strip().replace(".", "", 1).isdigit())

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield found
        finally:
            smi.terminate()
            reader.join()


def integral_j(watts: Sequence[tuple[int, float]], begin_ns: int, end_ns: int) -> float | None:
    """Energy between two instants by the trapezoidal rule; outermost readings extend to them. None without readings."""
    inside = [(at, value) for at, value in watts if begin_ns <= at <= end_ns]
    if not inside:
        return None
    at_s = np.array([begin_ns, *(at for at, _ in inside), end_ns]) / 1e9
    value = np.array([inside[0][1], *(value for _, value in inside), inside[-1][1]])
    return float(np.sum(np.diff(at_s) * (value[1:] + value[:-1]) / 2))


def _zeus() -> Callable[[], float] | None:
    """Begin a window of Zeus' monitor; a function that ends it and returns its joules, or None without Zeus."""
    if importlib.util.find_spec("zeus") is None:
        return None
    monitor = importlib.import_module("zeus.monitor").ZeusMonitor(gpu_indices=[0])
    monitor.begin_window("check")
    return lambda: float(monitor.end_window("check").total_energy)


def judged(totals: Totals) -> list[RangeCheck]:
    """Checks of joulery's joules against those of each other reader."""
    lines = [
        RangeCheck("total: seconds compared", totals.seconds, 10.0, float("inf")),
        RangeCheck("total against the energy counter", _ratio(totals.joulery_j, totals.counter_j), 0.98, 1.02),
    ]
    if totals.zeus_j is not None:
        lines.append(RangeCheck("total against ZeusMonitor", _ratio(totals.joulery_j, totals.zeus_j), 0.98, 1.02))
    smi_j = totals.smi_j if totals.smi_j is not None else float("nan")
    lines.append(RangeCheck("total against nvidia-smi's mean power", _ratio(totals.joulery_j, smi_j), 0.95, 1.05))
    instant_j = totals.instant_j if totals.instant_j is not None else float("nan")
    return [
        *lines,
        RangeCheck("integral of instantaneous power against the total", _ratio(instant_j, totals.joulery_j), 0.9, 1.1),
    ]


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else float("nan")


# ---- ranks


def traced_ranks(plan: Plan) -> dict[str, Any]:
    """Trace two ranks on one board, which their environment names by its UUID; the report by layer."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    meter = "cpu-model:10,50"
    if plan.place.startswith("cuda"):
        with board() as (driver, handle):
            meter, environ["CUDA_VISIBLE_DEVICES"] = "nvml", str(driver.nvmlDeviceGetUUID(handle))
    with tempfile.TemporaryDirectory(prefix="joulery-bench-") as folder:
        joulery_itself = [sys.executable, "-m", "joulery"]
        program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(RANKS)]
        asked = ["measure", "--trace", "torch", "--meter", meter, "--out", f"{folder}/run", "--", *program]
        subprocess.run([*joulery_itself, *asked], env=environ, check=True, capture_output=True)
        shown = [*joulery_itself, "report", f"{folder}/run", "--by", "layer", "--json"]
        shown_output = subprocess.run(shown, env=environ, check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(shown_output.stdout)
    return found


def judged_ranks(report: Any, device: str) -> list[RangeCheck]:
    """Checks that all ranks form one tree, on the board with that UUID."""
    ranks = {each["rank"] for each in report["ranks"]}
    whole_j = sum(each["energy_j"] or 0.0 for each in report["ranks"])
    kernels = [op for op in report["ops"] if op["device"].startswith(device.partition(":")[0])]
    here_s = sum(op["runtime_s"] for op in kernels if op["device"] == device)
    layers = [(op["op"], op["phase"]) for op in kernels]
    return [
        RangeCheck("ranks recorded of two", len(ranks & {0, 1}), 2, 2),
        RangeCheck(
            "joules of the ranks against the tree's",
            _ratio(whole_j, report["devices"][device]["attributed_j"]),
            1 - 1e-6,
            1 + 1e-6,
        ),
        RangeCheck("rows of a layer and phase", _ratio(len(layers), len(set(layers))), 1, 1),
        RangeCheck(
            "kernel time on the board of that UUID", _ratio(here_s, sum(op["runtime_s"] for op in kernels)), 1, 1
        ),
    ]


# ---- kernels, anatomy, overhead


def links(step: Callable[[], None], plan: Plan) -> tuple[float, float]:
    """Shares of the kernel time of ten steps that are linked to an operation, and to a module or an optimizer."""
    from joulery.adapters.tracers.inject.torch_recorder import TorchRecorder

    with tempfile.TemporaryDirectory(prefix="joulery-bench-") as folder:
        recorder = TorchRecorder(Path(folder), 0, 0, plan.schedule.active, 1)
        recorder.install()
        recorder.begin()
        for _ in range(plan.schedule.active):
            step()
        recorder.finish()
        columns = read_columns(next(Path(folder).glob("torch-*.json")))
    return linked(columns)


def linked(columns: Any) -> tuple[float, float]:
    """Shares of the kernel time of a trace that are linked to an operation, and to a module or an optimizer."""
    whole_ns, linked_ns = kernel_time_ns(columns)
    trace = name_events(columns)
    accelerator = np.array([name.startswith("GPU") for name in trace.devices], np.bool_)[trace.device]
    named = np.array([not name.startswith(UNNAMED) for name in trace.ops], np.bool_)[trace.op]
    named_ns = int(trace.dur_ns[accelerator & named].sum())
    return _ratio(linked_ns, whole_ns), _ratio(named_ns, whole_ns)


def judged_kernels(to_operation: float, to_module: float) -> list[RangeCheck]:
    """Checks of the shares of kernel time that are linked to an operation and to a module."""
    return [
        RangeCheck("kernel time linked to an operation", to_operation, 0.99, 1.0),
        RangeCheck("kernel time linked to a module", to_module, 0.97, 1.0),
    ]


def anatomy(step: Callable[[], None], plan: Plan) -> list[RangeCheck]:
    """Checks 4 to 9 of a run of which ten steps are recorded."""
    with joulery.trace(steps=plan.schedule) as traced:
        for _ in range(plan.steps):
            step()
    footprint = traced.operations
    return [*shares(footprint, plan.device, spread=0.007), *passes(footprint, plan.device, products=9)]


def known_parts(plan: Plan) -> list[RangeCheck]:
    """Check of the joules of a model's parts, whose power is known from running each part alone."""
    from benchmarks._gpu_parts import measured_parts, weighted_error

    if plan is REHEARSAL:
        parts = measured_parts(plan.place, plan.device, lambda: 50.0 * time.monotonic(), 0.1)
    else:
        with board() as (driver, handle):

            def counter_j() -> float:
                return float(driver.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

            parts = measured_parts(plan.place, plan.device, counter_j, plan.seconds / 8)
    for part in parts:
        ratio = _ratio(part.traced_j, part.known_j)
        print(f"  {part.name}: {part.alone_w:.0f} W alone, {ratio:.3f} of its joules in turn", file=sys.stderr)
    what = "joules of parts of known power, energy-weighted error"
    return [RangeCheck(what, weighted_error(parts), 0.0, 0.1)]


def overhead(step: Callable[[], None], plan: Plan) -> RangeCheck:
    """Check of the overhead a step of recording ten steps of a run: upper end of the interval."""
    many = repeated(step, plan.steps)
    took = rounds(many, {"plain": nothing, "recorded": lambda: recording(plan.schedule)}, ROUNDS)
    wall = Ratio.of(took["recorded"], took["plain"], around=True).wall
    return RangeCheck("overhead a step, upper end", statistics.fmean(wall) + half_interval(wall), -1.0, 0.03)


PARTS: dict[str, Callable[[Plan], list[RangeCheck]]] = {
    "totals": lambda plan: judged(measured_totals(trained(plan), plan.seconds)),
    "ranks": lambda plan: judged_ranks(traced_ranks(plan), plan.device),
    "kernels": lambda plan: judged_kernels(*links(trained(plan), plan)),
    "anatomy": lambda plan: anatomy(trained(plan), plan),
    "parts": known_parts,
    "overhead": lambda plan: [overhead(trained(plan), plan)],
}
"""Parts by name, in the order in which they run."""
