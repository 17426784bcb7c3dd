"""Three layers taught to say what five say. What trains skips where PyTorch is not installed."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.adapters.models import minilm, minilm_distil
from joulery.adapters.models.minilm_distil import DistilRecipe, Lesson, distil
from joulery.app.wiring.length_predictor import kept_predictor
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.ui.cli import main
from tests.runtime.llm.test_predictor_training import PROMPTS, answers, write

RECIPE = DistilRecipe(layers=1, epochs=2, pieces=1)
SCORES = np.random.default_rng(0).normal(size=(30, 3))


@pytest.fixture(scope="module")
def teacher():
    pytest.importorskip("torch", reason="torch is not installed: pip install 'joulery[torch]'")
    if not minilm.installed():
        pytest.skip(f"the prompt encoder is not installed: {minilm.HOW}")
    return minilm.PromptEncoder(2)


@pytest.fixture(scope="module")
def student(teacher):
    return distil(teacher, lesson(), RECIPE)


def lesson(scores=SCORES):
    return Lesson(PROMPTS[:30], scores, np.arange(30) % 5)


def distance(one, other):
    return float(np.mean([np.sum((one(prompt) - other(prompt)) ** 2) for prompt in PROMPTS[40:80]]))


def test_a_student_says_more_of_what_its_teacher_says_than_its_layers_did(teacher, student):
    assert (student.layers, student.max_tokens, student.last_tokens) == (1, 72, 32)
    assert student.name.endswith("distilled into 1 layers, int8")
    assert distance(student, teacher) < 0.8 * distance(minilm.PromptEncoder(1), teacher)


def test_equal_seeds_give_equal_students_and_leave_torch_as_it_was(teacher, student):
    import torch

    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    progress = []
    again = distil(teacher, lesson(), RECIPE, lambda done, of, what: progress.append((done, of, what)))
    assert all(np.array_equal(again.weights[name], student.weights[name]) for name in student.weights)
    assert torch.get_num_threads() == threads and torch.equal(torch.random.get_rng_state(), state)
    assert progress[-1][:2] == (6, 6) and progress[3][2].startswith("epoch 1 of 2, loss ")
    other = distil(teacher, lesson(), DistilRecipe(layers=1, epochs=2, pieces=1, seed=1))
    assert any(not np.array_equal(other.weights[name], student.weights[name]) for name in student.weights)


def test_what_the_heads_are_to_say_is_heard(teacher, student):
    other = distil(teacher, lesson(SCORES[::-1]), RECIPE)
    assert any(not np.array_equal(other.weights[name], student.weights[name]) for name in student.weights)
    deaf = [distil(teacher, lesson(each), DistilRecipe(1, 1, 0, heads_ratio=0.0)) for each in (SCORES, SCORES[::-1])]
    assert all(np.array_equal(deaf[0].weights[name], deaf[1].weights[name]) for name in deaf[0].weights)


def test_the_layers_that_are_trained_are_the_layers_that_run(teacher):
    tokens = [teacher.pieces(prompt) for prompt in (PROMPTS[0], PROMPTS[3])]
    trained = minilm_distil._meaning(minilm_distil._parameters(teacher.weights, 2), tokens, 2).numpy()
    graph = minilm._graph(teacher.weights, 2).SerializeToString()
    runner = pytest.importorskip(
        "onnxruntime", reason="onnxruntime is not installed: pip install 'joulery[vision]'"
    ).InferenceSession(graph, providers=["CPUExecutionProvider"])
    for row, each in zip(trained, tokens, strict=True):
        assert runner.run(None, {"tokens": np.array(each, np.int64)})[0] == pytest.approx(row, abs=1e-4)


def test_a_predictor_of_three_layers_is_trained_kept_and_run(tmp_path, capsys, teacher):
    texts = write(tmp_path / "texts.parquet", instruction_id=list(range(len(PROMPTS))), instruction=PROMPTS)
    files = {
        "data": answers(tmp_path / "data.parquet", range(50)),
        "instructions": texts,
        "evaluate": answers(tmp_path / "held.parquet", range(80, 120)),
        "out": tmp_path / "kept",
    }
    arguments = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    assert main(["train-length-predictor", "--encoder", "distilled", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["pairwise"] > 0.8
    assert found["encoder"].endswith("distilled into 3 layers, int8")
    assert "distilling" in printed.err and "epoch 5 of 5" in printed.err
    assert json.loads((tmp_path / "kept" / "predictor.json").read_text())["encoder"] == found["encoder"]
    scores, meaning = kept_predictor(tmp_path / "kept").look("Write a long essay about new tea")
    assert scores[0] > kept_predictor(tmp_path / "kept").look("Say in one word: new tea")[0][0]
    assert meaning is not None and meaning.shape == (minilm.WIDTH,)


def test_without_pytorch_it_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    if not minilm.installed():
        pytest.skip(f"the prompt encoder is not installed: {minilm.HOW}")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(CapabilityError, match="distilling needs PyTorch") as raised:
        distil(None, lesson())
    assert raised.value.grant == "pip install 'joulery[torch]'"


@pytest.mark.parametrize("bad", [{"layers": 0}, {"layers": 7}, {"epochs": 0}, {"pieces": -1}, {"batch": 1}])
def test_a_recipe_that_teaches_nothing_is_refused(bad):
    with pytest.raises(ConfigError):
        DistilRecipe(**bad)


@given(st.integers(0, 70), st.integers(0, 99))
def test_a_piece_is_a_run_of_the_prompt_opened_and_closed(size, seed):
    tokens = [101, *range(1000, 1000 + size), 102]
    piece = minilm_distil._piece(tokens, np.random.default_rng(seed))
    assert (piece[0], piece[-1]) == (101, 102)
    assert min(4, size) <= len(piece) - 2 <= size
    assert bool(np.all(np.diff(piece[1:-1]) == 1))


@settings(max_examples=50)
@given(st.lists(st.integers(2, 72), min_size=1, max_size=80), st.integers(2, 9))
def test_batches_hold_each_text_once(sizes, batch):
    found = minilm_distil._batches(sizes, batch, np.random.default_rng(0))
    assert sorted(np.concatenate(found).tolist()) == list(range(len(sizes)))
    assert max(map(len, found)) <= batch
