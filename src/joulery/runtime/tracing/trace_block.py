"""Trace a block of Python: joules by PyTorch operation, from a sampler process and hooks in this process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from joulery.accounting.operations.edd import Node, tree
from joulery.accounting.operations.rows import rolled_up
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.trace.tracing import Steps
from joulery.runtime.measuring.block import Measurement
from joulery.runtime.measuring.terms import Settings, Terms
from joulery.runtime.tracing.traced import Anatomy, Tracing, trace_folder

if TYPE_CHECKING:
    from joulery.domain.ports import CarbonSource
    from joulery.runtime.measuring.account import Account
    from joulery.store.run.directory import RunWriter
    from joulery.store.run.readings import RunReadings

WHOLE_BLOCK = Steps(skip=0, warmup=0, active=2**62, repeat=1)


class BlockRecorder(Protocol):
    """Records the operations of this process."""

    def install(self) -> None:
        """Add the hooks."""
        ...

    def name(self, module: Any, name: str) -> None:
        """Name a model."""
        ...

    def begin(self) -> None:
        """Start recording now instead of at the first call of a model."""
        ...

    def step(self) -> None:
        """End a step."""
        ...

    def finish(self) -> None:
        """End recording."""
        ...


class TraceBlock(Measurement):
    """A block of Python with recorded PyTorch operations; their energy is known when the block has ended."""

    _keeps_more = True

    def __init__(
        self,
        settings: Settings,
        terms: Terms,
        source: CarbonSource | None,
        owner: str | None,
        out: Path | None,
        tracing: Tracing,
        make_recorder: Callable[[Path, Steps], BlockRecorder],
        model: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(settings, terms, source, owner, out)
        self._tracing = tracing
        self._model = model
        self._name = name
        self._make_recorder = make_recorder
        self._block_recorder: BlockRecorder | None = None
        self._anatomy: Anatomy | None = None

    def __enter__(self) -> Self:
        if importlib.util.find_spec("torch") is None:
            raise CapabilityError(
                "PyTorch is not installed here", resource="torch", grant="pip install 'joulery[torch]'"
            )
        super().__enter__()
        assert self._recorder is not None and self._recorder.writer is not None
        recorder = self._make_recorder(trace_folder(self._recorder.writer, self._tracing), self._tracing.steps)
        recorder.install()
        if self._model is not None:
            recorder.name(self._model, self._name or type(self._model).__name__)
        if self._tracing.steps == WHOLE_BLOCK:
            recorder.begin()
        self._block_recorder = recorder
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._block_recorder is not None:
            self._block_recorder.finish()
        super().__exit__(kind, error, trace)

    def step(self) -> None:
        """End a step. Needed only where neither an optimizer nor the calls of the model mark its end."""
        if self._block_recorder is not None:
            self._block_recorder.step()

    @property
    def operations(self) -> TensorFootprint:
        """Joules by operation.

        Raises:
            ConfigError: The block has not ended, or no operation was recorded (a warning stated the reason).
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
            depth: Truncate names after this number of components.
        """
        return tree(rolled_up(self.operations, by, depth), phase=phase)

    def _traces(self, writer: RunWriter) -> Path | None:
        return self._tracing.folder(writer)

    def _keep_more(self) -> Callable[[RunWriter, Account, RunReadings], None] | None:
        def keep(writer: RunWriter, made: Account, readings: RunReadings) -> None:
            self._anatomy = self._tracing.keep(writer, made, readings)

        return keep
