"""Classification of a program's steps: training steps, and calls of models that are evaluation steps.

Training: the steps of the first optimizer that steps, where several take turns (of a GAN, the first of its two). Where
the program goes on without it, the next one takes its place: at once if the first one is gone, else after
:data:`_TAKEN_OVER` steps. An optimizer of plain tensors (a perturbation, a temperature) beside one of a model's
parameters is none of training.

Evaluation: a call in evaluation mode of the model that is trained, without gradients; with them too, if the model is
trained in training mode. Calls in training mode (rollouts), of frozen models (teachers) and of others called once a
step are none.
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
        """An optimizer was made, or steps."""
        self._known.add(optimizer)

    def is_trained(self, module: Any) -> bool:
        """Whether a module has a parameter that a known optimizer changes."""
        tables = [self._table(optimizer)[1] for optimizer in self._known]
        return any(id(parameter) in table for parameter in module.parameters() for table in tables)

    @property
    def main(self) -> Any:
        """The optimizer with steps that count; None before the first step, or when it is gone."""
        return self._main() if self._main is not None else None

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped, though it may be gone."""
        return self._main is not None

    def forget_main(self) -> None:
        """None of the optimizers has stepped yet: in a forked process."""
        self._main = self._before = self._rival = None
        self._run = self._longest = self._since = 0

    def stepped(self, optimizer: Any, model: Any) -> tuple[bool, int]:
        """An optimizer stepped.

        Args:
            optimizer: It.
            model: The model that the program called first; None where that is not known.

        Returns:
            Whether a step of training ends here, and how many steps have to be counted besides: those of an optimizer
            before it took over, or less than zero where it turns out that it only took a long turn.
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
        return self._turn(optimizer, main)

    def _turn(self, optimizer: Any, main: Any) -> tuple[bool, int]:
        """Another optimizer than the main one stepped."""
        if self._is_plain(optimizer) and not self._is_plain(main):
            return False, 0
        rival = self._rival() if self._rival is not None else None
        if rival is None:
            self._rival, self._run = weakref.ref(optimizer), 0
        elif rival is not optimizer:
            return False, 0
        self._run += 1
        if self._run < _TAKEN_OVER or not self._goes_on():
            return False, 0
        missed, self._since = self._run - 1, self._run
        self._before, self._main, self._rival, self._run = self._main, self._rival, None, 0
        return True, missed

    def rest(self) -> int:
        """Steps to be counted at the end of the program: of an optimizer that had begun to take over."""
        found = self._run if self._run > 1 and self._goes_on() else 0
        self._run = 0
        return found

    def _goes_on(self) -> bool:
        """Whether the other optimizer has stepped more often in a row than where they take turns."""
        return self._run > 2 * self._longest

    def _is_plain(self, optimizer: Any) -> bool:
        return not self._table(optimizer)[2]

    def _table(self, optimizer: Any) -> tuple[int, frozenset[int], bool]:
        """Parameters of an optimizer by their ids, and whether a model's are among them; until it gets a group more."""
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
        """Number of evaluation steps that a call adds, while an optimizer trains.

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
