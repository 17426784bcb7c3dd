"""PyTorch programs recorded live: names, phases, steps, and a program that never notices."""

import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.tracers.torch import TorchTracer
from joulery.domain.trace.tracing import Steps, TracedSession
from tests.adapters.tracers.torch_products import products

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'joulery[torch]'")
pytestmark = pytest.mark.filterwarnings("ignore")

from joulery.adapters.tracers.inject.torch_recorder import TorchRecorder  # noqa: E402  # needs torch

WIDTH = 32


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = Attention(), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm(x + self.out(self.attention(x)))
        return x + self.down(torch.relu(self.up(x)))


class TinyBert(torch.nn.Module):
    """14 linears and 4 batched products a forward pass, as the golden trace."""

    def __init__(self, checkpoint: bool = False) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.embed = torch.nn.Embedding(100, WIDTH)
        self.layer = torch.nn.ModuleList(Layer() for _ in range(2))
        self.pooler, self.classifier = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layer:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.checkpoint else layer(x)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


IDS = torch.arange(32).reshape(4, 8)


def train(model: Any, steps: int, loss: Any = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    loss = loss or torch.nn.CrossEntropyLoss()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(IDS), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Callable[..., tuple[list[TracedSession], list[str]]]]:
    """Runs a function under a recorder and returns its sessions and notes."""
    recorders = []

    def run(action: Callable[..., None], steps: Steps = Steps(0, 0, 2, 1), name: Any = None):  # noqa: B008
        recorder = TorchRecorder(tmp_path, **asdict(steps))
        recorder.install()
        recorders.append(recorder)
        if name is not None:
            recorder.name(*name)
        action()
        recorder.finish()
        found = TorchTracer().recorded(str(tmp_path), None)
        TorchTracer().leftovers(str(tmp_path))
        return found

    yield run
    for recorder in recorders:
        recorder.finish()


def test_every_product_of_a_training_step_has_its_module(recorded) -> None:
    model = TinyBert()
    (session,), notes = recorded(lambda: train(model, 4), name=(model, "bert"))
    assert notes == [] and session.steps == 2
    assert products(session) == {
        ("addmm", "forward"): 28,
        ("mm", "backward"): 56,
        ("bmm", "forward"): 8,
        ("bmm", "backward"): 16,
    }
    names = Counter(session.trace.ops[op] for op in session.trace.op.tolist())
    for linear in ("layer_0/attention/query", "layer_1/down", "pooler", "classifier"):
        assert [names[f"bert/{linear}/{leaf}"] for leaf in ("addmm", "mm", "mm_1")] == [2, 2, 2]
    phases = {session.trace.phases[phase] for phase in session.trace.phase.tolist()}
    assert {"forward", "backward", "optimizer"} <= phases
    assert any(name.startswith("AdamW.step/") for name in names)


def test_clocks_are_tied_together(recorded) -> None:
    (session,), _ = recorded(lambda: train(TinyBert(), 2))
    assert session.clock.offset_ns is not None and abs(session.clock.offset_ns) < 10_000_000
    begin, end = session.window_ns
    inside = (session.trace.start_ns >= begin) & (session.trace.end_ns <= end)
    assert inside.mean() > 0.95


def test_checkpointed_layers_are_recomputed_under_their_names(recorded) -> None:
    (session,), _ = recorded(lambda: train(TinyBert(checkpoint=True), 3))
    found = products(session)
    assert found["addmm", "forward"] == 28 and found["addmm", "recompute"] == 24
    assert found["mm", "backward"] == 56 and found["bmm", "recompute"] == 8


def test_inference_is_cut_into_steps_by_the_calls_of_the_model(recorded) -> None:
    model = TinyBert()

    def infer() -> None:
        with torch.inference_mode():
            for _ in range(6):
                model(IDS)

    sessions, _ = recorded(infer, Steps(1, 1, 2, 1))
    assert [session.steps for session in sessions] == [2]
    assert products(sessions[0]) == {("addmm", "forward"): 28, ("bmm", "forward"): 8}


def test_several_cycles_follow_the_schedule(recorded) -> None:
    sessions, _ = recorded(lambda: train(TinyBert(), 12), Steps(1, 1, 2, 2))
    assert [session.steps for session in sessions] == [2, 2]
    assert sessions[0].window_ns[1] <= sessions[1].window_ns[0]
    assert all(products(session)["addmm", "forward"] == 28 for session in sessions)


def test_a_program_that_ends_within_a_cycle_keeps_what_there_is(recorded) -> None:
    sessions, _ = recorded(lambda: train(TinyBert(), 5), Steps(1, 1, 9, 1))
    assert [session.steps for session in sessions] == [3]
    assert products(sessions[0])["addmm", "forward"] == 42


def test_a_program_that_ends_before_the_schedule_says_so(recorded) -> None:
    sessions, notes = recorded(lambda: train(TinyBert(), 2), Steps(9, 1, 1, 1))
    assert sessions == [] and "ended after 2 step(s)" in notes[-1]


def test_steps_by_hand(recorded, tmp_path: Path) -> None:
    recorder = TorchRecorder(tmp_path, 0, 0, 2, 1)
    recorder.install()
    recorder.begin()
    model = TinyBert()
    for _ in range(3):
        for _ in range(2):
            model(IDS).sum().backward()
        recorder.step()
    recorder.finish()
    (session,), _ = TorchTracer().recorded(str(tmp_path), None)
    assert session.steps == 2 and products(session)["addmm", "forward"] == 4 * 14


def test_several_forward_threads_keep_their_names(recorded) -> None:
    models = [TinyBert(), TinyBert()]

    def work() -> None:
        main = TinyBert()
        optimizer = torch.optim.SGD(main.parameters(), lr=0.1)
        for _ in range(3):
            main(IDS).sum().backward()
            threads = [threading.Thread(target=lambda m=m: m(IDS).sum().backward()) for m in models]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            optimizer.step()

    (session,), _ = recorded(work)
    found = products(session)
    assert found["addmm", "forward"] == 2 * 3 * 14 and found["mm", "backward"] == 2 * 3 * 28
    roots = {name.split("/")[0] for name in session.trace.ops if name.endswith("/mm")}
    assert roots == {"TinyBert", "TinyBert#2", "TinyBert#3"}


def test_operations_of_a_module_compiled_without_kernels_stand_below_its_region(recorded) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), backend="aot_eager")
            self.head = torch.nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.inner(x))

    model = Outer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work() -> None:
        for _ in range(6):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    (session,), _ = recorded(work, Steps(2, 1, 2, 1))
    composites = {name.rpartition("/")[2].partition(":")[0] for name in session.trace.composite}
    assert composites == {"Torch-Compiled Region", "CompiledFunctionBackward"}
    assert all(name.startswith("Outer/inner/") for name in session.trace.composite)
    regions = {op.split("/")[2] for op in session.trace.ops if op.startswith("Outer/inner/") and op.endswith("mm")}
    assert {region.partition(":")[0] for region in regions} == composites, "no module is known, but the operations are"


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: torch.compile needs it")
def test_the_modules_of_a_compiled_model_are_named_compiled_anew_or_from_the_cache(
    recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))

    class Body(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.compile(Body()), torch.nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.body(x))

    def run() -> TracedSession:
        torch._dynamo.reset()
        model = Outer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def work() -> None:
            for _ in range(6):
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()

        (session,), notes = recorded(work, Steps(2, 1, 2, 1))
        assert notes == []
        return session

    from torch._dynamo.utils import counters

    for attempt in ("anew", "from the cache"):
        counters.clear()
        trace = run().trace
        hits = sum(count for name, count in counters["inductor"].items() if name == "fxgraph_cache_hit")
        assert bool(hits) == (attempt == "from the cache")
        named = Counter(
            (trace.ops[op], trace.phases[phase])
            for op, phase in zip(trace.op.tolist(), trace.phase.tolist(), strict=True)
        )
        for layer in ("Outer/body/layers_0", "Outer/body/layers_1"):
            assert named[f"{layer}/addmm", "forward"] == 2, attempt
            assert sum(count for (op, phase), count in named.items() if op.startswith(f"{layer}/mm")) >= 2, attempt
        assert any("cpp_fused" in op and op.startswith("Outer/body/") for op, _ in named), attempt
        assert all(op.count("/") == 2 for op in trace.composite), "what is left to the region is its own overhead"


@pytest.mark.parametrize("outer", [False, True], ids=["the layers", "the layers and the model"])
def test_layers_that_compile_themselves_have_their_own_names_and_compile_no_more(recorded, outer: bool) -> None:
    from torch._dynamo.utils import counters

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = torch.nn.ModuleList(Layer() for _ in range(3)), torch.nn.Linear(8, 1)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    def work() -> None:
        torch._dynamo.reset()
        counters.clear()
        model = Net()
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        if outer:
            model.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        graphs.append(counters["stats"]["unique_graphs"])

    graphs: list[int] = []
    work()
    (session,), notes = recorded(work, Steps(2, 1, 2, 1))
    trace = session.trace
    assert notes == [] and (session.kind, session.steps) == ("training", 2)
    assert graphs[0] == graphs[1], "watching the calls compiles nothing"
    where = Counter(
        (name.partition("Layer")[0].partition("/Torch")[0].partition("/Compiled")[0], phase)
        for name, phase in (
            (trace.ops[op], trace.phases[at]) for op, at in zip(trace.op.tolist(), trace.phase.tolist(), strict=True)
        )
        if name.endswith("mm") or "mm_" in name
    )
    layers = ["Net"] if outer else [f"Net/layers_{at}" for at in range(3)]
    for layer in layers:
        assert where[layer, "forward"] and where[layer, "backward"], where
    assert "compile" in vars(torch.nn.Module) and torch.nn.Module.compile.__module__.startswith("torch")


def test_modules_of_loss_functions_lambdas_and_late_comers(recorded) -> None:
    class Lambda(torch.nn.Module):
        def forward(self, x):
            return torch.nn.Dropout(0.0)(x) * 2

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Lambda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work() -> None:
        for _ in range(3):
            torch.nn.MSELoss()(model(torch.ones(4, 8)), torch.zeros(4, 8)).backward()
            optimizer.step()

    (session,), _ = recorded(work)
    names = set(session.trace.ops)
    assert {"Sequential/0/addmm", "Sequential/1/mul", "MSELoss/mse_loss"} <= names
    assert any(name.startswith("Sequential/1/Dropout/") for name in names)


def test_an_exception_inside_a_module_leaves_names_intact(recorded) -> None:
    class Failing(torch.nn.Module):
        def forward(self, x):
            raise ValueError("mine")

    model, failing = torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), Failing())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work() -> None:
        for _ in range(3):
            with pytest.raises(ValueError, match="mine"):
                failing(torch.ones(1, 8))
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    (session,), notes = recorded(work)
    assert notes == [] and "Linear/addmm" in session.trace.ops
    assert not any("Failing/Linear" in name for name in session.trace.ops)


def test_workers_of_a_loader_record_nothing(recorded) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(12, 8)), batch_size=3, num_workers=1)

    def work() -> None:
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()

    (session,), notes = recorded(work, Steps(1, 1, 2, 1))
    assert notes == [] and products(session)["addmm", "forward"] == 2


def test_the_programs_own_profiler_keeps_its_results(recorded) -> None:
    kept = []

    def work() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
            train(TinyBert(), 2)
        kept.append(len(own.events()))
        train(TinyBert(), 4)

    sessions, notes = recorded(work, Steps(0, 0, 1, 1))
    assert kept[0] > 100
    assert any("own profiler was on" in note for note in notes) and len(sessions) == 1


def test_a_profiler_that_the_program_starts_while_steps_are_recorded_works(recorded) -> None:
    kept = []

    def work() -> None:
        train(TinyBert(), 2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
            train(TinyBert(), 2)
        kept.append(len(own.events()))
        train(TinyBert(), 4)

    start = torch.autograd.profiler._enable_profiler
    sessions, notes = recorded(work, Steps(0, 0, 6, 1))
    assert kept[0] > 100 and sessions[0].steps == 2
    assert any("the program started its own profiler" in note for note in notes)
    assert torch.autograd.profiler._enable_profiler is start, "nothing is left behind"


def test_a_full_disk_is_the_recorders_problem_alone(recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TorchRecorder(tmp_path / "gone", 0, 0, 1, 1)
    recorder.install()
    train(TinyBert(), 3)
    recorder.finish()
    sessions, notes = TorchTracer().recorded(str(tmp_path), None)
    assert sessions == [] and "called no PyTorch module" in notes[-1]


PROGRAM = """
import sitecustomize, torch
print("own start-up:", getattr(sitecustomize, "MINE", None))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
print("done")
"""


def test_an_unchanged_program_is_recorded_through_its_environment(tmp_path: Path) -> None:
    own, folder = tmp_path / "own", tmp_path / "trace"
    own.mkdir()
    folder.mkdir()
    (own / "sitecustomize.py").write_text("MINE = 42\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = TorchTracer().environment(str(folder), Steps(1, 1, 2, 1), {"PYTHONPATH": str(own)})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(tmp_path / "train.py")],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "own start-up: 42\ndone\n" and done.stderr == "", done.stderr
    (session,), notes = TorchTracer().recorded(str(folder), None)
    assert notes == [] and session.steps == 2 and "Sequential/0/addmm" in session.trace.ops
    marks = [json.loads(line) for line in next(folder.glob("*.marks")).read_text().splitlines()]
    assert marks[-1]["kind"] == "end" and marks[-1]["cycles"] == 1


def test_a_program_whose_environment_has_no_joulery_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'joulery':\n"
        "            raise ModuleNotFoundError('No module named joulery', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n" + PROGRAM
    )
    environment = TorchTracer().environment(str(tmp_path), Steps(1, 1, 2, 1), {})
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (session,), notes = TorchTracer().recorded(str(tmp_path), None)
    assert notes == [] and session.steps == 2


def steps_of(sessions: list[TracedSession]) -> list[tuple[str, int]]:
    return [(session.kind, session.steps) for session in sessions]


def test_transforms_are_no_steps_and_accumulated_calls_make_one(recorded) -> None:
    model, transform = TinyBert(), torch.nn.Sequential(torch.nn.Flatten(0), torch.nn.Unflatten(0, (4, 8)))

    def action() -> None:
        optimizer, loss = torch.optim.SGD(model.parameters()), torch.nn.CrossEntropyLoss()
        for _ in range(3):
            for _ in range(4):
                loss(model(transform(IDS)), torch.zeros(4, dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()

    (session,), _ = recorded(action, Steps(1, 0, 2, 1))
    assert (session.kind, session.steps) == ("training", 2)
    assert products(session)["addmm", "forward"] == 2 * 4 * 14
    ops = {session.trace.ops[op] for op in session.trace.op.tolist()}
    assert any(op.startswith("TinyBert/") for op in ops) and not any("/Flatten" in op for op in ops if "TinyBert" in op)


def test_an_evaluation_before_the_training_leaves_its_schedule_whole(recorded) -> None:
    model = TinyBert()

    def action() -> None:
        model.eval()
        with torch.no_grad():
            for _ in range(6):
                model(IDS)
        model.train()
        train(model, 4)

    sessions, _ = recorded(action, Steps(1, 0, 2, 1))
    assert steps_of(sessions) == [("evaluation", 2), ("training", 2)]
    assert not any("backward" in phase for _, phase in products(sessions[0]))
    assert products(sessions[1])["mm", "backward"] == 56


def test_an_evaluation_within_the_training_ends_a_cycle_and_counts_apart(recorded, tmp_path: Path) -> None:
    model = TinyBert()
    optimizer, loss = torch.optim.SGD(model.parameters()), torch.nn.CrossEntropyLoss()

    def epoch() -> None:
        for _ in range(3):
            loss(model(IDS), torch.zeros(4, dtype=torch.long)).backward()
            optimizer.step()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            for _ in range(5):
                model(IDS)
        model.train()

    counts = []

    def action() -> None:
        for _ in range(2):
            epoch()
            evaluate()

    recorder = TorchRecorder(tmp_path, skip=0, warmup=0, active=2, repeat=0)
    recorder.install()
    recorder._register_optimizer(optimizer)
    action()
    recorder.finish()
    counts = TorchTracer().step_counts(str(tmp_path))
    assert (counts.training, counts.evaluation) == (6, 10)


def test_a_frozen_encoder_is_no_step(recorded) -> None:
    encoder, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
    encoder.requires_grad_(False)

    def action() -> None:
        optimizer = torch.optim.SGD(head.parameters())
        for _ in range(5):
            with torch.no_grad():
                features = encoder(torch.ones(2, 8))
            head(features).sum().backward()
            optimizer.step()

    (session,), _ = recorded(action, Steps(1, 1, 2, 1))
    assert (session.kind, session.steps) == ("training", 2)
    assert products(session)["addmm", "forward"] == 4


def test_the_end_of_a_recording_recompiles_nothing_and_warns_of_nothing(recorded) -> None:
    from torch._dynamo.utils import counters

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    torch._dynamo.reset()
    seen = []

    def action() -> None:
        compiled, optimizer = torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters())
        for _ in range(8):
            compiled(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            seen.append(counters["stats"]["unique_graphs"])

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        (session,), _ = recorded(action, Steps(1, 1, 2, 1))
    assert session.steps == 2 and len(set(seen)) == 1


def test_training_in_threads_writes_nothing_to_standard_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import threading, torch\n"
        "def work():\n"
        "    m = torch.nn.Linear(4, 4); o = torch.optim.SGD(m.parameters())\n"
        "    for _ in range(8): m(torch.ones(2, 4)).sum().backward(); o.step()\n"
        "threads = [threading.Thread(target=work) for _ in range(3)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    (tmp_path / "trace").mkdir()
    environment = TorchTracer().environment(str(tmp_path / "trace"), Steps(1, 1, 2, 1), os.environ)
    done = subprocess.run([sys.executable, str(program)], env={**os.environ, **environment}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    sessions, _ = TorchTracer().recorded(str(tmp_path / "trace"), None)
    assert steps_of(sessions) == [("training", 2)]


def test_a_version_that_cannot_be_recorded_runs_on_untraced(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.4'\n")
    environment = TorchTracer().environment(str(tmp_path), Steps(), {"PYTHONPATH": str(tmp_path)})
    program = [sys.executable, "-c", "import torch; print('ran', torch.__version__)"]
    done = subprocess.run(program, env={**os.environ, **environment}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran 0.4\n", "")
    sessions, notes = TorchTracer().recorded(str(tmp_path), None)
    assert sessions == [] and any("0.4" in note for note in notes)
