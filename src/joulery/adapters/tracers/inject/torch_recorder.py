"""Records a few steps of a PyTorch program: module ranges by global hooks, everything else by its own profiler.

Runs in the traced program and must never be its problem (:mod:`joulery.adapters.tracers.inject.cycles`). A step ends
when the optimizer has stepped. Where no gradient is recorded (inference, evaluation), or no optimizer ever steps, it
ends where the next call of the model begins. A cycle's file is Kineto JSON.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from joulery.adapters.tracers.inject.cycles import Cycles

RANGE = "QTN:"
_PATIENCE = 3
"""Calls of a model in a row without any optimizer's step, after which a call counts as a step."""


def install_from(settings: dict[str, Any]) -> Recorder:
    """Install a recorder with the settings in the environment of the program."""
    recorder = Recorder(
        Path(settings["folder"]), settings["skip"], settings["warmup"], settings["active"], settings["repeat"]
    )
    recorder.install()
    return recorder


class Names:
    """Names of modules: ``Class/dotted.path``, of the tree below the module that was called first."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._roots: dict[str, weakref.WeakSet[Any]] = {}

    def __contains__(self, module: Any) -> bool:
        return module in self._names

    def of(self, module: Any, caller: str | None) -> str:
        """Name of a module; one not seen before is named after its class, below its caller where it has one."""
        name = self._names.get(module)
        if name is None:
            kind = type(module).__name__
            name = self.root(module, kind) if caller is None else f"{caller}.{kind}"
            self.name_tree(module, name)
        return name

    def root(self, module: Any, kind: str) -> str:
        """Name of a top-level module: its class, numbered where several with parameters are alive."""
        if getattr(module, "_is_replica", False) or next(module.parameters(), None) is None:
            return kind
        alive = self._roots.setdefault(kind, weakref.WeakSet())
        alive.add(module)
        return kind if len(alive) == 1 else f"{kind}#{len(alive)}"

    def name_tree(self, module: Any, name: str) -> None:
        """Name a module and everything below it that has no name yet."""
        for path, part in module.named_modules():
            if part not in self._names:
                self._names[part] = f"{name}/{path.replace('/', '|')}" if path else name


class Recorder(Cycles):
    """Records cycles of steps of a PyTorch program.

    Args:
        folder: Where the files go; it exists.
        skip, warmup, active, repeat: The schedule, as for :class:`~joulery.domain.trace.tracing.Steps`.
    """

    def __init__(self, folder: Path, skip: int, warmup: int, active: int, repeat: int) -> None:
        super().__init__("torch", folder, skip, warmup, active, repeat)
        self._names = Names()
        self._local = threading.local()
        self._handles: list[Any] = []
        self._model: weakref.ref[Any] | None = None
        self._optimizer: weakref.ref[Any] | None = None
        self._calls = 0
        self._starts: dict[str, tuple[Any, Any]] = {}
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
        compiling = self._torch.compiler.is_compiling

        # The cheapest range there is: the other kind costs ten times as much, most of what recording a module costs.
        self._module_range = getattr(self._torch._C._profiler, "_RecordFunctionFast", self._range)

        def before(module: Any, args: Any) -> None:
            if not self._over and not compiling():
                try:
                    self._enter(module)
                except self._trouble as error:
                    self._fail(error)

        def after(module: Any, args: Any, output: Any) -> None:
            if not self._over and not compiling():
                try:
                    self._leave(module)
                except self._trouble as error:
                    self._fail(error)

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not self._over:
                self._stepped(optimizer)

        self._handles = [
            modules.register_module_forward_pre_hook(before),
            modules.register_module_forward_hook(after, always_call=True),
            optimizers.register_optimizer_step_post_hook(stepped),
        ]
        # A second profiler would bring the program down, so the program's own goes first.
        own = self._torch.autograd.profiler
        for name in ("_prepare_profiler", "_enable_profiler"):
            start = getattr(own, name)
            self._starts[name] = (start, self._yielding(start))
            setattr(own, name, self._starts[name][1])
        self._installed()

    def name(self, module: Any, name: str) -> None:
        """Give a model a name of its own."""
        self._names.name_tree(module, name)

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
            if opened is not None:
                opened.__exit__(None, None, None)
            if left is module:
                return

    def _stack(self) -> list[tuple[Any, str, Any]]:
        stack: list[tuple[Any, str, Any]] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _called(self, module: Any) -> None:
        """A top-level module is called: this may begin a step."""
        if self._thread is None:
            self._model = weakref.ref(module)
            self.begin()
            return
        if threading.get_ident() != self._thread or self._in_backward():
            return
        model = self._model() if self._model is not None else None
        if model is None:
            self._model = weakref.ref(module)
        elif model is not module:
            return
        self._calls += 1
        if self._by_hand:
            return
        if not self._torch.is_grad_enabled() or (self._optimizer is None and self._calls >= _PATIENCE):
            self._guarded(self._advance)

    def _stepped(self, optimizer: Any) -> None:
        if self._thread is None or threading.get_ident() != self._thread:
            return
        main = self._optimizer() if self._optimizer is not None else None
        if main is None:
            self._optimizer = weakref.ref(optimizer)
        elif main is not optimizer:
            return
        if not self._by_hand:
            self._guarded(self._advance)

    def _in_backward(self) -> bool:
        """Whether autograd is calling: a module called there is computed again, not anew."""
        current = getattr(self._torch._C, "_current_graph_task_id", None)
        return current is not None and current() != -1

    # ---- the profiler

    def _settle(self) -> None:
        if self._torch.cuda.is_initialized():
            self._torch.cuda.synchronize()

    def _taken(self) -> bool:
        return bool(self._torch._C._autograd._profiler_enabled())

    def _prepare(self) -> None:
        self._profile = self._new_profile()
        self._profile.prepare_trace()

    def _start(self) -> None:
        self._profile.start_trace()

    def _stop(self, stem: Path) -> Path:
        profile, self._profile = self._profile, None
        profile.stop_trace()
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

    def _version(self) -> str:
        return str(self._torch.__version__)

    def _new_profile(self) -> Any:
        """A profiler of everything this machine has, of all threads, without slow tables where it can do without."""
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
        """Record nothing from here on. Hooks stay, idle, where code was compiled: without them it would be again."""
        super()._retire()
        self._profile = None
        for name, (start, yielding) in self._starts.items():
            if getattr(self._torch.autograd.profiler, name) is yielding:
                setattr(self._torch.autograd.profiler, name, start)
        if "torch._dynamo" not in sys.modules:
            for handle in self._handles:
                handle.remove()
        self._handles = []
