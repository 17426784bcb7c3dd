"""Sums up a running service once a second: the tick that is logged, shown and plotted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from joulery.domain.engine import Outcome, RequestRecord
from joulery.domain.footprint import Footprint
from joulery.domain.timeline import Charge, DecisionRecord, NowSnapshot, ServiceTick, SiteLabel, Tick
from joulery.policies.objective import JOULES_PER_KWH
from joulery.runtime.compose.service import Chosen, ServiceSetup
from joulery.runtime.controller import summarise
from joulery.runtime.grid import Grid
from joulery.runtime.live import LiveMeters

TICKS_SHOWN = 900
DECISIONS_SHOWN = 200


@dataclass(slots=True)
class Ticker:
    """Builds ticks and what the dashboard shows of them.

    Attributes:
        setup: The service.
        chosen: Its policy and its baseline.
        grid: The grid.
        live: The meters.
        pue: Facility energy per IT energy.
        spent: What the run was charged so far.
        base_g: Grams the baseline would have cost so far, by the profile; refined when the run ends.
        shown: The latest ticks.
    """

    setup: ServiceSetup
    chosen: Chosen
    grid: Grid
    live: LiveMeters
    pue: float
    spent: Footprint = field(default_factory=Footprint)
    base_g: float = 0.0
    shown: deque[Tick] = field(default_factory=lambda: deque(maxlen=TICKS_SHOWN))

    def tick(self, since_s: float, until_s: float, records: Sequence[RequestRecord]) -> Tick:
        """One period and the requests that ended in it.

        Raises:
            DataError: The sampler's files are damaged.
        """
        self.live.update()
        window = self.live.window(since_s, until_s, self.grid.series)
        self.spent = self.spent + window.run
        self.base_g += window.run.carbon_g + self._baseline_extra_g(records)
        counted = self.spent.signal is not None
        period_s = until_s - since_s
        tick = Tick(
            until_s,
            period_s,
            power_w=window.power_w,
            power_band_w=window.run.band_j / period_s,
            quality=window.run.quality,
            g_per_kwh=self.grid.at(until_s),
            grid_s=self.grid.grid_s(until_s),
            energy_j=self.spent.energy_j,
            carbon_g=self.spent.carbon_g if counted else math.nan,
            baseline_g=self.base_g if counted else math.nan,
            services=(self._service_tick(records),),
        )
        self.shown.append(tick)
        return tick

    def look(
        self,
        site: SiteLabel,
        started_s: float,
        now_s: float,
        decisions: Sequence[DecisionRecord],
        warnings: Sequence[str],
    ) -> NowSnapshot:
        """What the dashboard may see now."""
        return NowSnapshot(
            site=site,
            started_s=started_s,
            now_s=now_s,
            ticks=tuple(self.shown),
            decisions=tuple(decisions[-DECISIONS_SHOWN:]),
            warnings=tuple(warnings),
            meters=self.live.meters(now_s),
            charges=(Charge(self.setup.name, self.setup.owner, self.spent),),
        )

    def _baseline_extra_g(self, records: Sequence[RequestRecord]) -> float:
        """Grams by which the baseline would have cost more for these requests; 0 where the grid is not known."""
        joules_per_g = JOULES_PER_KWH / self.pue
        extra_g = 0.0
        for record in records:
            if record.outcome is Outcome.OK and record.energy is not None and record.energy.carbon_g is not None:
                base_g = self.chosen.base_metrics.energy_j * self.grid.at(record.end_s) / joules_per_g
                extra_g += base_g - record.energy.carbon_g
        return extra_g

    def _service_tick(self, records: Sequence[RequestRecord]) -> ServiceTick:
        mine = [record for record in records if record.service == self.setup.name]
        latency_s, attainment_ratio, answers, served = summarise(mine, self.setup.slo)
        accuracy = self.chosen.policy.predictor.accuracy_ratio
        return ServiceTick(
            self.setup.name,
            requests=len(mine),
            failed=len(mine) - answers,
            latency_s=latency_s,
            attainment_ratio=attainment_ratio,
            accuracy_ratio=math.fsum(accuracy[v] * n for v, n in served.items()) / answers if answers else math.nan,
            mix=tuple((variant, count / answers) for variant, count in served.items()),
        )
