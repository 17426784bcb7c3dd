"""Measure a block of Python: joules and grams, read by a sampler in a process of its own.

Modules that are needed only at the end of a block (numpy, the account) are imported while the sampler starts: the first
block of a program waits for the longer of the two, not for both. A block without a run directory keeps nothing and
writes nothing but the sampler's readings.
"""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from joulery.domain.errors import ConfigError
from joulery.runtime.measuring.recorder import RunRecorder
from joulery.runtime.measuring.terms import MeasureWarning, Settings, Terms

if TYPE_CHECKING:
    from joulery.domain.energy.footprint import Footprint
    from joulery.domain.ports import CarbonSource
    from joulery.runtime.measuring.account import Account
    from joulery.store.run.directory import RunWriter
    from joulery.store.run.readings import RunReadings

_ACCOUNT = "joulery.runtime.measuring.account"
"""Charges a block at its end; imports numpy."""


class Measurement:
    """A measured block of Python; its footprint is known when the block has ended.

    Attributes:
        path: Its run directory; None when none was requested.
    """

    _keeps_more = False
    """Whether further results go through a run directory, a temporary one where none was requested."""

    def __init__(
        self, settings: Settings, terms: Terms, source: CarbonSource | None, owner: str | None, out: Path | None
    ) -> None:
        self.path = out
        self._settings = settings
        self._terms = terms
        self._source = source
        self._owner = owner
        self._recorder: RunRecorder | None = None
        self._account: Account | None = None
        self._start_ns = 0
        self._cpu_s = 0.0
        self._scratch: weakref.finalize[[str, int], Self] | None = None
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        folder = self.path
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="joulery-"))
            self._scratch = weakref.finalize(self, _remove, str(folder), self._pid)
        writer = self._run_directory(folder)
        self._recorder = RunRecorder(folder, self._settings, writer)
        try:
            self._recorder.start(
                root=os.getpid(),
                include_root=True,
                threads=None if writer is None else self._traces(writer),
                meanwhile=lambda: importlib.import_module(_ACCOUNT),
            )
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
            keep_more=self._keep_more(),
        )
        self._clean_up()
        for text in recorder.warnings:
            warnings.warn(text, MeasureWarning, stacklevel=2)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __str__(self) -> str:
        return "the block has not ended" if self._account is None else str(self.footprint)

    def _repr_html_(self) -> str:
        return str(self) if self._account is None else self.footprint._repr_html_()

    def _run_directory(self, folder: Path) -> RunWriter | None:
        """Create the run directory; None where nothing is kept."""
        if self.path is None and not self._keeps_more:
            return None
        from joulery.store.run.directory import create_run

        zone, details = self._terms.carbon.get("zone"), {"terms": self._terms.to_dict()}
        return create_run(folder, kind="measure", zone=zone, owner=self._owner, details=details)

    def _clean_up(self) -> None:
        if self._scratch is not None:
            self._scratch()

    def _traces(self, writer: RunWriter) -> Path | None:
        """Folder in which the block records its operations; None where it records none."""
        return None

    def _keep_more(self) -> Callable[[RunWriter, Account, RunReadings], None] | None:
        """A function that keeps further results at the end of the block; None for none."""
        return None

    @property
    def footprint(self) -> Footprint:
        """Footprint of the block.

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
            raise ConfigError(
                "the footprint is known when the block has ended", hint="read it after the with statement"
            )
        return self._account


def _remove(folder: str, pid: int) -> None:
    """Delete the temporary folder of a block; does nothing in a fork of its process."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _cpu_s() -> float:
    """CPU seconds of this process and of the children it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
