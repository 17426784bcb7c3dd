"""Modules of compiled models: the names in a traced run, compared with the compiler's own record."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import NotRun, Result

_ROOT = re.compile(r"^L\['\w+'\]\.?")


def run() -> Result:
    """Train three models under ``torch.compile`` with an empty cache, and compare every call of their code."""
    if importlib.util.find_spec("torch") is None:
        raise NotRun("PyTorch is not installed: pip install 'joulery[torch]'")
    import torch

    rows, calls, right = [], 0, 0
    for name, make, batch in _models(torch):
        for label, count, same in _compared(torch, make(), batch()):
            rows.append((name, label, str(count), str(same)))
            calls, right = calls + count, right + same
    return Result(
        "Modules of compiled models",
        ("model", "code", "calls of kernels", "with the compiler's module"),
        rows,
        (
            f"PyTorch {torch.__version__}, Inductor on a CPU, training, empty cache. joulery names a call from what "
            "generated code keeps, so that a warm cache serves as well; the compiler's record exists only while it "
            "compiles. A fused kernel counts as right if it has the lowest common module of the last operations of its "
            "loops.",
        ),
        (("at least 95 % of the calls have the compiler's module", right >= 0.95 * calls > 0),),
        {"calls": calls, "right": right},
    )


def _compared(torch: Any, model: Any, batch: Any) -> list[tuple[str, int, int]]:
    """(pass, calls, calls with the compiler's module) of the code of one model."""
    from joulery.adapters.tracers.inject.torch_recorder import TorchRecorder
    from joulery.adapters.tracers.kineto.compiled import DynamoGraph, GeneratedCode, common, named_calls

    truth: dict[int, list[tuple[str, str]]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        _watched(truth),
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}),
    ):
        torch._dynamo.reset()
        recorder = TorchRecorder(Path(folder), 1, 1, 1, 1)
        recorder.install()
        compiled, optimizer = torch.compile(model), torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            compiled(batch).square().mean().backward()
            optimizer.step()
        recorder.finish()
        noted = json.loads(next(Path(folder).glob("*.compiled")).read_text())
    texts = noted["texts"]
    graphs = [DynamoGraph.of(graph, texts) for graph in noted["graphs"] if graph["calls"]]
    result = []
    for fields in noted["codes"]:
        code = GeneratedCode.of(fields, texts)
        known = next((rows for rows in truth.values() if [stack for _, stack in rows] == code.stacks), None)
        if known is None:
            continue
        found = [call.module or "." for call in named_calls(code, graphs)]
        wanted = [common([known[at][0] for at in own]) or "." for own in code.owned]
        same = sum(one == other for one, other in zip(found, wanted, strict=True))
        result.append(("backward" if code.backward else "forward", len(found), same))
    return result


def _watched(truth: dict[int, list[tuple[str, str]]]) -> Any:
    """Record the module and the stack of the last operation of every loop, as the compiler schedules it."""
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    entered: Callable[..., None] = Scheduler.enter_context

    def enter(scheduler: Any, node: Any) -> None:
        lines = V.graph.wrapper_code.lines
        before = len(lines)
        entered(scheduler, node)
        for line in lines[before:]:
            meta = line.context.meta
            stack = list((meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}).values())
            module = "." + _ROOT.sub("", str(stack[-1][0])).replace("_modules.", "") if stack else ""
            truth.setdefault(id(V.graph.graph), []).append((module, line.context.stack_trace or ""))

    return mock.patch.object(Scheduler, "enter_context", enter)


def _models(torch: Any) -> list[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """(name, model, batch): a perceptron, a CNN with residual blocks, a transformer of six layers."""
    nn = torch.nn

    class Residual(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
            self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

        def forward(self, x: Any) -> Any:
            return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))

    class Layer(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
            return x + self.mlp(self.norm2(x))

    def perceptron() -> Any:
        return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 4))

    def convolutional() -> Any:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3), *[Residual(16) for _ in range(4)], nn.Flatten(), nn.Linear(16 * 14 * 14, 10)
        )

    def transformer() -> Any:
        return nn.Sequential(
            nn.Embedding(100, 64), *[Layer(64) for _ in range(6)], nn.LayerNorm(64), nn.Linear(64, 100)
        )

    return [
        ("perceptron, 9 modules", perceptron, lambda: torch.randn(16, 64)),
        ("CNN, 4 residual blocks", convolutional, lambda: torch.randn(4, 3, 16, 16)),
        ("transformer, 6 layers", transformer, lambda: torch.randint(0, 100, (4, 32))),
    ]
