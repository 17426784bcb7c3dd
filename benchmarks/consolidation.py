"""Joules with and without slices left empty, at three loads, simulated; real cores: ``consolidation --live``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks import Result, bursts
from benchmarks import _burst_world as world
from benchmarks._burst_controllers import PolicyController
from benchmarks._elastic_service import BurstOutcome, ElasticService, PlantSettings
from joulery.policies.serving.consolidation import Consolidation

LOADS = {"low": 4.0, "medium": 40.0, "high": 110.0}
LENGTH_S = 600.0
AWAKE_W = 3.0
"""Watts of a replica that waits, in the simulation (assumed)."""


def simulated(rate_rps: float, awake_w: float, *, on: bool) -> BurstOutcome:
    """Simulate ten minutes of a demand, with or without consolidation."""
    known = bursts.predictor()
    entries = tuple(replace(one, awake_w=awake_w, startup_s=world.START_S) for one in known.profile.entries)
    known = replace(known, profile=replace(known.profile, entries=entries))
    gaps = np.random.default_rng(5).exponential(1.0 / rate_rps, int(2 * rate_rps * LENGTH_S) + 50)
    arrival_s = np.cumsum(gaps)
    table = {(one.variant, one.slice): (one.loaded.service_s, one.loaded.cpu_s, one.active_w) for one in entries}
    policy = replace(bursts.policy(known), consolidation=Consolidation() if on else None)
    settings = PlantSettings(world.SLO_S, world.START_S, tuple(sorted(world.MS)), awake_w=awake_w)
    controller = PolicyController(policy, world.BASE_G_PER_KWH)
    return ElasticService(table, arrival_s[arrival_s < LENGTH_S], settings, controller, 5).simulate(LENGTH_S + 5.0)


def joules(one: BurstOutcome) -> float:
    """Joules of requests and of replicas that wait."""
    return float(one.energy_j.sum()) + one.awake_j


def run() -> Result:
    """Simulate three loads with and without consolidation."""
    rows, ratios, worst = [], {}, 1.0
    for name, rate_rps in LOADS.items():
        for awake_w in (AWAKE_W, 0.0):
            on, off = (simulated(rate_rps, awake_w, on=each) for each in (True, False))
            ratios[name, awake_w] = joules(on) / joules(off)
            worst = min(worst, 1.0 - on.violations / len(on.latency_s))
            what = f"{name}, {rate_rps:g} /s, simulated, {awake_w:g} W a waiting replica (assumed)"
            rows.append([what, f"{joules(on):,.0f} J", f"{joules(off):,.0f} J", _change(ratios[name, awake_w])])
            rows[-1].append(f"{on.attainment_ratio:.2%} / {off.attainment_ratio:.2%}")
    return Result(
        "Consolidation: slices left empty while demand is low",
        ("load", "with", "without", "change", "within the SLO, with / without"),
        rows,
        notes=(
            "Simulated: joules above an empty machine, of requests and of replicas that wait; starts of replicas are "
            "left out. On real cores: `python -m benchmarks consolidation --live`.",
        ),
        checks=(
            (f"never more joules than without: at most {max(ratios.values()) - 1:+.1%}", max(ratios.values()) <= 1.01),
            (f"at least 99 % of the requests within the SLO: {worst:.2%}", worst >= 0.99),
        ),
    )


def _change(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"
