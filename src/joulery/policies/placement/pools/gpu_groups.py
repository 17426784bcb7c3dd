"""The GPU group of each service in a live pool: GPUs of its own, or its slices of a GPU that several services share.

The rules are simple, so that users can predict the result. A service gets the GPUs that it names. The other services
get equal numbers of the remaining GPUs, in the order of the site file. ``joulery plan`` computes the GPUs that a
service *needs*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.layout import SliceAssignment
from joulery.domain.serving.service import Slice
from joulery.policies.serving.search.layout_space import size_of

Partitions = Sequence[tuple[Slice, ...]]
"""The partitions of one GPU."""


def divide(named: Mapping[str, Sequence[int]], gpus: int, *, colocate: bool) -> dict[str, tuple[int, ...]]:
    """The GPUs that each service may run on.

    Args:
        named: GPUs that each service names, in the order of the site file; empty for none.
        gpus: Number of GPUs.
        colocate: Whether services may share GPUs. The services that name no GPU then share the remainder of the
            division; otherwise the first of them get one more each.

    Returns:
        Indices of GPUs, in order, by service.

    Raises:
        InfeasibleError: A service is left without a GPU.
    """
    claimed = {gpu for claims in named.values() for gpu in claims}
    free = [gpu for gpu in range(gpus) if gpu not in claimed]
    others = [name for name, claims in named.items() if not claims]
    if (others and not free) or (len(free) < len(others) and not colocate):
        raise InfeasibleError(
            f"{len(others)} services ({', '.join(others)}) and {len(free)} GPUs for them, one of its own each",
            binding="fleet.devices",
            nearest=len(free),
            hint="list more GPUs under fleet.devices, or let services share them: plan: {colocate: true}",
        )
    each, over = divmod(len(free), len(others)) if others else (0, 0)
    shared = free[each * len(others) :] if colocate else []
    found, at = {}, 0
    for index, name in enumerate(others):
        count = each + (0 if colocate else index < over)
        found[name] = (*free[at : at + count], *shared)
        at += count
    return {name: tuple(sorted(claims)) if claims else found[name] for name, claims in named.items()}


def parts(options: Mapping[str, Partitions], groups: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Partitions]]:
    """The partitions that each service may use: all those of a GPU of its own, its slices of a GPU that it shares.

    A shared GPU keeps one partition, and each slice belongs to one service: only what runs on a slice changes live. The
    partition is the one that gives most to the service with the least so far; of equal ones, that of fewest slices, so
    that they are large. Slices go, largest first, to the service with least. Each service gets one before any gets two.

    Args:
        options: The partitions of each GPU, by its name.
        groups: The GPUs that each service may run on, by its name.

    Returns:
        For each service, the partitions of each of its GPUs.

    Raises:
        InfeasibleError: A shared GPU has no partition with a slice for each service.
    """
    found: dict[str, dict[str, Partitions]] = {name: {} for name in groups}
    held = dict.fromkeys(groups, 0.0)
    for gpu, partitions in options.items():
        users = [name for name, group in groups.items() if gpu in group]
        if len(users) == 1:
            found[users[0]][gpu] = partitions
        elif users:
            dealt, held = _deal(gpu, partitions, users, held)
            for name, pieces in dealt.items():
                found[name][gpu] = (pieces,)
    return found


def _deal(
    gpu: str, partitions: Partitions, users: Sequence[str], held: Mapping[str, float]
) -> tuple[dict[str, tuple[Slice, ...]], dict[str, float]]:
    """The slices of one GPU by service, and the total that each service holds afterwards, in GPUs."""
    whole = max(sum(map(size_of, partition)) for partition in partitions)
    dealt = []
    for index, partition in enumerate(partitions):
        if len(partition) < len(users):
            continue
        total, pieces = {name: held[name] for name in users}, {name: list[Slice]() for name in users}
        for piece in sorted(partition, key=size_of, reverse=True):
            without = [name for name in users if not pieces[name]]
            who = min(without or users, key=lambda name: round(total[name], 9))
            pieces[who].append(piece)
            total[who] += size_of(piece) / whole
        dealt.append(((round(min(total.values()), 9), -len(partition), -index), pieces, total))
    if not dealt:
        raise InfeasibleError(
            f"{gpu}, which {', '.join(users)} share, has no partition with a slice for each",
            binding="fleet.devices",
            nearest=max(map(len, partitions)),
            hint="mode: mig or mode: mps, with a partition or shares for all of them; or fewer services on it",
        )
    _, pieces, total = max(dealt, key=lambda one: one[0])
    return {name: tuple(mine) for name, mine in pieces.items()}, {**held, **total}


def on_first(
    used: SliceAssignment, partition: tuple[Slice, ...], order: Sequence[str]
) -> tuple[tuple[Slice, str], ...]:
    """The slices of a partition that leaves some machines empty, on the first machines of an order.

    Slices move only between machines of the same size. The size of a machine is that of its slices in the partitions.

    Args:
        used: For each partition, the machine of each slice.
        partition: The partition, sorted.
        order: All machines, preferred ones first.
    """
    sizes: dict[str, int] = {}
    for assigned in used.values():
        for machine in {name for _, name in assigned}:
            sizes[machine] = sum(size_of(piece) for piece, name in assigned if name == machine)
    machines = list(dict.fromkeys(name for _, name in used[partition]))
    onto: dict[str, str] = {}
    for size in {sizes[machine] for machine in machines}:
        mine = [machine for machine in machines if sizes[machine] == size]
        first = [one for one in order if sizes.get(one) == size][: len(mine)]
        free = [one for one in first if one not in mine]
        onto |= {machine: machine if machine in first else free.pop(0) for machine in mine}
    return tuple((piece, onto[machine]) for piece, machine in used[partition])


def first_alone(options: Mapping[str, Partitions]) -> SliceAssignment:
    """The partitions of the first GPUs while the others are empty; of equal ones, that on the fewest GPUs.

    Args:
        options: The partitions of each GPU, by its name.
    """
    names = list(options)
    found: dict[tuple[Slice, ...], tuple[tuple[Slice, str], ...]] = {}
    for count in range(1, len(names)):
        for partition, assigned in split({name: options[name] for name in names[:count]}).items():
            found.setdefault(partition, assigned)
    return found


def split(options: Mapping[str, Partitions]) -> SliceAssignment:
    """The distinct joint partitions of several GPUs, and the GPU of each slice.

    Args:
        options: The partitions of each GPU, by its name.
    """
    found: SliceAssignment = {(): ()}
    for name, partitions in options.items():
        longer: dict[tuple[Slice, ...], tuple[tuple[Slice, str], ...]] = {}
        for slices, assigned in found.items():
            for partition in partitions:
                longer.setdefault(
                    tuple(sorted((*slices, *partition))), (*assigned, *((piece, name) for piece in partition))
                )
        found = longer
    return found
