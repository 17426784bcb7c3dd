"""The example notebook runs from top to bottom, and what its cells show is what joulery shows in a notebook."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "measure.ipynb"


def shown(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of its last expression, as a notebook would show it."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore::joulery.MeasureWarning")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code"), "outputs are not kept"
    names: dict[str, Any] = {}
    _, window, block, money, _ = [shown(source, names) for source in sources]
    assert window.energy_j >= 0
    assert "<table" in block._repr_html_() and "CO2e" in block._repr_html_()
    assert " kWh, " in money and names["m"].footprint.energy_j > 0
