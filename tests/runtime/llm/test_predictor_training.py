import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from joulery.domain.errors import DataError
from joulery.runtime.llm import predictor_files as lf
from joulery.runtime.llm import predictor_training as lt
from joulery.ui.cli import main

ASKED = ("Say in one word: {}", "What is {}?", "Explain {} in detail, step by step", "Write a long essay about {}")
THINGS = [f"{a} {b}" for a in ("red", "old", "wet", "odd", "raw") for b in ("tea", "ice", "oak", "fog", "sea", "jam")]
PROMPTS = [ask.format(thing) for thing in THINGS for ask in ASKED]
RANDOM = np.random.default_rng(1)
LENGTHS = {
    model: np.maximum(1, np.tile([5, 40, 200, 700], len(THINGS)) * scale * RANDOM.lognormal(0, 0.2, len(PROMPTS)))
    for model, scale in (("short", 0.5), ("long", 2.0))
}


def write(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def answers(path, ids, models=("short", "long")):
    return write(
        path,
        model=[model for model in models for _ in ids],
        instruction_id=[i for _ in models for i in ids],
        out_tokens=[int(LENGTHS[model][i]) for model in models for i in ids],
    )


@pytest.fixture
def files(tmp_path):
    return {
        "data": answers(tmp_path / "data.parquet", range(80)),
        "instructions": write(
            tmp_path / "texts.parquet", instruction_id=list(range(len(PROMPTS))), instruction=PROMPTS
        ),
        "evaluate": answers(tmp_path / "held.parquet", range(80, 120)),
    }


def run(capsys, files, *more):
    arguments = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    code = main(["train-length-predictor", "--encoder", "none", *arguments, *more])
    return code, capsys.readouterr()


def test_it_trains_and_judges_prompts_it_has_not_seen(capsys, files):
    code, printed = run(capsys, files, "--json")
    found = json.loads(printed.out)
    assert code == 0
    assert (
        found["pairwise"] > 0.8 and found["accuracy"] > 0.6 and found["kendall_tau"] > 0.5 and found["macro_f1"] > 0.4
    )
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert (found["models"], found["prompts"], found["answers"]) == (2, 40, 80)
    assert (found["unseen_models"], found["seen_prompts"], found["encoder"]) == (0, 0, None)
    assert found["trained_on"] == {"prompts": 80, "models": 2}


def test_a_person_reads_a_table_and_a_warning(capsys, files):
    code, printed = run(capsys, {**files, "evaluate": files["data"]})
    assert code == 0
    assert "kendall_tau" in printed.out and "trained on 80 prompts and 2 models" in printed.out
    assert "80 of the evaluated prompts were trained on: these figures are too good" in printed.err


def test_a_model_never_seen_is_judged_by_the_shared_head(tmp_path, files):
    log = lt.read_answers([answers(tmp_path / "one.parquet", range(80), ("long",))], [files["instructions"]])
    predictor = lt.train(log, None)
    found = lt.evaluate(predictor, lt.read_answers([files["evaluate"]], [files["instructions"]]), log.prompts)
    assert (found.models, found.unseen_models) == (2, 1)
    assert found.quality.pairwise > 0.8
    assert predictor.of("short").head == predictor.of("anyone").head != predictor.of("long").head


class Loudness:
    """An encoder that hears exclamation marks."""

    name = "loudness"

    def __call__(self, prompt):
        return np.array([float(prompt.count("!")), 1.0])


def test_what_is_kept_predicts_the_same(tmp_path, files):
    log = lt.read_answers([files["data"]], [files["instructions"]])
    for encoder in (None, Loudness()):
        folder = tmp_path / f"kept-{encoder is None}"
        predictor = lt.train(log, encoder)
        lf.save(folder, predictor, log, [files["data"]])
        again = lf.load(folder, encoder)
        for prompt in ("", "x" * 1_000_000, "\ud800", PROMPTS[3]):
            assert again.of("long").score(prompt) == predictor.of("long").score(prompt)
        document = json.loads((folder / "predictor.json").read_text())
        assert document["trained_on"]["files"][0]["name"] == "data.parquet"
        assert document["schema"] == lf.SCHEMA
        assert not any(prompt in (folder / "predictor.json").read_text() for prompt in PROMPTS)
    with pytest.raises(DataError, match="trained with encoder loudness, not None"):
        lf.load(folder, None)


def test_the_encoder_is_heard(files):
    log = lt.read_answers([files["data"]], [files["instructions"]])
    deaf, hearing = lt.train(log, None), lt.train(log, Loudness())
    assert len(hearing.model.blocks) == 2 and hearing.model.blocks[1] == 2
    assert len(lt.features_of("Hey!!", hearing.encoder)) == len(lt.features_of("Hey!!", deaf.encoder)) + 2
    assert lt.features_of("Hey!!", hearing.encoder)[-2] == 2.0


def test_a_longer_answer_scores_higher(files):
    predictor = lt.train(lt.read_answers([files["data"]], [files["instructions"]]), None).of("long")
    assert predictor.score("Write a long essay about new tea") > predictor.score("Say in one word: new tea") + 1


@pytest.mark.parametrize("damage", ["", "{", '{"schema": "joulery.length-predictor/0", "features": []}'])
def test_a_damaged_predictor_is_one_clear_error(tmp_path, damage):
    with pytest.raises(DataError, match="there is no length predictor"):
        lf.load(tmp_path, None)
    (tmp_path / "predictor.json").write_text(damage)
    with pytest.raises(DataError):
        lf.load(tmp_path, None)


def test_numbers_that_are_cut_off_are_one_clear_error(tmp_path, files):
    log = lt.read_answers([files["data"]], [files["instructions"]])
    lf.save(tmp_path / "kept", lt.train(log, None), log, [files["data"]])
    numbers = tmp_path / "kept" / "predictor.npz"
    numbers.write_bytes(numbers.read_bytes()[:300])
    with pytest.raises(DataError, match="cannot be read"):
        lf.load(tmp_path / "kept", None)


@pytest.mark.parametrize(
    ("name", "columns", "said"),
    [
        ("data", {"model": ["a"], "out_tokens": [1]}, "no column instruction_id"),
        ("data", {"model": ["a"], "instruction_id": [9999], "out_tokens": [1]}, "instruction_id 9999 is not in"),
        ("data", {"model": [""], "instruction_id": [1], "out_tokens": [1]}, "model is '', expected a name"),
        ("data", {"model": ["a"], "instruction_id": [1], "out_tokens": [-4]}, "out_tokens is -4"),
        ("data", {"model": ["a"], "instruction_id": [1], "out_tokens": [1.5]}, "expected a whole number"),
        ("data", {"model": ["a"], "instruction_id": [1], "out_tokens": ["many"]}, "out_tokens holds no numbers"),
        ("data", {"model": ["a"], "instruction_id": [1], "out_tokens": [12]}, "1 prompts are too few to learn from"),
        ("evaluate", {"model": [], "instruction_id": [], "out_tokens": []}, "no rows"),
        ("instructions", {"instruction_id": [1, 1], "instruction": ["a", "b"]}, "stands for two different texts"),
        ("instructions", {"instruction_id": [1], "instruction": [None]}, "instruction is None"),
        ("instructions", {"instruction_id": [1], "instruction": [b"\xff"]}, "expected text"),
        ("instructions", {"instruction_id": [1]}, "no column instruction"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path, capsys, files, name, columns, said):
    code, printed = run(capsys, {**files, name: write(tmp_path / "bad.parquet", **columns)})
    assert code == 2
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_text_that_is_not_utf8_is_one_clear_error(tmp_path, capsys, files):
    raw = pa.array([b"What is tea?", b"What is \xff\xfe?"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    code, printed = run(
        capsys, {**files, "instructions": write(tmp_path / "bad.parquet", instruction_id=[1, 2], instruction=texts)}
    )
    assert code == 2
    assert "bad.parquet:2: instruction holds text that is not UTF-8" in printed.err
    assert "Traceback" not in printed.err


def test_a_missing_file_is_one_clear_error(capsys, tmp_path, files):
    code, printed = run(capsys, {**files, "data": tmp_path / "none.parquet"})
    assert code == 2
    assert "none.parquet: there is no such series" in printed.err


def test_an_answer_logged_twice_counts_by_its_mean(tmp_path, files):
    twice = write(tmp_path / "twice.parquet", model=["a", "a"], instruction_id=[3, 3], out_tokens=[10, 20])
    log = lt.read_answers([twice], [files["instructions"]])
    assert log.answers.tokens.tolist() == [[15.0]]
    assert (log.prompts, log.ids) == ((PROMPTS[3],), (3,))
