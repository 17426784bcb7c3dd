"""Energy of named windows, measured with the meters and carbon sources of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from joulery.app.wiring.meters import open_meters, parse_meter
from joulery.app.wiring.share import open_busy, open_tree
from joulery.domain.errors import CapabilityError
from joulery.runtime.measuring.share import JoinedTrees, TreeReader
from joulery.runtime.measuring.windows import NamedWindow as NamedWindow
from joulery.runtime.measuring.windows import WindowMeter, WindowReaders

if TYPE_CHECKING:
    from joulery.domain.ports import CarbonSource


class MachineMeter(WindowMeter):
    """Measures the energy of named windows of this program; its public name is ``joulery.Meter``.

    ::

        meter = joulery.Meter(carbon="250 g/kWh")
        meter.begin_window("epoch")
        train()
        print(meter.end_window("epoch"))

    Windows may be nested or overlap; :meth:`read` returns the footprint of an open one so far. A window includes the
    energy of this program and of the processes that it starts, and the idle energy of the machine: in a run of
    several processes, use the meter in only one of them.

    Args:
        zone: Grid zone of the intensity, looked up when a window ends: ``GB``, ``typical:FR``, ``electricity-maps:DE``.
        carbon: A CSV or Parquet file with the intensity, or a stated one such as ``"250 g/kWh"``.
        column, time_column, timezone, scope, fill: How the file is read, as on the command line.
        idle: Part of the machine's idle energy that is charged to a window: ``whole`` or ``none``.
        pue: Facility energy per IT energy.
        meters: Meters to use, as on the command line (``["rapl", "nvml"]``); those this machine has when not given.
        launcher: Whether to include the parent of this process and all processes that it started (torchrun): one
            process of a node measures for all.
        processes: Returns the ids of further processes to include, with all that they start (the workers of a Ray job
            beside this one); called repeatedly while the program runs.

    Raises:
        ConfigError, DataError: An argument is wrong, or the file cannot be used.
        CapabilityError: No meter answers, a named one does not, or credentials are missing.
    """

    def __init__(
        self,
        *,
        zone: str | None = None,
        carbon: str | Path | None = None,
        column: str | None = None,
        time_column: str | None = None,
        timezone: str | None = None,
        scope: str | None = None,
        fill: str | None = None,
        idle: str = "whole",
        pue: float = 1.0,
        meters: Sequence[str] | None = None,
        launcher: bool = False,
        processes: Callable[[], Collection[int]] | None = None,
    ) -> None:
        how = {"column": column, "time_column": time_column, "timezone": timezone, "scope": scope, "fill": fill}
        given = {name: value for name, value in {"zone": zone, **how}.items() if value is not None}
        if carbon is not None:
            given["carbon"] = str(carbon)
        source = _carbon(given)
        opened = open_meters(None if meters is None else [parse_meter(text) for text in meters])
        if not opened.meters:
            raise CapabilityError(
                "no meter answers here", hint="joulery doctor lists what can be read here, and how to grant the rest"
            )
        busy = open_busy()

        def tree_of(root: int) -> TreeReader:
            return open_tree(root, include_root=True, exclude=frozenset(), sockets=busy.sockets, group=None)

        root = os.getppid() if launcher else os.getpid()
        tree = tree_of(root) if processes is None else JoinedTrees(lambda: {root, *processes()}, tree_of)
        readers = WindowReaders(opened.meters, busy, tree)
        try:
            super().__init__(readers, source, idle=idle, pue=pue)
        except BaseException:
            readers.close()
            raise
        self._warn([f"{refused}; {refused.hint}" if refused.hint else str(refused) for refused in opened.refused])


def _carbon(flags: Mapping[str, str]) -> CarbonSource | None:
    """Open the carbon source that the flags describe; without flags, return None and import nothing."""
    if not flags:
        return None
    from joulery.app.measuring import open_carbon

    return open_carbon(flags)


Meter = MachineMeter
"""Public name of the class, as ``joulery.Meter``."""
