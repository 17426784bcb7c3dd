"""Fetch the present carbon intensity for the exporter in the background: a slow or absent source delays no sample."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import ConfigError, JouleryError

ASK_AGAIN_S = 300.0
HOLD_S = 3600.0
"""Seconds for which the newest value is used after its end, where the source has no newer one."""


class IntensityFeed:
    """The newest intensity of a source.

    Args:
        ask: Returns the source's intensity around a time, Unix seconds.
        now_s: Unix seconds.
        ask_again_s: Seconds between two requests.

    Attributes:
        series: The newest answer; None before one.
    """

    def __init__(
        self, ask: Callable[[float], CarbonSeries], now_s: Callable[[], float], ask_again_s: float = ASK_AGAIN_S
    ) -> None:
        self.series: CarbonSeries | None = None
        self._ask, self._now_s, self._ask_again_s = ask, now_s, ask_again_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._notes: list[str] = []
        self._trouble = ""

    def first(self) -> None:
        """Fetch the intensity once, now.

        Raises:
            ConfigError: The description of the source is wrong; other failures become notes.
        """
        self._refresh(first=True)

    def start(self) -> None:
        """Fetch the intensity repeatedly in the background."""
        self._thread = threading.Thread(target=self._run, name="carbon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop fetching."""
        self._stop.set()

    def at(self, t_s: float) -> float:
        """g/kWh at a time; NaN while unknown. The last value is held for an hour."""
        series = self.series
        if series is None:
            return math.nan
        if t_s >= series.end_s:
            return float(series.g_per_kwh[-1]) if t_s < series.end_s + HOLD_S else math.nan
        return float(series.at(t_s)[0])

    def notes(self) -> list[str]:
        """Notes that no earlier call returned."""
        notes, self._notes = self._notes, []
        return notes

    def _run(self) -> None:
        while not self._stop.wait(self._ask_again_s):
            self._refresh()

    def _refresh(self, *, first: bool = False) -> None:
        try:
            self.series = self._ask(self._now_s())
        except ConfigError:
            if first:
                raise
            return
        except JouleryError as error:
            if not self._trouble:
                self._notes.append(f"the carbon intensity is not known: {error}; joules count on, grams do not")
            self._trouble = str(error)
            return
        if self._trouble:
            self._trouble = ""
            self._notes.append("the carbon intensity is known again")
