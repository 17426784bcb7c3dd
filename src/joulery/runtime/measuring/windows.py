"""Measure named windows of one running program, nested or overlapping, from inside it.

Meters are read where a window begins and ends, and in between by a thread: every second, or every tenth of one where a
meter reads power instead of energy. All windows are differences of the same sums, so the windows of a whole's parts add
up to that of the whole. The program is charged as under ``joulery measure``: its processes' share of the processors,
its share of the GPUs, and the idle energy of the machine. Between two readings the share of the processors is relative
to their available time, and their unused time counts as idle.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from joulery.accounting.charge import IdleRule, ShareRule, build_footprint, split, window_bins
from joulery.accounting.node_energy import counter_delta
from joulery.accounting.steps import NS_PER_S
from joulery.domain.arrays import FloatArray
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.footprint import Footprint
from joulery.domain.errors import ConfigError
from joulery.runtime.measuring.share import BusyReader, SharedMeter, TreeReader, board_ratios
from joulery.runtime.measuring.terms import MeasureWarning

if TYPE_CHECKING:
    from joulery.domain.energy.carbon import CarbonSeries
    from joulery.domain.ports import CarbonSource, Meter

TICK_S, POWER_TICK_S = 1.0, 0.1
KEEP_EVERY_S = 60.0
"""Interval of the points kept inside a window, for an intensity that changes during it."""
_CLOCK_ROUNDING_S = 1e-5
_KINDS = 4
"""Sums for each channel: own, idle, unattributed joules, and covered seconds."""


@dataclass(frozen=True, slots=True)
class WindowReaders:
    """Readers of a window meter.

    Attributes:
        meters: The meters.
        busy: CPU time of all processes.
        tree: CPU time of this program.
        clock_ns: Monotonic nanoseconds.
    """

    meters: Sequence[Meter]
    busy: BusyReader
    tree: TreeReader
    clock_ns: Callable[[], int] = time.monotonic_ns

    def close(self) -> None:
        """Close all readers. Safe to call twice."""
        for meter in self.meters:
            meter.close()
        self.busy.close()
        self.tree.close()


class NamedWindow:
    """One window that a ``with`` statement opened.

    Attributes:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._footprint: Footprint | None = None

    @property
    def footprint(self) -> Footprint:
        """Footprint of the window.

        Raises:
            ConfigError: The window has not ended.
        """
        if self._footprint is None:
            raise ConfigError(f"the window {self.name} has not ended", hint="read it after the with statement")
        return self._footprint

    def __str__(self) -> str:
        return f"{self.name}: {'not ended' if self._footprint is None else self._footprint}"

    def _repr_html_(self) -> str:
        return str(self) if self._footprint is None else self._footprint._repr_html_()


@dataclass(slots=True)
class _Sums:
    """Cumulative sums of all channels over time."""

    t_ns: list[int] = field(default_factory=list)
    rows: list[FloatArray] = field(default_factory=list)


class WindowMeter:
    """Energy of named windows of this program.

    Args:
        readers: Readers to use; closed with the meter.
        source: Carbon intensity, looked up when a window has ended; None for no grams.
        idle: How much of the idle energy the program pays: all of it, or nothing.
        pue: Facility energy per IT energy.

    Raises:
        ConfigError: ``idle`` or ``pue`` is out of range.
    """

    def __init__(
        self, readers: WindowReaders, source: CarbonSource | None = None, *, idle: str = "whole", pue: float = 1.0
    ) -> None:
        if idle not in (IdleRule.WHOLE, IdleRule.NONE):
            raise ConfigError("not a rule for idle energy", pointer="idle", got=str(idle), expected="whole or none")
        if not 1.0 <= pue < math.inf:
            raise ConfigError("facility energy per IT energy is at least 1", pointer="pue", got=f"{pue:g}")
        self._readers, self._source, self._idle, self._pue = readers, source, idle, pue
        self._channels: tuple[Channel, ...] = tuple(c for meter in readers.meters for c in meter.channels)
        self._unix_offset_ns = time.time_ns() - time.monotonic_ns()
        self._lock = threading.RLock()
        self._open: dict[str, int] = {}
        self._pid = os.getpid()
        self._warned: set[str] = set()
        count = len(self._channels)
        self._total = np.zeros((count, _KINDS))
        self._power_w, self._peak_w = np.full(count, np.nan), np.zeros(count)
        self._values = [math.nan] * count
        self._read_ns = [0] * count
        self._now_ns = self._start_ns = readers.clock_ns()
        self._busy_s, self._own_s = readers.busy.read(), readers.tree.read()
        self._sums = _Sums()
        self._read_first()
        self._stop = threading.Event()
        power = any(channel.kind is not ReadingKind.COUNTER for channel in self._channels)
        self._thread = threading.Thread(
            target=self._run, args=(POWER_TICK_S if power else TICK_S,), name="joulery-windows", daemon=True
        )
        self._thread.start()

    @property
    def power_w(self) -> float:
        """Power of all that is metered over the latest interval, other programs included; NaN where unknown.

        Raises:
            ConfigError: The meter is of another process.
        """
        self._check_process()
        with self._lock:
            return float(np.sum(self._power_w)) if len(self._power_w) else math.nan

    @property
    def open_windows(self) -> tuple[str, ...]:
        """Names of the windows that have not ended."""
        return tuple(self._open)

    def begin_window(self, name: str, *, sync: bool = True) -> None:
        """Open a window.

        Args:
            name: Its name; two of the same name cannot be open at once.
            sync: Whether to let the GPUs of PyTorch finish first, so that their work counts where it was started.

        Raises:
            ConfigError: A window of that name is open, or the meter is closed or of another process.
        """
        self._check()
        if sync:
            _synchronize()
        with self._lock:
            if name in self._open:
                raise ConfigError(f"the window {name} is open already", hint="end it first, or give it another name")
            self._advance(keep=True)
            self._open[name] = self._now_ns

    def end_window(self, name: str, *, sync: bool = True) -> Footprint:
        """Close a window; return its footprint.

        Args:
            name: Its name.
            sync: As for :meth:`begin_window`.

        Raises:
            ConfigError: No window of that name is open, or the meter is closed or of another process.
        """
        self._check()
        if sync:
            _synchronize()
        with self._lock:
            begun_ns = self._begun(name)
            self._advance(keep=True)
            del self._open[name]
            made = self._curves(begun_ns)
            self._forget()
        return self._footprint(*made)

    def read(self, name: str | None = None) -> Footprint:
        """Footprint of an open window so far, or, where no name is given, since the meter was made.

        Raises:
            ConfigError: No window of that name is open, or the meter is closed or of another process.
        """
        self._check()
        with self._lock:
            begun_ns = self._start_ns if name is None else self._begun(name)
            self._advance(keep=False)
            made = self._curves(begun_ns)
        return self._footprint(*made)

    def window(self, name: str, *, sync: bool = True) -> AbstractContextManager[NamedWindow]:
        """A window as a block, also around ``await``: ``with meter.window("epoch") as epoch: ...``."""
        return self._window(name, sync=sync)

    @contextmanager
    def _window(self, name: str, *, sync: bool) -> Iterator[NamedWindow]:
        made = NamedWindow(name)
        self.begin_window(name, sync=sync)
        try:
            yield made
        finally:
            if os.getpid() == self._pid and name in self._open:
                made._footprint = self.end_window(name, sync=sync)

    def close(self) -> None:
        """End the thread and close the readers. Safe to call twice."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join()
        with self._lock:
            self._readers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return "closed" if self._stop.is_set() else f"{self.read()} since the meter was made"

    def _repr_html_(self) -> str:
        return "closed" if self._stop.is_set() else self.read()._repr_html_()

    def _check_process(self) -> None:
        """Refuse use in a forked child, which has no reading thread and may inherit a lock that is held for ever."""
        if os.getpid() != self._pid:
            raise ConfigError("this meter was made in another process", hint="make one in this process")

    def _check(self) -> None:
        self._check_process()
        if self._stop.is_set():
            raise ConfigError("this meter is closed")

    def _begun(self, name: str) -> int:
        if name not in self._open:
            raise ConfigError(
                f"no window {name} is open", expected=", ".join(self._open) or None, hint="begin_window opens one"
            )
        return self._open[name]

    def _run(self, tick_s: float) -> None:
        while not self._stop.wait(tick_s):
            with self._lock:
                self._advance(keep=False)

    def _read_first(self) -> None:
        slot = 0
        for meter in self._readers.meters:
            for value in meter.read():
                self._values[slot], self._read_ns[slot] = value, self._now_ns
                slot += 1
            self._warn(meter.notes())
        self._holders()
        self._keep()

    def _advance(self, *, keep: bool) -> None:
        """Read everything, and add the energy used since the last reading."""
        self._readers.tree.discover()
        now_ns = self._readers.clock_ns()
        elapsed_s = (now_ns - self._now_ns) / NS_PER_S
        if elapsed_s > 0:
            self._now_ns = now_ns
            self._add(elapsed_s)
        kept_ns = self._sums.t_ns[-1]
        if keep or (self._open and now_ns - kept_ns >= KEEP_EVERY_S * NS_PER_S):
            self._keep()

    def _add(self, elapsed_s: float) -> None:
        # Meters first: it takes milliseconds to read the processors' time of every process, and joules have the stamp.
        read = [meter.read() for meter in self._readers.meters]
        busy_s, own_s = self._readers.busy.read(), self._readers.tree.read()
        all_s, app_s = np.subtract(busy_s, self._busy_s), np.subtract(own_s, self._own_s)
        self._busy_s, self._own_s = busy_s, own_s
        holders, pids = self._holders(), self._readers.tree.pids() | {self._pid}
        slot = 0
        for meter, values in zip(self._readers.meters, read, strict=True):
            for value in values:
                energy_j, covered_s = self._delta(slot, value)
                if not math.isnan(energy_j):
                    parts = self._parts(self._channels[slot], energy_j, elapsed_s, (app_s, all_s), (holders, pids))
                    self._total[slot] += (*parts, covered_s)
                slot += 1
            self._warn(meter.notes())

    def _delta(self, slot: int, value: float) -> tuple[float, float]:
        """Joules of a channel since its last reading, and the seconds that they cover."""
        channel, before = self._channels[slot], self._values[slot]
        if math.isnan(value):
            self._power_w[slot] = math.nan
            if channel.kind is not ReadingKind.COUNTER:
                self._values[slot], self._read_ns[slot] = value, self._now_ns
            return math.nan, 0.0
        elapsed_s = (self._now_ns - self._read_ns[slot]) / NS_PER_S
        self._values[slot], self._read_ns[slot] = value, self._now_ns
        if math.isnan(before) or elapsed_s <= 0:
            return math.nan, 0.0
        energy_j = counter_delta(channel, before, value, elapsed_s, float(self._peak_w[slot]))
        if math.isnan(energy_j):
            self._warn((f"{channel.device}: the counter of {channel.meter} was reset; that time is not covered",))
            return math.nan, 0.0
        self._power_w[slot] = energy_j / elapsed_s
        self._peak_w[slot] = max(self._peak_w[slot], self._power_w[slot])
        return energy_j, elapsed_s

    def _parts(
        self,
        channel: Channel,
        energy_j: float,
        elapsed_s: float,
        cpu: tuple[FloatArray, FloatArray],
        gpu: tuple[Mapping[str, Mapping[int, float] | None], frozenset[int]],
    ) -> tuple[float, float, float]:
        """Own, idle and unattributed joules; the rest is of other programs."""
        device, _, number = channel.device.partition(":")
        if device == "gpu":
            busy, own = board_ratios(gpu[0].get(channel.device), gpu[1])
            if math.isnan(own):
                return 0.0, 0.0, energy_j
            return energy_j * own, energy_j * max(0.0, 1.0 - busy), 0.0
        sockets = self._readers.busy.sockets
        at = [sockets.index(int(number))] if device == "cpu" and number.isdigit() else list(range(len(sockets)))
        app_s, all_s = float(np.sum(cpu[0][at])), float(np.sum(cpu[1][at]))
        capacity_s = sum(self._readers.busy.cpus[slot] for slot in at) * elapsed_s
        floor_j = min(energy_j, channel.idle_w * elapsed_s) if channel.idle_w > 0 else 0.0
        rule = ShareRule.BUSY if channel.idle_w > 0 else ShareRule.CAPACITY
        own_j, _, idle_j, rest_j = split([energy_j - floor_j], [app_s], [all_s], by=rule, capacity_s=[capacity_s])
        return float(own_j[0]), floor_j + float(idle_j[0]), float(rest_j[0])

    def _holders(self) -> dict[str, Mapping[int, float] | None]:
        found: dict[str, Mapping[int, float] | None] = {}
        for meter in self._readers.meters:
            if isinstance(meter, SharedMeter):
                found.update(meter.holders())
        return found

    def _keep(self) -> None:
        """Keep the present sums as a point at which windows begin, end or change their slope."""
        if self._sums.t_ns and self._sums.t_ns[-1] == self._now_ns:
            return
        self._sums.t_ns.append(self._now_ns)
        self._sums.rows.append(self._total.copy())

    def _forget(self) -> None:
        """Drop the points that no open window needs; the first stays, for reads since the meter was made."""
        first_ns = min(self._open.values(), default=self._now_ns)
        kept = [i for i, t_ns in enumerate(self._sums.t_ns) if i == 0 or t_ns >= first_ns]
        self._sums = _Sums([self._sums.t_ns[i] for i in kept], [self._sums.rows[i] for i in kept])

    def _curves(self, begun_ns: int) -> tuple[list[int], FloatArray]:
        """Times and sums of the points from ``begun_ns`` to now, float64[points, channels, kinds]."""
        at = [i for i, t_ns in enumerate(self._sums.t_ns) if t_ns >= begun_ns]
        t_ns, rows = [self._sums.t_ns[i] for i in at], [self._sums.rows[i] for i in at]
        if t_ns[-1] != self._now_ns:
            t_ns, rows = [*t_ns, self._now_ns], [*rows, self._total]
        return t_ns, np.array(rows)

    def _footprint(self, t_ns: list[int], sums: FloatArray) -> Footprint:
        start_s, end_s = ((t + self._unix_offset_ns) / NS_PER_S for t in (t_ns[0], t_ns[-1]))
        carbon = self._intensity(start_s, end_s)
        bins = window_bins(start_s, end_s, carbon)
        times = np.array(t_ns, np.float64) + self._unix_offset_ns
        edges = bins.edges_ns.astype(np.float64)

        def by_bin(slot: int, kind: int) -> FloatArray:
            curve = np.interp(edges, times, sums[:, slot, kind])
            curve[0], curve[-1] = sums[0, slot, kind], sums[-1, slot, kind]
            return np.diff(curve)

        every = list(enumerate(self._channels))
        whole = self._idle == IdleRule.WHOLE
        covered = [float(sums[-1, slot, 3] - sums[0, slot, 3]) for slot, _ in every]
        return build_footprint(
            bins,
            start_s,
            end_s,
            parts=[(channel, by_bin(slot, 0)) for slot, channel in every],
            idle=[(channel, by_bin(slot, 1)) for slot, channel in every] if whole else (),
            unattributed=[(channel, by_bin(slot, 2)) for slot, channel in every],
            covered_s=_rounded(math.fsum(covered) / len(covered) if covered else 0.0, end_s - start_s),
            pue=self._pue,
        )

    def _intensity(self, start_s: float, end_s: float) -> CarbonSeries | None:
        """The intensity of a window; None where no source was named, or the source cannot provide it."""
        if self._source is None:
            return None
        from joulery.runtime.measuring.account import intensity

        carbon, trouble = intensity(self._source, start_s, end_s, None)
        if trouble is not None:
            self._warn((trouble,))
        return carbon

    def _warn(self, texts: Sequence[str]) -> None:
        """Issue each warning once."""
        for text in texts:
            if text not in self._warned and len(self._warned) < 1000:
                self._warned.add(text)
                warnings.warn(text, MeasureWarning, stacklevel=4)


def _rounded(covered_s: float, duration_s: float) -> float:
    """Seconds with readings; the whole duration where only the rounding of Unix seconds is missing."""
    return duration_s if abs(duration_s - covered_s) < _CLOCK_ROUNDING_S else min(covered_s, duration_s)


def _synchronize() -> None:
    """Wait for the GPUs of PyTorch where the program uses them; imports nothing."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.synchronize()
