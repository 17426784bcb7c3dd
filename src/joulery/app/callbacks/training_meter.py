"""Joules and grams of a training run by step and epoch, for the callbacks of any framework.

One process of a node measures: the one of local rank 0, for all processes that its launcher (torchrun) started. In a
job on several nodes each node reports its totals to the first, which logs those of the job beside its own. An error of
the measurement never ends a training run: it is a warning, and the metrics are left out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from joulery.app.callbacks.job_board import JobBoard, MultiNodeEnergy, in_ray, open_board
from joulery.app.windows import MachineMeter
from joulery.domain.energy.footprint import Footprint
from joulery.domain.errors import JouleryError
from joulery.runtime.measuring.job_place import job_place
from joulery.runtime.measuring.terms import MeasureWarning

RUN, EPOCH, STEPS = "joulery run", "joulery epoch", "joulery steps"


def measures_here(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process measures for its node: the only one, or that of local rank 0 (torchrun, Ray, srun)."""
    rank = environment.get("LOCAL_RANK", "")
    return rank == "0" if rank else job_place(environment).task == 0


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started several processes on this node, and nothing else (torchrun, srun; not Ray)."""
    if not environment.get("LOCAL_RANK"):
        return job_place(environment).tasks > 1
    size = environment.get("LOCAL_WORLD_SIZE", "1")
    return size.isdigit() and int(size) > 1 and not in_ray(environment)


class TrainingMeter:
    """Measures one training run: the run, its epochs and its steps.

    Args:
        options: Keyword arguments of ``joulery.Meter``.
        open_meter: Makes the meter.
        here: Whether this process measures.
        board: Opens the board of a job on several nodes; None for a job on one.
        joins: Whether processes that do not measure join the board too; None: only under Ray Train.

    Attributes:
        footprint: Energy and carbon of the run on this node; None before its end, and in processes that do not measure.
        job: Energy of the job on all its nodes; None before the run has ended, and for a job on one node.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        open_meter: Callable[..., MachineMeter] = MachineMeter,
        *,
        here: bool = True,
        board: Callable[[], JobBoard | None] = lambda: open_board(os.environ),
        joins: bool | None = None,
    ) -> None:
        self.footprint: Footprint | None = None
        self.job: MultiNodeEnergy | None = None
        self._joins = in_ray(os.environ) if joins is None else joins
        self._open_board = board
        self._board: JobBoard | None = None
        self._options, self._open_meter, self._here = dict(options), open_meter, here
        self._meter: MachineMeter | None = None
        self._steps = 0
        self._epoch: Footprint | None = None

    def begin(self) -> None:
        """Start the measurement of the run."""
        if self._here and self._meter is None:
            self._guarded(self._begin)
        elif not self._here and self._joins and self._board is None:
            self._board = self._open_board()  # which joins it

    def step(self) -> None:
        """Count a step that has ended."""
        self._steps += 1

    def epoch_begins(self) -> None:
        """Start the window of an epoch."""
        meter = self._meter
        if meter is not None and EPOCH not in meter.open_windows:
            self._guarded(lambda: meter.begin_window(EPOCH, sync=False))

    def epoch_ends(self) -> dict[str, float]:
        """End the window of an epoch and return its metrics; empty where this process does not measure."""
        meter = self._meter
        if meter is None or EPOCH not in meter.open_windows:
            return {}
        self._epoch = self._guarded(lambda: meter.end_window(EPOCH, sync=True))
        return {} if self._epoch is None else _metrics(self._epoch, "epoch")

    def metrics(self) -> dict[str, float]:
        """Metrics of the mean step since the last call, and of the run; empty where this process does not measure."""
        meter = self._meter
        if meter is None or STEPS not in meter.open_windows:
            return {}
        spent = self._guarded(lambda: meter.end_window(STEPS, sync=True))
        self._guarded(lambda: meter.begin_window(STEPS, sync=False))
        so_far = self._guarded(lambda: meter.read(RUN))
        steps, self._steps = self._steps, 0
        found: dict[str, float] = {} if so_far is None else {**_metrics(so_far, "run"), **self._job_metrics(so_far)}
        if spent is not None and steps:
            found |= _metrics(spent.portion(1.0 / steps), "step")
            if spent.duration_s > 0:
                found["joulery/power_w"] = spent.energy_j / spent.duration_s
        return found

    def end(self) -> None:
        """End the measurement, whether the run succeeded or failed. Safe to call twice."""
        meter, self._meter = self._meter, None
        if meter is None:
            return
        if RUN in meter.open_windows:
            self.footprint = self._guarded(lambda: meter.end_window(RUN, sync=True))
        meter.close()
        if self._board is not None and self.footprint is not None:
            self._board.put(self.footprint.energy_j, _carbon_g(self.footprint), final=True)
            self.job = self._board.last() if self._board.node == 0 else self._board.job()

    def _begin(self) -> None:
        self._board = self._open_board()
        options = dict(self._options)
        if self._board is not None and self._joins:
            options["processes"] = self._board.pids
        self._meter = meter = self._open_meter(**options)
        for name in (RUN, STEPS):
            meter.begin_window(name, sync=True)

    def _job_metrics(self, so_far: Footprint) -> dict[str, float]:
        """Metrics of the job; its energy only once every node has reported. Empty for a job on one node."""
        if self._board is None:
            return {}
        self._board.put(so_far.energy_j, _carbon_g(so_far))
        job = self._board.job()
        if job is None:
            return {}
        found = {"joulery/job_nodes_reported": float(job.reported)}
        if job.reported == job.nodes:
            found["joulery/job_energy_j"] = job.energy_j
            if job.carbon_g is not None:
                found["joulery/job_carbon_g"] = job.carbon_g
        return found

    def _guarded(self, act: Callable[[], Any]) -> Any:
        """Call ``act``; return None and warn where joulery raises an error."""
        try:
            return act()
        except JouleryError as error:
            warnings.warn(f"training is not measured: {error}", MeasureWarning, stacklevel=3)
            return None


class TrainingJobMeter(TrainingMeter):
    """Measures a custom training loop, in a job of any number of processes and nodes.

    ::

        with joulery.TrainingJobMeter(carbon="250 g/kWh") as energy:
            for batch in batches:
                train_step(batch)
                energy.step()
        print(energy.footprint, energy.job)

    Enter it in every process of the job (torchrun, Ray Train, srun): one process of each node measures, and the first
    node has the total of all nodes. :meth:`metrics` returns the figures of the steps since its last call, for any
    logger.

    Args:
        options: As for ``joulery.Meter``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__({**options, "launcher": launched()}, here=measures_here())

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _metrics(footprint: Footprint, of: str) -> dict[str, float]:
    """Joules, and grams where the intensity is known, under the names of loggers."""
    found = {f"joulery/{of}_energy_j": footprint.energy_j}
    if (carbon_g := _carbon_g(footprint)) is not None:
        found[f"joulery/{of}_carbon_g"] = carbon_g
    return found


def _carbon_g(footprint: Footprint) -> float | None:
    """Grams of a footprint; None unless the intensity of all its joules is known."""
    known = footprint.carbon_g is not None and footprint.carbon_coverage_ratio == 1
    return footprint.carbon_g if known else None
