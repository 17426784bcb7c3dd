"""Request-by-request simulation of a service: one queue, replicas that start and stop, requests steered to variants.

Burst studies use it as their plant. A :class:`Controller` observes the service once a period and changes the layout. A
layout that needs new processes takes over after their start; other variants in the same processes take over at once.
Every request draws the same quantile of its service time whatever variant answers it, so two controllers on one seed
differ by their decisions alone. With dynamic batches the replica that has been idle longest takes the waiting requests,
up to the largest batch of the variant that answers; the time of a batch is drawn for its first request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.serving.dispatch import QueueLimit
from joulery.domain.serving.service import Slice
from joulery.sim.core.kernel import Kernel, Rank

_NEVER_S = -math.inf


@dataclass(frozen=True, slots=True)
class PlantSettings:
    """The service and its machine.

    Attributes:
        slo_s: Latency of the SLO.
        start_s: Seconds until new processes have loaded their models.
        loaded: Variants that every replica has loaded; empty for its own only.
        period_s: Seconds between two steps of the controller.
        window_s: Seconds of answers that an observation covers.
        drop_late: Whether a request that can no longer be answered within the SLO is dropped when its turn comes.
        slowdown: Service times over those of the profile, as a function of time.
        awake_w: Watts that each replica draws while it waits.
        batch_delay_s: How long a batch that is not full waits for more requests.
    """

    slo_s: float
    start_s: float = 1.5
    loaded: tuple[str, ...] = ()
    period_s: float = 1.0
    window_s: float = 4.0
    drop_late: bool = False
    slowdown: Callable[[float], float] = lambda _: 1.0
    awake_w: float = 0.0
    batch_delay_s: float = 0.0


class Steered(Protocol):
    """Chooses the variant of a request; see :class:`joulery.domain.serving.mix.MixCounter`."""

    def pick(self, own: str, warm: Any, waiting: int, oldest_wait_s: float, /) -> str:
        """Choose the variant that answers the next requests."""
        ...

    def count(self, requests: int, /) -> None:
        """Count requests that are answered by the variant that was picked last."""
        ...


class Controller(Protocol):
    """Decides once a period what a service runs."""

    def decide(self, now_s: float, service: ElasticService) -> None:
        """Observe the service and change what it runs if needed."""
        ...


@dataclass(slots=True, eq=False)
class _Replica:
    variant: str
    slice: Slice
    requests: tuple[int, ...] = ()
    leaving: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class BurstOutcome:
    """Result of a simulation.

    Attributes:
        arrival_s: Arrivals, float64[n].
        latency_s: Arrival to answer; infinite for a refused or dropped request, float64[n].
        energy_j: Joules above idle, float64[n].
        variant: The variant that answered, by request; empty for none.
        changes: ``(t_s, what)``: each change of layout, mix or limit.
        slo_s: The SLO.
        awake_s: Seconds that replicas waited for requests, all together.
        awake_j: Joules of that waiting.
        batch: Requests in the batch of each answered request, int64[n]; 0 for none.
    """

    arrival_s: FloatArray
    latency_s: FloatArray
    energy_j: FloatArray
    variant: tuple[str, ...]
    changes: tuple[tuple[float, str], ...]
    slo_s: float
    awake_s: float = 0.0
    awake_j: float = 0.0
    batch: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def mean_batch(self) -> float:
        """Requests a batch, on average over the batches; NaN where nothing was answered."""
        sizes = self.batch[self.batch > 0]
        return len(sizes) / float(np.sum(1.0 / sizes)) if len(sizes) else math.nan

    @property
    def answered(self) -> int:
        """Requests that were answered."""
        return int(np.isfinite(self.latency_s).sum())

    @property
    def refused(self) -> int:
        """Requests that were refused or dropped."""
        return len(self.latency_s) - self.answered

    @property
    def late(self) -> int:
        """Answers beyond the SLO."""
        return int((np.isfinite(self.latency_s) & (self.latency_s > self.slo_s)).sum())

    @property
    def violations(self) -> int:
        """Requests that were not answered within the SLO."""
        return self.late + self.refused

    @property
    def attainment_ratio(self) -> float:
        """Share of the answers within the SLO."""
        return 1.0 - self.late / max(1, self.answered)


@dataclass(eq=False)
class ElasticService:
    """The simulated service.

    Attributes:
        profile: Samples of service time and CPU time of each variant on each slice, in one order of their quantiles,
            and the watts of a busy core.
        arrival_s: Arrivals, float64[n].
        settings: The service and its machine.
        controller: Decides once a period.
        seed: Seed of the service times.
        running: The layout that serves; None before the first.
        steering: Chooses variants; None if each replica uses its own.
        limit: Limit of the queue; None for no limit.
        batches: The same samples for batches of 2 or more requests, by batch size; empty for a variant that answers
            requests one by one.
    """

    profile: Mapping[tuple[str, Slice], tuple[FloatArray, FloatArray, float]]
    arrival_s: FloatArray
    settings: PlantSettings
    controller: Controller
    seed: int = 0
    running: Layout | None = None
    steering: Steered | None = None
    limit: QueueLimit | None = None
    batches: Mapping[tuple[str, Slice], Mapping[int, tuple[FloatArray, FloatArray]]] = field(default_factory=dict)
    changes: list[tuple[float, str]] = field(default_factory=list)
    _kernel: Kernel = field(default_factory=Kernel)
    _queue: deque[int] = field(default_factory=deque)
    _idle: deque[_Replica] = field(default_factory=deque)
    _replicas: list[_Replica] = field(default_factory=list)
    _arrived: int = 0
    _version: int = 0
    _next: Layout | None = None
    _awake_s: float = 0.0
    _counted_s: float = 0.0
    _ripe_s: float = _NEVER_S

    def __post_init__(self) -> None:
        count = len(self.arrival_s)
        self._pick = np.random.default_rng(self.seed).random(count)
        self._latency_s = np.full(count, np.inf)
        self._start_s = np.full(count, np.nan)
        self._end_s = np.full(count, np.inf)
        self._energy_j = np.zeros(count)
        self._variant = [""] * count
        self._batch = np.zeros(count, np.int64)
        self._ended: deque[int] = deque()

    def simulate(self, until_s: float) -> BurstOutcome:
        """Simulate until no event is left; the controller decides until ``until_s``."""
        kernel = self._kernel
        kernel.on("end", Rank.COMPLETION, self._end)
        kernel.on("ready", Rank.COMPLETION, self._ready)
        kernel.on("arrival", Rank.ARRIVAL, self._arrive)
        kernel.on("ripe", Rank.ARRIVAL, self._ripen)
        kernel.on("look", Rank.POLICY, self._look)
        kernel.at(0.0, "look", until_s)
        if len(self.arrival_s):
            kernel.at(float(self.arrival_s[0]), "arrival", 0)
        kernel.run()
        return BurstOutcome(
            np.asarray(self.arrival_s),
            self._latency_s,
            self._energy_j,
            tuple(self._variant),
            tuple(self.changes),
            self.settings.slo_s,
            self._awake_s,
            self._awake_s * self.settings.awake_w,
            self._batch,
        )

    @property
    def changing(self) -> bool:
        """Whether the processes of another layout are starting."""
        return self._next is not None

    @property
    def queued(self) -> int:
        """Number of queued requests."""
        return len(self._queue)

    def oldest_wait_s(self, now_s: float) -> float:
        """Seconds that the oldest queued request has waited."""
        return now_s - float(self.arrival_s[self._queue[0]]) if self._queue else 0.0

    def held_s(self, now_s: float) -> dict[str, float]:
        """Seconds that a replica has worked on the oldest request of each variant, where longer than the SLO."""
        begun = {self._variant[one.requests[0]]: one.requests[0] for one in self._replicas if one.requests}
        held = {name: now_s - float(self._start_s[request]) for name, request in begun.items()}
        return {name: held_s for name, held_s in sorted(held.items()) if held_s > self.settings.slo_s}

    def arrivals_between(self, since_s: float, until_s: float) -> int:
        """Arrivals in ``(since_s, until_s]``."""
        first, last = np.searchsorted(self.arrival_s, (since_s, until_s), side="right")
        return int(last - first)

    def recent_rps(self, now_s: float, arrivals: int = 50) -> float:
        """Arrivals a second over the last second, or over the last ``arrivals`` if those took longer; NaN at first."""
        last = int(np.searchsorted(self.arrival_s, now_s, side="right"))
        since_s = float(self.arrival_s[last - arrivals]) if last >= arrivals else 0.0
        span_s = max(1.0, min(now_s - since_s, self.settings.window_s))
        return self.arrivals_between(now_s - span_s, now_s) / span_s if now_s >= span_s else float("nan")

    def ended_since(self, since_s: float) -> list[int]:
        """Requests that were answered since a time."""
        while self._ended and self._end_s[self._ended[0]] < since_s:
            self._ended.popleft()
        return list(self._ended)

    def latency_of(self, requests: Sequence[int]) -> FloatArray:
        """Latencies of requests that ended."""
        return np.asarray(self._latency_s[list(requests)])

    def variant_of(self, request: int) -> str:
        """The variant that answered a request."""
        return self._variant[request]

    def batch_of(self, requests: Sequence[int]) -> IntArray:
        """Size of the batch of each of the given answered requests."""
        return np.asarray(self._batch[requests])

    def occupied_s(self, requests: Sequence[int]) -> FloatArray:
        """Seconds that each request kept its replica busy: an equal share of the time of its batch."""
        return np.asarray((self._end_s[requests] - self._start_s[requests]) / self._batch[requests])

    def run(self, layout: Layout) -> None:
        """Change to a layout: at once if the present processes suffice, else when new ones have loaded."""
        now_s = self._kernel.now_s
        self._version += 1
        if layout == self.running:
            self._next = None
            return
        self.changes.append((now_s, str(layout)))
        if self.running is None or not self._missing(layout):
            self._next = None
            self._take_over(layout)
            return
        self._next = layout
        self._kernel.at(now_s + self.settings.start_s, "ready", (self._version, layout))

    def note(self, what: str) -> None:
        """Record a change."""
        self.changes.append((self._kernel.now_s, what))

    def _ready(self, _: float, payload: tuple[int, Layout]) -> None:
        version, layout = payload
        if version == self._version:
            self._next = None
            self._take_over(layout)

    def _missing(self, layout: Layout) -> list[Instance]:
        """Instances of a layout that need a new process because no present replica can take them."""
        free = [one for one in self._replicas if not one.leaving]
        return [item for item in layout.instances if self._taken(item, free) is None]

    def _taken(self, item: Instance, free: list[_Replica]) -> _Replica | None:
        """Take a replica that can become an instance out of ``free``: on its slice, and with its variant if need be."""
        mine = [one for one in free if one.slice == item.slice]
        mine.sort(key=lambda one: one.variant != item.variant)
        if not mine or (mine[0].variant != item.variant and not self.settings.loaded):
            return None
        free.remove(mine[0])
        return mine[0]

    def _take_over(self, layout: Layout) -> None:
        """Switch to a layout: keep the replicas that fit, add missing ones, retire the others after their requests."""
        self._count_awake()
        self.running = layout
        free, fresh = [one for one in self._replicas if not one.leaving], []
        for item in layout.instances:
            replica = self._taken(item, free)
            if replica is None:
                fresh.append(_Replica(item.variant, item.slice))
            else:
                replica.variant = item.variant
        for replica in free:
            replica.leaving = True
        self._replicas = [one for one in self._replicas if not one.leaving or one.requests] + fresh
        self._idle = deque([one for one in self._idle if not one.leaving] + fresh)
        self._pump()

    def _count_awake(self) -> None:
        """Add the seconds that idle replicas waited since the last call."""
        now_s = self._kernel.now_s
        self._awake_s += len(self._idle) * (now_s - self._counted_s)
        self._counted_s = now_s

    def _look(self, t_s: float, until_s: float) -> None:
        self._count_awake()
        self.controller.decide(t_s, self)
        if t_s + self.settings.period_s <= until_s:
            self._kernel.at(t_s + self.settings.period_s, "look", until_s)

    def _arrive(self, t_s: float, request: int) -> None:
        if request + 1 < len(self.arrival_s):
            self._kernel.at(float(self.arrival_s[request + 1]), "arrival", request + 1)
        if self.limit is not None and len(self._queue) >= self.limit.waiting and not self._idle:
            return
        self._queue.append(request)
        self._pump()

    def _pump(self) -> None:
        now_s = self._kernel.now_s
        wait_s = math.inf if self.limit is None else self.limit.wait_s
        while wait_s < math.inf and self._queue and self.oldest_wait_s(now_s) > wait_s:
            self._queue.popleft()
        while self._idle and self._queue:
            self._count_awake()
            replica = self._idle[0]
            variant = self._variant_for(now_s, replica)
            most, own = self._most(variant, replica.slice), self._most(replica.variant, replica.slice)
            ripe_s = float(self.arrival_s[self._queue[0]]) + (self.settings.batch_delay_s if own > 1 else 0.0)
            if len(self._queue) < most and now_s < ripe_s:
                if self._ripe_s != ripe_s:
                    self._ripe_s = ripe_s
                    self._kernel.at(ripe_s, "ripe", None)
                return
            taken = tuple(self._queue.popleft() for _ in range(min(most, len(self._queue))))
            self._begin(now_s, self._idle.popleft(), variant, taken)

    def _most(self, variant: str, piece: Slice) -> int:
        """Size of the largest batch of a variant on a slice."""
        return max(self.batches.get((variant, piece), ()), default=1)

    def _variant_for(self, now_s: float, replica: _Replica) -> str:
        """The variant that a replica is to answer the next requests with."""
        if self.steering is None:
            return replica.variant
        own = self._most(replica.variant, replica.slice)
        behind = max(0, len(self._queue) - own)
        waited_s = now_s - float(self.arrival_s[self._queue[own]]) if behind else 0.0
        return self.steering.pick(replica.variant, self.settings.loaded, behind, waited_s)

    def _begin(self, now_s: float, replica: _Replica, variant: str, taken: tuple[int, ...]) -> None:
        """Start a batch on a replica; with ``drop_late``, drop late requests and requeue the rest instead."""
        size = len(taken)
        took_s, cpu_s = self._times(variant, replica.slice, taken)
        took_s *= self.settings.slowdown(now_s)
        if self.settings.drop_late:
            latest_s = now_s + took_s - self.settings.slo_s
            kept = [request for request in taken if latest_s <= self.arrival_s[request]]
            if len(kept) < size:
                self._idle.appendleft(replica)
                self._queue.extendleft(reversed(kept))
                return
        if self.steering is not None:
            self.steering.count(size)
        replica.requests = taken
        for request in taken:
            self._start_s[request], self._variant[request], self._batch[request] = now_s, variant, size
            self._energy_j[request] = cpu_s / size * self.profile[variant, replica.slice][2]
        self._kernel.at(now_s + took_s, "end", replica)

    def _times(self, variant: str, piece: Slice, taken: Sequence[int]) -> tuple[float, float]:
        """Seconds and CPU seconds of a batch, interpolated between the profiled batch sizes."""
        times_s, used_s, _ = self.profile[variant, piece]
        at = int(self._pick[taken[0]] * len(times_s))
        sizes = self.batches.get((variant, piece)) if len(taken) > 1 else None
        if not sizes:  # one request, or a variant that takes no batches: one after the other
            return float(times_s[at]) * len(taken), float(used_s[at]) * len(taken)
        points = [(1, times_s[at], used_s[at])]
        points += [(n, one[at], two[at]) for n, (one, two) in sorted(sizes.items())]
        high = next((k for k, point in enumerate(points) if point[0] >= len(taken)), len(points) - 1)
        (fewer, low_s, low_cpu_s), (more, high_s, high_cpu_s) = points[high - 1], points[high]
        part = (len(taken) - fewer) / (more - fewer)
        return float(low_s + part * (high_s - low_s)), float(low_cpu_s + part * (high_cpu_s - low_cpu_s))

    def _ripen(self, _: float, __: None) -> None:
        self._pump()

    def _end(self, t_s: float, replica: _Replica) -> None:
        self._count_awake()
        taken, replica.requests = replica.requests, ()
        for request in taken:
            self._end_s[request] = t_s
            self._latency_s[request] = t_s - self.arrival_s[request]
            self._ended.append(request)
        if replica.leaving:
            self._replicas.remove(replica)
        else:
            self._idle.append(replica)
        self._pump()
