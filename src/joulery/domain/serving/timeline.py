"""The state of a running site over time: one tick a second or so, recorded and shown live in the same form.

A driver builds a :class:`Tick` a period. It logs each (a killed run stays readable), keeps the last few in a
:class:`NowSnapshot` for dashboards, and writes all of them when the run ends (``joulery.store.run.timeline``). NaN
means that a value is not known; it is never shown as 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from joulery.domain.decisions import Decision
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.energy.footprint import Footprint
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality

NAN = math.nan
EARLIEST_S, LATEST_S = -6e10, 1e11
"""Unix seconds that are surely wrong: the years 68 and 5138."""


class CarbonBasis(StrEnum):
    """Whether the intensity shown is what the grid does now."""

    LIVE = "live"
    """Fetched from a provider for the present."""
    REPLAYED = "replayed"
    """Real history of another time, played back."""
    ASSUMED = "assumed"
    """A typical day, a constant, a table: nothing of it observed."""


@dataclass(frozen=True, slots=True)
class CarbonLabel:
    """What the intensities of a run are.

    Attributes:
        zone: Grid zone.
        source: Where they come from, in words.
        basis: Live, replayed or assumed.
        signal, scope: What they count.
        speed: Grid seconds a second of the run; 1 unless played back faster.
    """

    zone: str
    source: str
    basis: CarbonBasis
    signal: Signal = Signal.AVERAGE
    scope: Scope = Scope.LIFECYCLE
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class ServiceLabel:
    """One service and its SLO.

    Attributes:
        name: The service.
        slo_s: Latency that ``quantile_ratio`` of the requests must not exceed.
        quantile_ratio: Such as 0.95.
        variants: Name and accuracy of each variant, least accurate first; fixes their order and colour everywhere.
        minimum_accuracy_ratio: Accuracy never to go below; 0 when none was asked for.
    """

    name: str
    slo_s: float
    quantile_ratio: float
    variants: tuple[tuple[str, float], ...]
    minimum_accuracy_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class SiteLabel:
    """What does not change while a site runs.

    Attributes:
        name: The site.
        mode: ``advise``, ``shadow`` or ``act``.
        simulated: True when devices, engines or time are simulated.
        carbon: What the intensities are; None when no carbon source was given.
        services: What is served.
    """

    name: str
    mode: str
    simulated: bool = False
    carbon: CarbonLabel | None = None
    services: tuple[ServiceLabel, ...] = ()


@dataclass(frozen=True, slots=True)
class ServiceTick:
    """One service over one period.

    Attributes:
        service: Which.
        requests: Requests that ended within the period, failed ones included.
        failed: Those not answered with a result.
        latency_s: The SLO's quantile of the latencies that ended within the period; NaN for none.
        attainment_ratio: Share of the answered requests within the SLO's latency; NaN for none.
        accuracy_ratio: Request-weighted accuracy of the answers; NaN for none.
        mix: Share of the answers by variant, ``(name, ratio)``; empty for none.
    """

    service: str
    requests: int
    failed: int = 0
    latency_s: float = NAN
    attainment_ratio: float = NAN
    accuracy_ratio: float = NAN
    mix: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """The whole site over one period ``[t_s - period_s, t_s)``.

    Attributes:
        t_s: End of the period, Unix seconds.
        period_s: Its length.
        power_w: Mean power of everything metered, facility overhead left out.
        power_band_w: Half-width of its uncertainty; 0 when not stated, NaN where the power is.
        quality: Quality of the power.
        g_per_kwh: Carbon intensity at the end of the period.
        grid_s: The grid's clock, Unix seconds; ``t_s`` unless intensities are played back.
        energy_j: Joules since the start of the run.
        carbon_g: Grams since the start of the run.
        baseline_g: Grams the same requests would have cost by now under the baseline; NaN until computed.
        baseline_low_g, baseline_high_g: The interval around it; NaN when not computed.
        services: One entry a service, in the order of the site file.

    Raises:
        DataError: The period is not positive, or the time is no time.
    """

    t_s: float
    period_s: float
    power_w: float = NAN
    power_band_w: float = 0.0
    quality: Quality = Quality.MEASURED
    g_per_kwh: float = NAN
    grid_s: float = NAN
    energy_j: float = NAN
    carbon_g: float = NAN
    baseline_g: float = NAN
    baseline_low_g: float = NAN
    baseline_high_g: float = NAN
    services: tuple[ServiceTick, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.period_s < math.inf:
            raise DataError(f"a tick needs a positive period, got {self.period_s} s")
        if not (self.t_s - self.period_s > EARLIEST_S and self.t_s < LATEST_S):
            raise DataError(f"a tick needs a time, got {self.t_s} s and a period of {self.period_s} s")

    @property
    def grams_per_hour(self) -> float:
        """Present rate of emission, g/h; NaN while power or intensity is unknown."""
        return self.power_w * self.g_per_kwh / 1000.0


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A decision and what became of it.

    Attributes:
        t_s: When it was taken, Unix seconds.
        decision: What to do, which policy, why.
        outcome: ``applied``, ``advised``, ``shadowed``, ``rejected`` or ``failed``.
        detail: Anything worth saying about the outcome.
    """

    t_s: float
    decision: Decision
    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MeterNow:
    """The latest reading of one channel.

    Attributes:
        device, component, meter, quality: As the channel says.
        power_w: Present power; NaN while unknown.
        age_s: Seconds since its last reading; infinite when it never gave one.
    """

    device: str
    component: str
    meter: str
    quality: Quality
    power_w: float
    age_s: float


@dataclass(frozen=True, slots=True)
class Charge:
    """What one workload of one owner cost since the start of the run. Only ever grows."""

    workload: str
    owner: str
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class NowSnapshot:
    """All that the dashboard may see, handed over whole: replaced, never changed.

    Attributes:
        site: What does not change.
        started_s: When the run began, Unix seconds.
        now_s: When the snapshot was taken.
        ticks: The latest ticks, oldest first; the last one is "now".
        decisions: The latest decisions, oldest first.
        warnings: What a person should know: a meter lost, data gone stale.
        meters: The latest reading of every channel.
        charges: Joules and grams by workload and owner.
    """

    site: SiteLabel
    started_s: float
    now_s: float
    ticks: tuple[Tick, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()
    warnings: tuple[str, ...] = ()
    meters: tuple[MeterNow, ...] = ()
    charges: tuple[Charge, ...] = ()
