"""A service of a running site: what it is on this machine, how it is run, and what became of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from joulery.config.loadgen import LoadConfig
from joulery.domain.layout import Layout
from joulery.domain.profile import Profile
from joulery.domain.timeline import ServiceLabel
from joulery.runtime.compose.service import Chosen, ServiceSetup
from joulery.runtime.controller import RequestWindow
from joulery.runtime.live_sample import LiveSample


@dataclass(slots=True, eq=False)
class Hosted:
    """One service of a session.

    Attributes:
        setup: The service on this machine.
        chosen: Its policy.
        profile: What its variants cost.
        window: Its latest requests.
        load: What is sent to it; None for nothing.
        profiled: Where the profile comes from, in words.
        sampling: What its trials show; None where nothing is tried.
        layouts: ``(from_s, layout)``: what served, from when.
        advised: What its policy decided last, where that is not carried out.
    """

    setup: ServiceSetup
    chosen: Chosen
    profile: Profile
    window: RequestWindow
    load: LoadConfig | None = None
    profiled: str = ""
    sampling: LiveSample | None = None
    layouts: list[tuple[float, Layout]] = field(default_factory=list)
    advised: Layout | None = None

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
            self.chosen.policy.minimum_accuracy_ratio,
        )
