"""Make an engine run the layouts that a policy decides on: each instance becomes a replica, on its GPU or node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from joulery.domain.decisions import Decision
from joulery.domain.errors import ActuationError, JouleryError
from joulery.domain.gpu.layout import Instance, Layout, SliceAssignment
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import ModelRef, ReplicaSpec, ReplicaState
from joulery.domain.serving.service import Slice
from joulery.policies.serving.messages import short
from joulery.policies.serving.observation import KEEP_LAYOUT
from joulery.runtime.serving.nodes.places import NodePlaces
from joulery.runtime.session.driver import APPLIED


@dataclass(frozen=True, slots=True)
class LayoutActuator:
    """Makes the engine run the layouts that a policy decides on.

    Attributes:
        engine: Runs them.
        service: The service.
        models: What each variant loads.
        slice_assignment: GPU of each slice, for each partition of its GPUs; empty on the CPU.
        loaded: Variants that every replica keeps loaded, the leanest first; empty for its own only.
        replica_bytes: Memory that a replica may reach by that; 0 for no bound.
        batches: Requests that a variant answers together on a slice, where that is more than one.
        batch_delay_s: How long a batch that is not full waits for more requests.
        places: The nodes of a cluster that replicas are placed on; None off a cluster's nodes.
    """

    engine: Engine
    service: str
    models: Mapping[str, ModelRef]
    slice_assignment: SliceAssignment = field(default_factory=dict)
    loaded: tuple[str, ...] = ()
    replica_bytes: int = 0
    batches: Mapping[tuple[str, Slice], int] = field(default_factory=dict)
    batch_delay_s: float = 0.0
    places: NodePlaces | None = None

    async def carry_out(self, decision: Decision) -> tuple[str, str]:
        """Carry out one decision; return its outcome and a sentence about the changes.

        Raises:
            JouleryError: The engine failed; the old replicas continue to serve.
        """
        layout = Layout.parse(decision.value)
        if decision.kind == KEEP_LAYOUT:
            return APPLIED, f"{short(layout)} runs already"
        return APPLIED, await self.run(layout)

    async def run(self, layout: Layout) -> str:
        """Run a layout; return a sentence about the changes.

        Raises:
            ActuationError: The engine failed; the message names the layout that continues to serve.
            JouleryError: The engine failed, and nothing runs.
        """
        try:
            done = await self.engine.apply(self.specs(layout))
        except JouleryError as error:
            running = running_layout(self.engine, self.service)
            if running is None:
                raise
            undone = (short(layout),)
            raise ActuationError(f"{error}; {short(running)} serves on", rolled_back=undone, hint=error.hint) from error
        return (
            f"{short(layout)} took over after {done.ready_s:.2f} s, {len(done.started)} replicas started, "
            f"{len(done.stopped)} stopped, {done.startup_cpu_s:.2f} CPU seconds"
        )

    def is_settled(self, layout: Layout) -> bool:
        """Whether the replicas of a layout that runs are on the GPUs or nodes that it would get now.

        A part of a layout, whose other nodes are not there yet, counts as settled: it has no assignment of its own.
        """
        if tuple(sorted(layout.slices)) not in self.slice_assignment:
            return True
        mine = [spec.device for spec in self.specs(layout) if spec.service == self.service]
        running = [view.spec.device for view in self.engine.replicas() if view.spec.service == self.service]
        return Counter(mine) == Counter(running)

    def specs(self, layout: Layout) -> list[ReplicaSpec]:
        """The replicas of a layout, one thread a core, and those of every other service as they are."""
        specs = [view.spec for view in self.engine.replicas() if view.state is not ReplicaState.DRAINING]
        running = [spec for spec in specs if spec.service == self.service]
        mine = [
            ReplicaSpec(
                self.service,
                item.variant,
                item.slice,
                self.models[item.variant],
                batch=self.batches.get((item.variant, item.slice), 1),
                max_delay_s=self.batch_delay_s if (item.variant, item.slice) in self.batches else 0.0,
                device=device,
                warm=tuple((name, self.models[name]) for name in self.loaded if name != item.variant),
                memory_bytes=self.replica_bytes,
                warm_batches=self._warm_batches(item),
            )
            for item, device in zip(layout.instances, self._devices(layout, running), strict=True)
        ]
        return [spec for spec in specs if spec.service != self.service] + mine

    def _warm_batches(self, item: Instance) -> tuple[tuple[str, int], ...]:
        """Requests that a replica answers together with each other variant it keeps loaded; none without batches."""
        if not self.batches:
            return ()
        return tuple((name, self.batches.get((name, item.slice), 1)) for name in self.loaded if name != item.variant)

    def _devices(self, layout: Layout, running: Sequence[ReplicaSpec]) -> list[str]:
        """The GPU of each instance of a layout; instances that run already stay on theirs."""
        if not self.slice_assignment:
            return [""] * len(layout.instances)
        partition = tuple(sorted(layout.slices))
        used = self.slice_assignment
        free = Counter(used[partition] if self.places is None else self.places.assigned(used, partition))
        there = Counter((spec.variant, spec.slice, spec.device) for spec in running)
        found: dict[int, str] = {}
        for index, item in enumerate(layout.instances):
            stays = [gpu for piece, gpu in free if piece == item.slice and there[item.variant, piece, gpu]]
            if stays:
                found[index] = stays[0]
                there[item.variant, item.slice, stays[0]] -= 1
                free -= Counter([(item.slice, stays[0])])
        for index, item in enumerate(layout.instances):
            if index not in found:
                found[index] = next(gpu for piece, gpu in free if piece == item.slice)
                free -= Counter([(item.slice, found[index])])
        return [found[index] for index in range(len(layout.instances))]


def running_layout(engine: Engine, service: str) -> Layout | None:
    """The layout of a service's replicas without those that drain; None where there are none."""
    instances = [
        Instance(view.spec.variant, view.spec.slice)
        for view in engine.replicas()
        if view.spec.service == service and view.state is not ReplicaState.DRAINING
    ]
    return Layout(instances) if instances else None
