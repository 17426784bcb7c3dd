"""A pool of instances that pull from one FIFO: the one simulation of Clover's dispatch (SC'23, section 3).

Requests wait in one FIFO. An idle instance takes the oldest one, an instance serves one request at a time, and among
several idle instances the longest idle goes first. All of that is one rule: the next request goes to the instance with
the earliest ``free_s``, which is the longest idle if any is idle, else the first to become free.

A request's service time is known for each instance before the simulation, so that every pool serves the same requests;
it grows with the number of other instances of the same host that are busy as the request starts.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class PoolInstance:
    """One instance's service times.

    Attributes:
        work_s: Service time of each request while every neighbour is idle, seconds, one a request.
        stretch_s: Seconds that each busy neighbour adds to it, one a request.
        floor_s: Least service time of a request.
        host: Host of the instance; only instances of one host stretch each other's requests.
        free_s: Time from which it serves.
    """

    work_s: Sequence[float]
    stretch_s: Sequence[float]
    floor_s: float = 0.0
    host: int = 0
    free_s: float = -math.inf


@dataclass(frozen=True, slots=True, eq=False)
class PoolRun:
    """Times and instance of each request, in order of arrival.

    Attributes:
        start_s: When an instance took it, float64[n], seconds.
        finish_s: When it was answered, float64[n], seconds.
        service_s: How long it took to serve, float64[n], seconds.
        instance: The instance that served it, int64[n].
        busy: Neighbours that were busy as it started, one a request.
        free_s: When each instance is free after the last request, float64[instances].
    """

    start_s: FloatArray
    finish_s: FloatArray
    service_s: FloatArray
    instance: IntArray
    busy: Sequence[int]
    free_s: FloatArray


def serve(arrival_s: Sequence[float], instances: Sequence[PoolInstance]) -> PoolRun:
    """Serve every request; none is lost, none is served twice.

    Args:
        arrival_s: When each request arrives, seconds, not decreasing.
        instances: The pool, one or more; at equal idle time the first listed goes first.
    """
    count = len(instances)
    free = sorted((one.free_s, index) for index, one in enumerate(instances))
    work, stretch = [one.work_s for one in instances], [one.stretch_s for one in instances]
    floor, host = [one.floor_s for one in instances], [one.host for one in instances]
    # With one host every instance is a neighbour: a second list of them would only cost time.
    apart = {number: [entry for entry in free if host[entry[1]] == number] for number in host}
    apart = apart if len(apart) > 1 else {}
    starts: list[float] = []
    services: list[float] = []
    servers: list[int] = []
    crowd: list[int] = []
    for request, arrival in enumerate(arrival_s):
        start, server = entry = free.pop(0)
        near = free
        if apart:
            near = apart[host[server]]
            near.remove(entry)
        if start < arrival:
            start = arrival
        busy = len(near) - bisect_right(near, (start, count))
        service = work[server][request] + stretch[server][request] * busy
        if service < floor[server]:
            service = floor[server]
        entry = (start + service, server)
        insort(free, entry)
        if apart:
            insort(near, entry)
        starts.append(start)
        services.append(service)
        servers.append(server)
        crowd.append(busy)
    last = np.empty(count)
    for free_s, server in free:
        last[server] = free_s
    start_s, service_s = np.array(starts, np.float64), np.array(services, np.float64)
    return PoolRun(
        start_s,
        start_s + service_s,
        service_s,
        np.array(servers, np.int64),
        crowd,
        last,
    )
