"""Requests, replicas and services as the engine on Ray Serve keeps them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from joulery.adapters.engines.embedded.batches import divided, joined, rows_of, split_rows
from joulery.domain.errors import DataError
from joulery.domain.serving.dispatch import Dispatcher, Server, Ticket
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    Outcome,
    QueuedRequest,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestError,
)
from joulery.domain.serving.tensors import TensorSpec
from joulery.steady_time import unix_s

_LOOK_S = 0.02


@dataclass(slots=True, eq=False)
class RayCall:
    """One accepted request."""

    request: InferRequest
    answer: asyncio.Future[tuple[RayReplica, Mapping[str, Any], float, int]]
    start_s: float = float("nan")


@dataclass(slots=True, eq=False)
class RayReplica:
    """One replica, as Ray reports it.

    Attributes:
        app, rank: Its application, and its place in that application's plan.
        spec: What it runs.
        info: The description that it gives of itself.
        unseen: Number of checks in which it was missing since it was last seen.
        server: Its place in the queue.
        inputs, outputs: What its model declares.
    """

    app: str
    rank: int
    spec: ReplicaSpec
    info: Mapping[str, Any]
    unseen: int = 0
    server: Server[RayCall, RayReplica] = field(init=False)
    inputs: tuple[TensorSpec, ...] = field(init=False)
    outputs: tuple[TensorSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.server = self.new_server()
        self.become(self.rank, self.spec, self.info)

    @property
    def id(self) -> str:
        """Its id in Ray; a restart changes it."""
        return str(self.info["id"])

    @property
    def name(self) -> str:
        """Its id in joulery; a restart keeps it."""
        return f"{self.app}#{self.rank}"

    def new_server(self) -> Server[RayCall, RayReplica]:
        """A place in the queue for what it runs."""
        return Server(self, self.spec.variant, self.spec.batch, self.spec.max_delay_s)

    def become(self, rank: int, spec: ReplicaSpec, info: Mapping[str, Any]) -> None:
        """Update the replica to a new rank, specification and description."""
        self.rank, self.spec, self.info = rank, spec, info
        self.server.become(self.new_server(), frozenset())
        self.inputs, self.outputs = (
            tuple(TensorSpec(name, datatype, tuple(shape)) for name, datatype, shape in info[side])
            for side in ("inputs", "outputs")
        )

    def view(self, *, served: int, restarts: int, leaving: bool) -> ReplicaView:
        """The public view of this replica."""
        return ReplicaView(
            id=self.name,
            spec=self.spec,
            state=ReplicaState.DRAINING if leaving or self.server.leaving else ReplicaState.READY,
            busy=self.server.ticket is not None,
            pid=int(self.info["pid"]),
            served=served,
            restarts=restarts,
            inputs=self.inputs,
            outputs=self.outputs,
            platform=str(self.info["platform"]),
            last_error=str(self.info["note"]),
        )


def views(
    plans: Mapping[str, Sequence[ReplicaSpec]],
    found: Iterable[RayReplica],
    served: Mapping[tuple[str, int], int],
    restarts: Mapping[tuple[str, int], int],
) -> tuple[ReplicaView, ...]:
    """Views of the present replicas, and of planned ones that are missing; sorted by id.

    Args:
        plans: What each rank runs, by application.
        found: The present replicas.
        served, restarts: Counts by application and rank.
    """
    shown, seen = [], set()
    for replica in found:
        seen.add(slot := (replica.app, replica.rank))
        leaving = replica.app not in plans
        shown.append(replica.view(served=served[slot], restarts=restarts[slot], leaving=leaving))
    for name, plan in plans.items():
        for rank, spec in enumerate(plan):
            if (name, rank) not in seen:
                restarted = restarts[name, rank]
                shown.append(ReplicaView(f"{name}#{rank}", spec, ReplicaState.RESTARTING, restarts=restarted))
    return tuple(sorted(shown, key=lambda view: view.id))


def runs(app: str, plan: Sequence[ReplicaSpec], found: Iterable[RayReplica]) -> bool:
    """Whether an application has the replicas of its plan, and no other."""
    return Counter(replica.spec for replica in found if replica.app == app) == Counter(plan)


@dataclass(slots=True, eq=False)
class RayService:
    """One service: its queue, its variants, and the timer for a batch that waits for more requests."""

    queue: Dispatcher[RayCall, RayReplica]
    variants: frozenset[str] = frozenset()
    ripe: asyncio.TimerHandle | None = None


def out_of_time(ticket: Ticket[RayCall], away: str, retry_after_s: float) -> RequestError:
    """The error of a request whose deadline passed; ``away`` is the reason where no replica could answer it."""
    if away:
        return RequestError(away, Outcome.UNAVAILABLE, retry_after_s=retry_after_s)
    return RequestError("the deadline came", Outcome.DEADLINE, attempts=ticket.attempts)


def queued(services: Mapping[str, RayService], at_0_s: float) -> tuple[QueuedRequest, ...]:
    """Every request in a replica or waiting, by arrival.

    Args:
        services: By name.
        at_0_s: Unix seconds at monotonic 0.
    """
    found = []
    for name, entry in services.items():
        running = {id(ticket): server for server in entry.queue.servers for ticket in server.held}
        for ticket in entry.queue.open_tickets():
            variant = running[id(ticket)].variant if id(ticket) in running else ""
            found.append(QueuedRequest(name, ticket.since_s + at_0_s, variant, ticket.payload.start_s))
    return tuple(sorted(found, key=lambda request: request.arrival_s))


def fail(ticket: Ticket[RayCall], error: RequestError) -> None:
    """Answer a request with an error, unless it has an answer."""
    if not ticket.payload.answer.done():
        ticket.payload.answer.set_exception(error)


def request_of(calls: Sequence[RayCall]) -> InferRequest:
    """The call to a replica for one request, or for several of one kind: their inputs joined along the first axis."""
    first = calls[0].request
    if len(calls) == 1:
        return first
    variant = next((call.request.variant for call in calls if call.request.variant), "")
    return InferRequest(joined([call.request for call in calls]), first.outputs, None, variant)


def answers_of(answer: Mapping[str, Any], calls: Sequence[RayCall]) -> list[Mapping[str, Any]]:
    """The answer of each request of a batch: its rows and its part of the CPU time, and the time in full.

    Raises:
        DataError: The batch failed, or cannot be split.
    """
    if len(calls) == 1:
        return [answer]
    if "e" in answer:
        raise DataError(str(answer["e"]))
    rows = rows_of([call.request for call in calls])
    cpu_s, tensors = divided(float(answer["c"]), rows), split_rows(answer["y"], rows)
    return [{**answer, "c": part, "y": mine} for part, mine in zip(cpu_s, tensors, strict=True)]


def response(
    replica: RayReplica, answer: Mapping[str, Any], arrival_s: float, start_s: float, attempts: int, batch: int
) -> InferResponse:
    """The response to a replica's answer.

    Raises:
        RequestError: The replica answered with an error.
    """
    variant, service_s, cpu_s = str(answer["variant"]), float(answer["s"]), float(answer["c"])
    if "e" in answer:
        raise RequestError(
            str(answer["e"]),
            Outcome(answer["o"]),
            variant=variant,
            service_s=service_s,
            cpu_s=cpu_s,
            attempts=attempts,
        )
    end_s = unix_s()
    return InferResponse(
        answer["y"], variant, replica.name, arrival_s, start_s, end_s, service_s, cpu_s, attempts, batch
    )


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    while True:
        if condition():
            return
        await asyncio.sleep(_LOOK_S)


def served_out(entry: RayService) -> bool:
    """Whether a service continues, or has no waiting requests left."""
    return bool(entry.variants) or not entry.queue.waiting
