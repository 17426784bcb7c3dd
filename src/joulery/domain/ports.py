"""Interfaces of the pure rooms to the world, one to four methods each. Adapters implement these; fakes too."""

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
    """Wall time and patience."""

    def now_s(self) -> float:
        """Unix seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class Meter(Protocol):
    """A source of energy or power readings."""

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Channels that ``read`` returns, in order; fixed for the life of the meter."""
        ...

    def read(self) -> tuple[float, ...]:
        """One value a channel, joules or watts as its kind says; NaN where the device gave none this time.

        A device that fails or disappears gives NaN and a note, never an exception.
        """
        ...

    def notes(self) -> tuple[str, ...]:
        """Notes for a reader of the data, one sentence each, that no earlier call returned."""
        ...

    def close(self) -> None:
        """Release the device. Safe to call twice."""
        ...


class CarbonSource(Protocol):
    """A source of carbon intensity for one zone."""

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The intensity over ``[t0_s, t1_s)``; unknown steps are NaN.

        Raises:
            DataError: The source has nothing for the interval, or answered nonsense.
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
        """Whether there is something new to ask for."""
        ...

    def known(self) -> CarbonSeries:
        """All that it holds; it may end in the past.

        Raises:
            DataError: It holds nothing, or cannot be used.
        """
        ...


class Engine(Protocol):
    """Runs model replicas and answers requests with them. Lives on one asyncio event loop."""

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        """Make ``target`` the set of replicas: start the new, switch, let the old finish. None is lost.

        Raises:
            ConfigError, DataError, CapabilityError: A replica of the target cannot be; the old set serves on.
            ActuationError: A new replica died or took too long; the old set serves on.
        """
        ...

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Every replica now, sorted by id."""
        ...

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        """The answer of the replica whose turn it is. Cancelling the call withdraws a waiting request.

        Raises:
            RequestError: It was not answered; ``outcome`` says why.
        """
        ...

    async def close(self) -> None:
        """Let running requests finish within the engine's own limit, then leave nothing behind. Safe to call twice."""
        ...


class ClusterBackend(Protocol):
    """Runs training jobs and is the source of truth about them."""

    def snapshot(self) -> ClusterSnapshot:
        """The present state of the cluster.

        Raises:
            CapabilityError: It does not answer.
            DataError: It answered nonsense.
        """
        ...

    def apply(self, action: ClusterAction, /) -> str:
        """Start one action; idempotent. Returns a remark for the log.

        Raises:
            ActuationError: It was refused (the job ended meanwhile, does not fit …).
            CapabilityError: The cluster does not answer.
        """
        ...

    def close(self) -> None:
        """Let go of the cluster; its jobs go on. Safe to call twice."""
        ...


class Device(Protocol[D]):
    """One knob of one device: its clock, its power limit, how a GPU is partitioned, which processes share it.

    A change either happens or does not: whatever fails, the device is set to what it was before or to what was asked
    for, and the error says which.
    """

    def capability(self) -> DeviceCapability:
        """The setting's range, whether this process may change it, and the line that grants it.

        Raises:
            CapabilityError: The device is gone.
        """
        ...

    def observe(self) -> DeviceState[D]:
        """Its present state.

        Raises:
            CapabilityError: The device is gone, or may not be looked at.
        """
        ...

    def apply(self, wanted: D, /) -> DeviceChange[D]:
        """Set it, and look whether it took. Setting what is set already does nothing.

        Raises:
            ConfigError: It cannot be set to that.
            CapabilityError: This process may not set it, or the device is gone; nothing was changed.
            ActuationError: It was refused; ``rolled_back`` or ``left_dirty`` says what it is set to now.
        """
        ...

    def reset(self, memento: Mapping[str, Any] | None = None, /) -> DeviceChange[D]:
        """Back to a state that was observed once, here or in another process; to the factory's when None.

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
    """An engine in another process: what it shows is a copy."""

    async def refresh(self) -> None:
        """Renew the copy."""
        ...


class Admission(Protocol):
    """An engine with a limit on waiting requests a service."""

    def limit_queue(self, service: str, limit: QueueLimit | None, /) -> None:
        """Refuse requests (``OVERLOADED``) past a limit on those that wait; None for the engine's own limit."""
        ...


class Steering(Protocol):
    """An engine that keeps shares of a service's requests: among the variants that replicas keep loaded, or among
    replicas of several variants."""

    def set_mix(self, service: str, mix: VariantMix, /) -> None:
        """Let the variants of a mix answer from the next request on; replicas stay as they are."""
        ...

    def set_next_mixes(self, mixes: Mapping[str, VariantMix], /) -> None:
        """The mix of each service from the next change of the replicas on; none of those given before."""
        ...

    def mix(self, service: str, /) -> VariantMix:
        """The mix in force."""
        ...


class Places(Protocol):
    """Hands out the parts of GPUs that replicas run on, and has the GPUs divided so that there are enough of them."""

    @property
    def alone(self) -> frozenset[str]:
        """Ids of the parts that take one process at a time: the old one ends before a new one starts."""
        ...

    def vacate(self, wanted: Sequence[WantedPart], /) -> frozenset[str]:
        """Ids of the parts that must be empty before :meth:`settle`; none where everything fits as it is.

        Raises:
            CapabilityError, ConfigError: The GPUs of this machine can never provide it.
        """
        ...

    def settle(self, wanted: Sequence[WantedPart], /) -> str:
        """Partition and share the GPUs so that all of it fits; the changes in words, empty for nothing.

        Raises:
            JouleryError: It cannot be; every GPU is as it was.
        """
        ...

    def assign(self, wanted: Sequence[WantedPart], taken: Sequence[DeviceSlice], /) -> tuple[DeviceSlice, ...]:
        """A part for each, in the order of ``wanted``, beside those that are taken.

        Raises:
            CapabilityError: There are not enough.
        """
        ...


class Policy(Protocol[S, O_contra]):
    """A pure decision rule: no clock, no device, no file, no random source of its own."""

    def initial(self) -> S:
        """The state before the first observation."""
        ...

    def step(self, state: S, observation: O_contra, /) -> Step[S]:
        """The next state and what to do."""
        ...


class Tracer(Protocol):
    """A way to have a program of some framework record what it runs."""

    def environment(self, folder: str, steps: Steps, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables that have a program recorded into a folder, on top of those it inherits."""
        ...

    def recorded(
        self, folder: str, sampler_offset_ns: int | None, *, calls: bool = False
    ) -> tuple[list[TracedSession], list[str]]:
        """The recorded sessions of a folder, and problems, one sentence each.

        Raises:
            DataError: A recording is damaged.
        """
        ...

    def step_counts(self, folder: str) -> StepCounts:
        """Steps of the programs that recorded themselves there, recorded or not."""
        ...

    def leftovers(self, folder: str) -> None:
        """Delete what was recorded there, after it has been read."""
        ...
