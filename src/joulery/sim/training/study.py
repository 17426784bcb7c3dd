"""Compare training schedulers on one workload, one grid and one power model (GREEN, NSDI'25, sections 8 and A).

A scheme is a policy with the interval of its rounds. Some schemes also suspend idle nodes or set power limits. Every
scheme under one seed faces the same jobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray, readonly
from joulery.domain.errors import ConfigError
from joulery.domain.ports import Policy
from joulery.perf.power.training_power import (
    RTX3090_CLASSES,
    JobClass,
    NodePower,
    PowerTable,
    limited,
    on_boards,
    power_table,
    widened,
)
from joulery.policies.clocks.power_limit import PowerLimitTuner
from joulery.policies.training.allocation import ClusterView
from joulery.policies.training.baselines import Backfill, CarbonTime, Fifo, Tiresias, zeus_limits
from joulery.policies.training.green import LEAN, LEAN_ETA, Green, ServiceOrder, green_paper
from joulery.policies.training.pollux import Pollux, goodput
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.cluster import ClusterPart, TrainingRun, run_training_pools
from joulery.sim.training.limited_job import learned_limits
from joulery.sim.training.node_groups import NodeGroup
from joulery.sim.training.parts import joined, parts_of
from joulery.sim.training.plant import Cluster, Jobs, Watch

_PRESET_BAR = 0.9
_CAP = 8
_LIFT_AFTER_S = 2 * 86_400.0
_LOOK_S = 2.0
"""Interval at which an agent checks a job: the site file's default."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Conditions common to all schemes.

    Attributes:
        nodes: Nodes of the cluster.
        node: Their power.
        restart_s: Checkpoint and restart of a job.
        window_s: Window of the mean intensity that separates green from dirty hours.
        sleep_after_s, wake_s: For schemes that suspend idle nodes.
        quantum_s: Interval of the rounds.
        belief: The schedulers' forecast of intensity; None for the truth.
        silent: No job reports progress; otherwise schedulers know the work left exactly.
        classes: The kinds of jobs; ``Jobs.kind`` is an index into them.
        placed: Whether jobs need nodes with room for them; otherwise GPUs are counted.
        groups: Groups of nodes, each with a GPU type, on which jobs are placed; they replace ``nodes`` and ``node``.
    """

    nodes: int = 32
    node: NodePower = field(default_factory=NodePower)
    restart_s: float = 120.0
    window_s: float = 86_400.0
    sleep_after_s: float = 600.0
    wake_s: float = 60.0
    quantum_s: float = 1800.0
    belief: Intensity | None = None
    silent: bool = False
    classes: tuple[JobClass, ...] = RTX3090_CLASSES
    placed: bool = False
    groups: tuple[NodeGroup, ...] = ()

    def on_group(self, group: NodeGroup) -> Setting:
        """The setting on one group of nodes alone."""
        classes = on_boards(self.classes, group.limit_w, group.speed_ratio)
        return replace(self, nodes=group.nodes, node=group.node, classes=classes, placed=True, groups=())

    def cluster(self, carbon: Intensity, scheme: Scheme, widest: int = _CAP) -> Cluster:
        """The cluster as one scheme runs it, for jobs of up to so many GPUs."""
        table, full = (
            power_table(widened(classes, widest), self.node) for classes in (scheme.classes(self.classes), self.classes)
        )
        own_s = self.sleep_after_s if scheme.sleep_after_s is None else scheme.sleep_after_s
        sleep_after_s = own_s if scheme.sleeping else math.inf
        learning_s = None if scheme.tuner is None else _learning_s(scheme.tuner, self.classes)
        return Cluster(
            self.nodes,
            self.node,
            table,
            carbon,
            self.window_s,
            self.restart_s,
            sleep_after_s,
            self.wake_s,
            self.belief,
            full,
            self.silent,
            learning_s,
            self.placed,
        )


def _as_they_are(classes: tuple[JobClass, ...]) -> tuple[JobClass, ...]:
    return classes


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheduler to compare.

    Attributes:
        about: Its short description.
        policy: Made from the power table, the jobs and the forecast of the intensity.
        period_s: Interval of its rounds; None for steps on every submission and completion; ``nan`` for the setting's.
        start_s: Its choice of a start time at submission, where it makes one.
        sleeping: Whether it suspends idle nodes.
        sleep_after_s: How long a node idles first; None for the setting's.
        classes: The jobs under the power limits it sets.
        tuner: The policy by which running jobs learn their power limits; None where jobs start as in ``classes``.
        runs_as: How ``joulery schedule`` runs it; empty where it is simulated only.
        instead: The nearest scheme that can be run; empty where this one can be run, or there is none.
    """

    about: str
    policy: Callable[[PowerTable, Jobs, Intensity], Policy[Any, ClusterView]]
    period_s: float | None = math.nan
    start_s: Callable[[Jobs, Intensity], Callable[[float, float], float]] | None = None
    sleeping: bool = False
    sleep_after_s: float | None = None
    classes: Callable[[tuple[JobClass, ...]], tuple[JobClass, ...]] = _as_they_are
    tuner: PowerLimitTuner | None = None
    runs_as: str = ""
    instead: str = ""

    @property
    def live(self) -> str:
        """A phrase that states whether and how the scheme can be run."""
        if self.runs_as:
            return f"run it with {self.runs_as}"
        nearest = f"; {self.instead} is what can be run" if self.instead else ""
        return f"simulated only: joulery schedule cannot run it{nearest}"


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


def _lengths_s(table: PowerTable, jobs: Jobs) -> FloatArray:
    """Run time of each job on the GPUs requested."""
    gpus = np.minimum(jobs.requested, jobs.max_gpus)
    return np.asarray(jobs.work_s / table.speedup[jobs.kind, gpus], np.float64)


def _cleanest(carbon: Intensity) -> float:
    return float(np.quantile(np.array(carbon.values), 0.10))


def _limited_to(limit_ratio: float, classes: tuple[JobClass, ...]) -> tuple[JobClass, ...]:
    return limited(classes, limit_ratio)


def _zeus(classes: tuple[JobClass, ...], eta: float = 0.5) -> tuple[JobClass, ...]:
    return limited(classes, zeus_limits(classes, _board_w(classes), eta))


def _board_w(classes: tuple[JobClass, ...]) -> float:
    """The power limit of the boards; at least what the most demanding job takes."""
    return max(max(job.board_w, job.gpu_w) for job in classes)


def _learning_s(tuner: PowerLimitTuner, classes: tuple[JobClass, ...]) -> tuple[FloatArray, FloatArray]:
    """Time that jobs of each kind run at full power before their limit is known: the first job, and later ones."""
    found = learned_limits(classes, tuner, _board_w(classes))
    limits = [found[job.name] for job in classes]

    def by_kind(times_s: Sequence[float]) -> FloatArray:
        limited_s = [time_s if limit.ratio < 1 else math.inf for limit, time_s in zip(limits, times_s, strict=True)]
        return readonly(np.array(limited_s), np.float64)

    return by_kind([limit.first_s for limit in limits]), by_kind([limit.again_s for limit in limits])


def _learned(tuner: PowerLimitTuner, classes: tuple[JobClass, ...]) -> tuple[JobClass, ...]:
    found = learned_limits(classes, tuner, _board_w(classes))
    return limited(classes, {name: limit.ratio for name, limit in found.items()})


def _lean(kind: str, about: str, sleep_after_s: float | None = None) -> Scheme:
    """A scheme that can be run: its jobs learn their limits while they run, within the bound on their slowdown."""
    tuner = PowerLimitTuner(eta=LEAN_ETA[kind], period_s=_LOOK_S)
    after = "" if sleep_after_s is None else f" (SuspendTime={sleep_after_s:g})"
    return Scheme(
        f"{about}, power limits learned by each job, idle nodes suspended",
        lambda t, j, c: Green(**LEAN[kind]),
        sleeping=True,
        sleep_after_s=sleep_after_s,
        classes=partial(_learned, tuner),
        tuner=tuner,
        runs_as=f"jobs.policy.kind: {kind}, joulery agent on the nodes and Slurm's SuspendProgram{after}",
    )


_KIND = "jobs.policy.kind: green"
_LIVE_KNOBS = frozenset(
    {
        "mu",
        "theta",
        "gamma",
        "cap",
        "hysteresis",
        "carbon_gamma",
        "oldest_share",
        "levels",
        "delay_ratio",
        "order",
        "price_ratio",
    }
)
"""Knobs that are also keys of ``jobs.policy``."""

SCHEMES: Mapping[str, Scheme] = {
    "green": Scheme(
        "GREEN with a profile cache, hysteresis and bounds on waiting", lambda t, j, c: Green(), runs_as=_KIND
    ),
    "green-paper": Scheme("GREEN as published", lambda t, j, c: green_paper(), runs_as="jobs.policy.kind: green-paper"),
    "green-unshifted": Scheme(
        "GREEN blind to the hour (mu = 1)", lambda t, j, c: Green(mu=1.0), runs_as=f"{_KIND} and mu: 1"
    ),
    "green-sleep": Scheme(
        "GREEN, idle nodes suspended", lambda t, j, c: Green(), sleeping=True,
        runs_as=f"{_KIND} and Slurm's SuspendProgram",
    ),
    "swift": _lean("swift", "GREEN for speed: wider jobs"),
    "lean": _lean("lean", "GREEN for both: jobs sized by a price of their time", 120.0),
    "frugal": _lean("frugal", "GREEN for grams"),
    "green-swift": Scheme(
        "GREEN for speed: wider jobs, power limited by kind from their start, idle nodes suspended",
        lambda t, j, c: Green(gamma_low=0.75, cap=_CAP, lift_after_s=_LIFT_AFTER_S),
        sleeping=True,
        classes=partial(_zeus, eta=0.5),
        instead="swift",
    ),
    "green-lean": Scheme(
        "GREEN for both: jobs somewhat wider, power limited by kind from their start, idle nodes suspended",
        lambda t, j, c: Green(gamma_low=0.80, gamma_from=0.8, cap=_CAP, lift_after_s=_LIFT_AFTER_S),
        sleeping=True,
        classes=partial(_zeus, eta=0.7),
        instead="lean",
    ),
    "green-frugal": Scheme(
        "GREEN for grams: power limited by kind from their start, idle nodes suspended",
        lambda t, j, c: Green(lift_after_s=_LIFT_AFTER_S),
        sleeping=True,
        classes=partial(_zeus, eta=0.5),
        instead="frugal",
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
        "Pollux: GPUs go where they add most goodput", lambda t, j, c: Pollux(goodput(t), _CAP), period_s=60.0
    ),
    "pollux-like": Scheme(
        "Pollux blind to statistical efficiency: GPUs go where they add most throughput",
        lambda t, j, c: Pollux(goodput(t, {}), _CAP),
        period_s=60.0,
    ),
    "zeus": Scheme(
        "Zeus: a power limit for each kind of job, ordered by Tiresias", lambda t, j, c: Tiresias(_preset(t)),
        classes=_zeus,
    ),
    "fifo": Scheme("first come, first served, GPUs as requested", lambda t, j, c: Fifo()),
    "backfill": Scheme(
        "EASY backfill that knows how long jobs run, GPUs as requested", lambda t, j, c: Backfill(_lengths_s(t, j)),
        period_s=None,
    ),
}  # fmt: skip
"""Schemes by name."""


def scheme(name: str) -> Scheme:
    """A scheme of ``SCHEMES``, or one with changed knobs: ``green:theta=0.5:sleep=1:limit=0.75:eta=0.5``.

    ``sleep`` suspends idle nodes, ``sleep_after_s`` sets after how long, ``limit`` limits every GPU to a share of its
    power and ``eta`` each kind of job as Zeus would; every other knob is an attribute of the scheme's policy.

    Raises:
        ConfigError: No such scheme or knob, or a value that is not a number.
    """
    base, *knobs = name.split(":")
    if base not in SCHEMES:
        raise ConfigError("no such training policy", got=base, expected=", ".join(SCHEMES))
    made = SCHEMES[base]
    changes: dict[str, Any] = {}
    for knob in knobs:
        key, _, text = knob.partition("=")
        value = _knob(text, name)
        if key == "sleep":
            made = replace(
                made, sleeping=bool(value), runs_as=made.runs_as and f"{made.runs_as} (nodes: SuspendProgram)"
            )
        elif key == "sleep_after_s":
            made = replace(made, sleep_after_s=float(value))
        elif key == "limit":
            made = replace(made, classes=partial(_limited_to, value), tuner=None, runs_as="")
        elif key == "eta":
            made = replace(made, classes=partial(_zeus, eta=value), tuner=None, runs_as="")
        else:
            key = _FORMER_KNOBS.get(key, key)
            changes[key] = value
            made = replace(
                made, runs_as=(made.runs_as and key in _LIVE_KNOBS and f"{made.runs_as}, {key}: {text}") or ""
            )
    return replace(made, policy=partial(_turned, made.policy, changes, name)) if changes else made


_FORMER_KNOBS = {"elder_share": "oldest_share", "elder_age_s": "oldest_age_s"}
"""Former names of policy attributes, read for one release."""


def _with(runs_as: str, more: str) -> str:
    """Instruction to run a scheme, with an addition; empty where either is empty."""
    return f"{runs_as}, {more}" if runs_as and more else ""


def _knob(text: str, name: str) -> Any:
    if text == "none":
        return None
    if text in get_args(ServiceOrder):
        return text
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise ConfigError("a knob takes a number", got=name, expected="such as green:theta=0.5") from None


def _turned(
    make: Callable[[PowerTable, Jobs, Intensity], Any],
    changes: Mapping[str, Any],
    name: str,
    table: PowerTable,
    jobs: Jobs,
    belief: Intensity,
) -> Any:
    policy = make(table, jobs, belief)
    known = [field.name for field in fields(policy)]
    if unknown := [knob for knob in changes if knob not in known]:
        raise ConfigError(f"{name.partition(':')[0]} has no knob {unknown[0]}", got=name, expected=", ".join(known))
    return replace(policy, **changes)


def run_scheme(name: str, setting: Setting, jobs: Jobs, carbon: Intensity, watch: Watch | None = None) -> TrainingRun:
    """Run one scheme to the end of its last job.

    Args:
        name: As :func:`scheme` reads it.
        setting: The conditions.
        jobs: The workload.
        carbon: The true intensity.
        watch: Called at every round; the run then keeps the timeline of its power.

    Raises:
        ConfigError: No such scheme.
        DataError: A job can never start.
    """
    made = scheme(name)
    period_s = setting.quantum_s if made.period_s is not None and math.isnan(made.period_s) else made.period_s
    parts = parts_of(setting.groups, jobs, len(setting.classes), setting.nodes * setting.node.gpus)
    pools = [_pool(made, setting, carbon, *part) for part in parts]
    return run_training_pools(pools, period_s=period_s, watch=watch)


def _pool(
    made: Scheme, setting: Setting, carbon: Intensity, groups: tuple[NodeGroup, ...], jobs: Jobs, numbers: IntArray
) -> ClusterPart:
    """The nodes of one pool as a scheme runs them, with its policy."""
    widest = max(_CAP, int(jobs.max_gpus.max(initial=1)))
    settings = [setting.on_group(group) for group in groups] or [setting]
    clusters = [one.cluster(carbon, made, widest) for one in settings]
    cluster = replace(joined(clusters), groups=groups)
    belief = carbon if setting.belief is None else setting.belief
    start_s = None if made.start_s is None else made.start_s(jobs, belief)
    return ClusterPart(cluster, jobs, numbers, made.policy(cluster.table, jobs, belief), start_s)


def with_slack(jobs: Jobs, slack_s: float, over_s: float = 3600.0) -> Jobs:
    """Add a deadline to jobs that take longer than ``over_s`` on one GPU: submission plus that time and the slack.

    Without slack the jobs are returned unchanged.
    """
    if slack_s <= 0:
        return jobs
    deadline_s = np.where(jobs.work_s > over_s, jobs.submit_s + jobs.work_s + slack_s, math.inf)
    return replace(jobs, deadline_s=deadline_s)


def jobs_from_trace(
    submit_s: FloatArray, duration_s: FloatArray, streams: Streams, *, requested: IntArray | None = None
) -> Jobs:
    """Turn a trace of submissions and durations into jobs of the eight classes, drawn uniformly.

    Owners request 1, 2, 4 or 8 GPUs at 40, 25, 25 and 10 % unless the trace states it. Durations are on one GPU.

    Raises:
        DataError: Submissions are out of order or a duration is not positive.
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
    """Submissions and durations, s, of generated jobs of a mix of ``MIXES``, busier by day than by night.

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
