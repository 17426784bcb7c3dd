"""A service of a running site: what it is on this machine, how it is run, and what became of it so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from joulery.app.serving.service import PolicyBinding, ServiceSetup
from joulery.config.loadgen import LoadConfig
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.profile import Profile
from joulery.domain.serving.timeline import ServiceLabel
from joulery.runtime.serving.controller import RequestWindow
from joulery.runtime.serving.live_sample import LiveSample


@dataclass(slots=True, eq=False)
class RunningService:
    """One service of a session.

    Attributes:
        setup: The service on this machine.
        chosen: Its policy; None where it is run as a plan says.
        profile: What its variants cost; None where that is not known.
        window: Its latest requests.
        load: What is sent to it; None for nothing.
        profiled: Where the profile comes from, in words.
        sampling: What its trials show; None where nothing is tried.
        layouts: ``(from_s, layout)``: what served, from when.
        advised: What its policy decided last, where that is not carried out.
        planned_rps: The demand its plan provides for, where one is run.
    """

    setup: ServiceSetup
    chosen: PolicyBinding | None
    profile: Profile | None
    window: RequestWindow
    load: LoadConfig | None = None
    profiled: str = ""
    sampling: LiveSample | None = None
    layouts: list[tuple[float, Layout]] = field(default_factory=list)
    advised: Layout | None = None
    planned_rps: float = math.nan

    @property
    def rate_rps(self) -> float:
        """The demand it is planned for."""
        return self.planned_rps if self.chosen is None else self.chosen.rate_rps

    @property
    def accuracy_ratio(self) -> dict[str, float]:
        """Accuracy by variant."""
        return {variant.name: variant.accuracy_ratio for variant in self.setup.family.variants}

    @property
    def base_energy_j(self) -> float:
        """Joules a request of the baseline; NaN where there is none to compare with."""
        return math.nan if self.chosen is None else self.chosen.base_metrics.energy_j

    @property
    def name(self) -> str:
        """The service's name."""
        return self.setup.name

    def label(self) -> ServiceLabel:
        """What it promises, its variants by accuracy."""
        ordered = sorted(self.setup.family.variants, key=lambda variant: variant.accuracy_ratio)
        return ServiceLabel(
            self.setup.name,
            self.setup.slo.latency_s,
            self.setup.slo.quantile,
            tuple((variant.name, variant.accuracy_ratio) for variant in ordered),
            0.0 if self.chosen is None else self.chosen.policy.objectives.minimum_accuracy_ratio,
        )
