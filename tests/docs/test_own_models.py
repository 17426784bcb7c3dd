"""docs/how-to/your-own-model.md, played: its files are written, its servers started, its requests sent."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from joulery.adapters.engines.remote.triton import TritonModel
from joulery.adapters.models import smollm2
from joulery.config import load
from joulery.domain.serving.tensors import TensorSpec
from tests.docs.pages import ROOT
from tests.triton_server import triton_server

PAGE = ROOT / "docs" / "how-to" / "your-own-model.md"
FILE = re.compile(r"^```py\n# (\S+\.py).*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SITE = re.compile(r"^```yaml\n(joulery: 1\n.*?)^```", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
Servers = Callable[[str, Path], AbstractContextManager[str]]
SHOWN = "http://127.0.0.1:8080"
pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def sections() -> list[str]:
    return re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]


def steps(section: str) -> Iterator[tuple[str, str]]:
    """Each command of a section's terminals and what is shown below it."""
    for body in CONSOLE.findall(section):
        for part in re.split(r"^\$ ", body.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


@contextmanager
def server(words: list[str], folder: Path) -> Iterator[str]:
    line = [sys.executable, "-m", "joulery", *words, "--listen", "127.0.0.1:0", "--json"]
    with (
        (folder / "server.log").open("ab") as log,
        subprocess.Popen(line, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.stdout.read()  # a site ends with its summary
    assert process.returncode == 0


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}


def outline(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without its numbers, which differ from processor to processor in their last digits."""
    outputs = [
        {**one, "data": one["data"] if one["datatype"] != "FP32" else len(one["data"])} for one in answer["outputs"]
    ]
    return {**answer, "outputs": outputs}


@pytest.mark.parametrize("title", ["ONNX", "PyTorch", "Hugging Face"])
def test_a_section_of_the_page_runs(title: str, tmp_path: Path) -> None:
    if title != "ONNX":
        pytest.importorskip("torch", reason="torch is not installed: pip install 'joulery[torch]'")
    if title == "Hugging Face":
        pytest.importorskip("transformers", reason="transformers is not installed")
    (section,) = [one for one in sections() if one.startswith(title)]
    for name, text in FILE.findall(section):
        (tmp_path / name).write_text(text)
    commands = list(steps(section))
    assert [command.split()[0] for command, _ in commands][:3] == ["python", "joulery", "curl"]
    (_, script), (_, serve, *flags) = (shlex.split(command) for command, _ in commands[:2])
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True, capture_output=True)
    with server([serve, *flags], tmp_path) as url:
        for command, shown in commands[2:]:
            done = subprocess.run(shlex.split(command.replace(SHOWN, url)), capture_output=True, check=True)
            got, expected = json.loads(done.stdout), json.loads(shown)
            if "model_name" in expected:
                got, expected = outline(got), outline(expected)
            assert got == expected, command


def test_the_site_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'joulery[torch]'")
    page = PAGE.read_text()
    files = dict(FILE.findall(page))
    (tmp_path / "export.py").write_text(files["export.py"])
    (text,) = [text for text in SITE.findall(page) if "net.pt2" in text and "split" not in text]
    (tmp_path / "net.yaml").write_text(text + "serving: {listen: '127.0.0.1:0'}\n")
    subprocess.run([sys.executable, "export.py"], cwd=tmp_path, check=True, capture_output=True)
    line = [sys.executable, "-m", "joulery", "up", "net.yaml", "--json-out", "report.json"]
    done = subprocess.run(line, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    (service,) = report["services"]
    assert service["requests"] > 0
    assert service["failed"] == service["refused"], "a busy machine may refuse, never fail"


DOUBLED = """
import onnx
from onnx import TensorProto, helper

two = helper.make_tensor("two", TensorProto.FLOAT, [1], [2.0])
graph = helper.make_graph(
    [helper.make_node("Mul", ["x", "two"], ["y"])],
    "net",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 2])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 2])],
    [two],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "resnet18.onnx")
"""
INDENTED = re.compile(r"^```yaml\n(    concurrency: .*?)^```", re.MULTILINE | re.DOTALL)


ADDRESS = re.compile(r"http://(gpu\d):8000/(\w+)")


@contextmanager
def stand_ins(text: str, folder: Path) -> Iterator[str]:
    """Starts a server for each address in a site file; the file with their addresses."""
    with ExitStack() as stack:
        for host, model in ADDRESS.findall(text):
            line = [sys.executable, "-m", "tests.fakes.open_inference_server", "0", model, "0.005", f"{folder}/{model}"]
            process = stack.enter_context(subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            text = text.replace(
                f"http://{host}:8000/{model}", f"http://127.0.0.1:{int(process.stdout.readline())}/{model}"
            )
        yield text


TRITON_MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        x = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * each)]) for each in x]
"""


@contextmanager
def on_triton(text: str, folder: Path) -> Iterator[str]:
    """Starts a real Triton that has the models of a site file; the file with its address."""
    x, y = (TensorSpec(name, "FP32", (-1, 2)) for name in "xy")
    models = [TritonModel(name, 4, 0.0, 0.1, "python", None, (x,), (y,)) for _, name in ADDRESS.findall(text)]
    with triton_server(folder / "triton", dict.fromkeys(models, TRITON_MODEL)) as url:
        yield ADDRESS.sub(rf"{url}/\2", text)


@pytest.mark.parametrize("servers", [stand_ins, on_triton])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_site_with_models_on_other_servers_runs(mixed: bool, servers: Servers, tmp_path: Path) -> None:
    """As it is shown, and with the lines of the section that has one variant here."""
    (section,) = [one for one in sections() if one.startswith("A model on another server")]
    (text,) = SITE.findall(section)
    if mixed:
        (lines,) = INDENTED.findall(section)
        text = (
            text[: text.index("    concurrency:")]
            + "    policy: {kind: clover, lambda: 15 %, base_intensity: 250 g/kWh}\n"
            + lines
        )
        subprocess.run([sys.executable, "-c", DOUBLED], cwd=tmp_path, check=True)
    with servers(text, tmp_path) as played:
        (tmp_path / "photos.yaml").write_text(played)
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
        with server(["serve", "photos.yaml"], tmp_path) as url:
            for variant in ("large", "small"):
                answer = httpx.post(f"{url}/v2/models/photos/versions/{variant}/infer", json=body, timeout=None)
                if answer.status_code == 503:
                    continue  # the layout has no slot for it
                assert answer.headers["x-joulery-variant"] == variant
                assert answer.json()["outputs"][0]["data"] == [2.0, 4.0]
            answer = httpx.post(f"{url}/v2/models/photos/infer", json=body, timeout=None)
            assert answer.status_code == 200 and answer.headers["x-joulery-variant"] in ("large", "small")
            assert float(answer.headers["x-joulery-energy-j"]) > 0
            assert answer.headers["x-joulery-quality"] in ("assumed", "modelled")


def test_the_language_models_of_the_page_answer(tmp_path: Path) -> None:
    """The other server is another joulery, which has the same file."""
    pytest.importorskip("xllamacpp", reason="joulery[llm] is not installed")
    if not smollm2.installed():
        pytest.skip(f"the small language model is not installed: {smollm2.HOW}")
    (section,) = [one for one in sections() if one.startswith("A language model")]
    (text,) = SITE.findall(section)
    (tmp_path / "mine.gguf").symlink_to(smollm2.weights())
    alone = text[: text.index("  - name: theirs")].replace("name: mine", "name: llama-3.1-8b")
    (tmp_path / "theirs.yaml").write_text(alone)
    (serve, _), (curl, _) = steps(section)
    with server(["serve", "theirs.yaml"], tmp_path) as there:
        here = text.replace("http://gpu1:8000", there).replace(', device: "gpu:0"', "")
        (tmp_path / "chat.yaml").write_text(here)
        with server(shlex.split(serve)[1:], tmp_path) as url:
            for model in ("mine", "theirs"):
                line = curl.replace(SHOWN, url).replace('"mine"', f'"{model}"')
                done = subprocess.run(shlex.split(line), capture_output=True, check=True)
                answer = json.loads(done.stdout)
                assert answer["choices"][0]["message"]["content"], answer
                assert 0 < answer["usage"]["completion_tokens"] <= 8
                spent = answer["usage"]["joulery"]
                assert spent["energy_j"] > 0 if model == "mine" else spent.get("energy_j") is None, spent


def test_every_site_of_the_page_is_accepted(tmp_path: Path) -> None:
    """tests/e2e plays a canary (test_up.py)."""
    for name in ("net.pt2", "mine.gguf"):
        (tmp_path / name).touch()
    texts = SITE.findall(PAGE.read_text())
    assert len(texts) == 4
    for text in texts:
        (tmp_path / "site.yaml").write_text(text)
        site = load(tmp_path / "site.yaml")
        assert site.services or site.language_models
