"""The FIFO pool written a second time, with a heap and a look at every instance: the oracle of the fast one."""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from joulery.domain.serving.profile import SliceProfile, Timings
from joulery.perf.queues.pull_queue import Replay


def replay(arrival_s, draws, layouts) -> Replay:
    n = len(arrival_s)
    server, epoch = np.empty(n, np.int64), np.empty(n, np.int64)
    start_s, service_s, cpu_s = np.empty(n), np.empty(n), np.empty(n)
    arrivals, picks = arrival_s.tolist(), draws.tolist()
    now = -1
    tables = []
    free = []
    for k in range(n):
        t = arrivals[k]
        while now + 1 < len(layouts) and (now < 0 or layouts[now + 1][0] <= t):
            now += 1
            tables = [_Table.of(item) for item in layouts[now][1]]
            free = [(-math.inf, index) for index in range(len(tables))]
        free_s, index = free[0]
        begin = t if free_s <= t else free_s
        others = sum(1 for until, other in free if until > begin and other != index)
        took, cost = tables[index].draw(picks[k], others / (len(free) - 1) if others else 0.0)
        heapq.heapreplace(free, (begin + took, index))
        server[k], epoch[k], start_s[k], service_s[k], cpu_s[k] = index, now, begin, took, cost
    return Replay(arrival_s, server, start_s, service_s, cpu_s, epoch)


@dataclass(frozen=True, slots=True)
class _Table:
    """Samples of one instance as plain lists: indexing them costs a tenth of indexing arrays."""

    alone_s: list[float]
    alone_cpu_s: list[float]
    loaded_s: list[float]
    loaded_cpu_s: list[float]

    @classmethod
    def of(cls, item: SliceProfile) -> "_Table":
        return cls(*_columns(item.alone), *_columns(item.loaded))

    def draw(self, pick: float, loaded_ratio: float) -> tuple[float, float]:
        """Seconds and CPU seconds of one request, between alone and loaded as the neighbours are."""
        a, b = int(pick * len(self.alone_s)), int(pick * len(self.loaded_s))
        alone_s, cost_s = self.alone_s[a], self.alone_cpu_s[a]
        return (
            alone_s + (self.loaded_s[b] - alone_s) * loaded_ratio,
            cost_s + (self.loaded_cpu_s[b] - cost_s) * loaded_ratio,
        )


def _columns(timings: Timings) -> tuple[list[float], list[float]]:
    order = np.argsort(timings.service_s, kind="stable")
    return timings.service_s[order].tolist(), timings.cpu_s[order].tolist()
