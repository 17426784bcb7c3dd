"""Groupings of a fleet's devices, and the shape in which a group runs a model (AlpaServe, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

from joulery.domain.errors import ConfigError

MAX_STAGES = 8
MAX_SHARDS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape in which every model of a group runs: the number of stages, and of devices for each stage.

    Attributes:
        stages: Pipeline stages.
        shards: Devices that share a stage.
    """

    stages: int
    shards: int

    @property
    def devices(self) -> int:
        """Devices of the group."""
        return self.stages * self.shards

    def __str__(self) -> str:
        stages = f"{self.stages} stage" + "s" * (self.stages > 1)
        return f"{stages} of {self.shards} GPU" + "s" * (self.shards > 1)


@dataclass(frozen=True, slots=True)
class Grouping:
    """A division of the fleet into groups.

    Attributes:
        shapes: Shape of each group, regular groups first.
    """

    shapes: tuple[Shape, ...]

    @property
    def devices(self) -> int:
        """Devices in all groups."""
        return sum(shape.devices for shape in self.shapes)

    def __str__(self) -> str:
        counts: dict[Shape, int] = {}
        for shape in self.shapes:
            counts[shape] = counts.get(shape, 0) + 1
        return " + ".join(f"{count} × ({shape})" for shape, count in counts.items())


def groupings(devices: int, max_stages: int = MAX_STAGES, max_shards: int = MAX_SHARDS) -> tuple[Grouping, ...]:
    """Every grouping with equal regular groups; leftover devices form groups of a power of two without shards.

    Sizes are 1, 2, 4, 8 and multiples of 8.

    Args:
        devices: Number of devices, >= 1.
        max_stages, max_shards: Most stages of a pipeline, and most devices that share a stage.

    Raises:
        ConfigError: There is no device.
    """
    if devices < 1:
        raise ConfigError("a fleet needs devices", got=str(devices), expected="1 or more")
    found: list[Grouping] = []
    for size in (*(1 << power for power in range(3)), *range(8, devices + 1, 8)):
        if size > devices:
            continue
        rest = _remainder(devices % size, max_stages)
        for stages in range(1, min(size, max_stages) + 1):
            if size % stages == 0 and size // stages <= max_shards and _power_of_two(size // stages):
                shape = Shape(stages, size // stages)
                found.append(Grouping((shape,) * (devices // size) + rest))
    return tuple(found)


def _remainder(devices: int, max_stages: int) -> tuple[Shape, ...]:
    shapes = []
    while devices:
        size = min(1 << (devices.bit_length() - 1), 1 << (max_stages.bit_length() - 1))
        shapes.append(Shape(size, 1))
        devices -= size
    return tuple(shapes)


def _power_of_two(value: int) -> bool:
    return value & (value - 1) == 0
