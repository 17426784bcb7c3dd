"""GPU groups of a live pool by service: GPUs of its own, or its slices of a GPU that several share.

The rules are plain, so that a person can foresee them: what a service names is its own; the others get equal parts of
the GPUs that none names, in the order of the site file. How many GPUs a service *needs* is what ``joulery plan`` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.layout import SliceAssignment
from joulery.domain.serving.service import Slice
from joulery.policies.serving.search.layout_space import size_of

Partitions = Sequence[tuple[Slice, ...]]
"""The ways to cut one GPU."""


def divide(named: Mapping[str, Sequence[int]], gpus: int, *, colocate: bool) -> dict[str, tuple[int, ...]]:
    """The GPUs that each service may run on.

    Args:
        named: What each service names, in the order of the site file; empty for nothing.
        gpus: How many there are.
        colocate: Whether services may share GPUs. What equal parts leave over is then shared by those that name
            nothing; without, the first of them get one more.

    Returns:
        Numbers of GPUs, in order, by service.

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
    """The ways each service may cut the GPUs of its group: any way where a GPU is its own, its slices where it shares.

    A shared GPU is cut once and for all, and its slices are dealt: what changes live is who is on them. Of all cuts
    the one that gives most to the service with the least so far; of equal ones that of fewest slices, so that they
    are large. Its slices go, largest first, to the service with least, and one to each before anyone has two.

    Args:
        options: The ways to cut each GPU, by its name.
        groups: The GPUs that each service may run on, by its name.

    Returns:
        Of each service the ways to cut each of its GPUs.

    Raises:
        InfeasibleError: A shared GPU has no partition with a slice for each.
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
    """The slices of one GPU by service, and what each holds afterwards, in GPUs."""
    whole = max(sum(map(size_of, cut)) for cut in partitions)
    dealt = []
    for index, cut in enumerate(partitions):
        if len(cut) < len(users):
            continue
        total, pieces = {name: held[name] for name in users}, {name: list[Slice]() for name in users}
        for piece in sorted(cut, key=size_of, reverse=True):
            without = [name for name in users if not pieces[name]]
            who = min(without or users, key=lambda name: round(total[name], 9))
            pieces[who].append(piece)
            total[who] += size_of(piece) / whole
        dealt.append(((round(min(total.values()), 9), -len(cut), -index), pieces, total))
    if not dealt:
        raise InfeasibleError(
            f"{gpu}, which {', '.join(users)} share, has no partition with a slice for each",
            binding="fleet.devices",
            nearest=max(map(len, partitions)),
            hint="mode: mig or mode: mps, with a partition or shares for all of them; or fewer services on it",
        )
    _, pieces, total = max(dealt, key=lambda one: one[0])
    return {name: tuple(mine) for name, mine in pieces.items()}, {**held, **total}


def on_first(used: SliceAssignment, cut: tuple[Slice, ...], order: Sequence[str]) -> tuple[tuple[Slice, str], ...]:
    """The slices of a cut that leaves some machines empty, on the first machines of an order.

    A machine gives its slices to another of its size alone: one that is as large by what they have in all cuts.

    Args:
        used: Of each cut which machine has which slice.
        cut: The cut, sorted.
        order: All machines, those first that are to have slices.
    """
    sizes: dict[str, int] = {}
    for assigned in used.values():
        for machine in {name for _, name in assigned}:
            sizes[machine] = sum(size_of(piece) for piece, name in assigned if name == machine)
    machines = list(dict.fromkeys(name for _, name in used[cut]))
    onto: dict[str, str] = {}
    for size in {sizes[machine] for machine in machines}:
        mine = [machine for machine in machines if sizes[machine] == size]
        first = [one for one in order if sizes.get(one) == size][: len(mine)]
        free = [one for one in first if one not in mine]
        onto |= {machine: machine if machine in first else free.pop(0) for machine in mine}
    return tuple((piece, onto[machine]) for piece, machine in used[cut])


def first_alone(options: Mapping[str, Partitions]) -> SliceAssignment:
    """The ways the first of several GPUs may be cut while the others are left empty; of equal ones the fewest GPUs.

    Args:
        options: The ways to cut each, by its name.
    """
    names = list(options)
    found: dict[tuple[Slice, ...], tuple[tuple[Slice, str], ...]] = {}
    for count in range(1, len(names)):
        for cut, assigned in split({name: options[name] for name in names[:count]}).items():
            found.setdefault(cut, assigned)
    return found


def split(options: Mapping[str, Partitions]) -> SliceAssignment:
    """The ways several GPUs may be cut at once, equal ones once, and which GPU has which slice then.

    Args:
        options: The ways to cut each, by its name.
    """
    found: SliceAssignment = {(): ()}
    for name, partitions in options.items():
        longer: dict[tuple[Slice, ...], tuple[tuple[Slice, str], ...]] = {}
        for slices, assigned in found.items():
            for cut in partitions:
                longer.setdefault(tuple(sorted((*slices, *cut))), (*assigned, *((piece, name) for piece in cut)))
        found = longer
    return found
