"""Simulate the bursts with an earlier version (commit ef7be44), in its own checkout and interpreter::

    git worktree add /tmp/before ef7be44      # with a virtual environment of its own
    cd /tmp/before && .venv/bin/python PATH/benchmarks/_bursts_before.py PATH

``PATH`` is this checkout. The program prints the constant ``BEFORE`` of ``benchmarks/bursts.py``. The old policy gets
the observations of its own controller: the rate counts answers, no decision is made while a layout changes, and 1024
requests may wait.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


def loaded(path: Path, name: str) -> Any:
    """Load a module of this checkout under a name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """Limit of a queue, as :class:`joulery.domain.serving.dispatch.QueueLimit`, which that version does not have."""

    waiting: int
    wait_s: float = math.inf


here = Path(sys.argv[1])
dispatch = sys.modules["joulery.domain.serving.dispatch"] = ModuleType("dispatch")
dispatch.QueueLimit = QueueLimit  # type: ignore[attr-defined]
for new, old in (
    ("joulery.domain.gpu.layout", "joulery.domain.layout"),
    ("joulery.domain.serving.service", "joulery.domain.serving"),
    ("joulery.sim.core.kernel", "joulery.sim.kernel"),
):
    sys.modules[new] = importlib.import_module(old)
world = loaded(here / "benchmarks" / "_burst_world.py", "burst_world")
plant = loaded(here / "benchmarks" / "_elastic_service.py", "elastic_service")

profile = importlib.import_module("joulery.domain.profile")
serving = importlib.import_module("joulery.domain.serving")
policy = importlib.import_module("joulery.policies.variants.policy")
spaces = importlib.import_module("joulery.policies.variants.spaces")
objective = importlib.import_module("joulery.policies.variants.objective")
perf = importlib.import_module("joulery.perf.layouts")
quality = importlib.import_module("joulery.domain.quality")
Layout = importlib.import_module("joulery.domain.layout").Layout


class Before:
    """Controller with the policy of ef7be44 and the observations of that version."""

    def __init__(self, made: Any, g_per_kwh: Any) -> None:
        self.policy, self.state, self.g_per_kwh = made, made.initial(), g_per_kwh

    def decide(self, now_s: float, service: Any) -> None:
        """Run one step of the policy, unless a layout is changing."""
        service.limit = QueueLimit(world.QUEUE)
        if service.changing:
            return
        span_s = service.settings.window_s
        ended = service.ended_since(now_s - span_s)
        seen = policy.Observation(
            now_s=now_s,
            g_per_kwh=self.g_per_kwh(now_s),
            rate_rps=len(ended) / span_s if now_s >= span_s else math.nan,
            latency_s=float(np.quantile(service.latency_of(ended), 0.95)) if ended else math.nan,
            requests=len(ended),
            served=dict(Counter(service.variant_of(one) for one in ended)),
            power_w=math.nan,
            running=service.running,
        )
        step = self.policy.step(self.state, seen)
        self.state = step.state
        for decision in step.decisions:
            service.run(Layout.parse(decision.value))


def made() -> tuple[Any, dict[Any, Any]]:
    """The policy and the plant's profile."""
    entries, table = [], {}
    for name in world.MS:
        for cores in (1, 2):
            piece = serving.Slice(serving.SliceKind.CPU, cores=cores)
            service_s, cpu_s = world.samples(name, cores)
            timings = profile.Timings(service_s, cpu_s)
            entries.append(profile.SliceProfile(name, piece, timings, timings, world.ACTIVE_W))
            table[name, piece] = (service_s, cpu_s, world.ACTIVE_W)
    known = profile.Profile(
        {}, tuple(entries), idle_w=world.IDLE_W, quality=quality.Quality.MODELLED, meter="cpu-model"
    )
    predictor = perf.Predictor(known, world.ACCURACY, requests=1500)
    space = spaces.layouts([spaces.cpu_slices(cut) for cut in spaces.core_partitions(2)], sorted(world.MS))
    pure = [predictor.predict(one, world.CALM_RPS) for one in space if set(one.counts) == {"large"}]
    energy_j = min(one.energy_j for one in pure if one.latency_s <= world.SLO_S)
    goals = objective.Objective(world.LAMBDA, world.ACCURACY["large"], energy_j, world.BASE_G_PER_KWH)
    slo = serving.Slo(world.SLO_S)
    return policy.VariantPolicy("photos", space, predictor, goals, slo, world.CALM_RPS), table


def played(arrival_s: Any, until_s: float, g_per_kwh: Any, seed: int) -> Any:
    """Simulate one trace."""
    chosen, table = made()
    settings = plant.PlantSettings(world.SLO_S, start_s=world.START_S)
    service = plant.ElasticService(table, arrival_s, settings, Before(chosen, g_per_kwh), seed)
    return service.simulate(until_s + 5.0)


def main() -> None:
    """Simulate all traces and grids, and print the figures."""
    found: dict[str, tuple[float, ...]] = {}
    for name in ("step", "ramp", "on-off", "recorded", "flash"):
        outcomes = []
        for seed in world.SEEDS if name != "recorded" else (0,):
            arrival_s, until_s, _ = world.arrivals(name, seed)
            outcomes.append(played(arrival_s, until_s, lambda _: world.BASE_G_PER_KWH, seed))
        late, refused = sum(one.late for one in outcomes), sum(one.refused for one in outcomes)
        found[name] = (sum(len(one.latency_s) for one in outcomes), late, refused)
    for name in world.GRIDS:
        hours, (arrival_s, until_s) = world.grid(name), world.day(0)
        at = lambda t_s, hours=hours: hours[min(int(t_s / world.HOUR_S), len(hours) - 1)]  # noqa: E731
        one = played(arrival_s, until_s, at, 0)
        grams = sum(j * at(t) for j, t in zip(one.energy_j, one.arrival_s, strict=True)) / 3.6e6
        accuracy = np.mean([world.ACCURACY[variant] for variant in one.variant if variant])
        found[name] = (round(float(grams), 6), round(float(accuracy), 6), one.violations)
    print(found)


if __name__ == "__main__":
    main()
