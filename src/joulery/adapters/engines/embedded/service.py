"""One service of the embedded engine: its queue, its replicas, and what a request has to be like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from joulery.adapters.engines.embedded.batches import joined, parted, rows_of
from joulery.adapters.engines.embedded.replica import Replica
from joulery.adapters.engines.embedded.wire import Frame, Piece, encode
from joulery.domain.errors import DataError
from joulery.domain.serving.dispatch import Dispatcher
from joulery.domain.serving.engine import InferRequest, InferResponse, Outcome, ReplicaState, RequestError
from joulery.domain.serving.tensors import TensorSpec, datatype_of

_SMOOTHING = 0.1
"""Weight of the newest service time in the mean that ``Retry-After`` is computed from."""


@dataclass(slots=True, eq=False)
class Call:
    """One request on its way.

    Attributes:
        request: What was asked.
        pieces: Its frame, ready to be sent to any replica.
        answer: Who answered, what, and how many requests together.
        start_s: When a replica took it, Unix seconds.
        replica: Which one.
    """

    request: InferRequest
    pieces: list[Piece]
    answer: asyncio.Future[tuple[Replica, Frame, int]]
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

    @property
    def batches(self) -> bool:
        """Whether any replica answers several requests together."""
        return any(replica.spec.batch > 1 for replica in self.replicas)

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


def encoded(requests: Sequence[InferRequest]) -> list[Piece]:
    """The frame of one request, or of several of one kind that are answered together.

    Raises:
        DataError: A tensor's type has no name in the protocol.
    """
    outputs = requests[0].outputs
    inputs = requests[0].inputs if len(requests) == 1 else joined(requests)
    return encode({"w": outputs} if outputs else {}, inputs)


def pieces_of(calls: Sequence[Call]) -> list[Piece]:
    """What to send to a replica for one call, or for several together."""
    return calls[0].pieces if len(calls) == 1 else encoded([call.request for call in calls])


def parts_of(frame: Frame, calls: Sequence[Call]) -> list[Frame]:
    """The answer of each request of a batch; CPU time in equal parts, time in full.

    Raises:
        DataError: The batch failed, or cannot be cut apart.
    """
    if len(calls) == 1:
        return [frame]
    if "e" in frame.header:
        raise DataError(str(frame.header["e"]))
    header = {**frame.header, "c": frame.header["c"] / len(calls)}
    outputs = parted(frame.tensors, [rows_of(call.request) for call in calls])
    return [Frame(header, tensors) for tensors in outputs]


def response(
    replica: Replica, frame: Frame, arrival_s: float, start_s: float, attempts: int, batch: int
) -> InferResponse:
    """What a replica answered.

    Raises:
        RequestError: It answered with an error.
    """
    header, variant = frame.header, replica.spec.variant
    service_s, cpu_s = header["s"], header["c"]
    if "e" in header:
        outcome = Outcome(header["o"])
        raise RequestError(header["e"], outcome, variant=variant, service_s=service_s, cpu_s=cpu_s, attempts=attempts)
    end_s = time.time()
    return InferResponse(
        frame.tensors, variant, replica.name, arrival_s, start_s, end_s, service_s, cpu_s, attempts, batch
    )


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
