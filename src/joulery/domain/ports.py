"""Interfaces of the pure packages to the outside world, one to four methods each. Adapters and fakes implement them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from joulery.domain.cluster import ClusterAction, ClusterSnapshot
from joulery.domain.decisions import Step
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.channel import Channel
from joulery.domain.gpu.device import (
    ClockSetting,
    DeviceCapability,
    DeviceChange,
    DeviceSlice,
    DeviceState,
    MigSetting,
    MpsSetting,
    PowerSetting,
    SleepSetting,
    WantedPart,
)
from joulery.domain.serving.dispatch import QueueLimit
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    QueuedRequest,
    ReplicaSpec,
    ReplicaView,
    Transition,
)
from joulery.domain.serving.mix import VariantMix
from joulery.domain.trace.tracing import StepCounts, Steps, TracedSession

S = TypeVar("S")
O_contra = TypeVar("O_contra", contravariant=True)
D = TypeVar("D", ClockSetting, PowerSetting, MigSetting, MpsSetting, SleepSetting)


class Clock(Protocol):
    """Source of the wall time, which can also wait."""

    def now_s(self) -> float:
        """The present time, Unix seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""
        ...


class Meter(Protocol):
    """A source of energy or power readings."""

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Channels that ``read`` returns, in order; fixed for the life of the meter."""
        ...

    def read(self) -> tuple[float, ...]:
        """Read one value for each channel, joules or watts by its kind; NaN where the device gave none this time.

        A device that fails or disappears gives NaN and a note, never an exception.
        """
        ...

    def notes(self) -> tuple[str, ...]:
        """New notes for readers of the data, one sentence each; no earlier call returned them."""
        ...

    def close(self) -> None:
        """Release the device. Safe to call twice."""
        ...


class CarbonSource(Protocol):
    """A source of carbon intensity for one zone."""

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The intensity over ``[t0_s, t1_s)``; unknown steps are NaN.

        Raises:
            DataError: The source has no data for the interval, or its answer is invalid.
        """
        ...

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The forecast of the intensity, with ``issued_at_s`` set.

        Raises:
            DataError: As ``history``.
            CapabilityError: The source does not forecast.
        """
        ...


class Following(CarbonSource, Protocol):
    """A source of carbon intensity that may change while a run uses it, such as a growing file."""

    def changed(self) -> bool:
        """Whether the source has new values."""
        ...

    def known(self) -> CarbonSeries:
        """The whole series that the source holds; it may end in the past.

        Raises:
            DataError: The source holds no values, or cannot be used.
        """
        ...


class Engine(Protocol):
    """Runs model replicas and answers requests with them. It belongs to one asyncio event loop."""

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        """Make ``target`` the set of replicas: start new ones, switch, let old ones finish. No request is lost.

        Raises:
            ConfigError, DataError, CapabilityError: A replica of the target is impossible; the old set stays in use.
            ActuationError: A new replica died or took too long; the old set stays in use.
        """
        ...

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Every present replica, sorted by id."""
        ...

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        """Let the next replica answer a request. Cancelling the call withdraws a waiting request.

        Raises:
            RequestError: The request was not answered; ``outcome`` states why.
        """
        ...

    async def close(self) -> None:
        """Let running requests finish within the engine's own limit, then release everything. Safe to call twice."""
        ...


class ClusterBackend(Protocol):
    """Runs training jobs and is the source of truth about them."""

    def snapshot(self) -> ClusterSnapshot:
        """The present state of the cluster.

        Raises:
            CapabilityError: The cluster does not answer.
            DataError: Its answer is invalid.
        """
        ...

    def apply(self, action: ClusterAction, /) -> str:
        """Start one action; idempotent. Returns a remark for the log.

        Raises:
            ActuationError: The action was refused (the job ended meanwhile, does not fit …).
            CapabilityError: The cluster does not answer.
        """
        ...

    def close(self) -> None:
        """Release the cluster; its jobs continue. Safe to call twice."""
        ...


class Device(Protocol[D]):
    """One knob of one device: its clock, its power limit, how a GPU is partitioned, which processes share it.

    A change happens completely or not at all: after any failure, the device has its former or the requested setting,
    and the error states which.
    """

    def capability(self) -> DeviceCapability:
        """The setting's range, whether this process may change it, and the command that grants the permission.

        Raises:
            CapabilityError: The device is gone.
        """
        ...

    def observe(self) -> DeviceState[D]:
        """The present state of the device.

        Raises:
            CapabilityError: The device is gone, or this process may not read it.
        """
        ...

    def apply(self, wanted: D, /) -> DeviceChange[D]:
        """Apply a setting and check that it took effect. A setting that is in force already changes nothing.

        Raises:
            ConfigError: The device cannot have this setting.
            CapabilityError: This process may not set it, or the device is gone; nothing was changed.
            ActuationError: The change was refused; ``rolled_back`` or ``left_dirty`` states the present setting.
        """
        ...

    def reset(self, memento: Mapping[str, Any] | None = None, /) -> DeviceChange[D]:
        """Restore a state that was observed once, by this or another process; the factory's when None.

        Raises:
            CapabilityError, ActuationError: As ``apply``.
        """
        ...


class Backlog(Protocol):
    """An engine that lists its unanswered requests."""

    def backlog(self) -> tuple[QueuedRequest, ...]:
        """Every request in a replica or waiting, by arrival."""
        ...


class Copied(Protocol):
    """An engine in another process, whose state is shown as a copy."""

    async def refresh(self) -> None:
        """Update the copy of the engine's state."""
        ...


class Admission(Protocol):
    """An engine with a limit on the waiting requests of each service."""

    def limit_queue(self, service: str, limit: QueueLimit | None, /) -> None:
        """Set the limit of a service's queue, past which requests are ``OVERLOADED``; None for the engine's own."""
        ...


class Steering(Protocol):
    """An engine that divides a service's requests by shares: among the variants that replicas keep loaded, or among
    replicas of several variants."""

    def set_mix(self, service: str, mix: VariantMix, /) -> None:
        """Set the mix that divides a service's requests from the next one on; replicas do not change."""
        ...

    def set_next_mixes(self, mixes: Mapping[str, VariantMix], /) -> None:
        """Set the mixes of services from the next change of the replicas on; they replace mixes set so before."""
        ...

    def mix(self, service: str, /) -> VariantMix:
        """The mix of a service that is in force."""
        ...


class Places(Protocol):
    """Assigns GPU slices to replicas, and partitions the GPUs so that there are enough slices."""

    @property
    def alone(self) -> frozenset[str]:
        """Ids of the slices that take one process at a time: the old one ends before a new one starts."""
        ...

    def vacate(self, wanted: Sequence[WantedPart], /) -> frozenset[str]:
        """Ids of the slices that must be empty before :meth:`settle`; none where everything fits already.

        Raises:
            CapabilityError, ConfigError: The GPUs of this machine can never provide the wanted slices.
        """
        ...

    def settle(self, wanted: Sequence[WantedPart], /) -> str:
        """Partition and share the GPUs so that all wanted slices fit; the changes as text, empty for none.

        Raises:
            JouleryError: The GPUs cannot be partitioned so; every GPU is as it was.
        """
        ...

    def assign(self, wanted: Sequence[WantedPart], taken: Sequence[DeviceSlice], /) -> tuple[DeviceSlice, ...]:
        """Assign a slice to each entry of ``wanted``, in its order, without those that are taken.

        Raises:
            CapabilityError: There are not enough slices.
        """
        ...


class Policy(Protocol[S, O_contra]):
    """A pure decision rule: no clock, no device, no file, no random source of its own."""

    def initial(self) -> S:
        """The state before the first observation."""
        ...

    def step(self, state: S, observation: O_contra, /) -> Step[S]:
        """The next state and the decisions."""
        ...


class Tracer(Protocol):
    """Makes programs of a framework record their operations, and reads the recordings."""

    def environment(self, folder: str, steps: Steps, inherited: Mapping[str, str]) -> dict[str, str]:
        """Environment variables that make a program record into a folder, on top of those it inherits."""
        ...

    def recorded(
        self, folder: str, sampler_offset_ns: int | None, *, calls: bool = False
    ) -> tuple[list[TracedSession], list[str]]:
        """The recorded sessions of a folder, and one sentence for each problem.

        Raises:
            DataError: A recording is damaged.
        """
        ...

    def step_counts(self, folder: str) -> StepCounts:
        """Steps, recorded or not, of the programs that recorded into a folder."""
        ...

    def leftovers(self, folder: str) -> None:
        """Delete the recordings of a folder, after they have been read."""
        ...
