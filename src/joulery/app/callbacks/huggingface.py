"""Callback for the Hugging Face Trainer that adds joules and grams of steps and epochs to the Trainer's logs."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from joulery.app.callbacks.job_board import MultiNodeEnergy
from joulery.app.callbacks.training_meter import TrainingJobMeter
from joulery.domain.energy.footprint import Footprint


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]  # the package is not there where types are checked
    """Trainer callback that logs the energy, carbon and power of a training run.

    It logs ``joulery/step_energy_j``, ``joulery/epoch_energy_j``, ``joulery/run_energy_j``, grams and watts.

    ::

        trainer = Trainer(...)
        energy = joulery.HuggingFaceCallback(carbon="250 g/kWh").attach(trainer)
        trainer.train()
        print(energy.footprint)

    :meth:`attach` inserts the callback before those of W&B, MLflow and TensorBoard, which then log its figures too.
    Passed as ``Trainer(callbacks=[...])``, it runs after them, and its figures are only in ``state.log_history``.
    Figures of a step are means since the last log (``logging_steps``).

    Args:
        options: As for ``joulery.Meter``.
    """

    def __init__(self, **options: Any) -> None:
        self._meter = TrainingJobMeter(**options)
        self._epoch: dict[str, float] = {}

    @property
    def footprint(self) -> Footprint | None:
        """Energy and carbon of the run on this node; None before its end, and in processes that do not measure."""
        return self._meter.footprint

    @property
    def job(self) -> MultiNodeEnergy | None:
        """Energy of the job on all its nodes; None before the run has ended, and for a job on one node."""
        return self._meter.job

    def attach(self, trainer: Any) -> HuggingFaceCallback:
        """Add this callback to a trainer, before the callbacks that log; return the callback."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the measurement (called by Trainer)."""
        self._meter.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the window of an epoch (called by Trainer)."""
        self._meter.epoch_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count an optimiser step (called by Trainer)."""
        self._meter.step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the window of an epoch; the next log contains its figures (called by Trainer)."""
        self._epoch = self._meter.epoch_ends()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the figures to the logs before they are written (called by Trainer)."""
        if logs is None:
            return
        figures = {**self._meter.metrics(), **self._epoch}
        self._epoch = {}
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the measurement (called by Trainer)."""
        self._meter.end()
