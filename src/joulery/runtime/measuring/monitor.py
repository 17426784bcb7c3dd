"""Measure processes that already run, in any language, until stopped.

Source: Smaragdine (ICSE'24), section 4, "decoupled monitoring": start, stop and read, by message. The
messages are those of :mod:`joulery.gateway.monitor`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from joulery.accounting.charge import divide_power
from joulery.accounting.steps import power_steps
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.energy.power import BusyTimes, PowerTrace
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality, weakest
from joulery.runtime.measuring.account import busy_together
from joulery.runtime.measuring.recorder import RunRecorder
from joulery.runtime.measuring.terms import Settings, Terms
from joulery.store.run.directory import SAMPLES, create_run, new_run_id
from joulery.store.run.readings import read_samples


@dataclass(slots=True)
class WatchedProcess:
    """One process that is being measured.

    Attributes:
        name: Name of the session.
        process: Process id.
        path: The run directory.
        started_ns: Monotonic nanoseconds.
    """

    name: str
    process: int
    path: Path
    started_ns: int
    recorder: RunRecorder
    terms: Terms


class Monitor:
    """Measuring sessions, each with its own sampler and run directory.

    Args:
        folder: Default folder of runs.
        settings: Default settings of a session.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self._watched: dict[str, WatchedProcess] = {}
        self._numbers = itertools.count(1)

    @property
    def watched(self) -> tuple[WatchedProcess, ...]:
        """Sessions, oldest first."""
        return tuple(self._watched.values())

    def start(self, process: int, *, out: Path | None = None, period_s: float | None = None) -> WatchedProcess:
        """Start to measure a process and everything it starts; the meters have been read once when this returns.

        Args:
            process: Process id.
            out: The run directory; a new one where not given.
            period_s: Time between two readings, seconds.

        Raises:
            ConfigError: No process has this identifier, or the folder holds a run.
            CapabilityError: The folder cannot be written, or a meter that was named cannot be read.
        """
        if process < 1 or not Path(f"/proc/{process}").exists():
            raise ConfigError("no such process", pointer="pid", got=str(process))
        settings = self._settings
        if period_s is not None:
            settings = Settings(period_s, settings.meters, settings.max_cpu_ratio)
        terms = Terms()
        path = out if out is not None else self._folder / new_run_id(time.time())
        details = {"terms": terms.to_dict(), "watched": process}
        writer = create_run(path, kind="measure", argv=_command_of(process), details=details)
        recorder = RunRecorder(path, settings, writer)
        recorder.start(root=process, include_root=True)
        started_ns = time.monotonic_ns()
        recorder.begin(started_ns, process)
        watched = WatchedProcess(str(next(self._numbers)), process, path, started_ns, recorder, terms)
        self._watched[watched.name] = watched
        return watched

    def read(self, name: str, since_ns: int = 0, *, whole: bool = False) -> Iterator[PowerRow]:
        """Power readings so far: of the process and everything it started, or of the whole devices.

        A process gets its share of a device's power by busy time, in intervals of 100 ms, without idle power. The whole
        devices are given as their meters read them.

        Args:
            name: Name of the session.
            since_ns: Only readings after this moment.
            whole: Read the whole devices.

        Raises:
            DataError: There is no such session.
        """
        readings = read_samples(self._session(name).path / SAMPLES)
        busy = dict(readings.busy)
        sockets = [times for device, times in busy.items() if device.startswith("cpu:")]
        if sockets:
            busy["machine"] = busy_together(sockets)
        for trace in readings.traces:
            yield from _rows(trace, since_ns) if whole else _share_rows(trace, busy, since_ns)

    def stop(self, name: str) -> dict[str, Any]:
        """Stop a session and close its run.

        Returns:
            The report of the run, and its folder under ``run``.

        Raises:
            DataError: There is no such session.
        """
        watched = self._session(name)
        del self._watched[name]
        made = watched.recorder.finish(
            watched.started_ns,
            time.monotonic_ns(),
            cpu_s=0.0,
            exit_code=None,
            terms=watched.terms,
            source=None,
        )
        return {**made.report, "run": str(watched.path)}

    def close(self) -> None:
        """Stop every session."""
        for name in list(self._watched):
            self.stop(name)

    def _session(self, name: str) -> WatchedProcess:
        watched = self._watched.get(name)
        if watched is None:
            raise DataError(f"there is no session {name}", hint="POST /sessions starts one, GET /sessions lists them")
        return watched


class PowerRow(NamedTuple):
    """One reading: Unix nanoseconds, device, component, watts or cumulative joules, and their quality."""

    t_ns: int
    device: str
    component: str
    power_w: float | None
    counter_j: float | None
    quality: Quality


def _share_rows(trace: PowerTrace, busy: Mapping[str, BusyTimes], since_ns: int) -> Iterator[PowerRow]:
    """Power of the process on one device; a GPU without busy times is wholly its own."""
    channel, steps = trace.channel, power_steps(trace)
    quality = channel.quality
    if channel.device in busy:
        steps = divide_power(steps, busy[channel.device]).run
        quality = weakest((quality, Quality.MODELLED))
    elif not channel.device.startswith("gpu:"):
        return
    for t_ns, watts in zip(steps.edges_ns[:-1].tolist(), steps.watts.tolist(), strict=True):
        if t_ns > since_ns and watts == watts:
            yield PowerRow(t_ns, channel.device, channel.component, watts, None, quality)


def _rows(trace: PowerTrace, since_ns: int) -> Iterator[PowerRow]:
    counter, channel = trace.channel.kind is ReadingKind.COUNTER, trace.channel
    later = trace.t_ns > since_ns
    for t_ns, value in zip(trace.t_ns[later].tolist(), trace.values[later].tolist(), strict=True):
        known = None if value != value else value
        watts, joules = (None, known) if counter else (known, None)
        yield PowerRow(t_ns, channel.device, channel.component, watts, joules, channel.quality)


def _command_of(process: int) -> list[str]:
    """Command line of a process; empty where it may not be read, or is gone."""
    try:
        return os.fsdecode(Path(f"/proc/{process}/cmdline").read_bytes()).rstrip("\0").split("\0")
    except OSError:
        return []
