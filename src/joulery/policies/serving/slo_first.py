"""Protection of the SLO: detects threats to it and chooses the loaded variants that answer while many requests arrive.

Pure arithmetic on the measured profile. A layout's slices serve ``1 / mean service time`` requests a second each; the
mean is over the variants that a slice answers with. Machines slow down while other programs run: ``slowdown_ratio``
divides every capacity.

Proteus (ASPLOS 2024) chooses the most accurate mix that carries an estimated demand, SuperServe (NSDI 2025) the variant
of a request by its slack. Here the shares follow the arrivals of the last seconds, and the slack decides in between.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from joulery.domain.errors import DataError
from joulery.domain.format import latency
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.serving.dispatch import QueueLimit
from joulery.domain.serving.mix import OWN, MixStep, VariantMix, Weights
from joulery.domain.serving.service import Slo, SloScope
from joulery.perf.layouts import Predictor
from joulery.policies.serving.objective import ServiceObjectives
from joulery.policies.serving.observation import TAIL_QUANTILE, Observation

ROOM_RATIO = 0.8
"""Share of a capacity up to which arrivals leave room: beyond it bursts of arrivals queue."""
_SLACK_RATIO = 0.85
"""Share of the SLO within which the queue is served without scaling."""
_ADMITTED_RATIO = 0.9
"""Share of the SLO within which the leanest variants must answer an admitted request."""
_PARTS = (0.25, 0.5, 0.75, 1.0)
_STRAIN, _THREAT = 1.0, 2.0
"""Delays of the queue as multiples of the SLO: two in a row above the first are a threat, or one above the second."""
_CALM = 0.5
"""Delay of the queue, as a multiple of the SLO, above which there is no room yet."""
_SURGE_ERRORS, _LASTING_ERRORS = 2.0, 1.0
"""Standard errors by which arrivals must exceed the capacity to be a threat: once, or twice in a row."""
_ARRIVALS = 50
"""Arrivals over which a low rate is measured."""
_ROOM_ERRORS = 1.0
"""Standard errors added to the present arrival rate to get the demand that must fit."""
_SLOWER = 1.15
"""A change of the service times by less than this leaves the slowdown as it is."""
_LEAST_ANSWERS = 10
_LEAST_ADMITTED, _SHRINKS, _GROWS, _HELD_RATIO = 0.1, 0.5, 1.5, 0.8
"""Limits of the admitted part of the queue: its minimum, its factors per step, and the share of the SLO to aim at."""


@dataclass(frozen=True, slots=True)
class VariantScaler:
    """Computes the capacities and the mixes of a service's layouts.

    Attributes:
        predictor: The measured profile.
        objectives: SLO and accuracy floors.
        slowdown_ratio: Service times now over those of the profile.
    """

    predictor: Predictor
    objectives: ServiceObjectives
    slowdown_ratio: float = 1.0

    @property
    def floor_ratio(self) -> float:
        """Mean accuracy never to go below while the SLO is threatened."""
        floor, threatened = self.objectives.minimum_accuracy_ratio, self.objectives.threatened_accuracy_ratio
        return (floor if threatened is None else min(floor, threatened)) - 1e-12

    def capacity_rps(self, layout: Layout, weights: Weights = ()) -> float:
        """Requests a second that a layout serves while it answers with a mix.

        Raises:
            DataError: A variant was not measured on one of its slices.
        """
        times_s = self._times_s(layout, weights)
        return math.fsum(1.0 / one for one in times_s)

    def known_capacity_rps(self, layout: Layout, weights: Weights = ()) -> float:
        """As :meth:`capacity_rps`; 0 where the profile lacks a variant on one of the layout's slices."""
        try:
            return self.capacity_rps(layout, weights)
        except DataError:
            return 0.0

    def attains(self, layout: Layout) -> bool:
        """Whether an instance of a layout answers within the SLO when nothing waits; True where that is not known."""
        try:
            entries = self.predictor.instances(layout)
        except DataError:
            return True
        return min(entry.loaded.mean_s for entry in entries) <= self.objectives.slo.latency_s

    def accuracy_ratio(self, layout: Layout, weights: Weights = ()) -> float:
        """Mean accuracy of the answers while every replica is busy."""
        accuracy, rest = self.predictor.accuracy_ratio, 1.0 - math.fsum(share for _, share in weights)
        own = self.predictor.when_busy(layout, 1.0).accuracy_ratio if rest > 0 else 0.0
        return math.fsum(share * accuracy[name] for name, share in weights) + rest * own

    def lean(self, layout: Layout, loaded: Collection[str]) -> Weights:
        """The weights with the largest capacity whose mean accuracy keeps the floor; empty for the own variants.

        Raises:
            DataError: A variant was not measured on one of its slices.
        """
        return max(self._mixes(layout, loaded), key=lambda one: (self.capacity_rps(layout, one), one == ()))

    def steady(self, layout: Layout, loaded: Collection[str], rate_rps: float) -> Weights | None:
        """The most accurate weights with room for a demand; empty for the own variants, None where none have room.

        Raises:
            DataError: A variant was not measured on one of its slices.
        """
        leaner = [
            tuple((name, part * share) for name, share in weights)
            for weights in self._mixes(layout, loaded)
            for part in _PARTS
        ]
        carries = [one for one in [(), *leaner] if ROOM_RATIO * self.capacity_rps(layout, one) >= rate_rps]
        return max(carries, key=lambda one: (self.accuracy_ratio(layout, one), one == ()), default=None)

    def mix(self, layout: Layout, loaded: Collection[str], steady: Weights) -> VariantMix:
        """A mix of the steady weights and of leaner ones, for a queue that the steady ones would serve too late.

        An admitted request may find every replica busy with its longest request, so each step leaves time for two of
        those.
        """
        if self.objectives.slo.scope is not SloScope.END_TO_END:
            return OWN
        try:
            ladder = sorted({steady, *self._mixes(layout, loaded)}, key=lambda one: self.capacity_rps(layout, one))
            leaner = ladder[ladder.index(steady) :]
            # On a layout of fast slices fewer steps suffice: one that is less accurate and not faster is left out.
            steps = [self._step(layout, one) for one in leaner]
        except DataError:
            return OWN  # a variant was not profiled on its slice
        if len(steps) == 1 and not steady:
            return OWN
        return VariantMix(tuple(steps))

    def queue_limit(
        self, layout: Layout, weights: Weights, now: Weights = (), ratio: float = 1.0, *, protected: bool = False
    ) -> QueueLimit | None:
        """Queue limit at which the last request is answered within the SLO; None where not even the first would be.

        Args:
            layout: The layout that serves.
            weights: Weights of the variants that answer a long queue.
            now: Weights of the variants that answer while nothing waits: replicas may be busy with them when the queue
                begins.
            ratio: Part of the profiled limit to allow.
            protected: Whether requests that have waited for too long are refused in favour of later ones.
        """
        try:
            lean_s, now_s = self._slowest_s(layout, weights), self._slowest_s(layout, now)
            capacity_rps = self.capacity_rps(layout, weights)
        except DataError:
            return None
        if lean_s > self.objectives.slo.latency_s:
            return None
        longest_s = _ADMITTED_RATIO * self.objectives.slo.latency_s - lean_s
        waiting = math.floor(ratio * capacity_rps * max(longest_s - max(now_s, lean_s), 0.0))
        wait_s = max(ratio * longest_s, lean_s) if protected else math.inf
        return QueueLimit(max(len(layout.instances), waiting), wait_s)

    def held_s(self, seen: Observation) -> float:
        """The latency that must stay within the SLO; NaN where there are too few answers.

        This is the tail latency, or that of the SLO's own quantile where the service times alone exceed the SLO at the
        tail: a shorter queue would not help there.
        """
        own_s = seen.latency_s if seen.requests >= _LEAST_ANSWERS else math.nan
        if seen.running is None:
            return own_s
        try:
            alone_s = self._slowest_s(seen.running, tuple((name, 0.0) for name in seen.loaded), TAIL_QUANTILE)
        except DataError:
            return own_s  # a variant was not profiled on its slice
        return seen.tail_latency_s if alone_s <= _HELD_RATIO * self.objectives.slo.latency_s else own_s

    def _step(self, layout: Layout, weights: Weights) -> MixStep:
        delay_s = _SLACK_RATIO * self.objectives.slo.latency_s - 2.0 * self._slowest_s(layout, weights)
        return MixStep(self.capacity_rps(layout, weights), max(delay_s, 0.0), weights)

    def _slowest_s(self, layout: Layout, weights: Weights, quantile: float | None = None) -> float:
        """The longest time that an instance takes for a request with these weights, by a quantile or the SLO's."""
        rest = 1.0 - math.fsum(share for _, share in weights)
        names = [(item.slice, name) for item in layout.instances for name, _ in weights]
        if rest > 1e-9:
            names += [(item.slice, item.variant) for item in layout.instances]
        entries = [self.predictor.profile.entry(name, piece) for piece, name in names]
        quantile = self.objectives.slo.quantile if quantile is None else quantile
        return self.slowdown_ratio * max(entry.slowest_s(quantile) for entry in entries)

    def _times_s(self, layout: Layout, weights: Weights) -> list[float]:
        """Mean service time of each instance."""
        rest = max(0.0, 1.0 - math.fsum(share for _, share in weights))
        found = []
        for item in layout.instances:
            mean_s = rest * self._mean_s(item.variant, item) if rest else 0.0
            mean_s += math.fsum(share * self._mean_s(name, item) for name, share in weights)
            found.append(mean_s * self.slowdown_ratio)
        return found

    def _mean_s(self, variant: str, item: Instance) -> float:
        return self.predictor.profile.entry(variant, item.slice).each_s

    def _mixes(self, layout: Layout, loaded: Collection[str]) -> list[Weights]:
        """The own variants, each loaded variant alone, and pairs whose mean accuracy is the floor."""
        accuracy, floor = self.predictor.accuracy_ratio, self.floor_ratio
        own = self.capacity_rps(layout)
        found: list[Weights] = [()]
        above = [name for name in loaded if accuracy[name] >= floor]
        found += [((name, 1.0),) for name in above]
        for low in (name for name in loaded if accuracy[name] < floor):
            for high in above:
                part = (accuracy[high] - floor) / (accuracy[high] - accuracy[low])
                found.append(((high, 1.0 - part), (low, part)))
        return [one for one in found if not one or self.capacity_rps(layout, one) > own]


@dataclass(frozen=True, slots=True)
class Threat:
    """Threat to the SLO.

    Attributes:
        phrase: The threat as text; empty for no threat.
        strained: Observations in a row in which the queue was longer than the SLO allows.
        surging: Observations in a row in which more arrived than can be served.
    """

    phrase: str = ""
    strained: int = 0
    surging: int = 0


NO_THREAT = Threat()


def steers(seen: Observation, predictor: Predictor) -> bool:
    """Whether requests can be steered among variants that are loaded and profiled."""
    if seen.running is None or len(seen.loaded) < 2:
        return False
    known = {(entry.variant, entry.slice) for entry in predictor.profile.entries}
    return all((name, piece) in known for name in seen.loaded for piece in set(seen.running.slices))


def delay_s(seen: Observation, capacity_rps: float) -> float:
    """Seconds that a request which arrives now waits at least, or that the oldest has waited."""
    if not seen.queued:
        return 0.0
    return max(seen.oldest_wait_s, seen.queued / capacity_rps if capacity_rps > 0 else 0.0)


def threat(seen: Observation, slo: Slo, capacity_rps: float, before: Threat) -> Threat:
    """The threat to the SLO that an observation shows.

    Args:
        seen: The observation.
        slo: The SLO.
        capacity_rps: Requests a second that can be served now; 0 without a profile.
        before: The threat that the observation before showed.
    """
    waits_s = delay_s(seen, capacity_rps) if slo.scope is SloScope.END_TO_END else 0.0
    strained = before.strained + 1 if waits_s > _STRAIN * slo.latency_s else 0
    rate_rps, surging = seen.arrival_rps, 0
    excess_rps = rate_rps - capacity_rps if capacity_rps > 0 and rate_rps > 0 else 0.0
    if excess_rps > 0 and excess_rps > _LASTING_ERRORS * _error_rps(rate_rps):
        surging = before.surging + 1
    phrase = ""
    if strained >= 2 or waits_s > _THREAT * slo.latency_s:
        phrase = f"{seen.queued} requests queued, the oldest for {latency(seen.oldest_wait_s)}"
    elif surging >= 2 or (surging and excess_rps > _SURGE_ERRORS * _error_rps(rate_rps)):
        phrase = f"{rate_rps:.0f} requests/s arrive, {capacity_rps:.0f} /s can be served"
    return Threat(phrase, strained, surging)


def admission(held_s: float, slo: Slo, before_ratio: float) -> float:
    """Part of the profiled queue that may wait while the SLO is protected; less while answers are late nevertheless.

    Delays outside the replicas, such as those of a busy gateway, are in no profile, but the latencies show them.
    Latencies follow the queue, so the part is scaled by the latency to aim at over the observed one.

    Args:
        held_s: The latency that must stay within the SLO; NaN while there are too few answers.
        slo: The SLO.
        before_ratio: The part so far.
    """
    if math.isnan(held_s):
        return before_ratio
    factor = _HELD_RATIO * slo.latency_s / held_s if held_s > 0 else math.inf
    return min(1.0, max(_LEAST_ADMITTED, before_ratio * min(_GROWS, max(_SHRINKS, factor))))


def is_calm(seen: Observation, slo: Slo, capacity_rps: float) -> bool:
    """Whether the queue that a burst left has been served."""
    return slo.scope is not SloScope.END_TO_END or delay_s(seen, capacity_rps) <= _CALM * slo.latency_s


def present_rps(seen: Observation, smoothed_rps: float) -> float:
    """The demand that must fit before accuracy or carbon count again: the larger of the present and the smoothed."""
    now_rps = seen.demand_rps
    if not 0 < now_rps < math.inf:
        return smoothed_rps
    return max(now_rps + _ROOM_ERRORS * _error_rps(now_rps), smoothed_rps)


def _error_rps(rate_rps: float) -> float:
    """Standard error of a rate that rests on a second of arrivals, or on the last fifty where they took longer."""
    return math.sqrt(rate_rps / max(1.0, _ARRIVALS / rate_rps))


def slowdown(seen: Observation, predictor: Predictor, before_ratio: float) -> float:
    """Ratio of the time that requests keep replicas busy to the profiled one; at least 1.

    Args:
        seen: An observation with the times that requests took.
        predictor: The profile.
        before_ratio: The slowdown so far, kept while it explains the times to 15 %.
    """
    if seen.running is None or sum(seen.served.values()) < _LEAST_ANSWERS:
        return before_ratio
    expected_s = observed_s = 0.0
    for name, took_s in seen.occupied_s.items():
        mine = [item.slice for item in seen.running.instances if item.variant == name]
        pieces = mine or [item.slice for item in seen.running.instances]
        try:
            size = seen.batched.get(name, 1.0)
            times_s = [predictor.profile.entry(name, piece).batch_s(size) / size for piece in pieces]
        except DataError:
            return before_ratio  # not profiled on its slice
        answers = seen.served.get(name, 0)
        expected_s += answers * math.fsum(times_s) / len(times_s)
        observed_s += answers * took_s
    if expected_s <= 0:
        return before_ratio
    found = max(1.0, observed_s / expected_s)
    return found if max(found / before_ratio, before_ratio / found) > _SLOWER else before_ratio
