"""Callback for Lightning that writes joules and grams of steps and epochs to the loggers of the trainer."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from joulery.app.callbacks.job_board import MultiNodeEnergy
from joulery.app.callbacks.training_meter import TrainingJobMeter
from joulery.domain.energy.footprint import Footprint

_OLD = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_Callback: Any = importlib.import_module("pytorch_lightning" if _OLD else "lightning.pytorch").Callback


class LightningCallback(_Callback):  # type: ignore[misc]  # the package is not there where types are checked
    """Lightning callback that logs the energy, carbon and power of a training run.

    It logs ``joulery/step_energy_j``, ``joulery/epoch_energy_j``, ``joulery/run_energy_j``, grams and watts.

    ::

        energy = joulery.LightningCallback(carbon="250 g/kWh")
        Trainer(callbacks=[energy], logger=...).fit(model)
        print(energy.footprint)

    Figures of a step are means since the last log (``log_every_n_steps``). Validation counts as part of its epoch.

    Args:
        options: As for ``joulery.Meter``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._meter = TrainingJobMeter(**options)

    @property
    def footprint(self) -> Footprint | None:
        """Energy and carbon of the run on this node; None before its end, and in processes that do not measure."""
        return self._meter.footprint

    @property
    def job(self) -> MultiNodeEnergy | None:
        """Energy of the job on all its nodes; None before the run has ended, and for a job on one node."""
        return self._meter.job

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the measurement (called by Lightning)."""
        self._meter.begin()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the window of an epoch (called by Lightning)."""
        self._meter.epoch_begins()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a trained batch; log the figures every ``log_every_n_steps`` batches (called by Lightning)."""
        self._meter.step()
        if (batch_idx + 1) % max(1, trainer.log_every_n_steps) == 0:
            self._log(trainer, self._meter.metrics())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the window of an epoch and log its figures (called by Lightning)."""
        self._log(trainer, self._meter.epoch_ends())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the measurement (called by Lightning)."""
        self._meter.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the measurement of an interrupted training run (called by Lightning)."""
        self._meter.end()

    def _log(self, trainer: Any, figures: dict[str, float]) -> None:
        if figures and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)
