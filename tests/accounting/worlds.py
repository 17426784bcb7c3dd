"""Small worlds of events and power for the accounting tests: one description, given to the product and the oracles."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from joulery.accounting.operations.align import align
from joulery.accounting.steps import PowerSteps
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.quality import Quality
from joulery.domain.trace.events import EventTrace
from tests.accounting.fair_oracle import Event

TICK_NS = 1_000
"""One tick of a world is a microsecond."""


@dataclass(frozen=True)
class World:
    events: tuple[Event, ...]
    power: dict[str, list[tuple[int, float | None]]]
    window: tuple[int, int]


def random_world(seed: int) -> World:
    """Nested, overlapping, crossing and empty events on two CPU sockets and a GPU; power with gaps; any window."""
    rng = random.Random(seed)
    end = rng.randint(20, 70)
    devices = ["CPU:0", "CPU:1", "GPU:0"][: rng.randint(1, 3)]
    events = []
    for _ in range(rng.randint(0, 14)):
        start = rng.randint(-5, end)
        length = rng.choice([0, 1, 2, 5, 10, 30])
        lane = rng.choice([-1, 0, 0, 1])
        events.append(Event(f"op{rng.randint(0, 3)}", start, start + length, rng.choice(devices), lane))
    power: dict[str, list[tuple[int, float | None]]] = {}
    for device in devices:
        stamps = sorted(rng.sample(range(-5, end), rng.randint(1, 6)))
        power[device] = [(t, rng.choice([None, 0, 7, 40, 113])) for t in stamps]
    t0 = rng.randint(-2, end // 2)
    return World(tuple(events), power, (t0, rng.randint(t0 + 1, end)))


def trace_of(events: Sequence[Event], tick_ns: int = TICK_NS) -> EventTrace:
    ops = sorted({event.op for event in events})
    devices = sorted({event.device for event in events})
    return EventTrace(
        ops,
        devices,
        [""],
        op=[ops.index(event.op) for event in events],
        start_ns=[event.start * tick_ns for event in events],
        dur_ns=[(event.end - event.start) * tick_ns for event in events],
        device=[devices.index(event.device) for event in events],
        lane=[event.lane for event in events],
        phase=[0] * len(events),
    )


def metered(device: str, steps: Sequence[tuple[int, float | None]], end: int, tick_ns: int = TICK_NS) -> PowerSteps:
    """Power that changes at the given ticks; the last value holds to ``end``."""
    channel = Channel(device, "package", ReadingKind.POWER, "fake", Quality.MEASURED)
    edges = [t * tick_ns for t, _ in steps] + [max(end, steps[-1][0] + 1) * tick_ns]
    return PowerSteps(channel, edges, [float("nan") if w is None else w for _, w in steps])


def accounted(world: World, multiplicity="events", tick_ns: int = TICK_NS) -> TensorFootprint:
    t0, t1 = world.window
    power = {device: [metered(device, steps, t1, tick_ns)] for device, steps in world.power.items()}
    trace = trace_of(world.events, tick_ns)
    return align(trace, power, (t0 * tick_ns, t1 * tick_ns), multiplicity=multiplicity)
