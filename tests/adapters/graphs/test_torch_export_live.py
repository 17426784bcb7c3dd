"""A model exported by the PyTorch that is installed, read back without it."""

from pathlib import Path

import pytest

from joulery.adapters.graphs.torch_export import read_torch_export
from joulery.domain.trace.operators import OperatorKind
from joulery.perf.power.operator_costs import operator_costs

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'joulery[torch]'")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("decomposed", [False, True])
def test_flops_agree_with_pytorchs_own_counter(tmp_path: Path, decomposed: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.GELU(),
        torch.nn.ConvTranspose2d(8, 4, 2, stride=2),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 32),
        torch.nn.LayerNorm(32),
        torch.nn.Softmax(-1),
    ).eval()
    example = torch.randn(2, 3, 16, 16)
    program = torch.export.export(model, (example,))
    if decomposed:
        program = program.run_decompositions()
    file = tmp_path / "model.pt2"
    torch.export.save(program, str(file))
    graph = read_torch_export(file, {})
    assert OperatorKind.OTHER not in {operator.kind for operator in graph}
    costs = operator_costs(graph)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(example)
    products = sum(cost.flops for cost in costs if any(word in cost.type for word in ("conv", "linear", "mm")))
    assert products == counter.get_total_flops()
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    statistics = 2 * 8 * 4  # of the batch normalisation
    assert weights <= sum(cost.parameter_bytes for cost in costs) <= weights + statistics
