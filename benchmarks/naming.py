"""Names in traces of other tools: the share of operations, time and joules that has a module or a function."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import NotRun, Result, data_folder
from joulery.accounting.operations.align import align
from joulery.accounting.operations.session import session
from joulery.accounting.steps import PowerSteps
from joulery.adapters.tracers.files import read_events
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.quality import Quality
from joulery.domain.trace.events import UNNAMED, EventTrace

ROOT = Path(__file__).parents[1]
BAR = 0.95
_PLACE = re.compile(r"^[^/:]+:\d+|^[^/:]+\.py$")
_REGION = re.compile(r"(^|/)(Torch-Compiled Region|CompiledFunction|CompiledFxGraph)")
_WATTS = (30.0, 90.0, 50.0, 120.0)
_RECORDED = (
    ("PyTorch, no option", "torch:plain", False),
    ("PyTorch, record_shapes", "torch:shapes", False),
    ("PyTorch, with_stack", "torch:stack", True),
    ("PyTorch, with_stack, record_shapes, with_modules", "torch:stack+shapes+modules", True),
    ("PyTorch, inference, with_stack", "torch:inference+stack", True),
    ("PyTorch, TensorBoard's handler, with_stack", "torch:tensorboard+stack", True),
    ("PyTorch, two ranks (DDP, gloo), with_stack", "torch:ddp+stack", True),
    ("PyTorch, torch.compile", "torch:compile", False),
    ("PyTorch, torch.compile, with_stack", "torch:compile+stack", True),
    ("JAX, jit, no scope", "jax:jit", True),
    ("JAX, jit and scan, no scope", "jax:scan", True),
    ("JAX, not compiled", "jax:eager", True),
)
"""(title, program, whether the trace states where its operations were called)"""
_PUBLIC = (
    ("A100, AlexNet, two streams", "kineto_gpu/a100_alexnet_2stream.json.gz", True),
    ("A100, DDP with NCCL", "kineto_gpu/a100_nccl_data.json.gz", True),
    ("MI250, toy model, no stack", "kineto_gpu/mi250_minitoy_train_ROCm6_2_kineto.json.gz", False),
    ("TensorFlow 1 timeline", "tf1_timeline/timeline-0.json.gz", True),
    ("TensorFlow 2 profile", "tf2_jax/tf2.21_cpu_train.xplane.pb.gz", True),
    ("JAX, scopes", "tf2_jax/jax0.10.2_cpu_grad.xplane.pb.gz", True),
)


@dataclass(frozen=True, slots=True)
class Shares:
    """Named shares of a trace, and shares of its joules by kind of name.

    Attributes:
        operations, time, joules: Shares with a module, a range, a scope or a function, 0 to 1.
        places: Share of the joules that are named by functions of the program.
        regions: Share of the joules in compiled regions, whose modules the trace does not contain.
        error: Attributed plus unattributed joules against the total, relative.
    """

    operations: float
    time: float
    joules: float
    places: float
    regions: float
    error: float


def shares(trace: EventTrace) -> Shares:
    """Shares of one trace, under powers that change at known times."""
    begin, end = window = trace.extent_ns
    edges = np.linspace(begin, end, 4 * len(_WATTS) + 1).astype(np.int64)
    channels = {
        device: [
            PowerSteps(Channel(device, "package", ReadingKind.POWER, "benchmark", Quality.ASSUMED), edges, _WATTS * 4)
        ]
        for device in trace.devices
    }
    found = align(trace, channels, window)
    total = sum(each.total_j for each in found.devices)
    parts = sum(found.energy_by_op.values()) + sum(each.unattributed_j for each in found.devices)
    cut = session(trace, window)
    times = np.bincount(cut.row, cut.end_ns - cut.start_ns, len(cut.rows))
    named = np.array([not name.startswith(UNNAMED) for name in trace.ops], np.bool_)
    joules = found.energy_by_op
    spent = sum(joules.values())

    def share(which: re.Pattern[str]) -> float:
        return sum(energy for name, energy in joules.items() if which.search(name)) / spent

    return Shares(
        float(named[trace.op].mean()),
        float(
            sum(time for name, time in zip(cut.rows.op, times, strict=True) if not name.startswith(UNNAMED))
            / times.sum()
        ),
        sum(energy for name, energy in joules.items() if not name.startswith(UNNAMED)) / spent,
        share(_PLACE),
        share(_REGION),
        abs(parts - total) / total,
    )


def recorded(program: str, out: Path) -> Iterator[Path]:
    """Run a program and yield the trace files that it writes."""
    command = [sys.executable, "-m", "benchmarks._naming_programs", program, str(out)]
    if "ddp" in program:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launch, *command[1:]]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    yield from sorted([*out.rglob("*.xplane.pb"), *out.rglob("*.json"), *out.rglob("*.pt.trace.json.gz")])


def run() -> Result:
    """Record and read every trace."""
    rows: list[tuple[str, ...]] = []
    checks: list[tuple[str, bool | None]] = []
    errors: list[float] = []

    def add(title: str, trace: EventTrace, says: bool) -> None:
        found = shares(trace)
        least = min(found.operations, found.time, found.joules)
        cells = (found.operations, found.time, found.joules, found.places, found.regions)
        rows.append((title, str(len(trace)), *(f"{value:.1%}".replace("%", " %") for value in cells)))
        errors.append(found.error)
        if says:
            checks.append((f"{title}: at least 95 % of operations, time and joules are named", least >= BAR))

    for title, file, says in _PUBLIC:
        try:
            add(title, read_events(data_folder("smaragdine") / file), says)
        except NotRun:
            checks.append((title, None))
    for title, program, says in _RECORDED:
        framework = program.partition(":")[0]
        if importlib.util.find_spec(framework) is None or ("compile" in program and shutil.which("g++") is None):
            checks.append((title, None))
            continue
        with tempfile.TemporaryDirectory() as folder:
            for number, file in enumerate(recorded(program, Path(folder))):
                add(title + (f", rank {number}" if "ddp" in program else ""), read_events(file), says)
    checks.append(("attributed and unattributed joules are the total, to 1e-9", max(errors, default=1.0) <= 1e-9))
    return Result(
        "Names in traces of other tools",
        (
            "trace",
            "operations",
            "named",
            "of the time",
            "of the joules",
            "joules named by a function",
            "joules in compiled regions",
        ),
        rows,
        (
            "Named: a module, a range or a scope of the program, or a function of it that called the operation. Time "
            "is that of the innermost operations; joules are those attributed under assumed powers (30 to 120 W, in "
            "16 intervals). A trace without a bar does not say where its operations were called: PyTorch without "
            "`with_stack=True`. In regions of `torch.compile`, names are of the caller and of the operations inside; "
            "`joulery measure --trace torch` knows their modules. Names of JAX code that is not compiled are inferred "
            "from the order of launches.",
        ),
        checks,
        {"traces": len(rows), "largest_error": max(errors, default=0.0)},
    )
