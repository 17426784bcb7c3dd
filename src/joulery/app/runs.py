"""Read recorded runs and traces back, with the tracers and carbon sources that their manifests name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from joulery.app.measuring import open_carbon
from joulery.app.wiring.tracers import open_tracer
from joulery.runtime.runs import recorded
from joulery.runtime.runs.recorded import RunView

if TYPE_CHECKING:
    from joulery.accounting.align import Estimator
    from joulery.domain.ports import CarbonSource
    from joulery.runtime.tracing.anatomies import RunAnatomy
    from joulery.runtime.tracing.anatomy import Accounted, AccountSettings
    from joulery.runtime.tracing.traced import RunOpeners


def load_run(path: str | Path, *, with_timeline: bool = False, carbon: CarbonSource | None = None) -> RunView:
    """Load a run to report it (:func:`joulery.runtime.runs.recorded.load_run`)."""
    return recorded.load_run(path, open_carbon=open_carbon, with_timeline=with_timeline, carbon=carbon)


def load_anatomies(paths: Sequence[str | Path]) -> list[RunAnatomy]:
    """Load traced runs (:func:`joulery.runtime.tracing.anatomies.load_anatomies`)."""
    from joulery.runtime.tracing import anatomies

    return anatomies.load_anatomies(paths, run_openers())


def account_run(path: Path, estimator: Estimator | None = None) -> Accounted:
    """Account a traced run (:func:`joulery.runtime.tracing.anatomy.account_run`)."""
    from joulery.runtime.tracing import anatomy

    return anatomy.account_run(path, run_openers(), estimator)


def account_files(events: Path, power: Path, settings: AccountSettings) -> Accounted:
    """Account a recorded trace with recorded power.

    A reading of power stands until the next one, however long that takes; the last one for two sampling periods.

    Raises:
        DataError: A file cannot be used, the two have no moment in common, or the window is empty.
    """
    from joulery.adapters.tracers.files import read_events
    from joulery.adapters.tracers.tables import read_power_table
    from joulery.domain.energy.power import PowerTrace
    from joulery.runtime.tracing.anatomy import account_trace

    traces = read_power_table(power, period_s=settings.period_s)
    if settings.offset_ns:
        traces = [PowerTrace(t.channel, t.t_ns + settings.offset_ns, t.values, t.period_s) for t in traces]
    return account_trace(read_events(events, settings.form, settings.hlo), traces, settings)


def run_openers() -> RunOpeners:
    """Opens tracers and carbon sources by the names in a manifest."""
    from joulery.runtime.tracing.traced import RunOpeners

    return RunOpeners(open_tracer, open_carbon)
