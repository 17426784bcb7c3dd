"""Which calls of models are evaluation steps, in a program that trains.

A call in evaluation mode of the model that is trained, without gradients; with them too, if the model is trained in
training mode. Calls in training mode (rollouts), of frozen models (teachers) and of others called once a step are none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from joulery.adapters.tracers.inject.optimizer_turns import OptimizerTurns


class Evaluations:
    """Counts evaluation steps between the steps of the optimizer.

    Args:
        optimizers: The optimizers of the program.
        is_grad_enabled: Whether gradients are recorded now.

    Attributes:
        running: Evaluation steps since the optimizer stepped last.
        before: Calls in evaluation mode, with gradients, before the first step of an optimizer.
    """

    def __init__(self, optimizers: OptimizerTurns, is_grad_enabled: Callable[[], bool]) -> None:
        self._optimizers, self._is_grad_enabled = optimizers, is_grad_enabled
        self._current: weakref.ref[Any] | None = None
        self._trains_in_training_mode = self._last_mode = False
        self.running = self.before = 0

    def stepped(self) -> None:
        """The optimizer stepped: what was called last was trained."""
        self.running, self._current = 0, None
        self._trains_in_training_mode = self._last_mode

    def begun(self) -> int:
        """The first step of an optimizer: how many calls before it were evaluations with gradients."""
        found, self.before = self.before, 0
        return found if self._last_mode else 0

    def is_first(self, module: Any) -> bool:
        """Whether a call before the first step of an optimizer may be an evaluation with gradients; counts it."""
        if not self._is_grad_enabled():
            return False
        self._last_mode = bool(module.training)
        if module.training or not self._optimizers or not self._optimizers.is_trained(module):
            return False
        self.before += 1
        return True

    def called(self, module: Any) -> int:
        """How many evaluation steps a call adds, while an optimizer trains.

        One where the model is the one that is trained. Another one, such as an average of the weights, is evaluated if
        it is called twice in a row: both calls count then.
        """
        graded = self._is_grad_enabled()
        if module.training:
            self._last_mode = self._last_mode or graded
            return 0
        if graded:
            if not self._optimizers.is_trained(module):
                return 0
            self._last_mode = False
            if not self._trains_in_training_mode:
                return 0
        found = self._found(module)
        self.running += found
        return found

    def _found(self, module: Any) -> int:
        current = self._current() if self._current is not None else None
        if current is not None:
            return (1 if self.running else 2) if current is module else 0
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return 0
        self._current = weakref.ref(module)
        return int(self._optimizers.is_trained(module))
