"""Hugging Face Trainer: joules and grams of steps and epochs among the logs that Trainer hands to its loggers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from joulery.app.callbacks.job_board import MultiNodeEnergy
from joulery.app.callbacks.training_meter import TrainingJobMeter
from joulery.domain.energy.footprint import Footprint


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]  # the package is not there where types are checked
    """Logs ``joulery/step_energy_j``, ``joulery/epoch_energy_j``, ``joulery/run_energy_j``, grams and watts.

    ::

        trainer = Trainer(...)
        energy = joulery.HuggingFaceCallback(carbon="250 g/kWh").attach(trainer)
        trainer.train()
        print(energy.footprint)

    :meth:`attach` puts it before the callbacks of W&B, MLflow and TensorBoard, which then log its figures too; as
    ``Trainer(callbacks=[...])`` it comes behind them, and its figures are in ``state.log_history`` alone. Figures of a
    step are means since the last log (``logging_steps``).

    Args:
        options: As for ``joulery.Meter``.
    """

    def __init__(self, **options: Any) -> None:
        self._meter = TrainingJobMeter(**options)
        self._epoch: dict[str, float] = {}

    @property
    def footprint(self) -> Footprint | None:
        """The run's cost on this node; None before it has ended, and in processes that do not measure."""
        return self._meter.footprint

    @property
    def job(self) -> MultiNodeEnergy | None:
        """The job's energy on all its nodes; None before the run has ended, and where there is one node."""
        return self._meter.job

    def attach(self, trainer: Any) -> HuggingFaceCallback:
        """Add it to a trainer, before the callbacks that log; itself."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer: training begins."""
        self._meter.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer: an epoch begins."""
        self._meter.epoch_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer: an optimiser step has ended."""
        self._meter.step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer: an epoch has ended; its figures are in the next log."""
        self._epoch = self._meter.epoch_ends()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Trainer: logs are about to be written."""
        if logs is None:
            return
        figures = {**self._meter.metrics(), **self._epoch}
        self._epoch = {}
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer: training has ended."""
        self._meter.end()
