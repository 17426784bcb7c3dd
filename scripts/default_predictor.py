"""Makes the length predictor that joulery ships: prompts of our own, answered by SmolLM2-135M-Instruct, nothing else.

``python scripts/default_predictor.py scripts/default_predictor_answers.jsonl [COUNT]`` asks the bundled model for what
the file lacks of COUNT prompts, then trains on the file and writes ``runtime/text/default_predictor``.
"""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from joulery.adapters.models import smollm2
from joulery.perf.length_model import AnswerLengths
from joulery.runtime.text import length_files, length_training

SEED, MOST_TOKENS, LANES = 7, 512, 8
LICENCE = (
    "joulery's own (Apache-2.0): the prompts were written for it, the lengths are those of answers of "
    "SmolLM2-135M-Instruct (Apache-2.0), cut at 512 tokens; no text is kept"
)
THINGS = (
    *("tea", "volcanoes", "the moon", "bicycles", "honey bees", "chess", "rain", "glaciers", "bread", "trains", "owls"),
    *("coffee", "copper", "sailing", "gardens", "maps", "clocks", "bridges", "whales", "football", "jazz", "cheese"),
    *("deserts", "paper", "robots", "kites", "salt", "libraries", "candles", "forests", "windmills", "stamps"),
    *("rivers", "mirrors", "pianos", "spiders", "cinema", "weather", "lighthouses", "potatoes"),
)
PLACES = (
    *("Norway", "Peru", "Kenya", "Japan", "Canada", "Egypt", "Chile", "India", "Portugal", "Vietnam", "Iceland"),
    "Ghana",
)
ASKED = (
    "What is {t}?",
    "Define {t} in one sentence.",
    "Name one fact about {t}. Answer in one short sentence.",
    "Write a short poem about {t}.",
    "Write a long story about {t}.",
    "Explain {t} to a child.",
    "Explain in detail how {t} came to matter to people.",
    "List five things to know about {t}.",
    "List ten ideas for a lesson on {t}, with a sentence on each.",
    "Answer yes or no: is {t} older than a thousand years?",
    "Translate the word {t} into French.",
    "Give me a title for a talk on {t}.",
    "Write an essay of 500 words on {t}.",
    "Summarise what people like about {t} in two sentences.",
    "Write an email to a friend about {t}.",
    "How many letters are in '{t}'?",
    "Write a step-by-step guide for somebody new to {t}.",
    "Compare {t} with {u}.",
    "Which is larger, {t} or {u}? One word.",
    "Write a dialogue between {t} and {u}.",
    "Is {t} a noun or a verb? Reply with one word.",
    "Give a detailed history of {t} in {p}.",
    "What is the capital of {p}?",
    "Plan a week of holidays in {p} for somebody who likes {t}.",
    "Write a Python function that counts the word '{t}' in a text.",
    "Correct the grammar: 'me and him likes {t} very many'.",
    "Rewrite politely: 'Give me {t} now.'",
    "Tell me a joke about {t}.",
    "What are the pros and cons of {t}?",
    "Say hello.",
    "Classify as positive or negative: 'I never liked {t}.'",
    "Write three questions for a quiz about {t}.",
    "Describe {t} using only three words.",
    "Imagine a world without {t}. What would happen? Explain at length.",
    "Recommend a book about {t}.",
    "Complete the sentence: 'When I think of {t},'",
)
BEFORE = ("Please help me. ", "Hi! ", "You are an expert. ", "Quick question: ")
AFTER = (" Keep it brief.", " Be thorough.", " Use bullet points.", " In one sentence.")


def prompts(count: int) -> list[str]:
    """Prompts of our own, all different."""
    draw, found = random.Random(SEED), dict[str, None]()
    while len(found) < count:
        t, u = draw.sample(THINGS, 2)
        text = draw.choice(ASKED).format(t=t, u=u, p=draw.choice(PLACES))
        if draw.random() < 0.15:
            text = draw.choice(BEFORE) + text
        if draw.random() < 0.1:
            text += draw.choice(AFTER)
        found[text] = None
    return list(found)


def answer(file: Path, count: int) -> None:
    """Add what the file lacks."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(smollm2.weights())
    params.n_parallel, params.n_ctx, params.kv_unified, params.verbosity = LANES, LANES * 1024, False, -1
    server = xllamacpp.Server(params)
    known = {row["prompt"] for row in _rows(file)}
    with file.open("a") as out, ThreadPoolExecutor(LANES) as pool:

        def ask(prompt: str) -> None:
            messages = [{"role": "user", "content": prompt}]
            said = server.handle_chat_completions({"messages": messages, "max_tokens": MOST_TOKENS, "temperature": 0})
            out.write(json.dumps({"prompt": prompt, "tokens": said["usage"]["completion_tokens"]}) + "\n")
            out.flush()

        list(pool.map(ask, [prompt for prompt in prompts(count) if prompt not in known]))


def train(file: Path, folder: Path) -> None:
    """Train on the file, write the folder."""
    rows = {row["prompt"]: float(row["tokens"]) for row in _rows(file)}
    tokens = np.array([[each] for each in rows.values()])
    lengths = AnswerLengths((smollm2.NAME,), tokens)
    log = length_training.AnswerLog(tuple(rows), tuple(range(len(rows))), lengths)
    predictor = length_training.train(log, None)
    length_files.save(folder, predictor, log, [], licence=LICENCE)
    sys.stdout.write(f"{len(rows)} prompts, left out: {predictor.model.left_out}\n")


def _rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    answers = Path(sys.argv[1])
    if len(sys.argv) > 2:
        answer(answers, int(sys.argv[2]))
    train(answers, length_files.DEFAULT)
