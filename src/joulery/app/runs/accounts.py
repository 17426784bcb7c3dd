"""Account a traced run or recorded files, with the tracers and carbon sources that they name."""

from __future__ import annotations

from pathlib import Path

from joulery.accounting.operations.align import Estimator
from joulery.app.measuring import open_carbon
from joulery.app.wiring.tracers import open_tracer
from joulery.domain.energy.power import PowerTrace
from joulery.runtime.tracing import anatomy
from joulery.runtime.tracing.anatomy import Accounted
from joulery.runtime.tracing.anatomy import AccountSettings as AccountSettings
from joulery.runtime.tracing.anatomy import keep as keep
from joulery.runtime.tracing.traced import RunOpeners


def account_run(path: Path, estimator: Estimator | None = None) -> Accounted:
    """Account a traced run (:func:`joulery.runtime.tracing.anatomy.account_traced`)."""
    return anatomy.account_traced(path, run_openers(), estimator)


def account_files(events: Path, power: Path, settings: AccountSettings) -> Accounted:
    """Account a recorded trace with recorded power.

    A reading of power holds until the next one, however long that takes; the last one for two sampling periods.

    Raises:
        DataError: A file cannot be used, the two files do not overlap in time, or the window is empty.
    """
    from joulery.adapters.tracers.files import read_events
    from joulery.adapters.tracers.tables import read_power_table

    traces = read_power_table(power, period_s=settings.period_s)
    if settings.offset_ns:
        traces = [PowerTrace(t.channel, t.t_ns + settings.offset_ns, t.values, t.period_s) for t in traces]
    return anatomy.account_trace(read_events(events, settings.form, settings.hlo), traces, settings)


def run_openers() -> RunOpeners:
    """Functions that open tracers and carbon sources by the names in a manifest."""
    return RunOpeners(open_tracer, open_carbon)
