"""A service whose true saving is known: demand, grid and the machine's speed vary, and its profile is wrong."""

from __future__ import annotations

import numpy as np

from benchmarks._audited_service import AuditedRun, TrueService, run_audited, varying_arrivals
from joulery.domain.arrays import FloatArray
from joulery.domain.quality import Quality
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.domain.serving.service import Slice, SliceKind, Slo
from joulery.perf.layouts import Predictor
from joulery.policies.serving.objective import Objective, ReplanTrigger, ServiceObjectives
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.layout_space import cpu_slices, layouts
from joulery.policies.serving.search.predictive_search import PredictiveSearch, baseline_layout
from joulery.policies.serving.switchback import AuditedPolicy, Switchback

ONE = Slice(SliceKind.CPU, cores=1)
ACCURACY = {"lite0": 0.751, "lite1": 0.767, "lite2": 0.776}
PROFILED_MS = {"lite0": 5.0, "lite1": 8.0, "lite2": 14.0}
TRUE_MS = {"lite0": 6.0, "lite1": 8.5, "lite2": 10.0}
"""True milliseconds of a request: the profile overestimates the baseline (lite2) and underestimates the others."""
RATE_RPS = 50.0
SLO = Slo(0.1)


def policy(share_ratio: float, seed: int) -> AuditedPolicy:
    """The audited policy, with its wrong profile."""
    entries = []
    for name, ms in PROFILED_MS.items():
        seconds = ms / 1e3 * np.linspace(0.9, 1.1, 21)
        timings = Timings(seconds, seconds)
        entries.append(SliceProfile(name, ONE, timings, timings, 10.0))
    profile = Profile({}, tuple(entries), 20.0, Quality.MODELLED, "cpu-model")
    predictor = Predictor(profile, ACCURACY, requests=1000)
    space = layouts([cpu_slices((1, 1))], sorted(ACCURACY))
    base, metrics = baseline_layout(space, "lite2", predictor, SLO, RATE_RPS)
    search = PredictiveSearch(space, predictor, Objective(0.045, ACCURACY["lite2"], metrics.energy_j, 200.0))
    goals = ServiceObjectives(0.045, SLO)
    inner = ServicePolicy("photos", search, goals, RATE_RPS, ReplanTrigger(200.0))
    return AuditedPolicy(inner, Switchback(base, share_ratio, trim_s=1.0, period_s=3.0, seed=seed))


def truth(seed: int, duration_s: float) -> TrueService:
    """The true service: demand varies over the day, speed by noise over seconds and slow drift, the grid in steps."""
    rng = np.random.default_rng([seed, 11])
    phase, grid_phase, drift_phase = rng.uniform(0, 2 * np.pi, 3)

    def rate_rps(at_s: FloatArray) -> FloatArray:
        return np.asarray(RATE_RPS * (1.0 + 0.35 * np.sin(2 * np.pi * at_s / duration_s + phase)))

    arrival_s = varying_arrivals(rate_rps, duration_s, seed)
    noise, wide = np.empty(int(duration_s) + 2), 0.06
    noise[0] = rng.normal()
    for k in range(1, len(noise)):  # a neighbour's work, correlated over about ten seconds
        noise[k] = 0.9 * noise[k - 1] + np.sqrt(1 - 0.81) * rng.normal()
    drift = 1.0 + 0.1 * np.sin(2 * np.pi * arrival_s / duration_s + drift_phase)
    slow = drift * np.exp(wide * noise[arrival_s.astype(int)])
    own = {name: rng.gamma(25.0, 1 / 25.0, len(arrival_s)) for name in TRUE_MS}
    hours = np.floor(arrival_s / duration_s * 24)
    g_per_kwh = 200.0 + 120.0 * np.sin(2 * np.pi * hours / 24 + grid_phase)
    cpu_s = {name: TRUE_MS[name] / 1e3 * slow * own[name] for name in TRUE_MS}
    return TrueService(arrival_s, cpu_s, g_per_kwh, stretch_ratio=0.1)


def audited_run(seed: int, *, share_ratio: float = 0.02, duration_s: float = 3600.0) -> AuditedRun:
    """Simulate one seeded run of the audited service."""
    return run_audited(policy(share_ratio, seed), truth(seed, duration_s), duration_s)
