"""TorchScript and torch.export models, loaded in this process and in workers."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from joulery.adapters.engines.embedded.models import load, warm_up
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.serving.engine import ModelKind, ModelRef, Outcome, ReplicaSpec, RequestError
from joulery.domain.serving.tensors import TensorSpec
from tests.adapters.engines.support import CORE, ask, running
from tests.adapters.engines.torch_files import export_file, linear, script_file

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'joulery[torch]'")
DECLARED = '{"inputs": [["x", "FP32", [-1, 4]]]}'


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    return ModelRef.parse(str(script_file(tmp_path_factory.mktemp("script") / "net.pt")))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    return ModelRef.parse(str(export_file(tmp_path_factory.mktemp("export") / "net.pt2")))


@pytest.fixture(params=["script", "program"])
def model(request: pytest.FixtureRequest) -> ModelRef:
    found: ModelRef = request.getfixturevalue(request.param)
    return found


def rows(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32)


def truth(x: Any) -> Any:
    with torch.inference_mode():
        return linear()(torch.from_numpy(x))["scores"].numpy()


@pytest.mark.parametrize("count", [1, 3])
def test_a_torch_model_answers_what_torch_answers(model: ModelRef, count: int) -> None:
    loaded, x = load(model, threads=1), rows(count)
    results = loaded.run({"x": x}, ())
    assert set(results) == {"scores", "best"}
    np.testing.assert_allclose(results["scores"], truth(x), rtol=1e-6)
    assert results["best"].tolist() == truth(x).argmax(-1).tolist()
    assert list(loaded.run({"x": x}, ("best",))) == ["best"]


def test_an_exported_program_declares_its_tensors(program: ModelRef) -> None:
    loaded = load(program, threads=1)
    assert loaded.inputs == (TensorSpec("x", "FP32", (-1, 4)),)
    assert loaded.outputs == (TensorSpec("scores", "FP32", (-1, 3)), TensorSpec("best", "INT64", (-1,)))
    assert warm_up(loaded) == ""


def test_torchscript_declares_the_inputs_of_its_options(script: ModelRef) -> None:
    assert load(script, threads=1).inputs == ()
    declared = ModelRef(ModelKind.TORCHSCRIPT, script.location, DECLARED)
    assert load(declared, threads=1).inputs == (TensorSpec("x", "FP32", (-1, 4)),)
    wrong = ModelRef(ModelKind.TORCHSCRIPT, script.location, DECLARED.replace('"x"', '"photo"'))
    with pytest.raises(ConfigError, match="no input 'photo'"):
        load(wrong, threads=1)


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"x": np.zeros((1, 5), np.float32)},
        {"x": np.zeros((1, 4), np.float64)},
        {"x": np.array([[b"text"]], object)},
        {"x": np.zeros((1, 4), np.float32), "y": np.zeros(1)},
    ],
    ids=["missing", "shape", "type", "text", "unknown"],
)
def test_what_does_not_fit_is_the_fault_of_the_request(model: ModelRef, inputs: dict[str, Any]) -> None:
    loaded = load(model, threads=1)
    with pytest.raises(RequestError) as caught:
        loaded.run(inputs, ())
    assert caught.value.outcome is Outcome.INVALID
    with pytest.raises(RequestError, match="no output"):
        loaded.run({"x": rows(1)}, ("nope",))


@pytest.mark.parametrize("name", ["broken.pt", "broken.pt2"])
def test_a_file_that_is_no_model_is_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("no model")
    with pytest.raises(DataError, match=r"not .* that can be run"):
        load(ModelRef.parse(str(tmp_path / name)), threads=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(ModelRef.parse(str(tmp_path / "none.pt")), threads=1)


def test_without_torch_the_error_says_what_to_install(model: ModelRef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CapabilityError) as caught:
        load(model, threads=1)
    assert caught.value.grant == "pip install 'joulery[torch]'"


@pytest.mark.parametrize("returned", ["x", "(x, x + 1)"])
def test_outputs_without_names_are_numbered(tmp_path: Path, returned: str) -> None:
    class Plain(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x + 0 if returned == "x" else (x + 0, x + 1)

    for file in (script_file(tmp_path / "n.pt", Plain()), export_file(tmp_path / "n.pt2", Plain())):
        results = load(ModelRef.parse(str(file)), threads=1).run({"x": rows(1)}, ())
        assert list(results) == (["output"] if returned == "x" else ["output_0", "output_1"])


async def test_workers_answer_with_torch(model: ModelRef) -> None:
    async with running(ReplicaSpec("net", "v", CORE, model), launch_s=240.0) as engine:
        (view,) = engine.replicas()
        assert view.platform in ("torch_torchscript", "torch_export")
        x = rows(2)
        answer = await ask(engine, service="net", x=x)
        np.testing.assert_allclose(answer.outputs["scores"], truth(x), rtol=1e-6)
        with pytest.raises(RequestError) as caught:
            await ask(engine, service="net", x=np.zeros((1, 5), np.float32))
        assert caught.value.outcome is Outcome.INVALID
