"""Code that ``torch.compile`` cut into parts for CUDA graphs: it has no lines of the program.

``partitioned.compiled`` is what the recorder noted of a ResNet-50 that trained under ``mode="reduce-overhead"`` with
PyTorch 2.11 on an H100: its graph without the lines, and the calls of its backward pass with those of their source
nodes that the graph has.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from joulery.adapters.tracers.kineto.compiled import CompiledCall, read_compiled
from joulery.adapters.tracers.kineto.names import name_events
from joulery.adapters.tracers.kineto.reader import read_columns
from tests.adapters.tracers.kineto.kineto_file import KinetoFile

NOTED = Path(__file__).with_name("partitioned.compiled")


def forward(called: str) -> list[str]:
    """Modules of the operations of a kind, in the order of the forward pass."""
    noted = json.loads(NOTED.read_text(encoding="utf-8"))
    texts = noted["texts"]
    return [texts[module] for _, _, module, function in noted["graphs"][0]["calls"] if texts[function] == called]


def backward() -> list[CompiledCall]:
    return list(read_compiled(NOTED).values())


def test_each_convolution_is_differentiated_once_against_the_order_of_the_network() -> None:
    convolutions = forward("conv2d")
    assert len(convolutions) == 53
    found = [call.module for call in backward() if call.leaf == "convolution_backward"]
    assert found == convolutions[::-1]


def test_each_norm_has_its_kernels_and_a_kernel_of_two_norms_their_block() -> None:
    kernels = [call for call in backward() if "native_batch_norm_backward" in call.leaf]
    found = Counter(call.module for call in kernels)
    norms = forward("batch_norm")
    assert len(norms) == 53
    assert not set(norms) - set(found)
    blocks = {f".layer{n}.0" for n in range(1, 5)}  # the norms of a block and of its downsampling run in one kernel
    assert set(found) - set(norms) == blocks
    alone = [name for name in norms if not name.startswith(tuple(blocks))]
    assert {found[name] for name in alone} <= {4, 5}


def test_a_call_that_nothing_places_belongs_to_the_module_that_all_have_in_common() -> None:
    unplaced = {call.leaf.rstrip("_0123456789") for call in backward() if call.module == "."}
    assert unplaced == {f"triton_poi_fused_{name}" for name in ("_to_copy", "new_zeros", "squeeze_view")}
    assert all(call.module for call in backward())


@pytest.fixture
def replayed(tmp_path: Path) -> Path:
    """A replay of that code, launched from autograd's thread; products and convolutions run kernels of a library."""
    f = KinetoFile()
    f.module("ResNet", 0, 100)
    f.op("CompiledFunction", 10, 50, seq=7)
    f.node("CompiledFunctionBackward", 200, 100, tid=2, seq=7)
    f.arrow((1, 10), (2, 200.1))
    f.launch("cudaGraphLaunch", 220, 10, correlation=5, tid=2)
    for at, call in enumerate(backward()):
        library = not call.leaf.startswith("triton_")
        if library and at % 2:
            f.kernel("Memset (Device)", 300 + 10 * at, 2, correlation=5, cat="gpu_memset")
        f.kernel("sm90_xmma_wgrad" if library else call.leaf, 303 + 10 * at, 6, correlation=5)
    return f.write(tmp_path)


def test_a_backward_graph_of_it_is_named_to_the_last_kernel(replayed: Path, tmp_path: Path) -> None:
    shutil.copy(NOTED, tmp_path / "torch-1.compiled")
    trace = name_events(read_columns(replayed), compiled=read_compiled(tmp_path / "torch-1.compiled"))
    gpu = trace.devices.index("GPU:0")
    rows = [
        (trace.ops[op], trace.phases[phase])
        for op, phase, device in zip(trace.op.tolist(), trace.phase.tolist(), trace.device.tolist(), strict=True)
        if device == gpu
    ]
    assert len(rows) > len(backward())
    assert {phase for _, phase in rows} == {"backward"}
    assert not [op for op, _ in rows if "CUDA graph" in op or not op.startswith("ResNet/")]
    assert sum(op.startswith("ResNet/layer1_0/downsample_0/") for op, _ in rows) > 0
