"""Values of the engine interface: replicas, requests, responses, and the measured cost of changing the replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from joulery.domain.errors import ConfigError, JouleryError
from joulery.domain.quality import Quality
from joulery.domain.serving.service import Slice
from joulery.domain.serving.tensors import Tensor, TensorSpec


class ModelKind(StrEnum):
    """Kind of a model, by its loader."""

    ONNX = "onnx"
    """An ONNX file, run by ONNX Runtime."""
    PYTHON = "python"
    """A Python callable ``module:function``: takes a dict of arrays by name, returns one."""
    TORCHSCRIPT = "torchscript"
    """A file of ``torch.jit.save``, run by PyTorch."""
    TORCH_EXPORT = "torch_export"
    """A file of ``torch.export.save``, run by PyTorch."""
    TRANSFORMERS = "transformers"
    """A Hugging Face pipeline: the folder of its model, or the model's name on the hub; its task is an option."""
    REMOTE = "remote"
    """A model on another server with the Open Inference Protocol: ``http://HOST:PORT/MODEL``."""

    @property
    def is_file(self) -> bool:
        """Whether the location of such a model is the path of one file."""
        return self in (ModelKind.ONNX, ModelKind.TORCHSCRIPT, ModelKind.TORCH_EXPORT)


_SUFFIXES = {
    ".onnx": ModelKind.ONNX,
    ".pt": ModelKind.TORCHSCRIPT,
    ".torchscript": ModelKind.TORCHSCRIPT,
    ".pt2": ModelKind.TORCH_EXPORT,
}
_PIPELINE = "transformers:"


@dataclass(frozen=True, slots=True, order=True)
class ModelRef:
    """Reference to a model.

    Attributes:
        kind: How it is loaded.
        location: The path of a file, ``module:function`` or an address; ``module:Class`` is instantiated once a
            replica.
        options: Options as a JSON object; empty for none. For a callable its keyword arguments, for a pipeline its
            ``task`` and keyword arguments, for TorchScript the ``inputs`` that it takes, for a model on another server
            ``power_w``: watts above idle while it answers one request, where they are stated.
    """

    kind: ModelKind
    location: str
    options: str = ""

    @classmethod
    def parse(cls, text: str) -> ModelRef:
        """Parse a file ``lite0.onnx``, a Python callable ``package.module:function`` or a served model ``http://…``.

        ``.pt`` and ``.torchscript`` are files of TorchScript, ``.pt2`` of torch.export; ``transformers:TASK:FOLDER`` is
        a Hugging Face pipeline.

        Raises:
            ConfigError: The text is none of these.
        """
        if text.startswith(("http://", "https://")):
            return cls(ModelKind.REMOTE, text)
        for suffix, kind in _SUFFIXES.items():
            if text.endswith(suffix):
                return cls(kind, text)
        task, second, folder = text.removeprefix(_PIPELINE).partition(":")
        if text.startswith(_PIPELINE) and second and task and folder and task.replace("-", "").isalpha():
            return cls(ModelKind.TRANSFORMERS, folder, f'{{"task": "{task}"}}')
        module, colon, function = text.partition(":")
        if colon and function.isidentifier() and all(part.isidentifier() for part in module.split(".")):
            return cls(ModelKind.PYTHON, text)
        raise ConfigError(
            "not a model",
            got=text,
            expected="a file ending in .onnx, .pt or .pt2, module:function, transformers:TASK:FOLDER, "
            "or http://HOST:PORT/MODEL",
        )

    def __str__(self) -> str:
        return self.location


NODE = "node:"
"""Prefix of the device of a replica that is to be on a node of a cluster."""


@dataclass(frozen=True, slots=True, order=True)
class ReplicaSpec:
    """One instance to run. Equal specs are interchangeable; a set of replicas is a multiset of specs.

    Attributes:
        service: The service it serves.
        variant: The variant of the service's family.
        slice: The slice it runs on.
        model: The model it loads.
        threads: Threads inside one operator; 0 for one per core of the slice.
        batch: Largest number of requests it may answer together.
        max_delay_s: Time a request waits for others before a smaller batch starts.
        cores: The CPU cores it is bound to; empty for the least loaded ones.
        standby: Loaded and warm, but takes no requests until it is promoted (iGniter 4.2).
        device: The GPU (``gpu:0``) or the node of a cluster (``node:north``) it must be on; empty for any with room.
        warm: Other variants that its process keeps loaded, most wanted first: a :class:`VariantMix` may have them
            answer.
        warm_batches: ``((variant, requests), …)``: number of requests it may answer together with these warm variants;
            with the others as many as with its own.
        together: Replicas with the same label share one MIG slice under MPS; empty for a slice of its own.
        memory_bytes: Memory of the process beyond which it keeps no more warm variants; 0 for no bound.
    """

    service: str
    variant: str
    slice: Slice
    model: ModelRef
    threads: int = 0
    batch: int = 1
    max_delay_s: float = 0.0
    cores: tuple[int, ...] = ()
    standby: bool = False
    device: str = ""
    warm: tuple[tuple[str, ModelRef], ...] = ()
    memory_bytes: int = 0
    together: str = ""
    warm_batches: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ConfigError("a replica cannot have negative threads", pointer=self.service, got=str(self.threads))
        if min([self.batch, *dict(self.warm_batches).values()]) < 1 or not 0 <= self.max_delay_s < math.inf:
            raise ConfigError(
                "a replica batches one request or more, and waits a finite time for them",
                pointer=self.service,
                got=f"batch {self.batch}, {self.max_delay_s:g} s",
            )
        if self.cores and len(self.cores) != self.slice.cores:
            raise ConfigError(
                f"a slice of {self.slice.cores} cores cannot be bound to {len(self.cores)}", pointer=self.service
            )

    @property
    def models(self) -> tuple[tuple[str, ModelRef], ...]:
        """Every variant that its process loads, sorted: its own and the warm ones."""
        return tuple(sorted(((self.variant, self.model), *self.warm)))

    def __str__(self) -> str:
        together = f" x{self.batch}" if self.batch > 1 else ""
        return f"{self.service}/{self.variant} on {self.slice}{together}{' (standby)' if self.standby else ''}"


class ReplicaState(StrEnum):
    """State of a replica."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Finishes its running requests and takes no more."""
    RESTARTING = "restarting"
    """Crashed or was killed; waits for its next start."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """Public view of one replica.

    Attributes:
        id: Unique within the engine for its life; restarts keep it.
        spec: Its specification.
        state: Its state.
        busy: True while it works on a request.
        cores: The CPU cores it is bound to; empty off the CPU.
        pid: Its process; 0 while it has none.
        served: Requests answered since it first started.
        restarts: How often it was started again.
        inputs, outputs: Tensors that its model declares; empty when it declares none.
        platform: Runtime of its model (``onnxruntime_onnx``, ``python``).
        last_error: The newest reason for a restart or a failed warm-up; empty when all went well.
        place: The vendor's identity of the GPU slice it runs on; empty off the GPU.
        warm: Variants that it keeps loaded beside its own.
    """

    id: str
    spec: ReplicaSpec
    state: ReplicaState
    busy: bool = False
    cores: tuple[int, ...] = ()
    pid: int = 0
    served: int = 0
    restarts: int = 0
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    platform: str = ""
    last_error: str = ""
    place: str = ""
    warm: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Transition:
    """Measured cost of changing the set of replicas.

    Attributes:
        started, stopped, kept: The replicas that were started, stopped and kept, sorted.
        start_s: When the change began, Unix seconds.
        ready_s: Seconds from then until the new set had taken over; the old one served meanwhile.
        duration_s: Seconds until the last old replica had finished its work and ended.
        startup_cpu_s: CPU seconds the new replicas spent starting, loading and warming up.
    """

    started: tuple[ReplicaSpec, ...]
    stopped: tuple[ReplicaSpec, ...]
    kept: tuple[ReplicaSpec, ...]
    start_s: float
    ready_s: float
    duration_s: float
    startup_cpu_s: float


class Outcome(StrEnum):
    """Outcome of a request."""

    OK = "ok"
    INVALID = "invalid"
    """The request does not fit the model."""
    UNKNOWN = "unknown"
    """No such service."""
    OVERLOADED = "overloaded"
    """The queue was full."""
    DEADLINE = "deadline"
    """Not answered in time."""
    CANCELLED = "cancelled"
    """The client went away."""
    FAILED = "failed"
    """The model raised an error."""
    CRASHED = "crashed"
    """The replica died while running the request, and so did the one that tried it again."""
    UNAVAILABLE = "unavailable"
    """The service has no replicas, or the engine is closing."""


class RequestError(JouleryError):
    """A request was not answered; the engine itself still works.

    Args:
        message: What happened, for the client.
        outcome: Which kind of failure; never ``OK``.
        retry_after_s: Seconds after which a retry makes sense; None when unknown.
        variant: The variant that ran it, where one did.
        service_s, cpu_s: Seconds and CPU seconds in a replica before it failed, where known.
        attempts: Number of replicas that took it.
    """

    kind = "request"

    def __init__(
        self,
        message: str,
        outcome: Outcome,
        *,
        retry_after_s: float | None = None,
        variant: str = "",
        service_s: float = 0.0,
        cpu_s: float = 0.0,
        attempts: int = 0,
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.retry_after_s = retry_after_s
        self.variant = variant
        self.service_s = service_s
        self.cpu_s = cpu_s
        self.attempts = attempts


# The three below pass once a request through the hot path: tuples cost a quarter of a frozen dataclass there.
class InferRequest(NamedTuple):
    """One inference request.

    Attributes:
        inputs: Arrays by name.
        outputs: Names of the outputs wanted; empty for all.
        timeout_s: Seconds from arrival in which it must be answered; None for the engine's own limit.
        variant: The only variant that may answer; empty for any.
    """

    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...] = ()
    timeout_s: float | None = None
    variant: str = ""


class InferResponse(NamedTuple):
    """One answer and its cost.

    Attributes:
        outputs: Arrays by name.
        variant, replica: The variant and the replica that answered.
        arrival_s, start_s, end_s: When the engine got it, a replica took it, the answer was back; Unix seconds.
        service_s: Seconds inside the replica.
        cpu_s: CPU seconds of the replica's process over the same time, all threads; its part of a batch's. On a GPU,
            seconds of the whole GPU: ``service_s`` times the replica's share of it.
        attempts: 1, or 2 when the first replica died while running it.
        batch: Number of requests that were answered together.
    """

    outputs: Mapping[str, Tensor]
    variant: str
    replica: str
    arrival_s: float
    start_s: float
    end_s: float
    service_s: float
    cpu_s: float
    attempts: int = 1
    batch: int = 1


class EnergyShare(NamedTuple):
    """Energy and carbon charged to one request.

    Attributes:
        energy_j: Joules.
        carbon_g: Grams of CO2-equivalent; None where no intensity is known.
        quality: Measured, modelled or assumed.
    """

    energy_j: float
    carbon_g: float | None
    quality: Quality


Attributor = Callable[[str, str, float, float, float], EnergyShare | None]
"""Function from ``(service, variant, cpu_s, service_s, end_s)`` to a share; None where it is unknown (never zero)."""


class RequestRecord(NamedTuple):
    """Telemetry record of one request, answered or not.

    Attributes:
        service, variant, replica: The service called, and the variant and replica that answered; empty where none did.
        arrival_s, start_s, end_s: First byte handled, taken by a replica (NaN when never), answered; Unix seconds.
        outcome: Outcome of the request.
        service_s, cpu_s: Seconds and CPU seconds in the replica; 0 when it reached none.
        attempts: Number of replicas that took it.
        energy: Energy and carbon charged to it; None where unknown.
        batch: Number of requests that were answered together.
    """

    service: str
    variant: str
    replica: str
    arrival_s: float
    start_s: float
    end_s: float
    outcome: Outcome
    service_s: float
    cpu_s: float
    attempts: int
    energy: EnergyShare | None
    batch: int = 1

    @property
    def latency_s(self) -> float:
        """Arrival to answer, queueing included."""
        return self.end_s - self.arrival_s


class QueuedRequest(NamedTuple):
    """A request that was accepted and not answered yet.

    Attributes:
        service: The service called.
        arrival_s: When the engine got it, Unix seconds.
        variant: The variant that runs it; empty while it waits.
        start_s: When a replica took it, Unix seconds; NaN while it waits.
    """

    service: str
    arrival_s: float
    variant: str = ""
    start_s: float = math.nan


Telemetry = Callable[[RequestRecord], None]
"""Function that is called once for every request that ends."""
