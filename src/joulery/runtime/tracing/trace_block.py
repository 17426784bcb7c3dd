"""Trace a block of Python: joules of its PyTorch operations, with the sampler outside and the hooks inside."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from joulery.accounting.align import Estimator
from joulery.accounting.edd import Node, tree
from joulery.accounting.rows import rolled_up
from joulery.app.wiring.meters import parse_meter
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.trace.tracing import Steps
from joulery.runtime.measuring.measure import Measurement
from joulery.runtime.measuring.terms import PERIOD_S, Settings, Terms, source_of
from joulery.runtime.tracing.traced import Anatomy, Tracing, keep_anatomy, trace_folder

if TYPE_CHECKING:
    from joulery.domain.ports import CarbonSource
    from joulery.runtime.measuring.account import Account
    from joulery.runtime.measuring.readings import RunReadings
    from joulery.store.run.directory import RunWriter

_WHOLE_BLOCK = Steps(skip=0, warmup=0, active=2**62, repeat=1)


class Trace(Measurement):
    """A block of Python whose PyTorch operations are recorded, and afterwards what they cost."""

    def __init__(
        self,
        settings: Settings,
        terms: Terms,
        source: CarbonSource | None,
        owner: str | None,
        out: Path | None,
        tracing: Tracing,
        model: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(settings, terms, source, owner, out)
        self._tracing = tracing
        self._model = model
        self._name = name
        self._tensors: Any = None
        self._anatomy: Anatomy | None = None

    def __enter__(self) -> Self:
        if importlib.util.find_spec("torch") is None:
            raise CapabilityError(
                "PyTorch is not installed here", resource="torch", grant="pip install 'joulery[torch]'"
            )
        from joulery.adapters.tracers.inject.torch_recorder import Recorder

        super().__enter__()
        assert self._recorder is not None
        recorder = Recorder(trace_folder(self._recorder.writer, self._tracing), **asdict(self._tracing.steps))
        recorder.install()
        if self._model is not None:
            recorder.name(self._model, self._name or type(self._model).__name__)
        if self._tracing.steps == _WHOLE_BLOCK:
            recorder.begin()
        self._tensors = recorder
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors.finish()
        super().__exit__(kind, error, trace)

    def step(self) -> None:
        """End a step. Needed only where neither an optimizer nor the calls of the model tell where one ends."""
        self._tensors.step()

    @property
    def operations(self) -> TensorFootprint:
        """Joules by operation.

        Raises:
            ConfigError: The block has not ended, or nothing of it was recorded (a warning said why).
        """
        if self._anatomy is None:
            raise ConfigError(
                "no operation was recorded" if self._account is not None else "the block has not ended",
                hint="read it after the with statement; call the model inside it",
            )
        return self._anatomy.footprint

    def tree(self, *, phase: str | None = None, by: str = "op", depth: int | None = None) -> Node:
        """The energy dependency diagram.

        Args:
            phase: ``forward``, ``backward`` ...; all of them when not given.
            by: ``op``, ``module`` or ``layer``.
            depth: Cut names after so many components.
        """
        return tree(rolled_up(self.operations, by, depth), phase=phase)

    def _more(self) -> Callable[[RunWriter, Account, RunReadings], None] | None:
        def keep(writer: RunWriter, made: Account, evidence: RunReadings) -> None:
            self._anatomy = keep_anatomy(writer, self._tracing, made.basis, evidence.offset_ns)

        return keep


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
) -> Trace:
    """Trace a block of Python that runs PyTorch: joules by module and operation, forward, backward and optimizer.

    ::

        with joulery.trace(model, out="runs/mine") as t:
            for batch in batches:
                train_step(batch)
        print(t.tree(depth=3).at("Net/encoder").energy_j)

    Args:
        model: The model; its modules are named by their place in it. Modules called without being named are named
            after the class of the one that was called first.
        name: Name of the model; its class when not given.
        steps: Which steps to record, as :class:`~joulery.domain.trace.tracing.Steps` or
        ``"skip=10,warmup=2,active=5"``; the
            whole block when not given.
        estimator: ``recency`` or ``regression``.
        calls: Number repeated calls of one module, for models that share layers.
        zone, carbon: Where the carbon intensity comes from, as for :func:`joulery.measure`.
        owner: Who pays.
        out: Keep the run in this folder, for ``joulery report``.
        period_s: Time between two readings, seconds.
        meters: Meters to use; those this machine has when not given.

    Raises:
        ConfigError, CapabilityError: An argument is wrong; on entering, PyTorch is not installed.
    """
    schedule = _WHOLE_BLOCK if steps is None else Steps.parse(steps) if isinstance(steps, str) else steps
    flags = {"zone": zone, "carbon": str(carbon) if carbon is not None else None}
    given = {key: value for key, value in flags.items() if value is not None}
    settings = Settings(period_s, None if meters is None else tuple(parse_meter(text) for text in meters))
    return Trace(
        settings,
        Terms("whole", 1.0, given, None),
        source_of(given),
        owner,
        Path(out) if out is not None else None,
        Tracing("torch", schedule, estimator, calls),
        model,
        name,
    )
