"""MIG menus of NVIDIA GPUs: the profiles of a menu and the partitions they allow.

A MIG partition is a sequence of profiles. The order is the order of creation and determines where the instances lie on
the chip. What runs on the instances does not depend on it: partitions with the same multiset of profiles differ only
for the driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from joulery.domain.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One kind of hardware slice.

    Attributes:
        name: The driver's name of the profile (``3g.20gb``).
        compute_slices: Seventh parts of the SMs.
        memory_slices: Eighth parts of the memory system.
        memory_bytes: Memory of the slice.
        starts: Memory slices it may begin at; empty where that is not known.
    """

    name: str
    compute_slices: int
    memory_slices: int
    memory_bytes: int
    starts: tuple[int, ...] = ()

    @property
    def size(self) -> str:
        """The name without the memory: ``3g``."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class MigMenu:
    """Profiles and partitions of one GPU type.

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
                    f"a {self.gpu} cannot be partitioned into {' + '.join(partition)}",
                    got=f"{compute} compute and {memory} memory slices",
                    expected=f"at most {self.compute_slices} and {self.memory_slices}",
                )

    def __getitem__(self, name: str) -> MigProfile:
        """The profile called ``name``.

        Raises:
            ConfigError: The menu has no profile of that name.
        """
        for profile in self.profiles:
            if profile.name == name:
                return profile
        raise ConfigError(
            f"a {self.gpu} has no MIG profile {name!r}", got=name, expected=", ".join(p.name for p in self.profiles)
        )

    @property
    def multisets(self) -> tuple[tuple[str, ...], ...]:
        """The partitions with different profiles, each as profile names, largest first, in order of the menu."""
        order = {profile.name: index for index, profile in enumerate(self.profiles)}
        found = dict.fromkeys(tuple(sorted(partition, key=order.__getitem__)) for partition in self.partitions)
        return tuple(found)

    def counts(self, partition: tuple[str, ...]) -> tuple[int, ...]:
        """Number of slices of each profile that a partition has, in the order of ``profiles``."""
        counted = Counter(partition)
        return tuple(counted[profile.name] for profile in self.profiles)


@dataclass(frozen=True, slots=True, order=True)
class MigPlace:
    """Place of a MIG instance on its GPU.

    Attributes:
        profile: Name of its profile.
        start: First memory slice.
        size: Memory slices.
    """

    profile: str
    start: int
    size: int

    def __str__(self) -> str:
        return f"{self.profile} at {self.start}"


@dataclass(frozen=True, slots=True)
class MigTransition:
    """Steps and time of a change to another partition of a GPU.

    Attributes:
        kept, destroyed, created: Instances that the change would keep, destroy and create.
        mode_change: True where MIG mode itself has to change, for which the whole GPU must be idle.
        busy_pids: Processes that prevent the change now.
        seconds: Expected duration of the change, s.
        measured: True where the duration follows from earlier changes of the same device; False where it is assumed.
    """

    kept: tuple[MigPlace, ...]
    destroyed: tuple[MigPlace, ...]
    created: tuple[MigPlace, ...]
    mode_change: bool
    busy_pids: tuple[int, ...]
    seconds: float
    measured: bool


def find_places(
    wanted: Sequence[str],
    profiles: Sequence[MigProfile],
    compute_slices: int,
    keep: Sequence[MigPlace] = (),
    used: Sequence[MigPlace] = (),
) -> tuple[MigPlace, ...] | None:
    """Find places for instances without overlap, reusing as many present places of the same profiles as possible.

    Args:
        wanted: Names of profiles, repeated as often as wanted.
        profiles: The menu, with ``starts``.
        compute_slices: Compute slices of the GPU.
        keep: The places of the present instances.
        used: Those of them that are in use: keeping one of these has priority over keeping any number of others.

    Returns:
        One place for each instance, sorted by start; None where they do not fit.

    Raises:
        KeyError: A profile is not on the menu.
    """
    menu = {profile.name: profile for profile in profiles}
    pieces = sorted((menu[name] for name in wanted), key=lambda piece: (-piece.memory_slices, piece.name))
    if sum(piece.compute_slices for piece in pieces) > compute_slices:
        return None
    present, in_use = frozenset(keep), frozenset(used)
    most = tuple(
        sum((Counter(wanted) & Counter(place.profile for place in places)).values()) for places in (in_use, present)
    )
    best: list[tuple[MigPlace, ...]] = []

    def kept(places: tuple[MigPlace, ...]) -> tuple[int, int]:
        return len(in_use & set(places)), len(present & set(places))

    def search(index: int, taken: frozenset[int], chosen: tuple[MigPlace, ...]) -> bool:
        """Try every place for the next instance; True once no better result is possible."""
        if index == len(pieces):
            if not best or kept(chosen) > kept(best[0]):
                best[:] = [chosen]
            return kept(best[0]) == most
        piece = pieces[index]
        before = chosen[-1].start if chosen and chosen[-1].profile == piece.name else -1
        options = [MigPlace(piece.name, start, piece.memory_slices) for start in piece.starts if start > before]
        for place in sorted(options, key=lambda option: (option not in in_use, option not in present, option.start)):
            covered = frozenset(range(place.start, place.start + place.size))
            if not covered & taken and search(index + 1, taken | covered, (*chosen, place)):
                return True
        return False

    search(0, frozenset(), ())
    return tuple(sorted(best[0], key=lambda place: place.start)) if best else None


def _seven_slices(gpu: str, sizes: str, source: str) -> MigMenu:
    """The menu of a GPU with an A100's partitions; ``sizes`` names its profiles from the largest to the smallest."""
    names = sizes.split()
    shapes = ((7, 8, (0,)), (4, 4, (0,)), (3, 4, (0, 4)), (2, 2, (0, 2, 4)), (1, 1, (0, 1, 2, 3, 4, 5, 6)))
    profiles = tuple(
        MigProfile(name, compute, memory, int(name.partition(".")[2].removesuffix("gb")) * GIB, starts)
        for name, (compute, memory, starts) in zip(names, shapes, strict=True)
    )
    of_size = {profile.size: profile.name for profile in profiles}
    partitions = tuple(tuple(of_size[size] for size in line.split()) for line in _NINETEEN.strip().splitlines())
    return MigMenu(gpu, 7, 8, profiles, partitions, source)


_NINETEEN = """
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
_GUIDE = "slice sizes and places: NVIDIA Multi-Instance GPU User Guide, supported profiles"

A100_40GB = _seven_slices(
    "A100-40GB",
    "7g.40gb 4g.20gb 3g.20gb 2g.10gb 1g.5gb",
    "the 19 configurations of Clover (Li et al., SC'23, Fig. 1), in the order of creation of its artifact v1.0; "
    "slice sizes: NVIDIA Multi-Instance GPU User Guide, A100-SXM4-40GB",
)
"""Configurations 1 to 19 of the Clover paper; 14 of them are different multisets of profiles."""
A100_80GB = _seven_slices("A100-80GB", "7g.80gb 4g.40gb 3g.40gb 2g.20gb 1g.10gb", f"{_GUIDE}, A100-SXM4-80GB")
H100_80GB = _seven_slices("H100-80GB", "7g.80gb 4g.40gb 3g.40gb 2g.20gb 1g.10gb", f"{_GUIDE}, H100-SXM5-80GB")
H200_141GB = _seven_slices("H200-141GB", "7g.141gb 4g.71gb 3g.71gb 2g.35gb 1g.18gb", f"{_GUIDE}, H200-SXM5-141GB")
B200_180GB = _seven_slices("B200-180GB", "7g.180gb 4g.90gb 3g.90gb 2g.45gb 1g.23gb", f"{_GUIDE}, B200-SXM6-180GB")
"""The same nineteen partitions: these GPUs are partitioned alike, with larger slices."""
A30_24GB = MigMenu(
    gpu="A30-24GB",
    compute_slices=4,
    memory_slices=4,
    profiles=(
        MigProfile("4g.24gb", 4, 4, 24 * GIB, (0,)),
        MigProfile("2g.12gb", 2, 2, 12 * GIB, (0, 2)),
        MigProfile("1g.6gb", 1, 1, 6 * GIB, (0, 1, 2, 3)),
    ),
    partitions=(
        ("4g.24gb",),
        ("2g.12gb", "2g.12gb"),
        ("2g.12gb", "1g.6gb", "1g.6gb"),
        ("1g.6gb", "1g.6gb", "2g.12gb"),
        ("1g.6gb", "1g.6gb", "1g.6gb", "1g.6gb"),
    ),
    source=f"{_GUIDE}, A30",
)
MENUS = (A100_40GB, A100_80GB, H100_80GB, H200_141GB, B200_180GB, A30_24GB)
"""The menu of every GPU type whose partitions are known."""


def menu_for(name: str) -> MigMenu | None:
    """Find a GPU's menu by the driver's name (``NVIDIA A100-SXM4-40GB``) or the menu's own; None for other GPUs."""
    words = name.upper().replace("-", " ").split()
    for menu in MENUS:
        model, memory = menu.gpu.upper().split("-")
        # The driver leaves out the memory where a model comes with one size alone.
        sizes = [word for word in words if word.endswith("GB")]
        if model in words and (not sizes or memory in sizes):
            return menu
    return None
