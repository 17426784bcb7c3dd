"""One service of the embedded engine: its queue, its replicas, and what a request has to be like."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from joulery.adapters.engines.replica import Replica
from joulery.adapters.engines.wire import Frame, Piece
from joulery.domain.dispatch import Dispatcher
from joulery.domain.engine import InferRequest, Outcome, ReplicaState, RequestError
from joulery.domain.tensors import TensorSpec, datatype_of

_SMOOTHING = 0.1
"""Weight of the newest service time in the mean that ``Retry-After`` is computed from."""


@dataclass(slots=True, eq=False)
class Call:
    """One request on its way.

    Attributes:
        pieces: Its frame, ready to be sent to any replica.
        answer: Who answered, and what.
        start_s: When a replica took it, Unix seconds.
        replica: Which one.
    """

    pieces: list[Piece]
    answer: asyncio.Future[tuple[Replica, Frame]]
    start_s: float = float("nan")
    replica: Replica | None = None

    def fail(self, error: RequestError) -> None:
        """Give it an error for an answer, unless nobody waits any more."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True, eq=False)
class Service:
    """One service.

    Attributes:
        name: Its name.
        queue: Who waits and who is free.
        replicas: All of them, in any state.
        variants: What it is to run; empty when it is leaving.
        inputs, outputs: What its replicas declare, where they agree.
        mean_service_s: Smoothed time a request takes in a replica.
        emptied: Set whenever nobody waits.
    """

    name: str
    queue: Dispatcher[Call, Replica]
    replicas: list[Replica] = field(default_factory=list)
    variants: frozenset[str] = frozenset()
    inputs: tuple[TensorSpec, ...] = ()
    outputs: frozenset[str] = frozenset()
    mean_service_s: float = 0.0
    emptied: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def retry_after_s(self) -> float:
        """When the queue as it is will have been served."""
        return self.queue.waiting * self.mean_service_s / max(1, len(self.queue.servers))

    def describe(self) -> None:
        """Take over what the replicas declare, where those that declare something agree: a request may meet any."""
        ready = [replica for replica in self.replicas if replica.state is ReplicaState.READY]
        inputs = {replica.inputs for replica in ready if replica.inputs}
        self.inputs = inputs.pop() if len(inputs) == 1 else ()
        names = {frozenset(spec.name for spec in replica.outputs) for replica in ready}
        self.outputs = names.pop() if len(names) == 1 else frozenset()

    def took(self, service_s: float) -> None:
        """A replica was busy for so long."""
        weight = _SMOOTHING if self.mean_service_s else 1.0
        self.mean_service_s += (service_s - self.mean_service_s) * weight

    def admit(self, request: InferRequest) -> None:
        """Check a request against what is known of the models.

        Raises:
            RequestError: It cannot be answered here.
        """
        if request.variant and request.variant not in self.variants:
            raise RequestError(f"{self.name} runs no variant {request.variant!r} now", Outcome.UNKNOWN)
        if self.inputs:
            check_inputs(request, self.inputs)
        if self.outputs:
            for name in request.outputs:
                if name not in self.outputs:
                    raise RequestError(f"there is no output {name!r}", Outcome.INVALID)


def check_inputs(request: InferRequest, declared: Sequence[TensorSpec]) -> None:
    """Every declared input is there with its type and shape, and nothing else.

    Raises:
        RequestError: It is not so.
    """
    for name, datatype, shape in declared:
        array = request.inputs.get(name)
        if array is None:
            raise RequestError(f"input {name!r} is missing", Outcome.INVALID)
        given = datatype_of(array)
        if given != datatype:
            raise RequestError(f"input {name!r} is {given}, the model takes {datatype}", Outcome.INVALID)
        if not _fits(array.shape, shape):
            raise RequestError(
                f"input {name!r} has shape {list(array.shape)}, the model takes {list(shape)}", Outcome.INVALID
            )
    if len(request.inputs) > len(declared):
        extra = sorted(set(request.inputs) - {spec.name for spec in declared})
        raise RequestError(f"the model has no input {extra[0]!r}", Outcome.INVALID)


def _fits(shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    if len(shape) != len(declared):
        return False
    for got, want in zip(shape, declared, strict=True):  # noqa: SIM110 - on the hot path, where a generator is dearer
        if want not in (-1, got):
            return False
    return True
