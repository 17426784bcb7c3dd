"""Recorder of the module that each kernel call in the generated code of ``torch.compile`` belongs to.

Dynamo's graph of a program states the module of each operation; the code that Inductor generates names, above each
kernel call, the graph nodes of the call. Both are recorded: the graph when Dynamo passes it to a backend, the code when
a cycle begins. While a cycle is recorded, each kernel call runs inside a range with its number: the ``__code__`` of the
generated function is exchanged for that time. Nothing is compiled again, and no compiler setting (its caches depend on
them) is changed. Where this version of PyTorch lacks one of these interfaces, a compiled region stays one leaf.
:mod:`joulery.adapters.tracers.kineto.compiled` reads the recorded graphs and code.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from joulery.adapters.tracers.inject.awaited_import import when_imported

CALL = "joulery:compiled:"
"""Prefix of the range of a call: number of the generated code and of the call in it follow."""
_MADE = "torch._dynamo.output_graph"
_CODE = "torch._inductor.codecache"
_RANGE = "_joulery_range"
_SOURCES = re.compile(r"Source Nodes: \[(.*?)\](?:, Original ATen: \[(.*?)\])?")
_NAME = re.compile(r"[\w.]+")
_INPUT = re.compile(r"(?:primals|arg)_?(\d+)(_1)?$")
_STEP = re.compile(r"\.(\w+)|\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]")
_GETATTR = re.compile(r"getattr\((.+), ['\"]([^'\"]+)['\"]\)")
_WRAPPERS = frozenset({"_modules", "_orig_mod"})


class CompiledCode:
    """Record of the compiled graphs and the generated code of one process.

    Args:
        enter: Returns a context manager for a range with the given name.
        caller: The module whose call is running in this thread, outermost wrapper first; None outside any.
        name: Name of a module.
    """

    def __init__(self, enter: Callable[[str], Any], caller: Callable[[], Any], name: Callable[[Any], str]) -> None:
        self._enter, self._caller, self._name = enter, caller, name
        self._graphs: list[dict[str, Any]] = []
        self._texts: dict[str, int] = {}
        self._codes: list[dict[str, Any]] = []
        self._known: set[int] = set()
        self._swaps: list[tuple[FunctionType, CodeType, CodeType]] = []
        self._marked = False
        self._restore: Callable[[], None] = lambda: None
        self._stop_waiting: Callable[[], None] = lambda: None

    # ---- graphs

    def install(self) -> None:
        """Record every graph from now on; if Dynamo is not loaded yet, start once it is."""
        self._stop_waiting = when_imported(_MADE, self._watch)

    def _watch(self, made: ModuleType) -> None:
        kind: Any = getattr(made, "OutputGraph", None)
        compiling = getattr(kind, "call_user_compiler", None)
        if compiling is None:
            return

        @functools.wraps(compiling)
        def noting(output: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self._note(output, graph)
            except Exception:  # noqa: BLE001  # whatever its inside looks like in this version, the program compiles on
                self._graphs.append({"calls": [], "inputs": []})
            return compiling(output, graph, *args, **kwargs)

        kind.call_user_compiler = noting

        def restore() -> None:
            if kind.call_user_compiler is noting:
                kind.call_user_compiler = compiling

        self._restore = restore

    def _note(self, output: Any, graph: Any) -> None:
        """Record a graph: its operations (name, the program's stack, module path, called function) and its inputs."""
        roots = {"L": getattr(output, "local_scope", {}), "G": getattr(output, "global_scope", {})}
        caller = self._caller()
        paths: dict[str, str] = {"": ""}
        rows, inputs = [], []
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                place, parameter, _ = _source(node).partition("._parameters[")
                place = place if parameter else ""
            elif node.op.startswith("call_"):
                stack = node.meta.get("nn_module_stack") or {}
                place = str(list(stack.values())[-1][0]) if stack else ""
            else:
                continue
            if place not in paths:
                paths[place] = self._path(place, roots, caller)
            path = self._text(paths[place])
            if node.op == "placeholder":
                inputs.append(path)
                continue
            called = getattr(node.target, "__name__", str(node.target))
            rows.append((node.name, self._text(str(node.meta.get("stack_trace") or "")), path, self._text(called)))
        self._graphs.append({"calls": rows, "inputs": inputs})

    def _path(self, place: str, roots: Mapping[str, Any], caller: Any) -> str:
        """The module path of a place: ``L['self'].layers.0`` as ``.layers.0`` below the caller, or as a full name."""
        first, *steps = _steps(place)
        value = roots[place[: place.index("[")]].get(first)
        module = sys.modules["torch"].nn.Module
        while steps and not isinstance(value, module):
            step = steps.pop(0)
            value = value[int(step)] if isinstance(value, (list, tuple)) else getattr(value, step)
        rest = ".".join(step for step in steps if step not in _WRAPPERS)
        if not isinstance(value, module):
            return ""
        if value is caller or value is getattr(caller, "_orig_mod", None):
            return f".{rest}"
        if caller is not None and sum(type(part) is type(value) for part in caller.modules()) > 1:
            # One graph serves all modules of the class, and does not say which one calls it: their class names them.
            return f".{type(value).__name__}.{rest}".rstrip(".")
        name = self._name(value)
        return f"{name}{'.' if '/' in name else '/'}{rest}" if rest else name

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    # ---- generated code

    def mark(self) -> None:
        """Put a range around each kernel call of all generated code, from its next run on."""
        self._marked = True
        self.look()

    def look(self) -> None:
        """Mark newly generated code; does nothing unless a cycle is recorded."""
        if not self._marked:
            return
        cache = getattr(sys.modules.get(_CODE), "PyCodeCache", None)
        loaded = getattr(cache, "modules", None) or list(getattr(cache, "cache", {}).values())
        for module in [module for module in loaded if id(module) not in self._known]:
            self._known.add(id(module))
            try:
                self._add(module, getattr(cache, "linemaps", {}))
            except Exception:  # noqa: BLE001, S112  # generated code of another shape stays one leaf
                continue
        for function, _, marked in self._swaps:
            if function.__code__ is not marked:
                function.__code__ = marked

    def unmark(self) -> None:
        """Restore the generated code without ranges."""
        self._marked = False
        for function, plain, _ in self._swaps:
            function.__code__ = plain

    def stop(self) -> None:
        """Restore the generated code and stop recording graphs."""
        self.unmark()
        self._stop_waiting()
        self._restore()
        self._swaps = []

    def write(self, file: Path) -> None:
        """Write the recorded graphs and code to a file; write no file where no code was recorded."""
        if not self._codes:
            return
        draft = file.with_suffix(".draft")
        draft.write_text(
            json.dumps({"texts": list(self._texts), "graphs": self._graphs, "codes": self._codes}), encoding="utf-8"
        )
        draft.replace(file)

    def _add(self, module: ModuleType, linemaps: Mapping[str, Any]) -> None:
        """Record the kernel calls of one generated module, and compile its code with ranges."""
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        code = _Calls(source, f"{CALL}{len(self._codes)}:")
        found = list(_exchanges(module, code))
        if not found:
            return
        lines, stacks = linemaps.get(str(module.__file__)) or ((), ())
        self._codes.append(
            {
                "backward": re.search(r"\btangents_\d+ *[,)=]", source) is not None,
                "calls": code.calls,
                "contexts": [(line, self._text(str(stack or ""))) for line, stack in zip(lines, stacks, strict=False)],
            }
        )
        setattr(module, _RANGE, self._enter)
        self._swaps += found


class _Calls(ast.NodeTransformer):
    """Puts a range around each statement of generated code that calls a kernel.

    Attributes:
        calls: Of each call, in order: (line, kernel, whether the kernel is fused, source nodes, operations, numbers
            of the graph's inputs in it).
        marked: The functions of the module, with ranges.
    """

    def __init__(self, source: str, prefix: str) -> None:
        self.calls: list[tuple[int, str, bool, list[str], list[str], list[int]]] = []
        self._prefix, self._lines = prefix, source.splitlines()
        tree = ast.parse(source)
        self._fused = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("async_compile.")
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        kept = [node for node in tree.body if isinstance(node, ast.ClassDef) or _is_run(node)]
        for node in kept:
            if isinstance(node, ast.ClassDef):
                node.body = [part for part in node.body if _is_run(part)]
        marked = ast.Module([self.visit(node) for node in kept if getattr(node, "body", None)], [])
        self.marked = ast.fix_missing_locations(marked)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:  # the name that ast asks for
        return self._ranged(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return self._ranged(node)

    def _ranged(self, node: ast.Expr | ast.Assign) -> ast.AST:
        called = self._called(node.value)
        if called is None:
            return node
        range_ = ast.parse(f"{_RANGE}({f'{self._prefix}{len(self.calls)}'!r})", mode="eval").body
        self.calls.append((node.lineno, *called, *self._sources(node.lineno), _inputs(node)))
        marked = ast.With([ast.withitem(range_)], [node])
        for part in ast.walk(range_):
            ast.copy_location(part, node)
        return ast.copy_location(marked, node)

    def _called(self, value: ast.expr) -> tuple[str, bool] | None:
        """Kernel that an expression calls, and whether it is a fused one; None for anything else."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, (ast.Name, ast.Attribute)):
            return None
        name = ast.unparse(value.func)
        head, _, last = name.rpartition(".")
        if name in self._fused:
            return name, True
        if last == "run" and head in self._fused:
            return head, True
        if head == "extern_kernels":
            return last, False
        if name.startswith(("torch.ops.", "aten.")):
            return (head if last == "default" else name).rpartition(".")[2], False
        return None

    def _sources(self, line: int) -> tuple[list[str], list[str]]:
        """Source nodes and their operations, in the comment right above a line."""
        for above in range(line - 2, max(-1, line - 5), -1):
            text = self._lines[above].strip()
            found = _SOURCES.search(text) if text.startswith("#") else None
            if found:
                nodes, operations = (_NAME.findall(part or "") for part in found.groups())
                return nodes, operations
        return [], []


def _is_run(node: ast.AST) -> bool:
    """Whether a part of generated code is a function that runs kernels."""
    return isinstance(node, ast.FunctionDef) and (node.name == "call" or node.name.startswith("partition_"))


def _exchanges(module: ModuleType, code: _Calls) -> Iterator[tuple[FunctionType, CodeType, CodeType]]:
    """(function, its code, the same with ranges) of each function of generated code that calls a kernel."""
    made = compile(code.marked, str(module.__file__), "exec", dont_inherit=True)
    scopes: list[tuple[Any, CodeType]] = [(module, made)]
    for owner, scope in scopes:
        for part in scope.co_consts:
            if not isinstance(part, CodeType):
                continue
            value = vars(owner).get(part.co_name)
            if isinstance(value, type):
                scopes.append((value, part))
            elif isinstance(value, FunctionType):
                plain = value.__code__
                if _RANGE in part.co_names and part.co_freevars == plain.co_freevars:
                    yield value, plain, part


def _source(node: Any) -> str:
    """Place where the program keeps an input of a graph."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def _inputs(statement: ast.stmt) -> list[int]:
    """Numbers of the graph's inputs in a statement: ``primals_1`` or ``arg0_1`` is the first one."""
    found = []
    for part in ast.walk(statement):
        match = _INPUT.match(part.id) if isinstance(part, ast.Name) else None
        if match:
            found.append(int(match[1]) - (match[2] is None))
    return found


def _steps(place: str) -> Iterator[str]:
    """``L['self'].layers[0]`` as ``self``, ``layers``, ``0``."""
    while match := _GETATTR.search(place):
        place = f"{place[: match.start()]}{match[1]}.{match[2]}{place[match.end() :]}"
    for match in _STEP.finditer(place):
        yield next(part for part in match.groups() if part is not None)
