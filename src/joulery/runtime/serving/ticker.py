"""Sum up the running services once a second in a tick, which is logged, shown and plotted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from joulery.accounting.charge import cpu_shares
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.domain.energy.footprint import Footprint
from joulery.domain.serving.engine import ModelKind, Outcome, RequestRecord
from joulery.domain.serving.timeline import Charge, DecisionRecord, NowSnapshot, ServiceTick, SiteLabel, Tick
from joulery.runtime.llm.hosted import HostedModels
from joulery.runtime.measuring.live import LiveMeters
from joulery.runtime.serving.live_intensity import LiveIntensity
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.session.requests import summarise

TICKS_SHOWN = 900


@dataclass(slots=True)
class Ticker:
    """Builds ticks and the snapshot of them that the dashboard shows.

    Attributes:
        services: The services by name.
        grid: Carbon intensity.
        live: The meters.
        pue: Facility energy per IT energy.
        spent: Charge of each service so far.
        base_g: Grams of the baseline so far, by the profile; refined when the run ends.
        shown: The latest ticks.
        models: The language models of the session; None for none.
    """

    services: Mapping[str, RunningService]
    grid: LiveIntensity
    live: LiveMeters
    pue: float
    spent: dict[str, Footprint] = field(default_factory=dict)
    base_g: float = 0.0
    shown: deque[Tick] = field(default_factory=lambda: deque(maxlen=TICKS_SHOWN))
    models: HostedModels | None = None

    def tick(self, since_s: float, until_s: float, records: Sequence[RequestRecord]) -> Tick:
        """The tick of one period and of the requests that ended in it.

        Raises:
            DataError: The sampler's files are damaged.
        """
        self.live.update()
        window = self.live.window(since_s, until_s, self.grid.series)
        served, models_j = ((), {}) if self.models is None else self.models.end_period()
        self._charge(window.run, records, models_j)
        self.base_g += window.run.counted_g + self._baseline_extra_g(records)
        spent = sum(self.spent.values(), Footprint())
        counted = spent.signal is not None
        period_s = until_s - since_s
        tick = Tick(
            until_s,
            period_s,
            power_w=window.power_w,
            power_band_w=window.power_band_w,
            quality=window.run.quality,
            g_per_kwh=self.grid.at(until_s),
            grid_s=self.grid.grid_s(until_s),
            energy_j=spent.energy_j,
            carbon_g=spent.counted_g if counted else math.nan,
            baseline_g=self.base_g if counted and self.services else math.nan,
            services=(*(_service_tick(one, records) for one in self.services.values()), *served),
        )
        self.shown.append(tick)
        return tick

    def snapshot(
        self,
        site: SiteLabel,
        started_s: float,
        now_s: float,
        decisions: Iterable[DecisionRecord],
        warnings: Sequence[str],
    ) -> NowSnapshot:
        """The state that the dashboard shows."""
        return NowSnapshot(
            site=site,
            started_s=started_s,
            now_s=now_s,
            ticks=tuple(self.shown),
            decisions=tuple(decisions),
            warnings=tuple(warnings),
            meters=self.live.meters(now_s),
            charges=tuple(
                Charge(name, owner, self.spent.get(name, Footprint())) for name, owner in self._owners.items()
            ),
            carbon=None if self.grid.source is None else self.grid.feed(now_s),
        )

    @property
    def _owners(self) -> dict[str, str]:
        """The owners that are charged: the services or, where there are none, the language models."""
        if self.models is not None and not self.services:
            return self.models.owners
        return {name: one.setup.owner for name, one in self.services.items()}

    def _charge(self, run: Footprint, records: Sequence[RequestRecord], models_j: Mapping[str, float]) -> None:
        """Divide a period's charge: services by CPU time, language models by the joules of their requests."""
        if self.services:
            weights = [_seconds(one, records, here=True) for one in self.services.values()]
            if not any(weights):
                weights = [_seconds(one, records, here=False) for one in self.services.values()]
        else:
            weights = list(models_j.values())
        for name, ratio in zip(self._owners, cpu_shares(weights), strict=True):
            self.spent[name] = self.spent.get(name, Footprint()) + run.portion(ratio)

    def _baseline_extra_g(self, records: Sequence[RequestRecord]) -> float:
        """Grams by which the baseline exceeds these requests; 0 where the intensity is not known."""
        joules_per_g = JOULES_PER_KWH / self.pue
        base_j = {one.name: one.base_energy_j for one in self.services.values() if math.isfinite(one.base_energy_j)}
        extra_g = 0.0
        for record in records:
            if record.service not in base_j:
                continue
            if record.outcome is Outcome.OK and record.energy is not None and record.energy.carbon_g is not None:
                base_g = base_j[record.service] * self.grid.at(record.end_s) / joules_per_g
                extra_g += base_g - record.energy.carbon_g
        return extra_g


def _seconds(one: RunningService, records: Sequence[RequestRecord], *, here: bool) -> float:
    """Seconds that the requests of a service cost: on this machine's CPUs alone, or on other servers too."""
    models = one.setup.models
    elsewhere = {name for name, model in models.items() if model.kind is ModelKind.REMOTE} if here else set[str]()
    return math.fsum(r.cpu_s for r in records if r.service == one.name and r.variant not in elsewhere)


def _service_tick(one: RunningService, records: Sequence[RequestRecord]) -> ServiceTick:
    mine = [record for record in records if record.service == one.name]
    latency_s, attainment_ratio, answers, served = summarise(mine, one.setup.slo)
    accuracy = one.accuracy_ratio
    return ServiceTick(
        one.name,
        requests=len(mine),
        failed=len(mine) - answers,
        latency_s=latency_s,
        attainment_ratio=attainment_ratio,
        accuracy_ratio=math.fsum(accuracy[v] * n for v, n in served.items()) / answers if answers else math.nan,
        mix=tuple((variant, count / answers) for variant, count in served.items()),
    )
