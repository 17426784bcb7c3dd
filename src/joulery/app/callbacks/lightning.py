"""Lightning: joules and grams of steps and epochs, written to the loggers of the trainer."""

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
    """Logs ``joulery/step_energy_j``, ``joulery/epoch_energy_j``, ``joulery/run_energy_j``, grams and watts.

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
        """The run's cost on this node; None before it has ended, and in processes that do not measure."""
        return self._meter.footprint

    @property
    def job(self) -> MultiNodeEnergy | None:
        """The job's energy on all its nodes; None before the run has ended, and where there is one node."""
        return self._meter.job

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: training begins."""
        self._meter.begin()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: an epoch begins."""
        self._meter.epoch_begins()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Lightning: a batch was trained on."""
        self._meter.step()
        if (batch_idx + 1) % max(1, trainer.log_every_n_steps) == 0:
            self._log(trainer, self._meter.metrics())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: an epoch has ended."""
        self._log(trainer, self._meter.epoch_ends())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: training has ended."""
        self._meter.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning: training was interrupted."""
        self._meter.end()

    def _log(self, trainer: Any, figures: dict[str, float]) -> None:
        if figures and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)
