"""How NVIDIA GPUs can be cut in hardware: the profiles of a menu and the partitions they allow.

A MIG partition is a sequence of profiles; the order is the one in which the instances are created and says where they
lie on the chip. What runs on them does not feel the order: partitions with the same multiset of profiles are equal to
everyone but the driver.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from joulery.domain.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One kind of hardware slice.

    Attributes:
        name: As the driver calls it (``3g.20gb``).
        compute_slices: Seventh parts of the SMs.
        memory_slices: Eighth parts of the memory system.
        memory_bytes: Memory of the slice.
    """

    name: str
    compute_slices: int
    memory_slices: int
    memory_bytes: int

    @property
    def size(self) -> str:
        """The name without the memory: ``3g``."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class MigMenu:
    """What one GPU type can be cut into.

    Attributes:
        gpu: GPU type.
        compute_slices: Compute slices of the whole GPU.
        memory_slices: Memory slices of the whole GPU.
        profiles: The kinds of slice, largest first.
        partitions: Every full partition as names of profiles, in order of creation.
        source: Where the menu comes from.

    Raises:
        ConfigError: A partition names an unknown profile or needs more slices than the GPU has.
    """

    gpu: str
    compute_slices: int
    memory_slices: int
    profiles: tuple[MigProfile, ...]
    partitions: tuple[tuple[str, ...], ...]
    source: str

    def __post_init__(self) -> None:
        for partition in self.partitions:
            pieces = [self[name] for name in partition]
            compute, memory = sum(p.compute_slices for p in pieces), sum(p.memory_slices for p in pieces)
            if compute > self.compute_slices or memory > self.memory_slices:
                raise ConfigError(
                    f"a {self.gpu} cannot be cut into {' + '.join(partition)}",
                    got=f"{compute} compute and {memory} memory slices",
                    expected=f"at most {self.compute_slices} and {self.memory_slices}",
                )

    def __getitem__(self, name: str) -> MigProfile:
        """The profile called ``name``.

        Raises:
            ConfigError: The menu has none of that name.
        """
        for profile in self.profiles:
            if profile.name == name:
                return profile
        raise ConfigError(
            f"a {self.gpu} has no MIG profile {name!r}", got=name, expected=", ".join(p.name for p in self.profiles)
        )

    @property
    def multisets(self) -> tuple[tuple[str, ...], ...]:
        """The partitions that differ in what they hold, each as profile names, largest first, in order of the menu."""
        order = {profile.name: index for index, profile in enumerate(self.profiles)}
        found = dict.fromkeys(tuple(sorted(partition, key=order.__getitem__)) for partition in self.partitions)
        return tuple(found)

    def counts(self, partition: tuple[str, ...]) -> tuple[int, ...]:
        """How many slices of each profile a partition has, in the order of ``profiles``."""
        counted = Counter(partition)
        return tuple(counted[profile.name] for profile in self.profiles)


def _a100(text: str) -> tuple[tuple[str, ...], ...]:
    memory = {"7g": "7g.40gb", "4g": "4g.20gb", "3g": "3g.20gb", "2g": "2g.10gb", "1g": "1g.5gb"}
    return tuple(tuple(memory[size] for size in line.split()) for line in text.strip().splitlines())


A100_40GB = MigMenu(
    gpu="A100-40GB",
    compute_slices=7,
    memory_slices=8,
    profiles=(
        MigProfile("7g.40gb", 7, 8, 40 * GIB),
        MigProfile("4g.20gb", 4, 4, 20 * GIB),
        MigProfile("3g.20gb", 3, 4, 20 * GIB),
        MigProfile("2g.10gb", 2, 2, 10 * GIB),
        MigProfile("1g.5gb", 1, 1, 5 * GIB),
    ),
    partitions=_a100(
        """
        7g
        3g 4g
        2g 1g 4g
        1g 1g 1g 4g
        3g 3g
        2g 1g 3g
        1g 1g 1g 3g
        3g 2g 2g
        3g 2g 1g 1g
        3g 1g 1g 2g
        3g 1g 1g 1g 1g
        2g 1g 2g 2g
        2g 1g 2g 1g 1g
        2g 1g 1g 1g 2g
        1g 1g 1g 2g 1g 1g
        1g 1g 1g 1g 1g 2g
        2g 1g 1g 1g 1g 1g
        1g 2g 1g 1g 1g 1g
        1g 1g 1g 1g 1g 1g 1g
        """
    ),
    source="the 19 configurations of Clover (Li et al., SC'23, Fig. 1), in the order of creation of its artifact v1.0; "
    "slice sizes: NVIDIA Multi-Instance GPU User Guide, A100-SXM4-40GB",
)
"""Configurations 1 to 19 of the Clover paper; 14 of them differ in what they hold."""
