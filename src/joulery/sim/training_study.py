"""Training schedulers side by side on one workload, one grid and one power model (GREEN, NSDI'25, sections 8 and A).

A scheme is a policy with its rhythm and, for the named additions, the state of the nodes it may ask for: suspended when
idle, or under a power limit. Every scheme under one seed faces the same jobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.ports import Policy
from joulery.perf.training_power import RTX3090_CLASSES, NodePower, PowerTable, limited, power_table
from joulery.policies.baselines.training import CarbonTime, Fifo, Goodput, Tiresias
from joulery.policies.training import ClusterView, Green, green_paper
from joulery.sim.streams import Streams
from joulery.sim.training_cluster import Cluster, Intensity, Jobs, TrainingRun, run_training_cluster

_PRESET_BAR = 0.9
_CAP = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """What every scheme runs on.

    Attributes:
        nodes: Nodes of the cluster.
        node: Their power.
        restart_s: Checkpoint and restart of a job.
        window_s: Window of the mean intensity that tells green hours from dirty ones.
        sleep_after_s, wake_s: For schemes that suspend idle nodes.
        quantum_s: Distance of the rounds.
    """

    nodes: int = 32
    node: NodePower = field(default_factory=NodePower)
    restart_s: float = 120.0
    window_s: float = 86_400.0
    sleep_after_s: float = 600.0
    wake_s: float = 60.0
    quantum_s: float = 1800.0

    def cluster(self, carbon: Intensity, *, sleeping: bool = False, limit_ratio: float = 1.0) -> Cluster:
        """The cluster as one scheme runs it."""
        table = power_table(limited(RTX3090_CLASSES, limit_ratio), self.node)
        sleep_after_s = self.sleep_after_s if sleeping else math.inf
        return Cluster(self.nodes, self.node, table, carbon, self.window_s, self.restart_s, sleep_after_s, self.wake_s)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheduler to compare.

    Attributes:
        about: What it is, in a few words.
        policy: Made from the power table, the jobs and the intensity.
        period_s: Its rounds; None to step it on every submission and completion; ``nan`` for the setting's quantum.
        start_s: Its choice of a start time at submission, where it makes one.
        sleeping: It suspends idle nodes.
        limit_ratio: Power limit it runs GPUs under.
    """

    about: str
    policy: Callable[[PowerTable, Jobs, Intensity], Policy[Any, ClusterView]]
    period_s: float | None = math.nan
    start_s: Callable[[Jobs, Intensity], Callable[[float, float], float]] | None = None
    sleeping: bool = False
    limit_ratio: float = 1.0


def _preset(table: PowerTable) -> dict[int, int]:
    """The largest number of GPUs, of at most 4, at which each kind keeps 90 % of its efficiency."""
    counts = range(1, min(5, table.degradation.shape[1]))
    return {
        kind: max(n for n in counts if table.degradation[kind, n] >= _PRESET_BAR) for kind in range(len(table.classes))
    }


def _carbon_time(jobs: Jobs, carbon: Intensity) -> Callable[[float, float], float]:
    short = jobs.work_s <= 7200.0
    means = [float(jobs.work_s[queue].mean()) if queue.any() else 3600.0 for queue in (short, ~short)]
    return CarbonTime(carbon.integral, means[0], means[1]).start_s


def _cleanest(carbon: Intensity) -> float:
    return float(np.quantile(np.array(carbon.values), 0.10))


SCHEMES: Mapping[str, Scheme] = {
    "green": Scheme("GREEN with a profile cache and hysteresis", lambda t, j, c: Green()),
    "green-paper": Scheme("GREEN as published", lambda t, j, c: green_paper()),
    "green-unshifted": Scheme("GREEN blind to the hour (mu = 1)", lambda t, j, c: Green(mu=1.0)),
    "green-sleep": Scheme("GREEN, idle nodes suspended", lambda t, j, c: Green(), sleeping=True),
    "green-lean": Scheme(
        "GREEN, idle nodes suspended, GPUs limited to 75 % power",
        lambda t, j, c: Green(gamma=0.88),
        sleeping=True,
        limit_ratio=0.75,
    ),
    "tiresias": Scheme("Tiresias, GPUs preset where they still pay", lambda t, j, c: Tiresias(_preset(t))),
    "tiresias-requested": Scheme("Tiresias, GPUs as requested", lambda t, j, c: Tiresias()),
    "tiresias-sleep": Scheme("Tiresias, idle nodes suspended", lambda t, j, c: Tiresias(_preset(t)), sleeping=True),
    "gaia": Scheme(
        "GAIA Carbon-Time, waits of up to 12 h",
        lambda t, j, c: Fifo(dict.fromkeys(range(len(t.classes)), 1)),
        start_s=_carbon_time,
    ),
    "ecovisor": Scheme(
        "EcoVisor, starts in the cleanest tenth of the hours",
        lambda t, j, c: Fifo(_preset(t), _cleanest(c)),
        period_s=3600.0,
    ),
    "pollux": Scheme(
        "Pollux-like: GPUs to whom they speed up most", lambda t, j, c: Goodput(t.speedup, _CAP), period_s=60.0
    ),
    "fifo": Scheme("first come, first served, GPUs as requested", lambda t, j, c: Fifo()),
}
"""Schemes by name."""


def run_scheme(name: str, setting: Setting, jobs: Jobs, carbon: Intensity) -> TrainingRun:
    """Run one scheme to the end of its last job.

    Raises:
        ConfigError: No such scheme.
        DataError: A job can never start.
    """
    scheme = SCHEMES.get(name)
    if scheme is None:
        raise ConfigError("no such training policy", got=name, expected=", ".join(SCHEMES))
    cluster = setting.cluster(carbon, sleeping=scheme.sleeping, limit_ratio=scheme.limit_ratio)
    too_wide = np.flatnonzero(jobs.requested > cluster.gpus)
    if len(too_wide):
        at = int(too_wide[0])
        raise DataError(f"job {at} asks for {jobs.requested[at]} GPUs, the cluster has {cluster.gpus}", row=at + 2)
    period_s = setting.quantum_s if scheme.period_s is not None and math.isnan(scheme.period_s) else scheme.period_s
    start_s = None if scheme.start_s is None else scheme.start_s(jobs, carbon)
    policy = scheme.policy(cluster.table, jobs, carbon)
    return run_training_cluster(cluster, jobs, policy, period_s=period_s, start_s=start_s)


def jobs_from_trace(
    submit_s: FloatArray, duration_s: FloatArray, streams: Streams, *, requested: IntArray | None = None
) -> Jobs:
    """A trace of submissions and durations as jobs of the eight classes, drawn uniformly.

    Owners request 1, 2, 4 or 8 GPUs at 40, 25, 25 and 10 % unless the trace says. Durations are on one GPU.

    Raises:
        DataError: Submissions step back or a duration is not positive.
    """
    n = len(submit_s)
    if requested is None:
        requested = np.asarray(streams("requested").choice([1, 2, 4, 8], n, p=[0.40, 0.25, 0.25, 0.10]), np.int64)
    kind = streams("class").integers(0, len(RTX3090_CLASSES), n)
    return Jobs(submit_s, duration_s, kind, requested, np.maximum(requested, _CAP))


_BOUNDS_S = (60.0, 600.0, 3600.0, 36_000.0, 133_200.0)
"""Edges of the four sizes of jobs, s: below 10 min, below 1 h, below 10 h, up to 37 h."""
MIXES: Mapping[str, tuple[float, float, float, float]] = MappingProxyType(
    {"year": (0.187, 0.395, 0.370, 0.048), "day": (0.22, 0.30, 0.30, 0.18)}
)
"""Share of jobs of each size: a year of Alibaba's PAI trace, and GREEN's testbed day (Table 2)."""


def synthetic_trace(days: int, jobs_per_day: int, mix: str, streams: Streams) -> tuple[FloatArray, FloatArray]:
    """Submissions and durations, s, of made-up jobs of a mix of ``MIXES``, busier by day than by night.

    Durations are log-uniform within each size; submissions follow one sine a day that halves the rate at night.
    """
    rng = streams("trace")
    n = days * jobs_per_day
    day = np.repeat(np.arange(days), jobs_per_day) * 86_400.0
    grid_s = np.linspace(0.0, 86_400.0, 289)
    rate = 1.0 - 0.5 * np.cos(2 * np.pi * grid_s / 86_400.0)
    share = np.concatenate(([0.0], np.cumsum((rate[1:] + rate[:-1]) / 2)))
    submit_s = np.sort(day + np.interp(rng.uniform(0, share[-1], n), share, grid_s))
    size = rng.choice(len(MIXES[mix]), n, p=MIXES[mix])
    edges = np.log(_BOUNDS_S)
    return submit_s, np.exp(rng.uniform(edges[size], edges[size + 1]))
