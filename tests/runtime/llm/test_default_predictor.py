"""The predictor that is shipped: what it was trained on, and that it is judged on nothing of that."""

import json
import math
import re

import numpy as np
import pytest
from scripts import default_predictor
from scripts.predictor_prompts import FORMS, more_prompts

from benchmarks._llm_load import KINDS, THINGS, requests
from joulery.app.wiring.length_predictor import kept_predictor, length_predictor
from joulery.domain.errors import DataError
from joulery.perf.lengths.classes import LengthClasses, judge
from joulery.runtime.llm.predictor_files import DEFAULT, kept_words
from joulery.runtime.llm.predictor_training import TrainedPredictor, evaluate, read_answers
from tests.data_folder import data_folder


def answered():
    return [json.loads(line) for line in default_predictor.ANSWERS.read_text().splitlines()]


def pieces(form):
    """The words around the braces of a form, where they are four or more."""
    return [piece for piece in re.split(r"\{\w+\}", form.lower()) if len(piece.split()) >= 4]


def test_it_was_trained_on_the_estimates_beside_its_script_and_on_nothing_else() -> None:
    kept = json.loads((DEFAULT / "predictor.json").read_text())
    known = default_predictor.estimates()
    assert kept["trained_on"]["prompts"] == kept["trained_on"]["answers"] == len(known) == 1074
    assert [file["name"] for file in kept["trained_on"]["files"]] == [default_predictor.ESTIMATES.name]
    assert kept["models"] == [default_predictor.ESTIMATED] and "assumed" in kept["models"][0]
    assert "joulery's own" in kept["trained_on"]["licence"] and "assumed" in kept["trained_on"]["licence"]
    assert all(prompt.strip() and math.isfinite(tokens) and tokens > 0 for prompt, tokens in known.items())


def test_no_prompt_form_or_thing_of_the_benchmark_was_learned_from() -> None:
    learned = " ".join(default_predictor.estimates()).lower()
    assert not [thing for thing in THINGS if re.search(rf"\b{thing}\b", learned)]
    for form in {form for _, _, group in KINDS for form in group}:
        assert not [piece for piece in pieces(form) if piece in learned], form


def test_no_prompt_that_judges_it_was_learned_from() -> None:
    assert not {row["prompt"] for row in answered()} & set(default_predictor.estimates())


def test_it_puts_measured_answers_to_prompts_it_has_not_seen_in_order() -> None:
    rows, kept = answered(), kept_predictor(DEFAULT)
    tokens = np.array([min(float(row["tokens"]), default_predictor.MOST_TOKENS) for row in rows])
    scores = np.array([kept.look(row["prompt"])[0][-1] for row in rows])
    assert judge(scores, tokens, LengthClasses.of(tokens)).pairwise == pytest.approx(0.776, abs=0.003)


def test_it_puts_seven_of_ten_pairs_of_forty_models_it_has_not_seen_in_order() -> None:
    folder = data_folder("muserve")
    log = read_answers([folder / "alpaca_eval_lengths.parquet"], [folder / "instructions.parquet"])
    kept = kept_predictor(DEFAULT)
    assert isinstance(kept, TrainedPredictor)
    found = evaluate(kept, log, list(default_predictor.estimates()))
    assert found.quality.pairwise >= 0.70 and found.unseen_models == found.models == 40 and found.seen_prompts == 0


def test_what_it_says_of_a_prompt_is_no_embedding() -> None:
    """Prompts of opposite meaning have nearly the same words: the cache must not take one for the other."""
    assert kept_predictor(DEFAULT).look("Is tea healthy? Do not answer with yes.")[1] is None


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_damaged_word_vectors_are_reported_with_their_file(tmp_path, damage) -> None:
    for file in DEFAULT.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = tmp_path / "words.npz"
    if damage == "missing":
        words.unlink()
    elif damage == "cut":
        words.write_bytes(words.read_bytes()[:1000])
    else:
        np.savez(words, words=np.frombuffer(b"tea\nmoon", np.uint8), vectors=np.zeros((3, 32), np.int8))
    with pytest.raises(DataError) as found:
        kept_words(tmp_path)
    assert found.value.file == str(words)


def test_further_prompts_are_all_different_and_use_every_form() -> None:
    found = more_prompts(240, 11)
    assert len({text for text, _ in found}) == 240 and {form for _, form in found} == set(range(len(FORMS)))
    assert more_prompts(100, 11) == found[:100]


def test_it_separates_a_word_from_a_story_in_unseen_prompts() -> None:
    predictor = length_predictor(None, "anything")
    load = requests()
    words = [predictor.predict(each.prompt).score for each in load if each.max_tokens == 8]
    stories = [predictor.predict(each.prompt).score for each in load if each.max_tokens == 320]
    right = sum(word < story for word in words for story in stories)
    assert right / (len(words) * len(stories)) > 0.85
