"""Recorder of a few steps of a PyTorch program: module ranges by global hooks, all else by PyTorch's own profiler.

It runs in the traced program without disturbing it (:mod:`joulery.adapters.tracers.inject.cycles`). A training step
ends when the optimizer has stepped, however often the model was called for it. Before the first step of an optimizer,
calls of a model without gradients are evaluation steps; they have a schedule of their own, and the training schedule
then starts from its beginning. :mod:`joulery.adapters.tracers.inject.step_kinds` decides which of several optimizers
counts, and which later calls are evaluations. Without any optimizer, a step ends where the next call of the model
begins. Modules without parameters (data transforms, losses) are not models. Only steps of the thread that trains count.
A cycle's file is Kineto JSON.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from joulery.adapters.tracers.inject.compiled import CompiledCode
from joulery.adapters.tracers.inject.cycles import EVALUATION, OTHER, TRAINING, Cycles
from joulery.adapters.tracers.inject.hidden_steps import HiddenSteps
from joulery.adapters.tracers.inject.module_names import ModuleNames
from joulery.adapters.tracers.inject.native import exit_at_once, without_lines
from joulery.adapters.tracers.inject.step_kinds import Evaluations, OptimizerTurns
from joulery.adapters.tracers.inject.unhooked_calls import UnhookedCalls

RANGE = "QTN:"
_PATIENCE, _LONG_PATIENCE = 3, 8
"""Calls of a model without a step of an optimizer after which a call counts as a step: where no optimizer is known, and
where one is (PyTorch 2.1 hides the steps of programs that compile). The first step of an optimizer starts again."""
_EVALUATION = 2
"""Calls in a row of a model in evaluation mode, without gradients, after which a training cycle ends early."""
_FOREIGN_THREAD = b"External init callback must run in same thread"


def install_from(settings: dict[str, Any]) -> TorchRecorder:
    """Install a recorder with the settings in the environment of the program."""
    recorder = TorchRecorder(
        Path(settings["folder"]), settings["skip"], settings["warmup"], settings["active"], settings["repeat"]
    )
    recorder.install()
    return recorder


class TorchRecorder(Cycles):
    """Records cycles of steps of a PyTorch program.

    Args:
        folder: Where the files go; it exists.
        skip, warmup, active, repeat: The schedule, as for :class:`~joulery.domain.trace.tracing.Steps`.
    """

    def __init__(self, folder: Path, skip: int, warmup: int, active: int, repeat: int) -> None:
        super().__init__("torch", folder, skip, warmup, active, repeat)
        self._names = ModuleNames()
        self._compiled = CompiledCode(self._new_range, self._caller, self._named)
        self._unhooked: UnhookedCalls | None = None
        self._hidden_steps: HiddenSteps | None = None
        self._local = threading.local()
        self._handles: list[Any] = []
        self._model: weakref.ref[Any] | None = None
        self._calls = self._rollouts = 0
        self._ended = False
        self._importer = threading.get_ident()
        self._starts: dict[str, tuple[Any, Any]] = {}
        self._made: tuple[Any, Any, Any] | None = None
        self._profile: Any = None
        self._module_range: Callable[[str], AbstractContextManager[Any]] = self._range
        self._torch: Any = None

    def install(self) -> None:
        """Add the hooks; recording begins with the first call of a model."""
        # The profiler would announce itself on standard error, which is the program's.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._torch = importlib.import_module("torch")
        modules = importlib.import_module("torch.nn.modules.module")
        optimizers = importlib.import_module("torch.optim.optimizer")
        compiling = _is_compiling(self._torch)
        self._optimizers = OptimizerTurns(self._torch.nn.Parameter)
        self._evaluations = Evaluations(self._optimizers, self._torch.is_grad_enabled)

        # The cheapest range there is: the other kind costs ten times as much, most of what recording a module costs.
        self._module_range = getattr(self._torch._C._profiler, "_RecordFunctionFast", self._range)

        def before(module: Any, args: Any) -> None:
            # Compiled code asks whether it is compiled first: then it depends on no other value of the recorder.
            if not compiling():
                try:
                    if not self._over:
                        self._enter(module)
                    elif self._counted is not None:
                        self._enter_later(module)
                except self._trouble as error:
                    self._fail(error)

        def after(module: Any, args: Any, output: Any) -> None:
            if not compiling():
                try:
                    self._leave(module)
                except self._trouble as error:
                    self._fail(error)

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._over:
                self._stepped_later(optimizer)
            else:
                self._stepped(optimizer)

        self._handles = [
            modules.register_module_forward_pre_hook(before),
            modules.register_module_forward_hook(after, always_call=True),
            optimizers.register_optimizer_step_post_hook(stepped),
        ]
        self._hide_hooks(modules)
        self._unhooked = UnhookedCalls(modules.Module, compiling, before, after)
        self._hidden_steps = HiddenSteps(self._torch.optim, compiling, stepped, self._range_while_recording)
        self._register_optimizers(optimizers.Optimizer)
        self._compiled.install()
        self._loaded.install(importlib.import_module("torch.utils.data.dataloader"))
        # A second profiler would bring the program down, so the program's own goes first.
        own = self._torch.autograd.profiler
        for name in ("_prepare_profiler", "_enable_profiler"):
            start = getattr(own, name)
            self._starts[name] = (start, self._ending_cycle_first(start))
            setattr(own, name, self._starts[name][1])
        self._installed()

    def _forked(self) -> None:
        super()._forked()
        self._importer = threading.get_ident()
        self._model = None
        self._calls = self._rollouts = 0
        self._optimizers.forget_main()
        self._evaluations = Evaluations(self._optimizers, self._torch.is_grad_enabled)
        self._local = threading.local()
        if self._used:
            exit_at_once()

    def _hide_hooks(self, modules: Any) -> None:
        """Make torch.compile warn of global hooks of the program, and not of the recorder's."""
        if not hasattr(modules, "_has_any_global_hook"):
            return
        kinds = [f"_global_{kind}_hooks" for kind in ("backward_pre", "backward", "forward_pre", "forward")]
        tables = [table for kind in kinds if (table := getattr(modules, kind, None)) is not None]
        modules._has_any_global_hook = lambda: any(
            hook.__module__ != __name__ for table in tables for hook in table.values()
        )

    def _register_optimizers(self, kind: Any) -> None:
        """Register every optimizer when it is created."""
        make = kind.__init__

        @functools.wraps(make)
        def making(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self._register_optimizer(optimizer)

        kind.__init__ = making
        self._made = kind, make, making

    def _register_optimizer(self, optimizer: Any) -> None:
        """Register an optimizer that was created."""
        self._optimizers.add(optimizer)

    def name(self, module: Any, name: str) -> None:
        """Give a model a name of its own."""
        self._names.name_tree(module, name)

    def _new_range(self, name: str) -> AbstractContextManager[Any]:
        return self._module_range(name)

    def _caller(self) -> Any:
        """The module whose call is running in this thread; None outside any."""
        stack = self._stack()
        return stack[-1][0] if stack else None

    def _named(self, module: Any) -> str:
        stack = self._stack()
        return self._names.of(module, stack[-1][1] if stack else None)

    # ---- hooks

    def _enter(self, module: Any) -> None:
        stack = self._stack()
        caller = stack[-1][1] if stack else None
        if caller is None:
            self._called(module)
        name = self._names.of(module, caller)
        opened = None
        if self._recording:
            opened = self._module_range(RANGE + name)
            opened.__enter__()
        stack.append((module, name, opened))

    def _leave(self, module: Any) -> None:
        stack = self._stack()
        # A call that missed its own hook (an exception in another hook) ends with its caller.
        while stack:
            left, _, opened = stack.pop()
            if opened is not None and not self._over:
                opened.__exit__(None, None, None)
            if left is module:
                return

    def _stack(self) -> list[tuple[Any, str, Any]]:
        stack: list[tuple[Any, str, Any]] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _called(self, module: Any) -> None:
        """Handle the call of a top-level module, which may begin a step."""
        if not _is_model(module):
            return
        if self._thread is None and self._in_loader():
            return
        if self._thread is None:
            self._model = weakref.ref(module)
            if not self._evaluations.is_first(module):
                self._evaluate_first(module)
            self.begin()
            return
        if self._by_hand or threading.get_ident() != self._thread or self._in_backward():
            return
        if self._optimizers.has_stepped:
            self._evaluated(module)
            return
        if self._evaluations.is_first(module):
            return
        model = self._model() if self._model is not None else None
        if model is None:
            self._model = weakref.ref(module)
        elif model is not module:
            return
        self._calls += 1
        if not self._torch.is_grad_enabled():
            if self._kind == EVALUATION:
                self._rollouts += bool(module.training)
                self._guarded(self._advance)
            else:
                self._evaluate_first(module)
        elif self._kind == EVALUATION and self._optimizers:
            self._guarded(self._begin_training)
        elif self._kind != TRAINING and self._calls >= (patience := _LONG_PATIENCE if self._optimizers else _PATIENCE):
            if not self._counts[OTHER]:  # what was waited for were steps
                self._steps += patience - 1
                self._counts[OTHER] += patience - 1
            self._guarded(self._advance)

    def _evaluate_first(self, module: Any) -> None:
        """Begin evaluation steps if the model is evaluated; a model that no known optimizer changes is not."""
        if not self._torch.is_grad_enabled() and (
            not self._optimizers or (not module.training and self._optimizers.is_trained(module))
        ):
            self._kind = EVALUATION
            self._rollouts += bool(module.training)

    def _evaluated(self, module: Any) -> None:
        """Count a model call while an optimizer trains; several evaluation steps in a row end the training cycle."""
        found = self._evaluations.called(module)
        self._counts[EVALUATION] += found
        if found and self._evaluations.running >= _EVALUATION and self._ready:
            self._guarded(self._pause)

    def _enter_later(self, module: Any) -> None:
        """Handle a module call after recording: count evaluations, and calls where the calls are the steps."""
        stack = self._stack()
        stack.append((module, "", None))
        if len(stack) > 1 or self._by_hand or threading.get_ident() != self._thread:
            return
        if self._optimizers.has_stepped:
            found = self._evaluations.called(module)
            self._counts[EVALUATION] += found
            self._later |= found > 0
        elif self._kind == OTHER and self._model is not None and self._model() is module and not self._in_backward():
            self._steps += 1
            self._counts[OTHER] += 1

    def finish(self) -> None:
        """End recording and keep what was recorded. Safe to call twice."""
        if os.getpid() == self._pid and not self._ended:
            self._ended = True
            self._end_call()
            if not self._by_hand:
                self._count_training(self._optimizers.rest())
        super().finish()

    def _end_call(self) -> None:
        """Count the step of the last call; every other step ends where the next one begins."""
        if self._by_hand or (self._over and self._kind == EVALUATION):
            return
        if self._kind == EVALUATION or (self._counts[OTHER] and not self._optimizers.has_stepped):
            self._steps += 1
            self._counts[self._kind] += 1

    def _begin_training(self) -> None:
        """Begin the training steps, with the schedule at its beginning."""
        if self._kind != TRAINING and self._steps:
            self._end(partial=True)
            self._position = self._cycles = 0
        self._end_call()
        model = self._model() if self._model is not None else None
        if not self._files:  # calls before an optimizer was known: which of them were evaluations shows now
            evaluated = model is not None and self._optimizers.is_trained(model)
            none = self._rollouts if evaluated else self._counts[EVALUATION]
            graded = self._evaluations.begun()
            self._counts[EVALUATION] += graded - none
            self._steps += graded - none
        self._kind, self._resting = TRAINING, False
        self._arrange()

    def _done(self) -> None:
        if self._kind == TRAINING or not (self._optimizers or self._kind == EVALUATION):
            super()._done()
        self._resting = True

    def _advance(self) -> None:
        super()._advance()
        self._compiled.look()

    def _pause(self) -> None:
        """End a training cycle early; the next one begins after the next step of the optimizer."""
        self._end(partial=True)
        self._position = 0

    def _stepped(self, optimizer: Any) -> None:
        if self._thread is None:  # where the whole pass is compiled, no call of a module is seen
            self._optimizers.stepped(optimizer, None)
            self._kind = TRAINING
            self._count_training(1)
            self.begin()
            return
        if not self._is_in_step_thread():
            return
        first = not self._optimizers.has_stepped
        ends, missed = self._optimizers.stepped(optimizer, self._model() if self._model is not None else None)
        if not ends:
            return
        if first and self._kind != TRAINING and not self._by_hand:
            self._guarded(self._begin_training)
        self._evaluations.stepped()
        self._count_training(missed)
        if not self._by_hand:
            self._guarded(self._advance)

    def _stepped_later(self, optimizer: Any) -> None:
        """Handle a step of an optimizer after recording: count training steps."""
        if self._orphan:
            self._unrecorded()
        elif self._counted is not None and not self._by_hand and self._is_in_step_thread():
            ends, missed = self._optimizers.stepped(optimizer, None)
            self._count_training(missed + ends)
            if ends:
                self._evaluations.stepped()

    def _count_training(self, number: int) -> None:
        """Add training steps that no cycle counted; a negative number removes steps that were not training."""
        self._steps += number
        self._counts[TRAINING] += number
        if self._recording:
            self._begin["step"] += number

    def _is_in_step_thread(self) -> bool:
        """Whether this is the thread whose steps count: the one that trains, if another one called a model first."""
        if threading.get_ident() != self._thread:
            if self._kind == TRAINING or self._ready or self._over or self._by_hand:
                self._elsewhere += 1
                return False
            self._thread = threading.get_ident()
        return True

    def _in_loader(self) -> bool:
        """Whether this process is a worker of a data loader: the modules it calls are transforms."""
        data = sys.modules.get("torch.utils.data")
        return data is not None and data.get_worker_info() is not None

    def _in_backward(self) -> bool:
        """Whether autograd is running: a module called there is recomputed, which is not a new call."""
        current = getattr(self._torch._C, "_current_graph_task_id", None)
        return current is not None and current() != -1

    # ---- the profiler

    def _settle(self) -> None:
        if self._torch.cuda.is_initialized():
            self._torch.cuda.synchronize()

    def _gpus(self) -> dict[str, str]:
        cuda = self._torch.cuda
        if not cuda.is_initialized():
            return {}
        found = {}
        for ordinal in range(cuda.device_count()):
            uuid = getattr(cuda.get_device_properties(ordinal), "uuid", None)
            if uuid is not None:
                found[f"GPU:{ordinal}"] = str(uuid)
        return found

    def _taken(self) -> bool:
        return bool(self._torch._C._autograd._profiler_enabled())

    def _prepare(self) -> None:
        self._profile = self._new_profile()
        if threading.get_ident() == self._importer:
            self._profile.prepare_trace()
            return
        with without_lines(_FOREIGN_THREAD):
            self._profile.prepare_trace()

    def _start(self) -> None:
        self._compiled.mark()
        self._profile.start_trace()

    def _stop(self, stem: Path) -> Path:
        profile, self._profile = self._profile, None
        profile.stop_trace()
        self._compiled.unmark()
        self._compiled.write(self._folder / f"{self._framework}-{self._pid}.compiled")
        file, draft = stem.with_suffix(".json"), stem.with_suffix(".draft.json")
        profile.export_chrome_trace(str(draft))
        draft.replace(file)
        return file

    def _drop(self) -> None:
        profile, self._profile = self._profile, None
        profile.start_trace()
        profile.stop_trace()

    def _range(self, name: str) -> AbstractContextManager[Any]:
        opened: AbstractContextManager[Any] = self._torch.autograd.profiler.record_function(name)
        return opened

    def _range_while_recording(self, name: str) -> AbstractContextManager[Any] | None:
        return self._range(name) if self._recording else None

    def _version(self) -> str:
        return str(self._torch.__version__)

    def _new_profile(self) -> Any:
        """A profiler of all supported activities and threads, without slow tables where this version allows it."""
        profiler = importlib.import_module("torch.profiler")
        activities = list(profiler.supported_activities())
        options = {"profile_all_threads": True, "trace_only": True}
        kind = profiler._KinetoProfile
        config: Callable[..., Any] = importlib.import_module("torch._C._profiler")._ExperimentalConfig
        while options:
            try:
                return kind(activities=activities, acc_events=False, experimental_config=config(**options))
            except TypeError:
                options.popitem()
        return kind(activities=activities)

    def _retire(self) -> None:
        """Stop recording for good. Hooks stay, idle, where code was compiled: removing them would compile it again."""
        super()._retire()
        self._compiled.stop()
        if self._unhooked is not None:
            self._unhooked.stop()
        if self._hidden_steps is not None:
            self._hidden_steps.stop()
        self._loaded.stop()
        if self._made is not None and self._made[0].__init__ is self._made[2]:
            self._made[0].__init__ = self._made[1]
        self._profile = None
        for name, (start, yielding) in self._starts.items():
            if getattr(self._torch.autograd.profiler, name) is yielding:
                setattr(self._torch.autograd.profiler, name, start)
        if "torch._dynamo" not in sys.modules and self._kind != OTHER:
            # The last hook goes on counting the steps of the optimizer; without one, all do.
            for handle in self._handles[:-1]:
                handle.remove()
        self._handles = []


def _is_model(module: Any) -> bool:
    """Whether a module has parameters: transforms and losses have none."""
    return next(module.parameters(), None) is not None


def _is_compiling(torch: Any) -> Callable[[], bool]:
    """The function that states whether the calling code is being compiled; PyTorch 2.1 has it elsewhere."""
    found: Callable[[], bool] | None = getattr(torch.compiler, "is_compiling", None)
    if found is not None:
        return found
    return lambda: "torch._dynamo" in sys.modules and bool(sys.modules["torch._dynamo"].is_compiling())
