"""Measure a command, or a block of Python: joules and grams, with nothing of joulery inside what is measured.

What goes wrong with measuring never becomes the problem of what is measured: it lowers the coverage and is said in a
warning. Only what was asked for wrongly (a flag, a file, a meter that was named and is not there) is refused, and that
before anything starts.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from joulery.app.wiring.meters import parse_meter
from joulery.app.wiring.share import make_run_group
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.runtime.measuring.launch import NOT_EXECUTABLE, NOT_FOUND, Outcome, run_command
from joulery.runtime.measuring.recorder import Recorder
from joulery.runtime.measuring.terms import PERIOD_S, Settings, Terms, source_of
from joulery.store.run.directory import RunWriter, create_run, new_run_id

if TYPE_CHECKING:
    from joulery.adapters.meters.cgroup import RunGroup
    from joulery.domain.energy.footprint import Footprint
    from joulery.domain.ports import CarbonSource
    from joulery.runtime.measuring.account import Account
    from joulery.runtime.measuring.readings import RunReadings
    from joulery.runtime.tracing.traced import Tracing

RUNS = Path("runs")
"""Where runs are kept that nobody gave a folder."""
_PR_SET_CHILD_SUBREAPER = 36


class MeasureWarning(UserWarning):
    """Something went wrong with measuring; what was measured went on."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A command that was measured.

    Attributes:
        exit_code: The command's own, as a shell would say it.
        error: Why it never ran; None when it did.
        account: What it cost; None when it never ran.
        path: Its run directory; None when it never ran.
        manifest: Of the run.
        warnings: What went wrong with measuring.
    """

    exit_code: int
    error: str | None = None
    account: Account | None = None
    path: Path | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def measure_command(
    argv: Sequence[str],
    *,
    settings: Settings,
    terms: Terms,
    source: CarbonSource | None,
    owner: str | None = None,
    out: Path | None = None,
    ended: Callable[[int], None] = lambda exit_code: None,
    tracing: Tracing | None = None,
) -> Measured:
    """Run a command and measure it and everything it starts.

    Args:
        argv: The command.
        settings: How to measure.
        terms: On what terms it is charged.
        source: Where the carbon intensity comes from; None for no grams.
        owner: Who pays.
        out: The run directory; a new one in :data:`RUNS` when not given.
        ended: Told the exit code as soon as there is one.
        tracing: How to have it record its operations; None when that was not asked for.

    Raises:
        JouleryError: The folder that was named holds a run or cannot be written, or a meter that was named cannot be
            read. Nothing has been started then.
    """
    refusal = _refusal(argv[0])
    if refusal is not None:
        return refusal
    writer, trouble = _run_directory(argv, terms, owner, out)
    recorder = Recorder(writer, settings)
    for text in trouble:
        recorder.warn(text)
    environment = _traced_environment(writer, tracing) if tracing is not None else None
    group = make_run_group(os.getpid())
    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            recorder.start(
                root=os.getpid(), include_root=False, group=(str(group.path), group.per_cpu) if group else None
            )
        except KeyboardInterrupt:
            recorder.abandon()
            raise
        outcome = run_command(
            argv,
            in_child=lambda: _enter(group),
            started=lambda pid, at_ns: recorder.begin(at_ns, pid),
            not_ours={recorder.sampler_pid or 0},
            environment=environment,
        )
        ended(outcome.exit_code)
        return _finished(recorder, outcome, terms, source, tracing)
    finally:
        if group is not None:
            group.remove()


def _enter(group: RunGroup | None) -> None:
    """Put this process, about to become the command, into the control group of the run."""
    if group is None:
        return
    try:
        group.enter()
    except OSError as error:  # it could be entered a moment ago; the command must start all the same
        os.write(2, f"joulery: warning: the run's CPU time is not counted: {error}\n".encode())


def _traced_environment(writer: RunWriter, tracing: Tracing) -> dict[str, str]:
    """The environment in which a command records itself into the run."""
    from joulery.app.wiring.tracers import open_tracer
    from joulery.runtime.tracing.traced import trace_folder

    folder = str(trace_folder(writer, tracing))
    return {**os.environ, **open_tracer(tracing.framework).environment(folder, tracing.steps, os.environ)}


def _finished(
    recorder: Recorder, outcome: Outcome, terms: Terms, source: CarbonSource | None, tracing: Tracing | None
) -> Measured:
    if outcome.error is not None:
        recorder.abandon()
        return Measured(outcome.exit_code, outcome.error, warnings=tuple(recorder.warnings))
    made = recorder.finish(
        outcome.started_ns,
        outcome.ended_ns,
        cpu_s=outcome.cpu_s,
        exit_code=outcome.exit_code,
        terms=terms,
        source=source,
        more=None if tracing is None else keeper(tracing),
    )
    writer = recorder.writer
    return Measured(outcome.exit_code, None, made, writer.path, writer.manifest, tuple(recorder.warnings))


def keeper(tracing: Tracing) -> Callable[[RunWriter, Account, RunReadings], None]:
    """What the end of a traced run keeps besides the power."""

    def keep(writer: RunWriter, made: Account, evidence: RunReadings) -> None:
        from joulery.runtime.tracing.traced import keep_anatomy

        keep_anatomy(writer, tracing, made.basis, evidence.offset_ns)

    return keep


def _refusal(command: str) -> Measured | None:
    """The answer to a command that cannot be run, found before anything starts."""
    if shutil.which(command) is not None:
        return None
    if os.sep in command and Path(command).exists():
        return Measured(
            NOT_EXECUTABLE, f"{command}: {'is a directory' if Path(command).is_dir() else 'permission denied'}"
        )
    return Measured(
        NOT_FOUND, f"{command}: {'no such file or directory' if os.sep in command else 'command not found'}"
    )


def _run_directory(
    argv: Sequence[str], terms: Terms, owner: str | None, out: Path | None
) -> tuple[RunWriter, list[str]]:
    def create(folder: Path) -> RunWriter:
        zone = terms.carbon.get("zone")
        return create_run(folder, kind="measure", argv=argv, zone=zone, owner=owner, details={"terms": terms.to_dict()})

    if out is not None:
        return create(out), []
    name = new_run_id(time.time())
    try:
        return create(RUNS / name), []
    except CapabilityError as error:
        folder = Path(tempfile.mkdtemp(prefix="joulery-"))
        return create(folder / name), [f"{error}: the run is kept in {folder / name}"]


class Measurement:
    """A block of Python that is being measured, and afterwards what it cost.

    Attributes:
        path: Its run directory; None when none was asked for.
    """

    def __init__(
        self, settings: Settings, terms: Terms, source: CarbonSource | None, owner: str | None, out: Path | None
    ) -> None:
        self.path = out
        self._settings = settings
        self._terms = terms
        self._source = source
        self._owner = owner
        self._recorder: Recorder | None = None
        self._account: Account | None = None
        self._start_ns = 0
        self._cpu_s = 0.0
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        folder = self.path
        if folder is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="joulery-")
            folder = Path(self._scratch.name) / "run"
        writer, _ = _run_directory((), self._terms, self._owner, folder)
        self._recorder = Recorder(writer, self._settings)
        try:
            self._recorder.start(root=os.getpid(), include_root=True)
        except BaseException:
            self._clean_up()
            raise
        self._cpu_s, self._start_ns = _cpu_s(), time.monotonic_ns()
        self._recorder.begin(self._start_ns, os.getpid())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_ns, cpu_s = time.monotonic_ns(), _cpu_s()
        if os.getpid() != self._pid:  # a fork leaves the block too: the run is its parent's
            return
        recorder = self._recorder
        assert recorder is not None
        self._account = recorder.finish(
            self._start_ns,
            end_ns,
            cpu_s=cpu_s - self._cpu_s,
            exit_code=None,
            terms=self._terms,
            source=self._source,
            more=self._more(),
        )
        self._clean_up()
        for text in recorder.warnings:
            warnings.warn(text, MeasureWarning, stacklevel=2)

    def _clean_up(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    def _more(self) -> Callable[[RunWriter, Account, RunReadings], None] | None:
        """What else the end of the block keeps."""
        return None

    @property
    def footprint(self) -> Footprint:
        """What the block cost.

        Raises:
            ConfigError: The block has not ended.
        """
        return self._done.charged.run

    @property
    def other_j(self) -> float:
        """Energy of other processes on the same devices meanwhile, joules; not part of the footprint."""
        return self._done.charged.other_j

    @property
    def report(self) -> dict[str, Any]:
        """The object of ``report.json``."""
        return dict(self._done.report)

    @property
    def _done(self) -> Account:
        if self._account is None:
            raise ConfigError("what a block cost is known when it has ended", hint="read it after the with statement")
        return self._account


def measure(
    *,
    zone: str | None = None,
    carbon: str | Path | None = None,
    column: str | None = None,
    timezone: str | None = None,
    scope: str | None = None,
    fill: str | None = None,
    carbon_at: str | float | datetime | None = None,
    owner: str | None = None,
    out: str | Path | None = None,
    period_s: float = PERIOD_S,
    idle: str = "whole",
    pue: float = 1.0,
    meters: Sequence[str] | None = None,
) -> Measurement:
    """Measure a block of Python: this process, its threads, and the processes it starts.

    ::

        with joulery.measure(zone="GB") as m:
            train()
        print(m.footprint.energy_j, m.footprint.carbon_g)

    Args:
        zone: Grid zone whose intensity is looked up after the block: ``GB``, ``typical:FR``, ``electricity-maps:DE``.
        carbon: A CSV or Parquet file with the intensity, or a stated one such as ``"250 g/kWh"``. Without ``zone`` and
            ``carbon`` no grams are known.
        column, timezone, scope, fill: How the file is read, as on the command line.
        carbon_at: When the block is taken to have begun, for the intensity alone (labelled assumed).
        owner: Who pays.
        out: Keep the run in this folder; nothing is kept when not given.
        period_s: Time between two readings, seconds, 0.001 to 1.
        idle: How much of the machine's idle energy the block pays: ``whole``, ``share`` or ``none``.
        pue: Facility energy per IT energy.
        meters: Meters to use, as on the command line (``["rapl", "nvml"]``); those this machine has when not given.

    Raises:
        ConfigError, DataError: An argument is wrong, or the file cannot be used.
        CapabilityError: Credentials are missing.
    """
    flags = {
        "zone": zone,
        "carbon": str(carbon) if carbon is not None else None,
        "column": column,
        "timezone": timezone,
        "scope": scope,
        "fill": fill,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    settings = Settings(period_s, None if meters is None else tuple(parse_meter(text) for text in meters))
    terms = Terms(idle, pue, given, None if carbon_at is None else instant_s(carbon_at))
    return Measurement(settings, terms, source_of(given), owner, Path(out) if out is not None else None)


def instant_s(value: str | float | datetime) -> float:
    """A moment as Unix seconds; without a time zone it is taken as UTC.

    Raises:
        ConfigError: It is no moment.
    """
    if isinstance(value, str):
        try:
            return instant_s(datetime.fromisoformat(value))
        except ValueError as error:
            raise ConfigError("no moment", got=value, expected="such as 2020-06-10T12:00Z") from error
    if isinstance(value, datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    return float(value)


def _cpu_s() -> float:
    """CPU seconds of this process and of the children it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
