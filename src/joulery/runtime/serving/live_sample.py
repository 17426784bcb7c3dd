"""A live trial's sample: the requests of a service since its layout took over, with confidence intervals."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.engine import Outcome, ReplicaState, ReplicaView, RequestRecord
from joulery.domain.serving.service import Slo, SloScope
from joulery.perf.confidence import mean_interval, quantile_interval
from joulery.policies.serving.observation import Sample

MOST_REQUESTS = 2000
"""Requests kept; older ones are dropped, since conditions of an hour ago may no longer hold."""
_STALE_RATIO = 0.05
"""A sample is computed again when this share of its requests has ended since."""
_FAILURES = frozenset({Outcome.OVERLOADED, Outcome.DEADLINE, Outcome.FAILED, Outcome.CRASHED, Outcome.UNAVAILABLE})
"""Outcomes that are the service's failures; the others are the client's own."""


class LiveSample:
    """Follows one service from the moment its layout takes over.

    Args:
        service: The service; records of others are ignored.
        confidence: Of the intervals.
        warm_up_s: Seconds after the take-over whose arrivals do not count.
    """

    def __init__(self, service: str, confidence: float, warm_up_s: float) -> None:
        self.service = service
        self._confidence, self._warm_up_s = confidence, warm_up_s
        self._records: deque[RequestRecord] = deque(maxlen=MOST_REQUESTS)
        self._layout: Layout | None = None
        self._since_s = math.inf
        self._restarts: dict[str, int] = {}
        self._deaths = 0
        self._whole = True
        self._added = 0
        self._drained_s = -math.inf
        self._made: tuple[int, Slo, Sample] | None = None
        # The intervals' imports are loaded before the first observation, which must not stall.
        quantile_interval(np.zeros(1), 0.5, confidence)
        mean_interval(np.zeros(2), confidence)

    def add(self, record: RequestRecord) -> None:
        """Add a request that ended; one from before the sample shows that the layout inherited a queue."""
        if record.service == self.service and record.arrival_s < self._since_s < record.end_s:
            self._drained_s = max(self._drained_s, record.end_s if math.isnan(record.start_s) else record.start_s)
        counts = record.outcome is Outcome.OK or record.outcome in _FAILURES
        if record.service == self.service and record.arrival_s >= self._since_s and counts:
            self._records.append(record)
            self._added += 1

    def watch(self, layout: Layout | None, replicas: Sequence[ReplicaView], now_s: float) -> None:
        """Check the running replicas: another layout begins a sample; the death or return of a replica restarts it."""
        mine = [view for view in replicas if view.spec.service == self.service]
        restarts = {view.id: view.restarts for view in mine}
        whole = all(view.state in (ReplicaState.READY, ReplicaState.DRAINING) for view in mine)
        if layout != self._layout:
            self._layout, self._deaths, self._restarts = layout, 0, restarts
            self.begin(now_s)
        died = sum(count - self._restarts.get(name, 0) for name, count in restarts.items())
        if died > 0 or (whole and not self._whole):
            self.begin(now_s)
        self._deaths += max(died, 0)
        self._restarts, self._whole = restarts, whole

    def begin(self, now_s: float) -> None:
        """Restart the sample: earlier requests do not count."""
        self._records.clear()
        self._added, self._made, self._drained_s = 0, None, -math.inf
        self._since_s = now_s + self._warm_up_s

    def sample(self, slo: Slo) -> Sample | None:
        """The sample so far, at most a few requests old; None before anything runs."""
        if self._layout is None:
            return None
        if self._made is None or self._made[1] != slo or self._made[2].deaths != self._deaths or self._is_stale():
            self._made = (self._added, slo, self._summed_up(self._layout, slo))
        return self._made[2]

    def _is_stale(self) -> bool:
        return self._made is not None and self._added - self._made[0] > _STALE_RATIO * self._made[2].requests

    def _summed_up(self, layout: Layout, slo: Slo) -> Sample:
        records = list(self._records)
        inherited = self._drained_s > self._since_s and slo.scope is SloScope.END_TO_END
        if inherited:  # a request that was refused while the inherited queue drained says nothing about the layout
            records = [one for one in records if not (math.isnan(one.start_s) and one.arrival_s < self._drained_s)]
        answered = [record for record in records if record.outcome is Outcome.OK]
        latencies = [_latency_s(record, slo.scope) for record in records]
        if inherited:
            latencies = _from_empty(records, len(layout.instances), self._since_s)
        latency = quantile_interval(np.array(latencies), slo.quantile, self._confidence)
        joules = mean_interval(
            np.array([record.energy.energy_j for record in answered if record.energy is not None]), self._confidence
        )
        return Sample(
            layout=layout,
            since_s=self._since_s,
            requests=len(records),
            failed=len(records) - len(answered),
            latency_s=latency.point,
            latency_low_s=latency.low,
            latency_high_s=latency.high,
            energy_j=joules.point,
            energy_band_j=joules.high - joules.point if math.isfinite(joules.high) else math.inf,
            served=dict(sorted(Counter(record.variant for record in answered).items())),
            deaths=self._deaths,
        )


def _latency_s(record: RequestRecord, scope: SloScope) -> float:
    if record.outcome is not Outcome.OK:
        return math.inf
    return record.latency_s if scope is SloScope.END_TO_END else record.service_s


def _from_empty(records: Sequence[RequestRecord], replicas: int, since_s: float) -> list[float]:
    """Latencies, seconds, had the queue been empty when the sample began.

    The layout's replicas serve the sample's requests in order of arrival, each as long as it really took, without the
    requests that came before. A request of a batch keeps its replica for its part of the batch's time.
    """
    free = [since_s] * replicas
    found = []
    for record in sorted(records, key=lambda one: one.arrival_s):
        if math.isnan(record.start_s):
            found.append(math.inf)
            continue
        start_s = min(max(record.arrival_s, free[0]), record.start_s)
        took_s = record.end_s - record.start_s
        end_s = start_s + took_s
        heapq.heapreplace(free, start_s + took_s / record.batch)
        found.append(end_s - record.arrival_s if record.outcome is Outcome.OK else math.inf)
    return found
