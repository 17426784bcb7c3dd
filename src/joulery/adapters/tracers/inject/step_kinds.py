"""Classification of a program's steps: training steps, and calls of models that are evaluation steps.

Training steps are the steps of the first optimizer that steps, where several alternate (in a GAN, the first of the
two). If the program continues without it, the next optimizer takes its place: at once if the first one was deleted,
else after :data:`_TAKEN_OVER` steps. Beside an optimizer of a model's parameters, an optimizer of plain tensors (a
perturbation, a temperature) does not count.

Evaluation steps are calls of the trained model in evaluation mode, without gradients; with gradients too, if the model
is trained in training mode. Calls in training mode (rollouts), calls of frozen models (teachers) and of other models
called once a step are not evaluation steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_TAKEN_OVER = 8
"""Steps of one other optimizer in a row after which it takes over, if they are more than twice as many as ever before
between two steps of the first one (of a GAN, the critic may step several times for one step of the generator)."""


class OptimizerTurns:
    """The optimizers of a program, and the one that ends the steps of training.

    Args:
        parameter: Type of a model's parameters (``torch.nn.Parameter``).
    """

    def __init__(self, parameter: type) -> None:
        self._parameter = parameter
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._changed: weakref.WeakKeyDictionary[Any, tuple[int, frozenset[int], bool]] = weakref.WeakKeyDictionary()
        self._main: weakref.ref[Any] | None = None
        self._before: weakref.ref[Any] | None = None
        self._rival: weakref.ref[Any] | None = None
        self._run = self._longest = self._since = 0

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, optimizer: Any) -> None:
        """Register an optimizer that was created or has stepped."""
        self._known.add(optimizer)

    def is_trained(self, module: Any) -> bool:
        """Whether a module has a parameter that a known optimizer changes."""
        tables = [self._table(optimizer)[1] for optimizer in self._known]
        return any(id(parameter) in table for parameter in module.parameters() for table in tables)

    @property
    def main(self) -> Any:
        """The optimizer whose steps count; None before the first step, or after it was deleted."""
        return self._main() if self._main is not None else None

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped, even if it was deleted since."""
        return self._main is not None

    def forget_main(self) -> None:
        """Return to the state before the first step of any optimizer, as in a forked process."""
        self._main = self._before = self._rival = None
        self._run = self._longest = self._since = 0

    def stepped(self, optimizer: Any, model: Any) -> tuple[bool, int]:
        """Handle a step of an optimizer.

        Args:
            optimizer: The optimizer that stepped.
            model: The model that the program called first; None where that is not known.

        Returns:
            Whether a step of training ends here, and the number of further steps to count: those of an optimizer
            before it took over, or a negative number where the other optimizer only took a long turn.
        """
        self.add(optimizer)
        main = self.main
        if main is None:
            if model is not None and self._is_plain(optimizer) and self.is_trained(model):
                return False, 0
            self.forget_main()
            self._main = weakref.ref(optimizer)
            return True, 0
        if optimizer is main:
            self._longest, self._run, self._rival = max(self._longest, self._run), 0, None
            self._since += self._before is not None
            return True, 0
        if self._before is not None and self._before() is optimizer:
            missed, self._longest = -self._since, max(self._longest, self._since)
            self._main, self._before, self._rival = self._before, None, None
            self._run = self._since = 0
            return True, missed
        return self._on_other_step(optimizer, main)

    def _on_other_step(self, optimizer: Any, main: Any) -> tuple[bool, int]:
        """Handle a step of an optimizer other than the main one."""
        if self._is_plain(optimizer) and not self._is_plain(main):
            return False, 0
        rival = self._rival() if self._rival is not None else None
        if rival is None:
            self._rival, self._run = weakref.ref(optimizer), 0
        elif rival is not optimizer:
            return False, 0
        self._run += 1
        if self._run < _TAKEN_OVER or not self._is_long_run():
            return False, 0
        missed, self._since = self._run - 1, self._run
        self._before, self._main, self._rival, self._run = self._main, self._rival, None, 0
        return True, missed

    def rest(self) -> int:
        """The steps to count at the end of the program: those of an optimizer that had begun to take over."""
        found = self._run if self._run > 1 and self._is_long_run() else 0
        self._run = 0
        return found

    def _is_long_run(self) -> bool:
        """Whether the other optimizer's run of steps is more than twice the longest run between two main steps."""
        return self._run > 2 * self._longest

    def _is_plain(self, optimizer: Any) -> bool:
        return not self._table(optimizer)[2]

    def _table(self, optimizer: Any) -> tuple[int, frozenset[int], bool]:
        """An optimizer's number of groups, ids of its parameters, and whether a model's are among them; cached."""
        groups, kept = optimizer.param_groups, self._changed.get(optimizer)
        if kept is None or kept[0] != len(groups):
            own = [parameter for group in groups for parameter in group["params"]]
            kept = len(groups), frozenset(map(id, own)), any(isinstance(each, self._parameter) for each in own)
            self._changed[optimizer] = kept
        return kept


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
        """Handle a step of the optimizer: start a new count, and keep the mode in which the model was trained."""
        self.running, self._current = 0, None
        self._trains_in_training_mode = self._last_mode

    def begun(self) -> int:
        """Return and reset the number of evaluation calls with gradients before the first step of an optimizer."""
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
        """The number of evaluation steps that a call adds, while an optimizer trains.

        A call of the trained model adds one. Another model, such as an average of the weights, is evaluated if it is
        called twice in a row: then both calls count.
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
