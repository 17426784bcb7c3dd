"""Hugging Face pipelines, loaded in this process and in a worker; the models are made here, nothing is downloaded."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from joulery.adapters.engines.embedded.models import load, warm_up
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.serving.engine import ModelKind, ModelRef, Outcome, ReplicaSpec, RequestError
from joulery.domain.serving.tensors import TensorSpec
from tests.adapters.engines.support import CORE, ask, running
from tests.adapters.engines.torch_files import bert_folder, vit_folder

pytest.importorskip("torch", reason="torch is not installed: pip install 'joulery[torch]'")
# Not imported here: that takes a second, and each worker would, whichever runs these tests.
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
TEXTS = np.array([b"good joule", b"bad", b"the good the bad a joule"], object)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("bert"))


def pipeline(folder: Path, task: str = "text-classification", **options: object) -> ModelRef:
    return ModelRef(ModelKind.TRANSFORMERS, str(folder), json.dumps({"task": task, **options}))


def test_a_classifier_answers_what_its_pipeline_answers(bert: Path) -> None:
    import transformers

    loaded = load(pipeline(bert), threads=1)
    assert loaded.inputs == (TensorSpec("text", "BYTES", (-1,)),)
    assert loaded.platform == "transformers_text_classification"
    assert warm_up(loaded) == ""
    results = loaded.run({"text": TEXTS}, ())
    pipe = transformers.pipeline("text-classification", model=str(bert), device="cpu")
    expected = pipe([text.decode() for text in TEXTS])
    assert [label.decode() for label in results["label"]] == [one["label"] for one in expected]
    np.testing.assert_allclose(results["score"], [one["score"] for one in expected], rtol=1e-5)
    assert list(loaded.run({"text": TEXTS}, ("score",))) == ["score"]
    assert loaded.run({"text": TEXTS[:0]}, ())["score"].size == 0


def test_rows_run_together_answer_as_they_do_alone(bert: Path) -> None:
    for task, name in (("text-classification", "score"), ("feature-extraction", "embedding")):
        loaded = load(pipeline(bert, task), threads=1)
        together = loaded.run({"text": TEXTS}, ())[name]
        alone = [loaded.run({"text": TEXTS[at : at + 1]}, ())[name][0] for at in range(len(TEXTS))]
        np.testing.assert_allclose(together, np.array(alone), rtol=1e-5)


def test_several_labels_are_columns(bert: Path) -> None:
    loaded = load(pipeline(bert, top_k=2), threads=1)
    results = loaded.run({"text": TEXTS}, ())
    assert results["label"].shape == results["score"].shape == (3, 2)
    np.testing.assert_allclose(results["score"].sum(axis=1), 1.0, rtol=1e-5)
    assert loaded.outputs == (TensorSpec("label", "BYTES", (-1, -1)), TensorSpec("score", "FP32", (-1, -1)))


def test_other_tasks_answer_json(bert: Path) -> None:
    loaded = load(pipeline(bert, "token-classification"), threads=1)
    found = [json.loads(text) for text in loaded.run({"text": TEXTS}, ())["json"]]
    assert [len(row) for row in found] == [2, 1, 6]
    assert found[0][0]["word"] == "good"


def test_pictures_are_classified(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image", reason="PIL.Image is not installed")
    loaded = load(pipeline(vit_folder(tmp_path), "image-classification"), threads=1)
    pictures = np.random.default_rng(0).integers(0, 255, (2, 40, 50, 3)).astype(np.uint8)
    results = loaded.run({"image": pictures}, ())
    assert results["label"].shape == results["score"].shape == (2, 2)
    with pytest.raises(RequestError, match="UINT8 of shape"):
        loaded.run({"image": pictures[0]}, ())


@pytest.mark.parametrize("text", [np.array("a", object), np.zeros((1, 2)), np.array([b"\xff"], object)])
def test_what_is_no_text_is_the_fault_of_the_request(bert: Path, text: object) -> None:
    with pytest.raises(RequestError) as caught:
        load(pipeline(bert), threads=1).run({"text": np.asarray(text)}, ())
    assert caught.value.outcome is Outcome.INVALID


def test_what_cannot_be_loaded_is_one_error(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no task that can be served"):
        load(pipeline(bert, "text-generation"), threads=1)
    with pytest.raises(DataError, match="not a model of"):
        load(pipeline(tmp_path), threads=1)
    with pytest.raises(ConfigError, match="no such model"):
        load(pipeline(tmp_path / "none"), threads=1)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CapabilityError) as caught:
        load(pipeline(bert), threads=1)
    assert caught.value.grant == "pip install 'joulery[transformers]'"


async def test_a_worker_answers_with_a_pipeline(bert: Path) -> None:
    reference = ModelRef.parse(f"transformers:text-classification:{bert}")
    assert reference == pipeline(bert)
    async with running(ReplicaSpec("reviews", "tiny", CORE, reference), launch_s=240.0) as engine:
        answer = await ask(engine, service="reviews", text=TEXTS)
        assert set(answer.outputs["label"].tolist()) <= {b"NEGATIVE", b"POSITIVE"}
