"""Readings of a run: power traces, busy times and notes of the sampler.

While the sampler runs, or after it was killed, they are read from its files (:mod:`joulery.store.run.samples`).
:func:`save_readings` keeps them as series of the run, and :func:`load_readings` reads either form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import orjson

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.energy.buffered import refined
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import BusyTimes, PowerTrace
from joulery.domain.errors import DataError
from joulery.store.run.channels import channel_from_dict, channel_to_dict
from joulery.store.run.samples import SAMPLES, SCHEMA, SUFFIX

if TYPE_CHECKING:
    import numpy.typing as npt

    from joulery.domain.trace.threads import ThreadTimes
    from joulery.store.run.directory import Run, RunWriter

NS_PER_S = 1_000_000_000
THREADS = ("process", "thread", "cpu_s", "wait_s", "sweep")
"""Columns of the CPU times of threads; older runs have no ``wait_s``."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One stream of samples.

    Attributes:
        header: Schema, columns and further keys of the writer.
        t_ns: Unix nanoseconds, strictly increasing, int64[n].
        values: float64[n, columns].
    """

    header: dict[str, Any]
    t_ns: IntArray
    values: FloatArray

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self.header["columns"])

    def column(self, name: str) -> FloatArray:
        """One column.

        Raises:
            DataError: The recording has no column of that name.
        """
        if name not in self.columns:
            raise DataError(f"no column {name!r} among {self.columns}")
        return np.ascontiguousarray(self.values[:, self.columns.index(name)])


def read_recording(file: Path) -> Recording:
    """The records of a file, up to the first that is torn or out of order of time.

    Raises:
        DataError: The file is missing or not in this format.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=str(file)) from error
    line, newline, _ = data.partition(b"\n")
    try:
        header = orjson.loads(line) if newline else None
    except orjson.JSONDecodeError as error:
        raise DataError("no header of samples", file=str(file), row=1) from error
    if not _is_header(header):
        raise DataError(f"no samples of schema {SCHEMA}", file=str(file), row=1)
    width = 1 + len(header["columns"])
    body = data[len(line) + 1 :]
    words = np.frombuffer(body, "<u8", count=len(body) // (8 * width) * width).reshape(-1, width)
    stamps = words[:, 0].astype(np.int64)
    good = len(stamps)
    if good:
        wrong = np.flatnonzero(np.diff(stamps, prepend=np.int64(0)) <= 0)
        good = int(wrong[0]) if len(wrong) else good
    values = np.ascontiguousarray(words[:good, 1:]).view("<f8").astype(np.float64)
    return Recording(header, stamps[:good] + (header["unix_ns"] - header["monotonic_ns"]), values)


def _is_header(value: Any) -> TypeGuard[dict[str, Any]]:
    return (
        isinstance(value, dict)
        and value.get("schema") == SCHEMA
        and isinstance(value.get("columns"), list)
        and isinstance(value.get("unix_ns"), int)
        and isinstance(value.get("monotonic_ns"), int)
    )


class RecordingTail:
    """The newest records of a file that is still being written, read as they arrive.

    Args:
        file: The file; it may not exist yet.
        keep_s: How much of the past to keep.
    """

    def __init__(self, file: Path, keep_s: float) -> None:
        self._file = file
        self._keep_ns = round(keep_s * 1e9)
        self._header: dict[str, Any] | None = None
        self._offset = 0
        self._t_ns: IntArray = np.empty(0, np.int64)
        self._values: FloatArray = np.empty((0, 0))

    def update(self) -> Recording | None:
        """Records written within ``keep_s`` before the newest one; None before there is any.

        Raises:
            DataError: The file is not in this format.
        """
        if self._header is None and not self._begin():
            return None
        assert self._header is not None
        width = 1 + len(self._header["columns"])
        with self._file.open("rb") as file:
            file.seek(self._offset)
            body = file.read()
        count = len(body) // (8 * width)
        if count:
            self._offset += 8 * width * count
            words = np.frombuffer(body, "<u8", count=width * count).reshape(-1, width)
            stamps = words[:, 0].astype(np.int64) + (self._header["unix_ns"] - self._header["monotonic_ns"])
            values = np.ascontiguousarray(words[:, 1:]).view("<f8")
            self._t_ns, self._values = np.append(self._t_ns, stamps), np.concatenate((self._values, values))
            fresh = self._t_ns >= self._t_ns[-1] - self._keep_ns
            self._t_ns, self._values = self._t_ns[fresh], self._values[fresh]
        return Recording(self._header, self._t_ns, self._values) if len(self._t_ns) else None

    def _begin(self) -> bool:
        """Read the header; False while it is not there."""
        if not self._file.exists():
            return False
        with self._file.open("rb") as file:
            if not file.readline().endswith(b"\n"):
                return False
            self._offset = file.tell()
        self._header = read_recording(self._file).header
        self._values = np.empty((0, len(self._header["columns"])))
        return True


def read_recordings(folder: Path) -> dict[str, Recording]:
    """Every readable stream of a folder, by name; empty where there is no such folder.

    Raises:
        DataError: A file is not in this format. A file torn within its header is left out.
    """
    found = {}
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        with file.open("rb") as start:
            whole = b"\n" in start.read(65536)
        if whole:
            found[file.stem] = read_recording(file)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class RunReadings:
    """Readings of a run.

    Attributes:
        traces: One power trace for each channel.
        busy: Busy times by device, at the intervals of the sampler.
        offset_ns: Unix minus monotonic nanoseconds on the sampler's clocks; None when nothing was read.
        end_ns: Unix nanoseconds of the last reading; None when nothing was read.
        notes: Remarks for the report, in order.
        sampler: Statistics of the sampler: ``late``, ``cpu_s``, ``period_s``; empty if it did not end in order.
        uuids: Device name by UUID, of the devices that have one.
        threads: CPU times of the run's threads, while a traced program recorded; None where none were read.
    """

    traces: tuple[PowerTrace, ...] = ()
    busy: Mapping[str, BusyTimes] = field(default_factory=dict)
    offset_ns: int | None = None
    end_ns: int | None = None
    notes: tuple[str, ...] = ()
    sampler: Mapping[str, Any] = field(default_factory=dict)
    uuids: Mapping[str, str] = field(default_factory=dict)
    threads: ThreadTimes | None = None


def read_samples(folder: Path) -> RunReadings:
    """Read what the sampler has written into a folder so far.

    Raises:
        DataError: A file is not in the sampler's format.
    """
    return readings_from(read_recordings(folder), folder / "notes.jsonl")


def readings_from(recordings: Mapping[str, Recording], notes_file: Path) -> RunReadings:
    """Build the readings from recordings by name and the file of notes."""
    notes = list(_notes(notes_file))
    slower = _slower(notes)
    named = {name: recording for name, recording in recordings.items() if len(recording.t_ns)}
    streams = list(named.values())
    return RunReadings(
        traces=tuple(
            trace
            for name, recording in named.items()
            for trace in _refined(_traces(recording, slower(name)), _buffer_of(name, streams))
        ),
        busy={device: times for recording in streams for device, times in _busy(recording)},
        offset_ns=next((r.header["unix_ns"] - r.header["monotonic_ns"] for r in streams), None),
        end_ns=max((int(r.t_ns[-1]) for r in streams), default=None),
        notes=tuple(note["text"] for note in notes if note["kind"] in ("refused", "meter", "slower", "clock")),
        uuids={key: name for r in streams for key, name in r.header.get("uuids", {}).items()},
        sampler=next((note for note in notes if note["kind"] == "done"), {}),
        threads=next((_threads(_columns(r)) for r in streams if "sweep" in r.columns), None),
    )


def save_readings(readings: RunReadings, writer: RunWriter) -> None:
    """Store readings as series of a run: ``power`` (one row a reading) and ``busy`` (one row an interval).

    Raises:
        CapabilityError: The disk cannot be written.
    """
    from joulery.store.run.series import Labels

    channels = [trace.channel for trace in readings.traces]
    rows = _rows([len(trace) for trace in readings.traces])
    writer.write_series(
        "power",
        {
            "t_ns": _joined([trace.t_ns for trace in readings.traces], np.int64),
            "value": _joined([trace.values for trace in readings.traces], np.float64),
            "unit": Labels(rows, [_unit(channel) for channel in channels]),
            "device": Labels(rows, [channel.device for channel in channels]),
            "component": Labels(rows, [channel.component for channel in channels]),
            "channel": rows,
        },
    )
    busy = list(readings.busy.values())
    rows = _rows([len(times.app_s) for times in busy])
    writer.write_series(
        "busy",
        {
            "start_ns": _joined([times.edges_ns[:-1] for times in busy], np.int64),
            "end_ns": _joined([times.edges_ns[1:] for times in busy], np.int64),
            "device": Labels(rows, list(readings.busy)),
            "run_s": _joined([times.app_s for times in busy], np.float64),
            "busy_s": _joined([times.all_s for times in busy], np.float64),
            "cpus": np.array([times.cpus for times in busy], np.int32)[rows],
        },
    )
    if readings.threads is not None:
        writer.write_series("threads", {name: getattr(readings.threads, name) for name in ("t_ns", *THREADS)})
    # Last: until the manifest says so, the run is read from the sampler's files.
    writer.describe(
        channels=[{**channel_to_dict(trace.channel), "period_s": trace.period_s} for trace in readings.traces],
        read={
            "offset_ns": readings.offset_ns,
            "end_ns": readings.end_ns,
            "notes": readings.notes,
            "sampler": dict(readings.sampler),
            "uuids": dict(readings.uuids),
        },
    )


def load_readings(run: Run) -> RunReadings:
    """Read the readings of a run: from its series, or from the files of a sampler that was killed.

    Raises:
        DataError: A series or a sampler file is damaged.
    """
    if "read" not in run.manifest or "power" not in run.series_names:
        return read_samples(run.path / SAMPLES)
    power, busy = run.series("power", ("t_ns", "value", "channel")), run.series("busy")
    traces = []
    for number, described in enumerate(run.manifest["channels"]):
        mine = power["channel"] == number
        traces.append(
            PowerTrace(channel_from_dict(described), power["t_ns"][mine], power["value"][mine], described["period_s"])
        )
    times = {}
    for device in dict.fromkeys(busy["device"].tolist()):
        mine = busy["device"] == device
        edges = np.append(busy["start_ns"][mine], busy["end_ns"][mine][-1])
        times[device] = BusyTimes(edges, busy["run_s"][mine], busy["busy_s"][mine], int(busy["cpus"][mine][0]))
    kept = {**run.manifest["read"], "notes": tuple(run.manifest["read"]["notes"])}
    threads = _threads(run.series("threads")) if "threads" in run.series_names else None
    return RunReadings(tuple(traces), times, **kept, threads=threads)


def _buffer_of(name: str, streams: Sequence[Recording]) -> Recording | None:
    """The power readings that the devices of a stream buffered, where there are any."""
    return next((recording for recording in streams if recording.header.get("channels_of") == name), None)


def _refined(traces: Iterator[PowerTrace], buffer: Recording | None) -> Iterator[PowerTrace]:
    """Refine counters at the times of the buffered power readings; other traces are unchanged."""
    for number, trace in enumerate(traces):
        if buffer is None or trace.channel.kind is not ReadingKind.COUNTER:
            yield trace
            continue
        mine = buffer.column("channel") == number
        late_ns = round(1e9 * float(buffer.header.get("late_s", 0.0)))
        yield refined(trace, buffer.t_ns[mine], buffer.column("watts")[mine], late_ns)


def _slower(notes: Sequence[Mapping[str, Any]]) -> Callable[[str], int]:
    """Final factor of a stream's interval, by the stream's name; notes without a name apply to all streams."""
    factors: dict[str | None, int] = {}
    for note in notes:
        if note["kind"] == "slower":
            stream = note.get("stream")
            factors[stream] = max(factors.get(stream, 1), note["factor"])
    return lambda name: max(factors.get(name, 1), factors.get(None, 1))


def _traces(recording: Recording, slower: int) -> Iterator[PowerTrace]:
    for slot, described in enumerate(recording.header.get("channels", ())):
        period_s = recording.header["period_s"] * slower
        yield PowerTrace(channel_from_dict(described), recording.t_ns, recording.values[:, slot], period_s)


def _threads(columns: Mapping[str, npt.NDArray[Any]]) -> ThreadTimes:
    from joulery.domain.trace.threads import ThreadTimes

    return ThreadTimes(**columns)


def _columns(recording: Recording) -> dict[str, npt.NDArray[Any]]:
    return {"t_ns": recording.t_ns, **{name: recording.column(name) for name in THREADS if name in recording.columns}}


def _busy(recording: Recording) -> Iterator[tuple[str, BusyTimes]]:
    if len(recording.t_ns) < 2:
        return
    for column in recording.columns:
        what, _, device = column.partition(":")
        if what == "busy_s":
            cpus = int(recording.header["cpus"][device])
            yield device, BusyTimes(recording.t_ns, _used(recording, f"run_s:{device}"), _used(recording, column), cpus)
        elif what == "busy_ratio":
            seconds = np.diff(recording.t_ns) / NS_PER_S
            run, busy = (recording.column(f"{name}_ratio:{device}")[1:] * seconds for name in ("run", "busy"))
            yield device, BusyTimes(recording.t_ns, run, busy)


def _used(recording: Recording, column: str) -> FloatArray:
    """Increase of a cumulative column in each interval."""
    return np.asarray(np.diff(recording.column(column)), np.float64)


def _notes(file: Path) -> Iterator[dict[str, Any]]:
    """The notes of a sampler; a torn last line is left out."""
    if not file.exists():
        return
    for line in file.read_bytes().split(b"\n")[:-1]:
        yield orjson.loads(line)


def _rows(counts: list[int]) -> npt.NDArray[np.int32]:
    """For each row of a concatenated table, the index of the part that it belongs to."""
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _joined(columns: list[npt.NDArray[Any]], kind: type[Any]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *columns]).astype(kind)


def _unit(channel: Channel) -> str:
    return "J" if channel.kind is ReadingKind.COUNTER else "W"
