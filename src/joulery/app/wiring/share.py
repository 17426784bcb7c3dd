"""Open the readers of a run's share of this machine. Imports nothing heavy: the sampler process starts with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from joulery.adapters.meters.cputimes import open_cpu_times, sockets_of_cpus
from joulery.adapters.meters.tree import ProcessTree
from joulery.domain.errors import CapabilityError
from joulery.runtime.measuring.share import BusyReader, ThreadReader, TreeReader

if TYPE_CHECKING:
    from joulery.adapters.cgroups import RunGroup


def make_run_group(pid: int) -> RunGroup | None:
    """Create a control group for a run that ``pid`` starts; None where not permitted (``/proc`` is used instead)."""
    from joulery.adapters.cgroups import make_group

    try:
        return make_group(pid)
    except CapabilityError:
        return None


def open_tree(
    root: int,
    *,
    include_root: bool,
    exclude: frozenset[int],
    sockets: tuple[int, ...],
    group: tuple[str, bool] | None,
    also: tuple[int, ...] = (),
) -> TreeReader:
    """Open the CPU time of a run: from its control group where that counts each socket, else from ``/proc``.

    Args:
        root: Process id of the run's first process.
        include_root: Whether that process belongs to the run.
        exclude: Process ids that do not belong to the run, with their children.
        sockets: Sockets of this machine.
        group: Path of the run's control group, and whether it counts each CPU; None without one.
        also: Further processes of the run, with their children.

    Raises:
        CapabilityError: The control group does not exist any more.
    """
    socket_of_cpu = sockets_of_cpus()
    if group is not None and (len(sockets) == 1 or group[1]):
        from joulery.adapters.cgroups import RunGroup, open_group

        return open_group(RunGroup(Path(group[0]), group[1]), sockets, socket_of_cpu)
    return ProcessTree(
        root, include_root=include_root, exclude=exclude, sockets=sockets, socket_of_cpu=socket_of_cpu, also=also
    )


def remove_group(group: tuple[str, bool]) -> None:
    """Delete the control group that a dead process left; processes still in it move one group up."""
    from joulery.adapters.cgroups import RunGroup

    RunGroup(Path(group[0]), group[1]).remove()


def open_busy() -> BusyReader:
    """Open the busy times of this machine's CPUs.

    Raises:
        CapabilityError: ``/proc/stat`` cannot be read.
    """
    return open_cpu_times()


def open_threads() -> ThreadReader:
    """Open the CPU times of the threads of a run."""
    from joulery.adapters.meters.threads import ThreadTable

    return ThreadTable()
