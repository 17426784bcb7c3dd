"""Record a run with a sampler, from the first reading to the report, with a run directory or without.

Trouble with measuring is collected as warnings and never raised while something is being measured.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from joulery.domain.errors import JouleryError
from joulery.runtime.measuring.sampler_config import SamplerConfig
from joulery.runtime.measuring.sampling import SamplerProcess
from joulery.runtime.measuring.terms import Settings, Span, Terms
from joulery.store.files import disk_errors
from joulery.store.run.samples import SAMPLES

if TYPE_CHECKING:
    from joulery.domain.ports import CarbonSource
    from joulery.runtime.measuring.account import Account
    from joulery.store.run.directory import RunWriter
    from joulery.store.run.readings import RunReadings

NS_PER_S = 1_000_000_000


class RunRecorder:
    """Records one run: its sampler, its warnings, its report.

    Args:
        folder: Where the sampler writes: the run directory, or a temporary folder where nothing is kept.
        settings: How to measure.
        writer: The run directory; None keeps nothing.

    Attributes:
        writer: The run directory; None where nothing is kept.
        warnings: Problems of measuring so far, one sentence each.
    """

    def __init__(self, folder: Path, settings: Settings, writer: RunWriter | None = None) -> None:
        self.writer = writer
        self._samples = folder / SAMPLES
        self.warnings: list[str] = []
        self._settings = settings
        self._sampler: SamplerProcess | None = None
        self._unix_offset_ns = time.time_ns() - time.monotonic_ns()

    @property
    def sampler_pid(self) -> int | None:
        """Process id of the sampler; None when there is none."""
        return self._sampler.pid if self._sampler is not None else None

    def start(
        self,
        *,
        root: int,
        include_root: bool,
        group: tuple[str, bool] | None = None,
        threads: Path | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the sampler; every meter was read once when this returns.

        Args:
            root: Root of the process tree that is the run.
            include_root: Whether the root's own CPU time is the run's.
            group: Control group of the run, and whether it counts CPU by CPU.
            threads: Folder of a traced program, whose threads are read while it records; None for none.
            meanwhile: Called while the sampler starts.

        Raises:
            JouleryError: A meter that was named cannot be read.
        """
        config = SamplerConfig(
            folder=str(self._samples.absolute()),
            parent=os.getpid(),
            root=root,
            include_root=include_root,
            period_s=self._settings.period_s,
            max_cpu_ratio=self._settings.max_cpu_ratio,
            meters=self._settings.meters,
            group=group,
            threads=None if threads is None else str(threads.absolute()),
        )
        try:
            with disk_errors(self._samples):
                self._samples.mkdir()
            self._sampler = SamplerProcess.start(config)
            meanwhile()
            self._sampler.wait_ready()
        except JouleryError as error:
            if self._settings.meters is not None:
                self.abandon()
                raise
            self.warn(f"nothing may be measured: {_sentence(error)}")

    def begin(self, at_ns: int, pid: int | None = None) -> None:
        """Log the start of the run, at monotonic nanoseconds."""
        self._log("started", monotonic_ns=at_ns, t_s=(at_ns + self._unix_offset_ns) / NS_PER_S, pid=pid)

    def finish(
        self,
        start_ns: int,
        end_ns: int,
        *,
        cpu_s: float,
        exit_code: int | None,
        terms: Terms,
        source: CarbonSource | None,
        keep_more: Callable[[RunWriter, Account, RunReadings], object] | None = None,
    ) -> Account:
        """Take a last reading, charge the run, and save and close its run directory where there is one.

        Args:
            start_ns, end_ns: Start and end of the run, monotonic nanoseconds.
            cpu_s: CPU seconds of the run as the system reports them.
            exit_code: Of the command; None where there was none.
            terms: Terms of the charge.
            source: Source of carbon intensity; None for no grams.
            keep_more: Keeps further results; called once the readings are kept.
        """
        from joulery.runtime.measuring.account import account
        from joulery.store.run.readings import RunReadings, read_samples

        self._log("ended", monotonic_ns=end_ns, cpu_s=cpu_s, exit_code=exit_code)
        if self._sampler is not None:
            try:
                self._sampler.stop()
            except JouleryError as error:
                self.warn(f"not all of the run was measured: {_sentence(error)}")
        readings = RunReadings()
        self._report_errors()
        try:
            readings = read_samples(self._samples)
        except JouleryError as error:
            self.warn(f"what was measured cannot be read: {_sentence(error)}")
        span = Span(start_ns, end_ns, self._unix_offset_ns, cpu_s, exit_code)
        made = account(readings, span, terms, source, tuple(self.warnings))
        if self.writer is not None:
            self._keep(self.writer, made, readings, keep_more)
        return made

    def _keep(
        self,
        writer: RunWriter,
        made: Account,
        readings: RunReadings,
        keep_more: Callable[[RunWriter, Account, RunReadings], object] | None,
    ) -> None:
        """Write the readings and the report into the run directory, and close it."""
        from joulery.store.run.intensity import write_intensity
        from joulery.store.run.readings import save_readings

        try:
            save_readings(readings, writer)
            if made.basis.carbon is not None:
                write_intensity(writer, made.basis.carbon)
            if keep_more is not None:
                self._keep_more(keep_more, writer, made, readings)
            writer.write_report(made.report)
            shutil.rmtree(self._samples, ignore_errors=True)
            writer.close()
        except JouleryError as error:
            self.warn(f"the run is not kept whole: {_sentence(error)}")

    def _report_errors(self) -> None:
        """Report the sampler's standard error, which is empty unless the sampler has a defect."""
        with suppress(OSError):  # no sampler was started
            error_output = (self._samples / "sampler.err").read_text(errors="replace").strip()
            if error_output:
                self._log("sampler", text=error_output)
                self.warn(f"the sampler failed: {error_output.splitlines()[-1]}")

    def _keep_more(
        self,
        keep: Callable[[RunWriter, Account, RunReadings], object],
        writer: RunWriter,
        made: Account,
        readings: RunReadings,
    ) -> None:
        try:
            keep(writer, made, readings)
        except JouleryError as error:
            self.warn(_sentence(error))

    def abandon(self) -> None:
        """Stop the sampler and delete the run, which never began."""
        if self._sampler is not None:
            try:
                self._sampler.stop(timeout_s=1.0)
            except JouleryError as error:
                self.warnings.append(_sentence(error))
        try:
            if self.writer is not None:
                self.writer.discard()
        except JouleryError as error:
            self.warnings.append(_sentence(error))

    def warn(self, text: str) -> None:
        """Collect a warning and, where possible, log it."""
        self.warnings.append(text)
        self._log("warning", text=text)

    def _log(self, kind: str, *, t_s: float | None = None, **fields: int | float | str | None) -> None:
        if self.writer is None:
            return
        try:
            self.writer.log(kind, t_s=t_s, **fields)
        except JouleryError as error:
            self.warnings.append(_sentence(error))


def _sentence(error: JouleryError) -> str:
    return f"{error}; {error.hint}" if error.hint else str(error)
