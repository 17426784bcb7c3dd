"""Store and read the carbon intensity of a run, so that a report needs no carbon source and no network.

::

    manifest.json    "carbon": zone, source, signal, scope, quality, issued_at_s
    carbon.parquet   a row a step: start_s, end_s, g_per_kwh (NaN: unknown), estimated
"""

from __future__ import annotations

import numpy as np

from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.store.run.directory import Run, RunWriter


def write_intensity(run: RunWriter, series: CarbonSeries) -> None:
    """Store a series in a run.

    Raises:
        CapabilityError: The disk refuses.
    """
    run.write_series(
        "carbon",
        {
            "start_s": series.edges_s[:-1],
            "end_s": series.edges_s[1:],
            "g_per_kwh": series.g_per_kwh,
            "estimated": series.estimated,
        },
    )
    # Last: until the manifest says so, the run has none.
    run.describe(
        carbon={
            "zone": series.zone,
            "source": series.source,
            "signal": series.signal.value,
            "scope": series.scope.value,
            "quality": series.quality.value,
            "issued_at_s": series.issued_at_s,
        }
    )


def read_intensity(run: Run) -> CarbonSeries | None:
    """The series a run was accounted with; None when it has none.

    Raises:
        DataError: It is damaged.
    """
    label = run.manifest.get("carbon")
    if label is None:
        return None
    columns = run.series("carbon")
    try:
        return CarbonSeries(
            label["zone"],
            np.append(columns["start_s"], columns["end_s"][-1:]),
            columns["g_per_kwh"],
            signal=Signal(label["signal"]),
            scope=Scope(label["scope"]),
            source=label["source"],
            issued_at_s=label["issued_at_s"],
            estimated=columns["estimated"],
            quality=Quality(label["quality"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"carbon: {type(error).__name__} {error}", file=str(run.path)) from error
