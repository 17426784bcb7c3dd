"""Simulate Clover's service: service times of requests on each instance, and the metrics of a measured pool.

The queue is :mod:`joulery.perf.queues.fifo_pool`. A request's service time on instance ``i``, while ``b`` other
instances of its host are busy as it starts, is::

    max(floor_i, host_i + gpu_i * size + jitter + host_i * contention * b)

``size`` and ``jitter`` belong to the request, not to the instance, and are sampled before the simulation: every
configuration serves the same requests (paired comparison). While instances are idle, each serves an equal count of
requests whatever its speed: the accuracy of a lightly loaded mixture is the mean over its instances. Only near
saturation do the fast ones serve more.

Energy is simulated, not measured: idle watts of every powered device over the whole window plus the dynamic joules of
each request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, IntArray, readonly
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quantile import quantile_of_sorted
from joulery.perf.queues.fifo_pool import PoolInstance, serve
from joulery.sim.core.streams import Streams


@dataclass(frozen=True, slots=True)
class PullInstance:
    """One variant on one slice.

    Attributes:
        name: For reports (``yolov5x on 3g``).
        host_s: Host part of a request's service time, stretched by busy neighbours.
        gpu_s: Device part for a request of mean size.
        floor_s: No request is served faster.
        dynamic_j: Joules of one request above idle.
        accuracy_ratio: Accuracy of its answers.
    """

    name: str
    host_s: float
    gpu_s: float
    floor_s: float
    dynamic_j: float
    accuracy_ratio: float

    def __post_init__(self) -> None:
        for value in (self.host_s, self.gpu_s, self.floor_s, self.dynamic_j):
            if not 0 <= value < math.inf:
                raise ConfigError("times and joules of an instance are 0 or more", pointer=self.name, got=str(value))
        if not self.host_s + self.gpu_s > 0:
            raise ConfigError("an instance needs a positive service time", pointer=self.name)


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """The requests, the same for every configuration that serves them.

    Attributes:
        arrival_s: When each request arrives, float64[n], non-decreasing.
        size: Size of each request's device part, mean 1, float64[n].
        jitter_s: Added to its service time, mean 0, float64[n].
    """

    arrival_s: FloatArray
    size: FloatArray
    jitter_s: FloatArray

    def __len__(self) -> int:
        return len(self.arrival_s)

    @classmethod
    def draw(cls, arrival_s: npt.ArrayLike, streams: Streams, *, size_cv: float, jitter_s: float) -> Requests:
        """Lognormal sizes of mean 1 and normal jitter for given arrivals.

        Args:
            arrival_s: float64[n], non-decreasing, 0 or more.
            streams: Random streams of sizes and jitter.
            size_cv: Coefficient of variation of the size.
            jitter_s: Standard deviation of the jitter, seconds.

        Raises:
            DataError: An arrival is negative, not finite or out of order.
        """
        arrivals = readonly(arrival_s, np.float64)
        if not bool(np.all(np.isfinite(arrivals)) and np.all(np.diff(arrivals, prepend=0.0) >= 0)):
            raise DataError("arrival times must be finite, start at 0 s or later and never step back")
        sigma = math.sqrt(math.log1p(size_cv**2))
        size = streams("sizes").lognormal(-(sigma**2) / 2, sigma, len(arrivals))
        jitter = streams("jitter").normal(0.0, jitter_s, len(arrivals))
        return cls(arrivals, readonly(size, np.float64), readonly(jitter, np.float64))


class ServiceTimes:
    """Service times of some requests while every neighbour is idle, worked out once for each kind of instance.

    Instances that are alike share a list (a list an instance would not fit into the processor's cache), and so do all
    pools that serve the same requests with one object of this class.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self.arrival_s: list[float] = requests.arrival_s.tolist()
        self._known: dict[tuple[float, float], list[float]] = {}

    def of(self, instance: PullInstance) -> list[float]:
        """Service time of each request on an instance, seconds."""
        kind = (instance.host_s, instance.gpu_s)
        if kind not in self._known:
            times = self._requests.size * instance.gpu_s
            times += instance.host_s
            times += self._requests.jitter_s
            self._known[kind] = times.tolist()
        return self._known[kind]


@dataclass(frozen=True, slots=True, eq=False)
class Pulled:
    """Times and instance of each request.

    Attributes:
        start_s: When an instance took it, float64[n], seconds.
        finish_s: When the request was answered.
        instance: Which instance served it, int64[n].
        free_s: When each instance is free after the last request, float64[instances].
    """

    start_s: FloatArray
    finish_s: FloatArray
    instance: IntArray
    free_s: FloatArray


def pull(
    requests: Requests,
    instances: Sequence[PullInstance],
    *,
    contention: float = 0.0,
    available_s: Sequence[float] | None = None,
    hosts: Sequence[int] = (),
    times: ServiceTimes | None = None,
) -> Pulled:
    """Serve every request exactly once on a pool of instances.

    Args:
        requests: The requests.
        instances: The pool, one or more; at equal idle time the first listed goes first.
        contention: Stretch of the host part per busy neighbour on the same host.
        available_s: From when each instance serves: the end of a start-up, or ``free_s`` of an earlier stretch.
        hosts: The number of the host of each instance; empty for one host.
        times: Service times of these requests, where several pools serve them.

    Raises:
        ConfigError: There is no instance.
        DataError: ``available_s`` does not have one finite time per instance.
    """
    count = len(instances)
    if count == 0:
        raise ConfigError("a service needs at least one instance", expected="one or more")
    available = [0.0] * count if available_s is None else [float(t_s) for t_s in available_s]
    if len(available) != count or not all(map(math.isfinite, available)):
        raise DataError(f"expected one finite available time for each of {count} instances, got {available}")
    times = times or ServiceTimes(requests)
    stretches = {spec.host_s: [spec.host_s * contention] * len(requests) for spec in instances}
    run = serve(
        times.arrival_s,
        [
            PoolInstance(times.of(spec), stretches[spec.host_s], spec.floor_s, host, free_s)
            for spec, host, free_s in zip(instances, hosts or (0,) * count, available, strict=True)
        ],
    )
    return Pulled(
        readonly(run.start_s, np.float64),
        readonly(run.finish_s, np.float64),
        readonly(run.instance, np.int64),
        readonly(run.free_s, np.float64),
    )


@dataclass(frozen=True, slots=True)
class PullMetrics:
    """Metrics of a measurement window of the service; every joule in it is simulated.

    Attributes:
        requests: Requests measured.
        served: Of these, how many each instance served.
        accuracy_ratio: Mean accuracy of the answers.
        p50_s: Median latency, arrival to answer.
        p95_s: 95th percentile of the latency.
        window_s: Length of the window: its first arrival (or 0) to its last answer.
        idle_j: Idle energy of the powered devices over the window.
        dynamic_j: Dynamic energy of the measured requests.
        energy_j_per_request: Both together, per request.
    """

    requests: int
    served: tuple[int, ...]
    accuracy_ratio: float
    p50_s: float
    p95_s: float
    window_s: float
    idle_j: float
    dynamic_j: float
    energy_j_per_request: float


def metrics(
    requests: Requests, pulled: Pulled, instances: Sequence[PullInstance], *, idle_w: float, skip: int = 0
) -> PullMetrics:
    """Summarise a run, leaving out its first ``skip`` requests as warm-up.

    Args:
        requests: What :func:`pull` served.
        pulled: What it returned.
        instances: The pool.
        idle_w: Idle power of all powered devices together.
        skip: Requests of warm-up; the published system removes none.

    Raises:
        DataError: Nothing is left to measure.
    """
    measured = len(requests) - skip
    if measured <= 0 or skip < 0:
        raise DataError(f"a window of {len(requests)} requests with {skip} of warm-up measures nothing")
    served = np.bincount(pulled.instance[skip:], minlength=len(instances))
    latency = pulled.finish_s[skip:] - requests.arrival_s[skip:]
    begin_s = float(requests.arrival_s[skip]) if skip else 0.0
    window_s = float(pulled.finish_s[skip:].max()) - begin_s
    idle_j = idle_w * window_s
    dynamic_j = float(served @ np.array([spec.dynamic_j for spec in instances]))
    ordered = np.sort(latency).tolist()
    return PullMetrics(
        requests=measured,
        served=tuple(served.tolist()),
        accuracy_ratio=float(served @ np.array([spec.accuracy_ratio for spec in instances])) / measured,
        p50_s=quantile_of_sorted(ordered, 0.5),
        p95_s=quantile_of_sorted(ordered, 0.95),
        window_s=window_s,
        idle_j=idle_j,
        dynamic_j=dynamic_j,
        energy_j_per_request=(idle_j + dynamic_j) / measured,
    )
