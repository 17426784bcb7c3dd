"""A model whose parts draw different power, measured each alone (the truth) and then in turn under the tracer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import joulery
from joulery.domain.trace.tracing import Steps

STEPS, RECORDED = 40, 30


class Products(nn.Module):
    """Products of bf16 matrices: tensor cores."""

    def __init__(self, size: int, times: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(size, size, dtype=torch.bfloat16) * 0.01)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x @ self.w
        return x


class Copies(nn.Module):
    """Additions to a large vector: memory."""

    def __init__(self, size: int, times: int) -> None:
        super().__init__()
        self.register_buffer("a", torch.randn(size))
        self.register_buffer("b", torch.empty(size))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            torch.add(self.a, 1.0, out=self.b)
        return x


class Doubles(nn.Module):
    """Products of fp64 matrices."""

    def __init__(self, size: int, times: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(size, size, dtype=torch.float64) * 0.01)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            self.w @ self.w
        return x


class Parts(nn.Module):
    """The three parts in sequence, 30 to 50 ms each on an H100."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.products = Products(8192 // scale, 30)
        self.copies = Copies(2**28 // scale**2, 40)
        self.doubles = Doubles(4096 // scale, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.doubles(self.copies(self.products(x)))


@dataclass(frozen=True, slots=True)
class PartJoules:
    """Joules of one part when it runs in turn with the others: from its power alone, and from the trace."""

    name: str
    alone_w: float
    known_j: float
    traced_j: float


def weighted_error(parts: Sequence[PartJoules]) -> float:
    """Energy-weighted error of the joules by part: |traced - watts alone x kernel time|, over the sum of the latter."""
    return sum(abs(part.traced_j - part.known_j) for part in parts) / sum(part.known_j for part in parts)


def measured_parts(place: str, device: str, counter_j: Callable[[], float], seconds: float) -> list[PartJoules]:
    """Measure each part alone, then all of them in turn.

    Args:
        place: Device of PyTorch.
        device: Name of that device in the footprint.
        counter_j: Reads the board's energy, joules.
        seconds: How long each part runs alone.
    """
    scale = 1 if place.startswith("cuda") else 64
    with torch.device(place):  # a CPU takes seconds to draw the numbers
        model = Parts(scale).eval()
    x = torch.randn(8192 // scale, 8192 // scale, dtype=torch.bfloat16, device=place)

    def settled(part: nn.Module) -> None:
        part(x)
        if place.startswith("cuda"):
            torch.cuda.synchronize()

    with torch.no_grad():
        watts = {name: _alone(partial(settled, part), counter_j, seconds) for name, part in model.named_children()}
        with joulery.trace(steps=Steps(skip=4, warmup=2, active=RECORDED, repeat=1), estimator="regression") as traced:
            for _ in range(STEPS):
                settled(model)
    found = traced.operations
    runtime_s, energy_j = dict.fromkeys(watts, 0.0), dict.fromkeys(watts, 0.0)
    for op, where, joules, runtime_ns in zip(found.op, found.device, found.energy_j, found.runtime_ns, strict=True):
        part = next((name for name in watts if f"/{name}/" in f"{op}/"), None)
        if part is not None and where == device:
            runtime_s[part] += runtime_ns / 1e9
            energy_j[part] += float(joules)
    return [PartJoules(name, watts[name], watts[name] * runtime_s[name], energy_j[name]) for name in watts]


def _alone(part: Callable[[], None], counter_j: Callable[[], float], seconds: float) -> float:
    """Watts of the board while a part runs over and over, once it is warm."""
    _repeat(part, seconds / 4)
    start_j = counter_j()
    took_s = _repeat(part, seconds)
    return (counter_j() - start_j) / took_s


def _repeat(part: Callable[[], None], seconds: float) -> float:
    """Run a part repeatedly for at least ``seconds``; the seconds that it took."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        part()
    return time.monotonic() - start
