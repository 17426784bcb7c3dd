"""Price services with models on other servers: the cost of a second of each variant, so that variants can be compared.

A second of an upstream's slot and a CPU second of this machine are different things, and so are those of two servers.
The figures of such a service are made from joules in place of CPU seconds: the seconds of a request times the watts of
its variant. Joules of models that run on this machine are still charged from its meters; those of upstreams are not in
the readings of these meters, and are reported apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.domain.quality import Quality, weakest
from joulery.domain.serving.engine import ModelKind, ModelRef
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.perf.layouts import Predictor
from joulery.runtime.session.requests import RequestColumns, Rows


@dataclass(frozen=True, slots=True)
class Prices:
    """Watts of each variant of a service with models on other servers; empty for a service of this machine.

    Attributes:
        active_w: Watts above idle: of a busy slot of an upstream, of a busy core of this machine.
        upstreams: The variants on other servers.
        quality: Quality of the watts of those variants.
    """

    active_w: Mapping[str, float] = field(default_factory=dict)
    upstreams: frozenset[str] = frozenset()
    quality: Quality = Quality.ASSUMED

    def __bool__(self) -> bool:
        return bool(self.active_w)

    def columns(self, requests: RequestColumns) -> RequestColumns:
        """The same requests with joules as ``cpu_s``; as they are where nothing is priced."""
        if not self:
            return requests
        return PricedColumns(requests.rows, requests.services, requests.variants, self)

    def predictor(self, predictor: Predictor | None) -> Predictor | None:
        """The same predictions with joules in place of CPU seconds."""
        if not self or predictor is None:
            return predictor
        entries = tuple(map(_priced, predictor.profile.entries))
        return replace(predictor, profile=replace(predictor.profile, entries=entries))


NOTHING = Prices()
"""A service whose models all run on this machine."""


@dataclass(frozen=True, slots=True, eq=False)
class PricedColumns(RequestColumns):
    """Requests whose ``cpu_s`` is their charge in joules.

    Attributes:
        prices: Watts by variant.
    """

    prices: Prices = NOTHING

    def blocks(self, service: str | None = None) -> Iterator[Rows]:
        """The rows in blocks, in order; those of one service where it is named."""
        watts = np.array([self.prices.active_w.get(name, 0.0) for name in self.variants] or [0.0])
        for block in RequestColumns.blocks(self, service):
            block["cpu_s"] *= watts[block["variant"]]
            yield block


def prices_of(models: Mapping[str, ModelRef], profile: Profile | None) -> Prices:
    """Watts of the variants of a service; empty where all run on this machine.

    Args:
        models: What each variant loads.
        profile: Its profile; None where it is not known.
    """
    upstreams = frozenset(name for name, model in models.items() if model.kind is ModelKind.REMOTE)
    if not upstreams or profile is None:
        return Prices()
    watts = {entry.variant: entry.active_w for entry in reversed(profile.entries)}
    return Prices(watts, upstreams, weakest((*map(profile.quality_of, upstreams), Quality.MODELLED)))


def _priced(entry: SliceProfile) -> SliceProfile:
    """The entry with joules as CPU seconds, at 1 W."""
    batches = {size: _joules(times, entry.active_w) for size, times in entry.batches.items()}
    alone = _joules(entry.alone, entry.active_w)
    loaded = alone if entry.loaded is entry.alone else _joules(entry.loaded, entry.active_w)
    return replace(entry, alone=alone, loaded=loaded, batches=batches, active_w=1.0)


def _joules(times: Timings, active_w: float) -> Timings:
    return Timings(times.service_s, times.cpu_s * active_w)


def seconds_here(spent_j: Mapping[str, float], prices: Prices) -> float:
    """CPU seconds on this machine, from the joules of each variant; a request that no variant answered has none."""
    here = prices.active_w.keys() - prices.upstreams
    return math.fsum(spent_j.get(name, 0.0) / prices.active_w[name] for name in sorted(here))
