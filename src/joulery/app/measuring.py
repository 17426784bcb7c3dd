"""Measure a command or a block of Python with the meters, tracers and carbon sources of this machine.

Imports little at first: a block starts its sampler, and imports other modules while the sampler starts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from joulery.domain.errors import ConfigError
from joulery.runtime.measuring.block import Measurement
from joulery.runtime.measuring.job_place import ALONE
from joulery.runtime.measuring.job_place import JobPlace as JobPlace
from joulery.runtime.measuring.job_place import job_place as job_place
from joulery.runtime.measuring.terms import PERIOD_S as PERIOD_S
from joulery.runtime.measuring.terms import Settings as Settings
from joulery.runtime.measuring.terms import Terms as Terms

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from joulery.accounting.operations.align import Estimator
    from joulery.domain.energy.channel import MeterSpec
    from joulery.domain.ports import CarbonSource
    from joulery.domain.trace.tracing import Steps
    from joulery.runtime.measuring.measure import Measured as Measured
    from joulery.runtime.measuring.measure import RunTracing
    from joulery.runtime.measuring.monitor import Monitor
    from joulery.runtime.tracing.trace_block import BlockRecorder, TraceBlock
    from joulery.runtime.tracing.traced import Tracing as Tracing

P = ParamSpec("P")
R = TypeVar("R")


def open_carbon(flags: Mapping[str, str]) -> CarbonSource | None:
    """Open the source of carbon intensity that the flags describe; without flags, return None and import nothing heavy.

    Raises:
        JouleryError: The flags are wrong, or their source cannot be used.
    """
    if not flags:
        return None
    from joulery.app.wiring.carbon import source_from_flags

    return source_from_flags(flags)


def measure_command(
    argv: Sequence[str],
    *,
    settings: Settings,
    terms: Terms,
    source: CarbonSource | None,
    owner: str | None = None,
    out: Path | None = None,
    ended: Callable[[int], None] = lambda exit_code: None,
    tracing: RunTracing | None = None,
    place: JobPlace = ALONE,
) -> Measured:
    """Run a command and measure it and its descendants, in a control group where this machine allows one.

    Of several tasks that a launcher started on this node, the first measures all; the others execute the command only.
    Arguments and errors are those of :func:`joulery.runtime.measuring.measure.run_measured`.
    """
    from joulery.app.wiring.share import make_run_group
    from joulery.runtime.measuring.launch import become
    from joulery.runtime.measuring.measure import Measured
    from joulery.runtime.measuring.measure import run_measured as measure

    if place.task > 0:
        return Measured(*become(argv))
    return measure(
        argv,
        settings=settings,
        terms=terms,
        source=source,
        owner=owner,
        out=out,
        ended=ended,
        make_group=make_run_group,
        tracing=tracing,
        place=place,
    )


def run_tracing(framework: str, steps: str | None, estimator: Estimator) -> Tracing:
    """Tracing settings for the operations of a command.

    Args:
        framework: ``torch``, ``jax`` or ``tensorflow``.
        steps: Steps to record, such as ``skip=1,warmup=1,active=3,repeat=3``; the default ones when None.
        estimator: ``recency`` or ``regression``.

    Raises:
        ConfigError: ``steps`` does not have this form, or would record no step.
    """
    from joulery.app.wiring.tracers import open_tracer
    from joulery.domain.trace.tracing import Steps
    from joulery.runtime.tracing.traced import Tracing

    return Tracing(framework, open_tracer(framework), Steps() if steps is None else Steps.parse(steps), estimator)


def open_monitor(runs: Path, period_s: float, meters: Sequence[str]) -> tuple[Monitor, Starlette]:
    """Create a monitor, which measures processes on request, and its HTTP application.

    Args:
        runs: Folder for runs whose request names no folder.
        period_s: Time between two readings, seconds.
        meters: As on the command line; those this machine has when empty.
    """
    from joulery.gateway.monitor import monitor_app
    from joulery.runtime.measuring.monitor import Monitor

    monitor = Monitor(runs, Settings(period_s, _specs(meters) or None))
    return monitor, monitor_app(monitor)


def measure(
    *,
    zone: str | None = None,
    carbon: str | Path | None = None,
    column: str | None = None,
    time_column: str | None = None,
    timezone: str | None = None,
    scope: str | None = None,
    fill: str | None = None,
    carbon_at: str | float | datetime | None = None,
    owner: str | None = None,
    out: str | Path | None = None,
    period_s: float = PERIOD_S,
    idle: str = "whole",
    pue: float = 1.0,
    embodied_kg: float = 0.0,
    lifetime_years: float = 0.0,
    meters: Sequence[str] | None = None,
) -> Measurement:
    """Measure a block of Python: this process, its threads, and the processes it starts.

    ::

        with joulery.measure(zone="GB") as m:
            train()
        print(m.footprint.energy_j, m.footprint.carbon_g)

    Args:
        zone: Grid zone of the intensity, looked up after the block: ``GB``, ``typical:FR``, ``electricity-maps:DE``.
        carbon: A CSV or Parquet file with the intensity, or a stated one such as ``"250 g/kWh"``. Without ``zone`` and
            ``carbon`` no grams are known.
        column, time_column, timezone, scope, fill: How the file is read, as on the command line.
        carbon_at: Assumed start of the block, used only to look up the intensity (labelled assumed).
        owner: Owner that the run is charged to.
        out: Keep the run in this folder; nothing is kept when not given.
        period_s: Time between two readings, seconds, 0.001 to 1.
        idle: Part of the machine's idle energy that is charged to the block: ``whole``, ``share`` or ``none``.
        pue: Facility energy per IT energy.
        embodied_kg, lifetime_years: Kilograms of CO2-equivalent of making the machine, and the years over which they
            are spread; the block is charged for its duration (``footprint.embodied_g``).
        meters: Meters to use, as on the command line (``["rapl", "nvml"]``); those this machine has when not given.

    Raises:
        ConfigError, DataError: An argument is wrong, or the file cannot be used.
        CapabilityError: Credentials are missing.
    """
    flags = {
        "zone": zone,
        "carbon": str(carbon) if carbon is not None else None,
        "column": column,
        "time_column": time_column,
        "timezone": timezone,
        "scope": scope,
        "fill": fill,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    settings = Settings(period_s, None if meters is None else _specs(meters))
    at_s = None if carbon_at is None else moment_s(carbon_at)
    terms = Terms(idle, pue, given, at_s, embodied_kg, lifetime_years)
    return Measurement(settings, terms, open_carbon(given), owner, Path(out) if out is not None else None)


def measured(
    function: Callable[P, R] | None = None,
    /,
    *,
    then: Callable[[Measurement], object] | None = None,
    **options: Any,
) -> Any:
    """Measure each call of a function or coroutine function, as :func:`measure` measures a block.

    ::

        @joulery.measured(zone="GB", then=lambda m: log(m.footprint.energy_j))
        def train(): ...

    Args:
        function: The function, when the decorator is used without options.
        then: Called with the measurement of each call that has ended, also by an exception; when not given, the
            measurement is printed on standard error.
        options: As for :func:`measure`. Each call measures the whole process: calls that overlap each include all of
            its energy.

    Raises:
        ConfigError, DataError, CapabilityError: As :func:`measure`, when the function is called.
    """
    if function is None:
        return functools.partial(measured, then=then, **options)
    name = getattr(function, "__qualname__", repr(function))

    @contextmanager
    def block() -> Iterator[None]:
        measurement = measure(**options)
        running = ExitStack()
        running.enter_context(measurement)
        try:
            with running:
                yield
        finally:
            if then is None:
                sys.stderr.write(f"{name}: {measurement}\n")
            else:
                then(measurement)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with block():
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
        with block():
            return await function(*args, **kwargs)  # type: ignore[misc]

    return call_async if iscoroutinefunction(function) else call


def _specs(meters: Sequence[str]) -> tuple[MeterSpec, ...]:
    """Parse the names of meters as on the command line."""
    from joulery.app.wiring.meters import parse_meter

    return tuple(parse_meter(text) for text in meters)


def moment_s(value: str | float | datetime) -> float:
    """Convert a time to Unix seconds; a time without a time zone is taken as UTC.

    Raises:
        ConfigError: The text is not a date and time.
    """
    if isinstance(value, str):
        try:
            return moment_s(datetime.fromisoformat(value))
        except ValueError as error:
            raise ConfigError("not a time", got=value, expected="such as 2020-06-10T12:00Z") from error
    if isinstance(value, datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    return float(value)


def trace(
    model: Any = None,
    *,
    name: str | None = None,
    steps: str | Steps | None = None,
    estimator: Estimator = "recency",
    calls: bool = False,
    zone: str | None = None,
    carbon: str | Path | None = None,
    owner: str | None = None,
    out: str | Path | None = None,
    period_s: float = PERIOD_S,
    meters: Sequence[str] | None = None,
) -> TraceBlock:
    """Trace a block of Python that runs PyTorch: joules by module and operation, forward, backward and optimizer.

    ::

        with joulery.trace(model, out="runs/mine") as t:
            for batch in batches:
                train_step(batch)
        print(t.tree(depth=3).at("Net/encoder").energy_j)

    Args:
        model: The model; its modules are named by their path in it. Unnamed modules are named after the class of the
            module that was called first.
        name: Name of the model; its class when not given.
        steps: Steps to record, as :class:`~joulery.domain.trace.tracing.Steps` or
            ``"skip=10,warmup=2,active=5"``; the whole block when not given.
        estimator: ``recency`` or ``regression``.
        calls: Whether to number the repeated calls of one module, for models that share layers.
        zone, carbon: Source of the carbon intensity, as for :func:`joulery.measure`.
        owner: Owner that the run is charged to.
        out: Keep the run in this folder, for ``joulery report``.
        period_s: Time between two readings, seconds.
        meters: Meters to use; those this machine has when not given.

    Raises:
        ConfigError, CapabilityError: An argument is wrong; on entering, PyTorch is not installed.
    """
    from joulery.app.wiring.tracers import open_tracer
    from joulery.domain.trace.tracing import Steps
    from joulery.runtime.tracing.trace_block import WHOLE_BLOCK, TraceBlock
    from joulery.runtime.tracing.traced import Tracing

    schedule = WHOLE_BLOCK if steps is None else Steps.parse(steps) if isinstance(steps, str) else steps
    flags = {"zone": zone, "carbon": str(carbon) if carbon is not None else None}
    given = {key: value for key, value in flags.items() if value is not None}
    settings = Settings(period_s, None if meters is None else _specs(meters))
    return TraceBlock(
        settings,
        Terms("whole", 1.0, given, None),
        open_carbon(given),
        owner,
        Path(out) if out is not None else None,
        Tracing("torch", open_tracer("torch"), schedule, estimator, calls),
        _torch_recorder,
        model,
        name,
    )


def _torch_recorder(folder: Path, steps: Steps) -> BlockRecorder:
    from joulery.adapters.tracers.inject.torch_recorder import TorchRecorder

    return TorchRecorder(folder, **asdict(steps))
