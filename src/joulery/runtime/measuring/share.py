"""The run's share of a machine: two streams of the sampler besides the meters, and the readers behind them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from joulery.domain.errors import JouleryError
    from joulery.domain.ports import Meter

DISCOVERY_RATIO = 0.005
"""Share of one core that the search for new processes may take: more processes are searched less often."""


class OpenMeters(NamedTuple):
    """Meters that were opened, and the reasons why others were not.

    Attributes:
        meters: In order of preference; no two read the same device.
        refused: Errors of meters that exist here but need a permission; the report contains them.
        absent: Errors of meters that this machine does not have.
    """

    meters: tuple[Meter, ...]
    refused: tuple[JouleryError, ...] = ()
    absent: tuple[JouleryError, ...] = ()


class BusyReader(Protocol):
    """Reader of the busy time of each socket's CPUs."""

    sockets: tuple[int, ...]
    cpus: tuple[int, ...]

    def read(self) -> tuple[float, ...]:
        """Busy CPU seconds of each socket, of all processes."""
        ...

    def close(self) -> None:
        """Release the source."""
        ...


class TreeReader(Protocol):
    """Reader of a run's CPU time."""

    def discover(self) -> None:
        """Search for new processes."""
        ...

    def pids(self) -> frozenset[int]:
        """Ids of the known processes."""
        ...

    def read(self) -> tuple[float, ...]:
        """CPU seconds of the run on each socket."""
        ...

    def close(self) -> None:
        """Release the source."""
        ...


class ThreadReader(Protocol):
    """Reader of the CPU times of threads."""

    def read(self, pids: Collection[int]) -> list[tuple[int, int, float, float]]:
        """(process, thread, CPU seconds, seconds ready) so far of every living thread of some processes."""
        ...


@runtime_checkable
class SharedMeter(Protocol):
    """A meter that reports which processes use its devices."""

    def holders(self) -> Mapping[str, Mapping[int, float] | None]:
        """Share of the busy time of each process, by device; None where it is not known."""
        ...


@runtime_checkable
class BusyMeter(Protocol):
    """A meter whose driver reports whether its devices compute."""

    def busy(self) -> Mapping[str, bool | None]:
        """Whether anything computed on each device since the last call; None where the driver does not report it."""
        ...


@runtime_checkable
class BufferedMeter(Protocol):
    """A meter whose devices keep their latest power readings.

    Attributes:
        buffer_late_s: Seconds by which the middle of a reading lies before its stamp.
    """

    buffer_late_s: float

    @property
    def buffered(self) -> tuple[int, ...]:
        """Its channels whose power is kept, by number."""
        ...

    def drain(self) -> list[tuple[int, int, float]]:
        """(Unix ns, number of the channel, watts) of every reading since the last call, by time."""
        ...


@runtime_checkable
class IdentifiedMeter(Protocol):
    """A meter that identifies its devices by UUID."""

    @property
    def uuids(self) -> Mapping[str, str]:
        """Device name by UUID."""
        ...


class CpuShare:
    """CPU seconds, cumulative: of all processes and of the run on each socket, and of the sampler itself.

    Attributes:
        columns: ``busy_s:cpu:N`` and ``run_s:cpu:N`` for each socket, and ``self_s``.
    """

    def __init__(self, busy: BusyReader, tree: TreeReader, clock: Callable[[], float] = time.monotonic) -> None:
        self.columns = (
            *(f"busy_s:cpu:{socket}" for socket in busy.sockets),
            *(f"run_s:cpu:{socket}" for socket in busy.sockets),
            "self_s",
        )
        self._busy = busy
        self._tree = tree
        self._clock = clock
        self._look_at_s = -math.inf

    def read(self) -> tuple[float, ...]:
        """One value a column."""
        if (now_s := self._clock()) >= self._look_at_s:
            before_s = time.thread_time()
            self._tree.discover()
            self._look_at_s = now_s + (time.thread_time() - before_s) / DISCOVERY_RATIO
        return (*self._busy.read(), *self._tree.read(), time.process_time())


class GpuShare:
    """Ratio of each GPU's time that belongs to the run and to all processes, since the previous reading.

    A board on which only the run has processes is charged to the run, idle or not; one with processes of others only
    is charged to them; one without processes idles. A process that ended since the previous reading had the board until
    then. Where both have processes, the board is split by the busy time the
    driver reports for each process. Without such a report the whole board is the run's (in a container process numbers
    do not match), unless others are known to be on it: then the split is unknown (NaN). Boards that
    are stated to be the run's are charged to it whichever process computes there.

    Args:
        devices: The boards, in order.
        holders: Which processes use each board (:class:`SharedMeter`).
        pids: The processes of the run.
        own: Boards that are the run's.

    Attributes:
        columns: ``busy_ratio:gpu:N`` and ``run_ratio:gpu:N`` for each board.
    """

    def __init__(
        self,
        devices: Collection[str],
        holders: Callable[[], Mapping[str, Mapping[int, float] | None]],
        pids: Callable[[], frozenset[int]],
        own: Collection[str] = (),
    ) -> None:
        self._devices = tuple(devices)
        self._own = frozenset(own)
        self.columns = tuple(f"{what}:{device}" for device in self._devices for what in ("busy_ratio", "run_ratio"))
        self._holders = holders
        self._pids = pids
        self._before: dict[str, tuple[float, float]] = {}

    def read(self) -> tuple[float, ...]:
        """One value a column."""
        held, pids = self._holders(), self._pids()
        now = {
            device: (1.0, 1.0) if device in self._own else board_ratios(held.get(device), pids)
            for device in self._devices
        }
        since = {device: _since(self._before.get(device, (0.0, 0.0)), ratios) for device, ratios in now.items()}
        self._before = now
        return tuple(ratio for device in self._devices for ratio in since[device])


def _since(before: tuple[float, float], now: tuple[float, float]) -> tuple[float, float]:
    """Ratios of an interval from those at its ends: a process that ended during it had the board until then."""
    left = now[1] == 0 < before[1] or now[0] == 0 < before[0]
    return before if left else now


def board_ratios(holders: Mapping[int, float] | None, run: frozenset[int]) -> tuple[float, float]:
    """(busy, run's) ratio of a board's time, from its processes; the rule is :class:`GpuShare`'s."""
    if holders is None:
        return 1.0, 1.0
    ours = [share for pid, share in holders.items() if pid in run]
    if not ours:
        return (1.0, 0.0) if holders else (0.0, 0.0)
    if len(ours) == len(holders):
        return 1.0, 1.0
    busy = math.fsum(holders.values())
    return (busy, math.fsum(ours)) if not math.isnan(busy) else (math.nan, math.nan)


class JoinedTrees:
    """Process trees of several roots, read as one; no root lies below another.

    Args:
        roots: Returns the root processes; later ones are found by :meth:`discover`.
        open_tree: Opens the tree of one root.
    """

    def __init__(self, roots: Callable[[], Collection[int]], open_tree: Callable[[int], TreeReader]) -> None:
        self._roots, self._open_tree = roots, open_tree
        self._trees: dict[int, TreeReader] = {}
        self._before: dict[int, tuple[float, ...]] = {}
        self.discover()

    def discover(self) -> None:
        """Search for new roots, and for new processes below all roots."""
        for tree in self._trees.values():
            tree.discover()
        for root in self._roots():
            if root not in self._trees:
                self._trees[root] = tree = self._open_tree(root)
                self._before[root] = tree.read()

    def pids(self) -> frozenset[int]:
        """Ids of the known processes."""
        return frozenset().union(*(tree.pids() for tree in self._trees.values()))

    def read(self) -> tuple[float, ...]:
        """CPU seconds on each socket since each tree was opened; never less than before."""
        moved = [
            [now - before for now, before in zip(tree.read(), self._before[root], strict=True)]
            for root, tree in self._trees.items()
        ]
        return tuple(math.fsum(each) for each in zip(*moved, strict=True))

    def close(self) -> None:
        """Release all of them. Safe to call twice."""
        for tree in self._trees.values():
            tree.close()
