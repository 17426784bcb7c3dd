"""The sampler: a process that reads meters at a fixed phase and writes the readings to files.

Its program is :mod:`joulery.app.sampler`. The sampler and the measured program do not disturb each other: nothing runs
in the measured interpreter; ticks lie on an absolute grid, and a late tick is skipped and counted; above a limit on its
own CPU time the sampler reads the costliest stream less often and reports that.

It writes ``{"ready": ...}`` to standard output after the first complete reading, ``{"error": ...}`` when it cannot
start or continue, and ``{"done": ...}`` at the end. It ends on any input, on SIGTERM, and after its parent: standard
input ends, the kernel sends a signal (``PR_SET_PDEATHSIG``), and the sampler checks the parent, in case a fork holds
the pipe.

Files (:mod:`joulery.store.run.samples`): one for each meter, one more for the readings that its devices buffer, ``cpu``
and ``gpu`` (busy times), ``threads`` (CPU times while a program records) and ``notes.jsonl``.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from joulery.domain.energy.channel import MeterSpec, ReadingKind
from joulery.domain.errors import CapabilityError
from joulery.runtime.measuring.sampler_config import SamplerConfig
from joulery.runtime.measuring.share import (
    BufferedMeter,
    BusyReader,
    CpuShare,
    GpuShare,
    IdentifiedMeter,
    OpenMeters,
    SharedMeter,
    ThreadReader,
    TreeReader,
)
from joulery.store.run.channels import channel_to_dict
from joulery.store.run.samples import BUFFER_COLUMNS, SUFFIX, Appender, SampleWriter

NS_PER_S = 1_000_000_000
HOUSEKEEPING_S = 0.2
CPU_SHARE_S = 0.1
"""Interval of the CPU busy times: the kernel counts in ticks of 10 ms, so shorter intervals are not informative."""
GPU_SHARE_S = 1.0
THREADS_S, THREADS_RATIO = 0.02, 0.01
"""Shortest interval of the CPU times of threads, and the share of one core that reading them may take."""
RECORDING = ".recording"
"""Suffix of files that exist while a traced program records; its threads are read only then."""
READS_PER_UPDATE = 5
"""A device that renews its reading every 100 ms is read every 20 ms: a change is stamped to a fifth of its interval."""
LINGER_UPDATES, LINGER_STEP_S = 2.0, 0.005
BUFFER_S = 0.5
"""Interval at which a device's buffer of power readings, and the counter that it refines, are read."""
LONGEST_PERIOD_S = 1.0
CLOCK_TOLERANCE_S = 0.05


class Clocks(NamedTuple):
    """Clocks of a sampler."""

    monotonic_ns: Callable[[], int] = time.monotonic_ns
    cpu_s: Callable[[], float] = time.process_time
    sleep: Callable[[float], None] = time.sleep


CLOCKS = Clocks()


class SampleStream:
    """A file of samples and the function that reads them.

    Attributes:
        writer: Destination of the records.
        every: Ticks between two readings.
        linger_s: Longest wait at the end for every value to change once more.
        name: Its file's name.
        slower: Factor by which its interval is currently lengthened.
        due: The next tick at which it is read.
        last: The last record.
        cost_s: CPU seconds of its readings since the last check of the limit.
    """

    def __init__(
        self,
        read: Callable[[], tuple[float, ...]],
        writer: SampleWriter,
        every: int = 1,
        linger_s: float = 0.0,
        clocks: Clocks = CLOCKS,
        name: str = "",
    ) -> None:
        self.writer = writer
        self.every = every
        self.linger_s = linger_s
        self.name = name
        self.slower = 1
        self.due = 0
        self.last: tuple[float, ...] = ()
        self.cost_s = 0.0
        self._read = read
        self._now_ns, self._cpu_s = clocks.monotonic_ns, clocks.cpu_s

    def sample(self) -> None:
        """Read one record and stamp it with the middle of the time this took."""
        before_s, before_ns = self._cpu_s(), self._now_ns()
        self.last = self._read()
        self.writer.record((before_ns + self._now_ns()) // 2, self.last)
        self.cost_s += self._cpu_s() - before_s


class ThreadStream(SampleStream):
    """CPU times of the run's threads while its program records: one record a thread.

    Args:
        table: Reads the threads.
        pids: The processes of the run.
        recording: Whether a program records now.
        writer: Destination of the records.
        every: Ticks between two readings.
    """

    def __init__(
        self,
        table: ThreadReader,
        pids: Callable[[], Collection[int]],
        recording: Callable[[], bool],
        writer: SampleWriter,
        every: int,
        clocks: Clocks = CLOCKS,
    ) -> None:
        super().__init__(tuple, writer, every, clocks=clocks)
        self._table, self._pids, self._recording = table, pids, recording
        self._clocks = clocks
        self._sweep, self._not_before_ns, self._stamp_ns = 0, 0, 0

    def sample(self) -> None:
        """Read every thread once; does nothing while no program records, or too soon after a costly reading."""
        now_ns = self._clocks.monotonic_ns()
        if now_ns < self._not_before_ns or not self._recording():
            return
        before_s = self._clocks.cpu_s()
        self._sweep += 1
        for process, thread, cpu_s, wait_s in self._table.read(self._pids()):
            self._stamp_ns = max(self._clocks.monotonic_ns(), self._stamp_ns + 1)
            self.writer.record(self._stamp_ns, (process, thread, cpu_s, wait_s, self._sweep))
        self._not_before_ns = now_ns + round((self._clocks.cpu_s() - before_s) / THREADS_RATIO * NS_PER_S)


class BufferStream(SampleStream):
    """Power readings that the devices of a meter have buffered: one record a reading.

    Args:
        meter: Meter whose devices buffer readings.
        offset_ns: Unix minus monotonic nanoseconds.
        writer: Destination of the records.
        every: Ticks between two readings of the buffers.
    """

    def __init__(
        self,
        meter: BufferedMeter,
        offset_ns: int,
        writer: SampleWriter,
        every: int,
        clocks: Clocks = CLOCKS,
        name: str = "",
    ) -> None:
        super().__init__(tuple, writer, every, clocks=clocks, name=name)
        self._meter, self._offset_ns = meter, offset_ns
        self._stamp_ns = -1

    def sample(self) -> None:
        """Record the readings since the last call. Readings of one moment get stamps a nanosecond apart."""
        before_s = self._cpu_s()
        for unix_ns, channel, watts in self._meter.drain():
            self._stamp_ns = max(unix_ns - self._offset_ns, self._stamp_ns + 1)
            self.writer.record(self._stamp_ns, (channel, watts))
        self.cost_s += self._cpu_s() - before_s


class Slowed(NamedTuple):
    """A stream that is read half as often from now on, and the share of a core that the sampler had used."""

    stream: SampleStream
    cpu_ratio: float


class SelfLimit:
    """Slows the sampler down when it takes more than its share of a core.

    The stream whose readings cost most is read half as often; the others keep their pace. Reading NVIDIA's energy
    counter takes milliseconds of CPU (an H100: 4, measured), reading the processes on a board microseconds.

    Args:
        max_cpu_ratio: Share of one core.
        most: Longest interval of a stream that is slowed down, in ticks: a device keeps its readings for seconds only.
    """

    def __init__(self, max_cpu_ratio: float, most: int, clocks: Clocks = CLOCKS) -> None:
        self._max_cpu_ratio = max_cpu_ratio
        self._most = most
        self._clocks = clocks
        self._wall_ns, self._cpu_s = clocks.monotonic_ns(), clocks.cpu_s()

    def check(self, streams: Sequence[SampleStream]) -> Slowed | None:
        """Slow down a stream if the last second or more exceeded the limit; return it, or None where none was."""
        wall_ns, cpu_s = self._clocks.monotonic_ns(), self._clocks.cpu_s()
        if wall_ns - self._wall_ns < NS_PER_S:
            return None
        ratio = (cpu_s - self._cpu_s) / (wall_ns - self._wall_ns) * NS_PER_S
        self._wall_ns, self._cpu_s = wall_ns, cpu_s
        can = [stream for stream in streams if 2 * stream.every * stream.slower <= self._most]
        costliest = max(can, key=lambda stream: stream.cost_s, default=None)
        for stream in streams:
            stream.cost_s = 0.0
        if ratio <= self._max_cpu_ratio or costliest is None:
            return None
        costliest.slower *= 2
        return Slowed(costliest, ratio)


def sample_until(
    stopped: Callable[[float], bool],
    streams: Sequence[SampleStream],
    period_s: float,
    limit: SelfLimit,
    keep_house: Callable[[Slowed | None], None],
    clocks: Clocks = CLOCKS,
) -> int:
    """Read the streams on an absolute grid until stopped, then once more, so that the readings cover the end.

    Args:
        stopped: Waits so many seconds, or less when stopped; True when stopped.
        streams: Streams to read.
        period_s: The grid.
        limit: Slows down what costs most.
        keep_house: Called every :data:`HOUSEKEEPING_S` with the stream that was slowed down, if one was.
        clocks: Clocks to use.

    Returns:
        Ticks that were skipped because their time had passed.
    """
    period_ns = round(period_s * NS_PER_S)
    now = clocks.monotonic_ns
    start_ns = house_ns = now()
    tick = late = 0
    while True:
        for stream in streams:
            if tick >= stream.due:
                stream.sample()
                step = stream.every * stream.slower
                stream.due = (tick // step + 1) * step
        now_ns = now()
        if now_ns - house_ns >= HOUSEKEEPING_S * NS_PER_S:
            house_ns = now_ns
            keep_house(limit.check(streams))
            now_ns = now()
        due = min(stream.due for stream in streams)
        tick = max(due, (now_ns - start_ns) // period_ns + 1)
        late += tick - due
        if stopped((start_ns + tick * period_ns - now()) / NS_PER_S):
            break
    for stream in streams:
        stream.sample()
    _wait_for_slow_counters(streams, clocks)
    for stream in streams:
        if isinstance(stream, BufferStream):
            stream.sample()
    return late


def _wait_for_slow_counters(streams: Sequence[SampleStream], clocks: Clocks) -> None:
    """Read slow counters until each has changed, so that the last interval reaches past the end."""
    end_ns = clocks.monotonic_ns()
    waiting = {stream: stream.last for stream in streams if stream.linger_s > 0}
    while waiting:
        clocks.sleep(LINGER_STEP_S)
        for stream, at_end in list(waiting.items()):
            stream.sample()
            renewed = all(new != old for new, old in zip(stream.last, at_end, strict=True))
            if renewed or clocks.monotonic_ns() - end_ns > stream.linger_s * NS_PER_S:
                del waiting[stream]


def clock_moved(by_ns: int) -> str:
    """Remark on a wall clock that moved against the monotonic one during a run; empty when it did not."""
    if abs(by_ns) < CLOCK_TOLERANCE_S * NS_PER_S:
        return ""
    return (
        f"the machine's clock moved by {by_ns / NS_PER_S:+.3f} s during the run (it was set, or the machine slept): "
        "times are as the clock was at the beginning"
    )


def _records(folder: str) -> bool:
    """Whether a program records into a folder now."""
    try:
        return any(name.endswith(RECORDING) for name in os.listdir(folder))  # noqa: PTH208  # 50 times a second
    except OSError:  # the folder is not there yet
        return False


class Sources(Protocol):
    """Opens the sources that a sampler reads."""

    def meters(self, specs: Sequence[MeterSpec] | None) -> OpenMeters:
        """The meters named, or those this machine has."""
        ...

    def busy(self) -> BusyReader:
        """Busy times of the CPUs.

        Raises:
            CapabilityError: They cannot be read.
        """
        ...

    def tree(self, config: SamplerConfig, sockets: tuple[int, ...]) -> TreeReader:
        """CPU time of the run."""
        ...

    def threads(self) -> ThreadReader:
        """CPU times of threads."""
        ...

    def remove_group(self, group: tuple[str, bool]) -> None:
        """Delete the control group of a run."""
        ...


class Sampler:
    """One run of the sampler process: opens the meters, samples, closes."""

    def __init__(self, config: SamplerConfig, say: Callable[[Mapping[str, Any]], None], sources: Sources) -> None:
        self._config = config
        self._sources = sources
        self._say = say
        self._stop = False
        self._abandoned = False
        self._folder = Path(config.folder)
        self._notes = Appender(self._folder / "notes.jsonl")
        opened = sources.meters(config.meters)
        self._meters = opened.meters
        for error in opened.refused:
            self._note("refused", text=f"{error}; {error.hint}" if error.hint else str(error))
        for error in opened.absent:
            self._note("absent", text=str(error))
        clock = {"unix_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
        self._offset_ns = clock["unix_ns"] - clock["monotonic_ns"]
        self._streams = [*self._meter_streams(clock), *self._share_streams(clock)]
        if not self._streams:
            raise CapabilityError("nothing can be read on this machine: neither meters nor /proc/stat")

    def run(self) -> None:
        """Sample until stopped; everything is on the disk afterwards."""
        most = max(1, int(LONGEST_PERIOD_S / self._config.period_s))
        threads_ratio = THREADS_RATIO if self._config.threads is not None else 0.0
        limit = SelfLimit(self._config.max_cpu_ratio + threads_ratio, most)
        for stream in self._streams:
            stream.sample()
            stream.due = stream.every
        self._flush()
        self._say(
            {"ready": {"pid": os.getpid(), "channels": [channel_to_dict(c) for m in self._meters for c in m.channels]}}
        )
        late = sample_until(self._stopped, self._streams, self._config.period_s, limit, self._note_and_flush)
        for meter in self._meters:
            meter.close()
        self._write_notes()
        if moved := clock_moved(time.time_ns() - time.monotonic_ns() - self._offset_ns):
            self._note("clock", text=moved)
        slowest = max(stream.slower for stream in self._streams)
        done = {"late": late, "cpu_s": time.process_time(), "period_s": self._config.period_s * slowest}
        self._note("done", **done)
        for stream in self._streams:
            stream.writer.close()
        self._notes.close()
        self._say({"done": done})
        if self._config.group is not None and self._abandoned:
            self._sources.remove_group(self._config.group)

    def stop(self) -> None:
        """End at the next tick."""
        self._stop = True

    def stop_if_orphaned(self) -> None:
        """End at the next tick if the parent is gone; the kernel's signal may mean that only a thread of it ended."""
        if os.getppid() != self._config.parent:
            self._stop = self._abandoned = True

    def _stopped(self, wait_s: float) -> bool:
        if select.select([0], [], [], max(0.0, wait_s))[0]:
            self._stop = True
            self._abandoned = os.read(0, 64) == b""
        return self._stop

    def _note_and_flush(self, slowed: Slowed | None) -> None:
        if slowed is not None:
            stream, cpu_ratio = slowed
            period_s = self._config.period_s * stream.every * stream.slower
            self._note(
                "slower",
                stream=stream.name,
                factor=stream.slower,
                period_s=period_s,
                cpu_ratio=cpu_ratio,
                text=f"the sampler took {cpu_ratio:.1%} of a core: it reads {stream.name} every {period_s * 1e3:g} ms "
                "from here on",
            )
        self._write_notes()
        self._flush()
        self.stop_if_orphaned()

    def _write_notes(self) -> None:
        for meter in self._meters:
            for text in meter.notes():
                self._note("meter", text=text)

    def _note(self, kind: str, **fields: Any) -> None:
        self._notes.add(json.dumps({"t_s": time.time(), "kind": kind, **fields}).encode() + b"\n")

    def _flush(self) -> None:
        for stream in self._streams:
            stream.writer.flush()
        self._notes.flush()

    def _meter_streams(self, clock: Mapping[str, float]) -> list[SampleStream]:
        period_s = self._config.period_s
        streams: list[SampleStream] = []
        for number, meter in enumerate(self._meters):
            channels = meter.channels
            columns = [f"{channel.device}:{channel.component}" for channel in channels]
            update_s = min(channel.update_s for channel in channels)
            kept = meter.buffered if isinstance(meter, BufferedMeter) else ()
            paced_s = BUFFER_S if len(kept) == len(channels) else update_s / READS_PER_UPDATE
            every = max(1, round(paced_s / period_s))
            described: dict[str, Any] = {
                "channels": [channel_to_dict(channel) for channel in channels],
                "period_s": every * period_s,
            }
            if isinstance(meter, IdentifiedMeter):
                described["uuids"] = dict(meter.uuids)
            name = f"{number}-{channels[0].meter}"
            writer = self._writer(name, columns, {**clock, **described})
            slow = max((c.update_s for c in channels if c.kind is ReadingKind.COUNTER), default=0.0)
            linger_s = LINGER_UPDATES * slow if slow > READS_PER_UPDATE * period_s else 0.0
            streams.append(SampleStream(meter.read, writer, every, linger_s, name=name))
            if isinstance(meter, BufferedMeter) and kept:
                name, every = f"{name}-buffer", max(1, round(BUFFER_S / period_s))
                refines = {"channels_of": streams[-1].name, "late_s": meter.buffer_late_s}
                buffer = self._writer(name, BUFFER_COLUMNS, {**clock, **refines})
                streams.append(BufferStream(meter, self._offset_ns, buffer, every, name=name))
        return streams

    def _share_streams(self, clock: Mapping[str, float]) -> list[SampleStream]:
        config = self._config
        try:
            busy = self._sources.busy()
        except CapabilityError as error:
            self._note("refused", text=f"the busy times of the CPUs are not known: {error}")
            return []
        tree = self._sources.tree(config, busy.sockets)
        cpu = CpuShare(busy, tree)
        cpus = {f"cpu:{socket}": count for socket, count in zip(busy.sockets, busy.cpus, strict=True)}
        writer = self._writer("cpu", cpu.columns, {**clock, "cpus": cpus})
        streams = [SampleStream(cpu.read, writer, max(1, round(CPU_SHARE_S / config.period_s)), name="cpu")]
        if config.threads is not None:
            folder = config.threads
            threads = self._writer("threads", ("process", "thread", "cpu_s", "wait_s", "sweep"), clock)
            every = max(1, round(THREADS_S / config.period_s))
            streams.append(ThreadStream(self._sources.threads(), tree.pids, lambda: _records(folder), threads, every))
        for meter in self._meters:
            if isinstance(meter, SharedMeter):
                boards = [channel.device for channel in meter.channels]
                gpu = GpuShare(boards, meter.holders, tree.pids, config.boards)
                every = max(1, round(GPU_SHARE_S / config.period_s))
                streams.append(SampleStream(gpu.read, self._writer("gpu", gpu.columns, clock), every, name="gpu"))
        return streams

    def _writer(self, name: str, columns: Sequence[str], header: Mapping[str, Any]) -> SampleWriter:
        return SampleWriter(self._folder / f"{name}{SUFFIX}", columns, header)
