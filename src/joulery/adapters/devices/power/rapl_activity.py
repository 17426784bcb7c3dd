"""Counter of the energy of the CPUs, from RAPL; the kernel provides no count of their work."""

from __future__ import annotations

import math
from pathlib import Path

from joulery.adapters.meters.rapl import POWERCAP, open_rapl


class RaplActivity:
    """Counter of the energy of all RAPL channels of this machine.

    Args:
        root: The powercap folder.

    Raises:
        CapabilityError: There are no counters, or they may not be read.
    """

    def __init__(self, root: str | None = None) -> None:
        self._meter = open_rapl(POWERCAP if root is None else Path(root))
        self._last = self._meter.read()
        self._energy_j = 0.0

    def read(self, now_s: float) -> tuple[float, float]:
        """Energy, J, since this object was created, NaN while a counter cannot be read; NaN for busy cycles.

        Args:
            now_s: Not used: the counters are cumulative.
        """
        values = self._meter.read()
        if any(map(math.isnan, values)):
            return math.nan, math.nan
        for channel, before, now in zip(self._meter.channels, self._last, values, strict=True):
            if not math.isnan(before):
                self._energy_j += now - before if now >= before else now - before + channel.wrap_j
        self._last = values
        return self._energy_j, math.nan

    def close(self) -> None:
        """Release the counters."""
        self._meter.close()
