"""A service of a running site: its setup on this machine, its policy, and what ran so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from joulery.config.loadgen import LoadConfig
from joulery.config.trials import TrialsConfig
from joulery.domain.gpu.layout import Layout, SliceAssignment
from joulery.domain.serving.engine import ModelRef
from joulery.domain.serving.mix import Weights
from joulery.domain.serving.profile import Profile
from joulery.domain.serving.service import ModelFamily, Slice, Slo
from joulery.domain.serving.timeline import ServiceLabel
from joulery.perf.layouts import LayoutMetrics, Predictor
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.switchback import AuditedPolicy, AuditTally, BaselinePeriod, Switchback
from joulery.policies.serving.variants.traffic_split import TrafficSplit
from joulery.runtime.serving.live_sample import LiveSample
from joulery.runtime.serving.shadow import ShadowReplays
from joulery.runtime.session.requests import RequestWindow


@dataclass(frozen=True, slots=True)
class ServiceSetup:
    """One service on this machine.

    Attributes:
        name: Its name.
        owner: Owner that it is charged to.
        family: Its variants.
        models: What each variant loads.
        slo: Its latency SLO.
        cores: The CPU cores it may use.
        partitions: The ways its cores may be partitioned.
        candidates: The layouts to choose from.
        gpus: The GPUs its replicas run on (``gpu:0``); empty on the CPU.
        slice_assignment: GPU of each slice, for each partition; empty on the CPU.
        max_batch: Requests that a replica may answer together.
        batch_delay_s: How long a batch that is not full waits for more requests.
        replica_cores: Cores of each replica, where some variants run here and some on other servers; else empty.
    """

    name: str
    owner: str
    family: ModelFamily
    models: Mapping[str, ModelRef]
    slo: Slo
    cores: tuple[int, ...]
    partitions: tuple[tuple[Slice, ...], ...]
    candidates: tuple[Layout, ...]
    gpus: tuple[str, ...] = ()
    slice_assignment: SliceAssignment = field(default_factory=dict)
    max_batch: int = 1
    batch_delay_s: float = 0.0
    replica_cores: tuple[tuple[int, ...], ...] = ()

    @property
    def beside_upstreams(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Cores of each replica by service, where some variants run here and some on other servers; else empty."""
        return {self.name: self.replica_cores} if self.replica_cores else {}


@dataclass(frozen=True, slots=True, eq=False)
class PolicyBinding:
    """The policy of a service.

    Attributes:
        policy: Chooses its layouts.
        predictor: Predicts a layout from the profile.
        rate_rps: The demand it is planned for.
        base: The baseline layout.
        base_metrics: The baseline's prediction under that demand.
        trials: How trials are measured; None where nothing is tried.
        remark: A warning about how it decides; empty for none.
        audit: When the baseline runs to be measured; None where it does not.
        loaded: Variants that every replica keeps loaded, the leanest first; empty for its own only.
        replica_bytes: Memory that a replica may reach by that; 0 for no bound.
        shares: Share of the requests that each variant answers, by variant; empty where the policy decides.
    """

    policy: ServicePolicy
    predictor: Predictor
    rate_rps: float
    base: Layout
    base_metrics: LayoutMetrics
    trials: TrialsConfig | None = None
    remark: str = ""
    audit: Switchback | None = None
    loaded: tuple[str, ...] = ()
    replica_bytes: int = 0
    shares: Weights = ()

    @property
    def batches(self) -> dict[tuple[str, Slice], int]:
        """Requests that a variant answers together on a slice, where that is more than one."""
        entries = self.predictor.profile.entries
        return {(entry.variant, entry.slice): entry.max_batch for entry in entries if entry.batches}

    @property
    def driven(self) -> ServicePolicy | AuditedPolicy | TrafficSplit:
        """The policy that the service's loop steps: with periods of the baseline where it is audited."""
        if self.shares:
            return TrafficSplit(self.policy, self.shares)
        return self.policy if self.audit is None else AuditedPolicy(self.policy, self.audit)


@dataclass(slots=True, eq=False)
class RunningService:
    """One service of a session.

    Attributes:
        setup: The service on this machine.
        chosen: Its policy; None where a plan decides.
        profile: Latency and energy of its variants; None where that is not known.
        window: Its latest requests.
        load: The load sent to it; None for none.
        profiled: Source of the profile, as text.
        sampling: The sample of the layout on trial; None where nothing is tried.
        layouts: ``(from_s, layout)``: which layout served from when.
        advised: The latest decision, where it is not carried out.
        planned_rps, planned_floor_ratio: The demand of its plan, and the accuracy that the plan keeps, where a plan
            decides.
        periods: When the baseline served and was measured.
        tally: Outcome of the periods of its audit; None where it is not audited.
        shadow: Its shadow replays; None where there are none.
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
    planned_floor_ratio: float = 0.0
    periods: list[BaselinePeriod] = field(default_factory=list)
    tally: AuditTally | None = None
    shadow: ShadowReplays | None = None

    @property
    def audit(self) -> Switchback | None:
        """Settings for measuring its baseline; None where it is not measured."""
        return None if self.chosen is None else self.chosen.audit

    @property
    def rate_rps(self) -> float:
        """The demand it is planned for."""
        return self.planned_rps if self.chosen is None else self.chosen.rate_rps

    @property
    def floor_ratio(self) -> float:
        """The accuracy that its answers keep in the mean; 0 for none."""
        return self.planned_floor_ratio if self.chosen is None else self.chosen.policy.objectives.minimum_accuracy_ratio

    @property
    def accuracy_ratio(self) -> dict[str, float]:
        """Accuracy by variant."""
        return {variant.name: variant.accuracy_ratio for variant in self.setup.family.variants}

    @property
    def base_energy_j(self) -> float:
        """Joules a request of the baseline; NaN without a baseline."""
        return math.nan if self.chosen is None else self.chosen.base_metrics.energy_j

    @property
    def name(self) -> str:
        """The service's name."""
        return self.setup.name

    def label(self) -> ServiceLabel:
        """Its SLO and its variants by accuracy, for display."""
        ordered = sorted(self.setup.family.variants, key=lambda variant: variant.accuracy_ratio)
        return ServiceLabel(
            self.setup.name,
            self.setup.slo.latency_s,
            self.setup.slo.quantile,
            tuple((variant.name, variant.accuracy_ratio) for variant in ordered),
            self.floor_ratio,
        )
