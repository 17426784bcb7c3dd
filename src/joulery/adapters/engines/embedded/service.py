"""One service of the embedded engine: its queue, its replicas, and the requests between them.

Replicas are started and ended by the engine; they report here when they become ready, answer or end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from joulery.adapters.engines.embedded.batches import divided, joined, kind_of, rows_of, split_rows
from joulery.adapters.engines.embedded.replica import WorkerReplica, wait_all_ended
from joulery.adapters.engines.embedded.wire import Frame, Piece, encode
from joulery.domain.errors import DataError
from joulery.domain.serving.dispatch import Dispatcher, QueueLimit, Server, Ticket
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    Outcome,
    QueuedRequest,
    ReplicaState,
    RequestError,
)
from joulery.domain.serving.mix import MixCounter
from joulery.domain.serving.tensors import TensorSpec, datatype_of
from joulery.steady_time import unix_s

_SMOOTHING = 0.1
"""Weight of the newest service time in the mean that ``Retry-After`` is computed from."""
INFINITY = float("inf")


@dataclass(slots=True, eq=False)
class QueuedCall:
    """One accepted request.

    Attributes:
        request: The request.
        pieces: Its frame, ready for any replica.
        answer: The replica that answered, its frame, and how many requests it answered together.
        start_s: When a replica took it, Unix seconds.
        replica: That replica.
        variant: The variant that it answers with.
    """

    request: InferRequest
    pieces: list[Piece]
    answer: asyncio.Future[tuple[WorkerReplica, Frame, int]]
    start_s: float = float("nan")
    replica: WorkerReplica | None = None
    variant: str = ""

    def fail(self, error: RequestError) -> None:
        """Answer with an error, unless there is an answer."""
        if not self.answer.done():
            self.answer.set_exception(error)


class ServiceQueue:
    """Queue and replicas of one service. Implements :class:`joulery.adapters.engines.embedded.replica.ReplicaOwner`.

    Args:
        name: Its name.
        limit: Limit on the requests that wait.
        hang_s: A replica busy with one request for longer is killed.
        wake_at: Schedules a call of :meth:`sweep` at a time, monotonic seconds.
        steering: Chooses which loaded variant answers a request that names none.

    Attributes:
        queue: Waiting requests and free replicas.
        replicas: All replicas, in any state.
        variants: Variants it is to run; empty when the service is ending.
        inputs, outputs: Declarations of its models, where they agree.
        mean_service_s: Smoothed time a request takes in a replica.
    """

    def __init__(
        self, name: str, limit: QueueLimit, hang_s: float, wake_at: Callable[[float], None], steering: MixCounter
    ) -> None:
        self.name = name
        self.queue: Dispatcher[QueuedCall, WorkerReplica] = Dispatcher(limit.waiting, limit.wait_s)
        self.replicas: list[WorkerReplica] = []
        self.variants: frozenset[str] = frozenset()
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: frozenset[str] = frozenset()
        self.mean_service_s = 0.0
        self._stand_ins: dict[WorkerReplica, WorkerReplica] = {}
        self._steering = steering
        self._emptied = asyncio.Event()
        self._hang_s, self._wake_at = hang_s, wake_at

    async def infer(self, request: InferRequest, deadline_s: float, now_s: float) -> InferResponse:
        """The answer of the next free replica.

        Args:
            request: The request.
            deadline_s: When it is answered at the latest, monotonic seconds.
            now_s: Monotonic seconds.

        Raises:
            RequestError: The request was not answered; ``outcome`` gives the reason.
        """
        arrival_s = unix_s()
        self._check(request)
        call = QueuedCall(request, encoded([request]), asyncio.get_running_loop().create_future())
        kind = kind_of(request, self.inputs) if self._batches else None
        variant = request.variant or (self._steered() if self._steering.mix.steps else "")
        ticket = Ticket(call, deadline_s, variant, kind=kind, since_s=now_s)
        if not self.queue.offer(ticket):
            raise self._overloaded(f"{self.name} has {self.queue.waiting} requests waiting, its limit")
        self.pump()
        self._wake_at(deadline_s)
        try:
            replica, frame, batch = await call.answer
        except asyncio.CancelledError:
            self.queue.withdraw(ticket)
            self.pump()
            raise
        return _response(replica, call.variant, frame, arrival_s, call.start_s, ticket.attempts, batch)

    def _steered(self) -> str:
        """The variant that must answer a request where several variants have stated shares; empty for any."""
        there = self._answering()
        if len(there) < 2 or any(server.warm for server in self.queue.servers):
            return ""  # replicas that keep several variants loaded choose when they take a request
        return self._steering.choose("", there, 0, 0.0)

    def _answering(self) -> set[str]:
        """Variants of the replicas that take requests."""
        return {server.variant for server in self.queue.servers if not server.leaving}

    def _clear_steering(self, there: Collection[str]) -> None:
        """Let any replica answer the waiting requests that were steered to a variant outside ``there``."""
        for ticket in self.queue.open_tickets():
            if ticket.variant and not ticket.payload.request.variant and ticket.variant not in there:
                ticket.variant = ""

    def pump(self) -> None:
        """Give waiting requests to free replicas."""
        queue = self.queue
        if queue.waiting:
            self._give(time.monotonic())
        else:
            queue.ripe_s = INFINITY
        if not queue.waiting:
            self._emptied.set()

    def _give(self, now_s: float) -> None:
        """Answer the requests that waited too long with an error; give the others to free replicas."""
        for late in self.queue.overdue(now_s):
            late.payload.fail(self._overloaded(f"{self.name} could not answer this request within its SLO"))
        while (pair := self._pull(now_s)) is not None:
            ticket, server = pair
            calls = [ticket.payload for ticket in server.held]
            start_s, variant = unix_s(), ticket.variant or server.turn or server.variant
            if server.warm and not ticket.variant:
                self._steering.count(len(calls))
            for call in calls:
                call.start_s, call.replica, call.variant = start_s, server.payload, variant
            pieces = calls[0].pieces if len(calls) == 1 else encoded([call.request for call in calls])
            server.payload.send(pieces, now_s, variant)
            self._wake_at(now_s + self._hang_s)
        if self.queue.ripe_s < INFINITY:
            self._wake_at(self.queue.ripe_s)

    def _pull(self, now_s: float) -> tuple[Ticket[QueuedCall], Server[QueuedCall, WorkerReplica]] | None:
        """Choose the variant, then take the next request and its replica: batch sizes differ by variant."""
        server = self.queue.first_idle
        if server is not None and server.warm and self.queue.waiting:
            behind = max(0, self.queue.waiting - server.batch)
            waited_s = now_s - self.queue.since_s(server.batch) if behind else 0.0
            server.turn = self._steering.pick(server.variant, server.warm, behind, waited_s)
        return self.queue.pull(now_s)

    def ready(self, replica: WorkerReplica) -> None:
        """Handle a replica that is ready to answer, or to stand by."""
        replica.server.warm = replica.warm
        self.variants |= replica.warm
        if not replica.spec.standby and replica.server not in self.queue.servers:
            self.queue.join(replica.server)
        standby = self._stand_ins.pop(replica, None)
        returns = standby is not None and standby.spec.standby and standby.server in self.queue.servers
        if standby is not None and returns and self.queue.retire(standby.server):
            standby.server = standby.new_server()
        self._describe()
        self.pump()

    def answered(self, replica: WorkerReplica, frame: Frame) -> None:
        """Handle a replica's answer to the requests it held."""
        held = [ticket.payload for ticket in replica.server.held]
        try:
            frames = _parts(frame, held)
        except DataError:
            # One request may be at fault, or the model answers no batches: each goes alone now.
            self.queue.split(replica.server)
            self.pump()
            return
        tickets = self.queue.finish_all(replica.server)
        if replica.spec.standby and replica.server not in self.queue.servers:
            replica.server = replica.new_server()
        self.pump()
        weight = _SMOOTHING if self.mean_service_s else 1.0
        self.mean_service_s += (frame.header["s"] - self.mean_service_s) * weight
        for ticket, part in zip(tickets, frames, strict=True):
            if ticket is not None and not ticket.payload.answer.done():
                ticket.payload.answer.set_result((replica, part, len(held)))

    def ended(self, replica: WorkerReplica, reason: str) -> None:
        """Handle the end of a replica's worker: the requests it held are tried once more on another replica."""
        if replica not in self.replicas:
            return  # it was stopped before it ever served
        if replica.server in self.queue.servers:
            for ticket in self.queue.lose(replica.server):
                message = f"two replicas died under this request; the last: {reason}"
                variant, attempts = ticket.payload.variant, ticket.attempts
                ticket.payload.fail(RequestError(message, Outcome.CRASHED, variant=variant, attempts=attempts))
        if replica.state is ReplicaState.DRAINING:
            self.replicas.remove(replica)
        elif not replica.spec.standby:
            self._fail_over(replica)
        self._clear_steering(self._answering())
        self._stand_ins = {
            lost: one for lost, one in self._stand_ins.items() if one is not replica and lost in self.replicas
        }
        self.pump()

    def _fail_over(self, lost: WorkerReplica) -> None:
        """Let the warm standby of a replica answer while the replica restarts."""
        taken = self._stand_ins.values()
        standby = next((one for one in self.replicas if one not in taken and _is_standby_of(one, lost)), None)
        if standby is not None:
            self._stand_ins[lost] = standby
            standby.server.warm = standby.warm
            self.queue.join(standby.server)

    def retire(self, replica: WorkerReplica) -> None:
        """End a replica after it has answered the requests it holds."""
        if replica.server in self.queue.servers and not replica.server.leaving:
            self.queue.retire(replica.server)
        replica.leave()

    async def close(self) -> None:
        """End the service: accepted requests are answered, then its replicas end."""
        self._emptied.clear()
        self.pump()
        await self._emptied.wait()
        leaving = list(self.replicas)
        for replica in leaving:
            self.retire(replica)
        await wait_all_ended(None, leaving)
        self.drop(f"{self.name} is not served any more")

    def drop(self, message: str, variants: frozenset[str] | None = None) -> None:
        """Answer waiting requests with an error: all, or those for a variant that is not among ``variants``."""
        if variants is not None:
            self._clear_steering(variants)
        for ticket in self.queue.drop_waiting(variants) if variants is not None else self.queue.drop_waiting():
            ticket.payload.fail(RequestError(message, Outcome.UNAVAILABLE))
        self.pump()

    def backlog(self, unix_s: float) -> list[QueuedRequest]:
        """Every request in a replica or waiting; ``unix_s``: Unix seconds at monotonic 0."""
        found = []
        for ticket in self.queue.open_tickets():
            call = ticket.payload
            found.append(QueuedRequest(self.name, ticket.since_s + unix_s, call.variant, call.start_s))
        return found

    def sweep(self, now_s: float) -> float:
        """Fail requests past their deadline, kill replicas that hang; return when to sweep again, monotonic seconds."""
        for ticket in self.queue.expire(now_s):
            _too_late(ticket, "in the queue" if ticket.payload.replica is None else "in a replica")
        self.pump()
        for replica in self.replicas:
            if replica.busy_since_s + self._hang_s <= now_s:
                self._end_hanging(replica)
        hanging_s = (replica.busy_since_s + self._hang_s for replica in self.replicas)
        return min((self.queue.next_deadline_s(), self.queue.ripe_s, *hanging_s))

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until the present queue is served."""
        return self.queue.waiting * self.mean_service_s / max(1, len(self.queue.servers))

    def _overloaded(self, message: str) -> RequestError:
        return RequestError(message, Outcome.OVERLOADED, retry_after_s=self.retry_after_s)

    @property
    def _batches(self) -> bool:
        for replica in self.replicas:  # noqa: SIM110 - on the hot path, where a generator is dearer
            if replica.spec.batch > 1:
                return True
        return False

    def _describe(self) -> None:
        """Set the declared inputs and outputs where the ready replicas agree: any of them may get a request."""
        ready = [replica for replica in self.replicas if replica.state is ReplicaState.READY]
        inputs = {replica.inputs for replica in ready if replica.inputs}
        self.inputs = inputs.pop() if len(inputs) == 1 else ()
        names = {frozenset(spec.name for spec in replica.outputs) for replica in ready}
        self.outputs = names.pop() if len(names) == 1 else frozenset()

    def _check(self, request: InferRequest) -> None:
        """Raise RequestError unless the models can answer a request."""
        if request.variant and request.variant not in self.variants:
            raise RequestError(f"{self.name} runs no variant {request.variant!r} now", Outcome.UNKNOWN)
        if self.inputs:
            check_inputs(request, self.inputs)
        if self.outputs:
            for name in request.outputs:
                if name not in self.outputs:
                    raise RequestError(f"there is no output {name!r}", Outcome.INVALID)

    def _end_hanging(self, replica: WorkerReplica) -> None:
        """Kill a replica that does not answer. Its requests are not tried again: they would hang the next one too."""
        reason = f"it was busy with one request for {self._hang_s:g} s"
        for ticket in replica.server.held:
            if self.queue.withdraw(ticket):
                _too_late(ticket, f"in a replica, which was ended: {reason}")
        replica.busy_since_s = INFINITY
        replica.kill(reason)


def _is_standby_of(standby: WorkerReplica, lost: WorkerReplica) -> bool:
    """Whether one is a warm standby of the other: of the same variant, on the same cores or the same GPU."""
    one, other = standby.spec, lost.spec
    places = (one.variant, one.cores, one.device) == (other.variant, other.cores, other.device)
    return one.standby and standby.state is ReplicaState.READY and places


def encoded(requests: Sequence[InferRequest]) -> list[Piece]:
    """The frame of one request, or of several of one kind joined along their first axis.

    Raises:
        DataError: A tensor's type has no name in the protocol.
    """
    outputs, inputs = requests[0].outputs, requests[0].inputs
    if len(requests) > 1:
        inputs = joined(requests)
    return encode({"w": outputs} if outputs else {}, inputs)


def _parts(frame: Frame, calls: Sequence[QueuedCall]) -> list[Frame]:
    """Split a batch's answer into one for each request: CPU time by rows, service time in full.

    The parts of the CPU time sum to the batch's exactly.

    Raises:
        DataError: The batch failed, or cannot be split.
    """
    if len(calls) == 1:
        return [frame]
    if "e" in frame.header:
        raise DataError(str(frame.header["e"]))
    rows = rows_of([call.request for call in calls])
    parts = divided(frame.header["c"], rows)
    tensors = split_rows(frame.tensors, rows)
    return [Frame({**frame.header, "c": part}, mine) for part, mine in zip(parts, tensors, strict=True)]


def _response(
    replica: WorkerReplica, variant: str, frame: Frame, arrival_s: float, start_s: float, attempts: int, batch: int
) -> InferResponse:
    """The response in a replica's frame.

    Raises:
        RequestError: The frame holds an error.
    """
    header = frame.header
    service_s, cpu_s = header["s"], header["c"]
    if "e" in header:
        outcome = Outcome(header["o"])
        raise RequestError(header["e"], outcome, variant=variant, service_s=service_s, cpu_s=cpu_s, attempts=attempts)
    end_s = unix_s()
    return InferResponse(
        frame.tensors, variant, replica.name, arrival_s, start_s, end_s, service_s, cpu_s, attempts, batch
    )


def _too_late(ticket: Ticket[QueuedCall], where: str) -> None:
    error = RequestError(
        f"the deadline passed {where}",
        Outcome.DEADLINE,
        variant=ticket.payload.variant,
        attempts=ticket.attempts,
    )
    ticket.payload.fail(error)


def check_inputs(request: InferRequest, declared: Sequence[TensorSpec]) -> None:
    """Check that a request has every declared input with its type and shape, and no other.

    Raises:
        RequestError: An input is missing, does not match, or is not declared.
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
