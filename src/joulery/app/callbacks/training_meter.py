"""Joules and grams of a training run by step and epoch, for the callbacks of any framework.

One process of a node measures: the one of local rank 0, for all processes that its launcher (torchrun) started. Nothing
here ever ends a training run: what fails is warned of, and the metrics stay out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from joulery.app.windows import MachineMeter
from joulery.domain.energy.footprint import Footprint
from joulery.domain.errors import JouleryError
from joulery.runtime.measuring.measure import MeasureWarning

RUN, EPOCH, STEPS = "joulery run", "joulery epoch", "joulery steps"


def measures_here(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process measures for its node: the only one, or that of local rank 0."""
    return environment.get("LOCAL_RANK", "0") in ("", "0")


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started several processes on this node."""
    size = environment.get("LOCAL_WORLD_SIZE", "1")
    return size.isdigit() and int(size) > 1


class TrainingMeter:
    """Windows of one training run.

    Args:
        options: Keyword arguments of ``joulery.Meter``.
        open_meter: Makes the meter.

    Attributes:
        footprint: What the run cost; None before it has ended, and in processes that do not measure.
    """

    def __init__(
        self, options: Mapping[str, Any], open_meter: Callable[..., MachineMeter] = MachineMeter, *, here: bool = True
    ) -> None:
        self.footprint: Footprint | None = None
        self._options, self._open_meter, self._here = dict(options), open_meter, here
        self._meter: MachineMeter | None = None
        self._steps = 0
        self._epoch: Footprint | None = None

    def begin(self) -> None:
        """The run begins."""
        if self._here and self._meter is None:
            self._guarded(self._begin)

    def step(self) -> None:
        """A step has ended."""
        self._steps += 1

    def epoch_begins(self) -> None:
        """An epoch begins."""
        meter = self._meter
        if meter is not None and EPOCH not in meter.open_windows:
            self._guarded(lambda: meter.begin_window(EPOCH, sync=False))

    def epoch_ends(self) -> dict[str, float]:
        """An epoch has ended; its metrics, empty where nothing measures."""
        meter = self._meter
        if meter is None or EPOCH not in meter.open_windows:
            return {}
        self._epoch = self._guarded(lambda: meter.end_window(EPOCH, sync=True))
        return {} if self._epoch is None else _metrics(self._epoch, "epoch")

    def metrics(self) -> dict[str, float]:
        """Metrics of a step since the last call, and of the run so far; empty where nothing measures."""
        meter = self._meter
        if meter is None or STEPS not in meter.open_windows:
            return {}
        spent = self._guarded(lambda: meter.end_window(STEPS, sync=True))
        self._guarded(lambda: meter.begin_window(STEPS, sync=False))
        so_far = self._guarded(lambda: meter.read(RUN))
        steps, self._steps = self._steps, 0
        found: dict[str, float] = {} if so_far is None else _metrics(so_far, "run")
        if spent is not None and steps:
            found |= _metrics(spent.portion(1.0 / steps), "step")
            if spent.duration_s > 0:
                found["joulery/power_w"] = spent.energy_j / spent.duration_s
        return found

    def end(self) -> None:
        """The run has ended, well or not. Safe to call twice."""
        meter, self._meter = self._meter, None
        if meter is None:
            return
        if RUN in meter.open_windows:
            self.footprint = self._guarded(lambda: meter.end_window(RUN, sync=True))
        meter.close()

    def _begin(self) -> None:
        self._meter = meter = self._open_meter(**self._options)
        for name in (RUN, STEPS):
            meter.begin_window(name, sync=True)

    def _guarded(self, act: Callable[[], Any]) -> Any:
        """Do it; None and a warning where joulery cannot."""
        try:
            return act()
        except JouleryError as error:
            warnings.warn(f"training is not measured: {error}", MeasureWarning, stacklevel=3)
            return None


def _metrics(footprint: Footprint, of: str) -> dict[str, float]:
    """Joules, and grams where the intensity is known, under the names of loggers."""
    found = {f"joulery/{of}_energy_j": footprint.energy_j}
    if footprint.carbon_g is not None and footprint.carbon_coverage_ratio == 1:
        found[f"joulery/{of}_carbon_g"] = footprint.carbon_g
    return found
