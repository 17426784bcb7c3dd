"""Generated code with its calls in ranges: the same results, and left as it was."""

import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from joulery.adapters.tracers.inject.compiled import CALL, CompiledCode, _steps

GENERATED = '''
class Compiler:
    def cpp(self, text):
        return lambda *args: args[0]

async_compile = Compiler()
cpp_fused_relu_0 = async_compile.cpp(r"""void kernel() {}""")
triton_poi_fused_1 = async_compile.cpp("x")
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        primals_1, primals_2 = args
        args.clear()
        # Topologically Sorted Source Nodes: [x, linear], Original ATen: [aten.view, aten.addmm]
        buf0 = extern_kernels.addmm(primals_1, primals_2)
        if buf0:
            cpp_fused_relu_0(buf0)
        del primals_1
        return (buf0, )

runner = Runner(partitions=[])
call = runner.call

def benchmark_compiled_module():
    extern_kernels.addmm(1, 1)
'''


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Loads text as code that Inductor generated."""
    cache = SimpleNamespace(modules=[], linemaps={})
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", SimpleNamespace(PyCodeCache=cache))

    def load(text: str) -> ModuleType:
        file = tmp_path / f"c{len(cache.modules)}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        module.extern_kernels = SimpleNamespace(addmm=lambda a, b: a * b)
        spec.loader.exec_module(module)
        cache.modules.append(module)
        cache.linemaps[str(file)] = [(20, 22), ("first", "second")]
        return module

    return load


class Ranges:
    """A recorder's ranges, by name."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.open = 0

    @contextmanager
    def enter(self, name: str) -> Any:
        self.seen.append(name)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def code(self) -> CompiledCode:
        return CompiledCode(self.enter, lambda: None, lambda module: "Net")


def test_calls_run_in_ranges_while_a_cycle_is_recorded_and_as_before_otherwise(
    generated: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    module, ranges = generated(GENERATED), Ranges()
    plain = module.Runner.call.__code__
    code = ranges.code()
    assert module.call([2, 3]) == (6,) and ranges.seen == []
    code.mark()
    assert module.call([2, 3]) == (6,) and module.call([0, 3]) == (0,)
    assert ranges.seen == [f"{CALL}0:0", f"{CALL}0:1", f"{CALL}0:0"]
    late = generated(GENERATED.replace("addmm", "mm").replace("extern_kernels.mm", "extern_kernels.addmm"))
    code.look()
    late.call([1, 1])
    assert ranges.seen[-1] == f"{CALL}1:1"
    code.unmark()
    assert module.Runner.call.__code__ is plain and module.call([2, 3]) == (6,) and len(ranges.seen) == 5
    code.write(tmp_path / "torch-1.compiled")
    noted = json.loads((tmp_path / "torch-1.compiled").read_text())
    line, leaf, fused, sources, kinds, inputs = noted["codes"][0]["calls"][0]
    assert (leaf, fused, sources, inputs) == ("addmm", False, ["x", "linear"], [0, 1])
    assert kinds == ["aten.view", "aten.addmm"] and GENERATED.splitlines()[line - 1].strip().startswith("buf0 = ")
    assert noted["codes"][0]["calls"][1][1:3] == ["cpp_fused_relu_0", True] and len(noted["codes"][0]["calls"]) == 2


def test_an_error_in_a_kernel_is_the_programs_and_closes_its_range(generated: Callable[[str], ModuleType]) -> None:
    module, ranges = generated(GENERATED), Ranges()
    code = ranges.code()
    code.mark()
    with pytest.raises(TypeError) as error:
        module.call([None, 3])
    assert ranges.open == 0 and error.traceback[1].path == Path(module.__file__)
    code.stop()
    assert module.call([1, 1]) == (1,) and ranges.seen == [f"{CALL}0:0"]


@pytest.mark.parametrize("change", ["def call(self: ((", "", "x = 1"])
def test_generated_code_of_another_shape_stays_as_it_is(generated: Callable[[str], ModuleType], change: str) -> None:
    module, ranges = generated("def call(args):\n    return args\n"), Ranges()
    Path(module.__file__).write_text(change)
    code = ranges.code()
    code.mark()
    assert module.call([1]) == [1] and ranges.seen == []
    Path(module.__file__).unlink()
    code.look()


def test_paths_of_modules_as_versions_of_the_compiler_write_them() -> None:
    assert list(_steps("L['self'].layers.0.ln")) == ["self", "layers", "0", "ln"]
    assert list(_steps("L['self']._modules['layers']._modules['0']")) == ["self", "_modules", "layers", "_modules", "0"]
    assert list(_steps("getattr(L['self'].layers, '0').fc")) == ["self", "layers", "0", "fc"]
    assert list(_steps("G['models'][1]")) == ["models", "1"]


def test_code_that_several_modules_share_is_named_after_their_class(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'joulery[torch]'")
    block, head = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.ReLU()
    net = torch.nn.ModuleList([block, torch.nn.Sequential(torch.nn.Linear(2, 2)), head])
    code = CompiledCode(Ranges().enter, lambda: net, lambda module: "Net/head")

    def path(place: str, root: Any) -> str:
        return code._path(place, {"L": {"self": root}}, net)

    assert path("L['self'].0", block) == ".Sequential.0", "either of the two may call it"
    assert path("L['self']", block) == ".Sequential"
    assert path("L['self']", head) == "Net/head" and path("L['self'].0", net) == ".0"
