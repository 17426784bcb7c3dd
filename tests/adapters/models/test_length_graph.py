"""A predictor as one ONNX file says what its numbers say."""

import numpy as np
import pytest

from joulery.adapters.models import minilm
from joulery.adapters.models.length_graph import LengthGraph, build
from joulery.app.wiring import length_predictor as length_guess
from joulery.app.wiring.length_predictor import prompt_encoder
from joulery.domain.errors import CapabilityError, DataError
from joulery.perf.lengths.kernel_ridge import AnswerLengths, fit_lengths
from joulery.perf.lengths.prompt_features import FEATURES, prompt_features
from joulery.runtime.llm import predictor_files as lf
from joulery.runtime.llm import predictor_training as lt

PROMPTS = [
    f"{ask} {thing}" for ask in ("Name", "Explain in detail", "Is it", "List ten") for thing in "abcdefghijklmno"
]
ODD = ("", "x" * 1_000_000, "\ud800", "Ünïcode ✓")


def log_of(prompts):
    tokens = np.random.default_rng(2).lognormal(3, 1, (len(prompts), 2)).round() + 1
    return lt.TrainingAnswers(tuple(prompts), tuple(range(len(prompts))), AnswerLengths(("m", "n"), tokens))


def test_the_graph_and_the_numbers_agree(tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed: pip install 'joulery[llm]'")
    features = np.array([prompt_features(prompt) for prompt in PROMPTS])
    model = fit_lengths(features, [len(FEATURES)], log_of(PROMPTS).answers)
    file = tmp_path / "p.onnx"
    file.write_bytes(build(model.arrays, model.recipe.width, len(FEATURES), None))
    graph = LengthGraph(file, None, 0)
    for prompt in (*PROMPTS[:5], *ODD):
        row = prompt_features(prompt)
        raw, embedding = graph(prompt, row)
        assert embedding is None
        assert raw == pytest.approx(model.raw_scores(row), abs=2e-5)


def test_what_is_kept_is_run_from_its_onnx_file_with_the_encoder_inside(tmp_path, monkeypatch):
    if not minilm.installed():
        pytest.skip(f"the prompt encoder is not installed: {minilm.HOW}")
    log = log_of(PROMPTS)
    trained = lt.train(log, prompt_encoder("minilm"))
    lf.save(tmp_path, trained, log, [], length_guess.predictor_graph(trained))
    assert (tmp_path / "predictor.onnx").exists() and (tmp_path / "vocab.txt").exists()
    monkeypatch.setattr(minilm, "PACKAGE", "no-such-package")  # what is kept needs nothing else
    kept = length_guess.kept_predictor(tmp_path)
    assert isinstance(kept, lf.GraphPredictor)
    for prompt in (PROMPTS[0], *ODD):
        scores, embedding = kept.look(prompt)
        expected, meaning = trained.look(prompt)
        assert scores == pytest.approx(expected, abs=1e-3)
        assert embedding == pytest.approx(meaning, abs=1e-3)
    guesser = length_guess.length_predictor(tmp_path, "n")
    assert guesser.head == 1
    assert guesser.predict("Name a").score == pytest.approx(trained.look("Name a")[0][1], abs=1e-3)
    assert list(guesser.class_tokens) == sorted(guesser.class_tokens)
    assert length_guess.length_predictor(tmp_path, "another model").head == 2


def test_without_something_to_run_it_with_the_numbers_are_used(tmp_path, monkeypatch):
    pytest.importorskip("onnx", reason="onnx is not installed: pip install 'joulery[llm]'")
    log = log_of(PROMPTS)
    trained = lt.train(log, None)
    lf.save(tmp_path, trained, log, [], length_guess.predictor_graph(trained))
    assert isinstance(length_guess.kept_predictor(tmp_path), lf.GraphPredictor)
    found = length_guess.importlib.util.find_spec
    monkeypatch.setattr(
        length_guess.importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name)
    )
    kept = length_guess.kept_predictor(tmp_path)
    assert isinstance(kept, lt.TrainedPredictor)
    assert kept.look("Name a")[0] == pytest.approx(trained.look("Name a")[0])
    lf.save(tmp_path, trained, log, [])
    assert lf.kept_graph(tmp_path) is None


def test_files_that_are_no_predictor_are_refused(tmp_path):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'joulery[vision]'")
    file = tmp_path / "p.onnx"
    file.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="cannot be run"):
        LengthGraph(file, None, 0)
    model = fit_lengths(
        np.array([prompt_features(prompt) for prompt in PROMPTS]), [len(FEATURES)], log_of(PROMPTS).answers
    )
    file.write_bytes(build(model.arrays, model.recipe.width, len(FEATURES), None))
    words = tmp_path / "vocab.txt"
    words.write_text("a\nb\n")
    with pytest.raises(DataError, match="not a length predictor"):
        LengthGraph(file, words, 96)
    with pytest.raises(DataError, match="there is no length predictor"):
        length_guess.length_predictor(tmp_path / "nowhere", "m")


def test_a_package_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(CapabilityError, match="onnx is not installed"):
        build({}, 1.0, 1, None)
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(CapabilityError, match="onnxruntime is not installed"):
        LengthGraph(tmp_path / "p.onnx", None, 0)
