"""The predictor that is shipped: what it was trained on, and that no benchmark is judged on that."""

import json
import re
from pathlib import Path

from scripts import default_predictor
from scripts.predictor_prompts import FORMS, more_prompts

from benchmarks._llm_load import KINDS, THINGS, requests
from joulery.app.wiring.length_predictor import length_predictor
from joulery.runtime.llm.predictor_files import DEFAULT

ANSWERS = Path(default_predictor.__file__).with_name("default_predictor_answers.jsonl")


def asked():
    return [json.loads(line) for line in ANSWERS.read_text().splitlines()]


def test_it_was_trained_on_what_lies_beside_its_script_and_on_nothing_else() -> None:
    kept = json.loads((DEFAULT / "predictor.json").read_text())
    assert kept["trained_on"]["prompts"] == len({row["prompt"] for row in asked()})
    assert kept["encoder"] is None
    assert "joulery's own" in kept["trained_on"]["licence"]
    assert all(set(row) == {"prompt", "tokens"} for row in asked())


def test_no_prompt_form_or_thing_of_the_benchmark_was_learned_from() -> None:
    learned = " ".join(row["prompt"] for row in asked()).lower()
    assert not [thing for thing in THINGS if re.search(rf"\b{thing}\b", learned)]
    forms = {form for _, _, group in KINDS for form in group}
    assert not forms & {*default_predictor.SHORT, *default_predictor.MIDDLE, *default_predictor.LONG, *FORMS}
    # Nor the words around the braces, whatever stood in them.
    for form in forms:
        pieces = [piece for piece in re.split(r"\{\w+\}", form.lower()) if len(piece.split()) >= 4]
        assert not [piece for piece in pieces if piece in learned], form


def test_further_prompts_are_all_different_and_use_every_form() -> None:
    found = more_prompts(240, 11)
    assert len({text for text, _ in found}) == 240 and {form for _, form in found} == set(range(len(FORMS)))
    assert more_prompts(100, 11) == found[:100]


def test_it_separates_a_word_from_a_story_in_unseen_prompts() -> None:
    guesser = length_predictor(None, "anything")
    load = requests()
    words = [guesser.guess(each.prompt).score for each in load if each.max_tokens == 8]
    stories = [guesser.guess(each.prompt).score for each in load if each.max_tokens == 320]
    right = sum(word < story for word in words for story in stories)
    assert right / (len(words) * len(stories)) > 0.85
