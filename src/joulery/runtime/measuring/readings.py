"""What a sampler left behind, as nouns that can be accounted: power traces, busy times, notes.

Taken from its files while they are there (a run that lasts, or was killed), else from the series they were folded into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from joulery.accounting.charge import BusyTimes
from joulery.domain.arrays import FloatArray
from joulery.domain.energy.power import Channel, PowerTrace, ReadingKind
from joulery.store.run.channels import channel_from_dict, channel_to_dict
from joulery.store.run.directory import SAMPLES, Run, RunWriter
from joulery.store.run.recordings import Recording, read_recordings
from joulery.store.run.series import Labels

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class RunReadings:
    """What was read during a run.

    Attributes:
        traces: One a channel.
        busy: Who kept each device busy, as finely as it was read.
        offset_ns: Unix minus monotonic nanoseconds on the sampler's clocks; None when nothing was read.
        end_ns: Unix nanoseconds of the last reading; None when nothing was read.
        notes: What a reader should know, in order.
        sampler: What the sampler said of itself at its end: ``late``, ``cpu_s``, ``period_s``; empty if it did not.
    """

    traces: tuple[PowerTrace, ...] = ()
    busy: Mapping[str, BusyTimes] = field(default_factory=dict)
    offset_ns: int | None = None
    end_ns: int | None = None
    notes: tuple[str, ...] = ()
    sampler: Mapping[str, Any] = field(default_factory=dict)


def read_evidence(folder: Path) -> RunReadings:
    """What the sampler has written so far into a folder.

    Raises:
        DataError: A file there is no file of the sampler's.
    """
    return evidence_of(read_recordings(folder), folder / "notes.jsonl")


def evidence_of(recordings: Mapping[str, Recording], notes_file: Path) -> RunReadings:
    """Recordings by name and the notes beside them, as nouns."""
    notes = list(_notes(notes_file))
    slower = max((note["factor"] for note in notes if note["kind"] == "slower"), default=1)
    streams = [r for r in recordings.values() if len(r.t_ns)]
    return RunReadings(
        traces=tuple(trace for recording in streams for trace in _traces(recording, slower)),
        busy={device: times for recording in streams for device, times in _busy(recording)},
        offset_ns=next((r.header["unix_ns"] - r.header["monotonic_ns"] for r in streams), None),
        end_ns=max((int(r.t_ns[-1]) for r in streams), default=None),
        notes=tuple(note["text"] for note in notes if note["kind"] in ("refused", "meter", "slower", "clock")),
        sampler=next((note for note in notes if note["kind"] == "done"), {}),
    )


def fold(evidence: RunReadings, writer: RunWriter) -> None:
    """Keep the evidence as series of a run: ``power`` (one row a reading) and ``busy`` (one row an interval).

    Raises:
        CapabilityError: The disk refuses.
    """
    channels = [trace.channel for trace in evidence.traces]
    rows = _rows([len(trace) for trace in evidence.traces])
    writer.write_series(
        "power",
        {
            "t_ns": _joined([trace.t_ns for trace in evidence.traces], np.int64),
            "value": _joined([trace.values for trace in evidence.traces], np.float64),
            "unit": Labels(rows, [_unit(channel) for channel in channels]),
            "device": Labels(rows, [channel.device for channel in channels]),
            "component": Labels(rows, [channel.component for channel in channels]),
            "channel": rows,
        },
    )
    busy = list(evidence.busy.values())
    rows = _rows([len(times.app_s) for times in busy])
    writer.write_series(
        "busy",
        {
            "start_ns": _joined([times.edges_ns[:-1] for times in busy], np.int64),
            "end_ns": _joined([times.edges_ns[1:] for times in busy], np.int64),
            "device": Labels(rows, list(evidence.busy)),
            "run_s": _joined([times.app_s for times in busy], np.float64),
            "busy_s": _joined([times.all_s for times in busy], np.float64),
            "cpus": np.array([times.cpus for times in busy], np.int32)[rows],
        },
    )
    # Last: until the manifest says so, the run is read from the sampler's files.
    writer.describe(
        channels=[{**channel_to_dict(trace.channel), "period_s": trace.period_s} for trace in evidence.traces],
        read={
            "offset_ns": evidence.offset_ns,
            "end_ns": evidence.end_ns,
            "notes": evidence.notes,
            "sampler": dict(evidence.sampler),
        },
    )


def unfold(run: Run) -> RunReadings:
    """The evidence a run keeps: from its series, or what the sampler had written when it was killed.

    Raises:
        DataError: A series or a file of the sampler's is damaged.
    """
    if "read" not in run.manifest or "power" not in run.series_names:
        return read_evidence(run.path / SAMPLES)
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
    return RunReadings(tuple(traces), times, **{**run.manifest["read"], "notes": tuple(run.manifest["read"]["notes"])})


def coarser(times: BusyTimes, window_s: float) -> BusyTimes:
    """The same busy times in intervals of about ``window_s``: ticks of 10 ms say little about much shorter ones."""
    edges, window_ns = times.edges_ns, round(window_s * NS_PER_S)
    starts = np.flatnonzero(np.diff((edges[:-1] - edges[0]) // window_ns, prepend=-1) > 0)
    starts = starts[(starts == 0) | (edges[starts] <= edges[-1] - window_ns)]
    return BusyTimes(
        np.append(edges[starts], edges[-1]),
        np.add.reduceat(times.app_s, starts),
        np.add.reduceat(times.all_s, starts),
        times.cpus,
    )


def _traces(recording: Recording, slower: int) -> Iterator[PowerTrace]:
    for slot, described in enumerate(recording.header.get("channels", ())):
        period_s = recording.header["period_s"] * slower
        yield PowerTrace(channel_from_dict(described), recording.t_ns, recording.values[:, slot], period_s)


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
    """What a cumulative column grew by in each interval."""
    return np.asarray(np.diff(recording.column(column)), np.float64)


def _notes(file: Path) -> Iterator[dict[str, Any]]:
    """The notes of a sampler; a torn last line is left out."""
    if not file.exists():
        return
    for line in file.read_bytes().split(b"\n")[:-1]:
        yield orjson.loads(line)


def _rows(counts: list[int]) -> npt.NDArray[np.int32]:
    """For each row of a long table, which of its parts it belongs to."""
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _joined(columns: list[npt.NDArray[Any]], kind: type[Any]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *columns]).astype(kind)


def _unit(channel: Channel) -> str:
    return "J" if channel.kind is ReadingKind.COUNTER else "W"
