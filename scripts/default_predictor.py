"""Trains the length predictor that joulery ships, only from prompts written for joulery.

The training data is ``predictor_estimates.tsv``: prompts, and the number of tokens that their author expects of a chat
model's answer (*assumed*; no answer was written). The test data is a small model's answers to other prompts written for
joulery (*measured*). With COUNT, ``python -m scripts.default_predictor [COUNT]`` first has SmolLM2-135M-Instruct
(bundled) answer those of twice COUNT prompts that ``default_predictor_answers.jsonl`` lacks. It then trains, writes
``runtime/llm/default_predictor`` and prints the share of pairs of those answers that the predictor orders correctly.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from scripts.predictor_prompts import more_prompts

from joulery.adapters.models import minilm, smollm2
from joulery.perf.lengths.classes import LengthClasses, judge
from joulery.perf.lengths.kernel_ridge import AnswerLengths
from joulery.perf.lengths.word_vectors import WordVectors
from joulery.runtime.llm import predictor_files, predictor_training

SEED, MOST_TOKENS, LANES = 7, 256, 8
VOCABULARY, WIDTH = 8_000, 32
"""Number of words with a vector (the commonest of the encoder's vocabulary), and length of each vector."""
ESTIMATES = Path(__file__).with_name("predictor_estimates.tsv")
ESTIMATED = "a chat model of common size (assumed)"
ANSWERS = Path(__file__).with_name("default_predictor_answers.jsonl")
LICENCE = (
    "joulery's own (Apache-2.0): the prompts were written for it, the lengths are estimates by their author (assumed, "
    "there are no answers); no text is kept. Word vectors: principal components of the word embeddings of "
    "all-MiniLM-L6-v2 (Apache-2.0)"
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
NAMES = ("Maria", "Tom", "Aisha", "Jonas", "Mei", "Peter", "Olga", "Sam")
ADJECTIVES = ("old", "quiet", "useful", "strange", "cheap", "bright", "dangerous", "slow")
WORDS = ("table", "boat", "lamp", "basket", "box", "chair")
SHORT = (
    "Define {t} in one sentence.",
    "Name one fact about {t}. Answer in one short sentence.",
    "Answer yes or no: is {t} older than a thousand years?",
    "Translate the word {t} into French.",
    "Give me a title for a talk on {t}.",
    "How many letters are in '{t}'?",
    "Which is larger, {t} or {u}? One word.",
    "Is {t} a noun or a verb? Reply with one word.",
    "What is the capital of {p}?",
    "Correct the grammar: 'me and him likes {t} very many'.",
    "Rewrite politely: 'Give me {t} now.'",
    "Say hello.",
    "Classify as positive or negative: 'I never liked {t}.'",
    "Describe {t} using only three words.",
    "Complete the sentence: 'When I think of {t},'",
    "True or false: {t} were invented in {p}.",
    "What is {m} plus {n}?",
    "What is {m} times {n}? Only the number.",
    "Convert {m} kilometres to miles.",
    "Choose one: {t} or {u}.",
    "Extract the name: '{a} went to {p} to buy {t}.'",
    "Which country is mentioned here? '{a} went to {p} to buy {t}.'",
    "What is the opposite of '{adj}'?",
    "Give a synonym for '{adj}'.",
    "Put in alphabetical order: {t}, {u}, bread.",
    "Who was the first king of {p}?",
    "When did people first use {t}? Give only the year.",
    "What language do people speak in {p}?",
    "Write a headline about {t} in {p}.",
    "Fix the spelling: 'I relly like {t} and {u}.'",
    "Turn into the past tense: '{a} likes {t}.'",
    "Label the topic of this text in one word: '{a} bought {t} in {p}.'",
    "Rate from 1 to 5 how {adj} {t} are. Only the number.",
    "Does this sentence speak of {t}? '{a} lives in {p} and likes {u}.' Answer yes or no.",
    "What does the abbreviation 'CPU' stand for?",
    "Finish the proverb: 'A rolling stone'",
    "Make this shorter: '{a} went all the way to {p} only in order to be able to buy {t}.'",
    "Write a hashtag for a picture of {t}.",
    "In a few words, what are {t} for?",
    "Hi, how are you?",
    "Thank you!",
    "Is {p} in Europe?",
)
MIDDLE = (
    "What is {t}?",
    "Explain {t} to a child.",
    "List five things to know about {t}.",
    "Summarise what people like about {t} in two sentences.",
    "Tell me a joke about {t}.",
    "Write three questions for a quiz about {t}.",
    "Recommend a book about {t}.",
    "Write a tweet about {t}.",
    "Name four colours that go well with {t}.",
    "Why do people like {t}?",
    "How does {t} work?",
    "What is the difference between {t} and {u}?",
    "Describe {t} in one paragraph.",
    "Write a haiku about {t}.",
    "Give me three reasons to visit {p}.",
    "List the ingredients for a soup with {t}.",
    "Suggest two names for a shop that sells {t}.",
    "Explain the word '{adj}' with an example.",
    "Who invented {t}?",
    "Where can I find {t} in {p}?",
    "Write a short description of {t} for a shop window.",
    (
        "Summarise: '{a} came from {p}. There {a} learned about {t}. "
        "Later {a} wrote a book on {u} and became known for it.'"
    ),
    "Write a regular expression that matches the word '{t}'.",
    "Write an SQL query that counts rows of the table '{w}'.",
    "Write a function in JavaScript that adds two numbers.",
    "Give an example sentence with the word '{adj}'.",
    "What should I say when {a} asks me about {t}?",
    "Translate into Spanish: '{a} likes {t}, but {u} are {adj}.'",
    "What are two advantages of {t}?",
    "How old are {t}?",
    "I lost my {w}. What should I do?",
    "Write a birthday card for {a}, who likes {t}.",
)
LONG = (
    "Write a short poem about {t}.",
    "Write a long story about {t}.",
    "Explain in detail how {t} came to matter to people.",
    "List ten ideas for a lesson on {t}, with a sentence on each.",
    "Write an essay of 500 words on {t}.",
    "Write an email to a friend about {t}.",
    "Write a step-by-step guide for somebody new to {t}.",
    "Compare {t} with {u}.",
    "Write a dialogue between {t} and {u}.",
    "Give a detailed history of {t} in {p}.",
    "Plan a week of holidays in {p} for somebody who likes {t}.",
    "Write a Python function that counts the word '{t}' in a text.",
    "What are the pros and cons of {t}?",
    "Imagine a world without {t}. What would happen? Explain at length.",
    "Write a speech about {t} for the people of {p}.",
    "Write a song about {t} with three verses.",
    "Write a cover letter for a job with {t}.",
    "Create a marketing plan for a company that makes {t}.",
    "Write a scene in which {a} and the mayor argue about {t}.",
    "Give me a recipe with potatoes and {w}.",
    "Write a fairy tale about {a}, who loved {t}.",
    "List twenty facts about {p}.",
    "Write a review of a film about {t}.",
    "Explain how to build a {w} from wood.",
    "Analyse the role of {t} in modern society.",
    "Write a program in C that sorts a list of {w}s.",
    "Describe a day in the life of {a}, who works with {t}.",
    "Argue for and against {t} in schools.",
    "Make a table of {t}, {u} and their properties.",
    "Write a blog post on why {t} are {adj}.",
    "Draft a letter to the government of {p} about {t}.",
    "Teach me about {t}, from the beginning to the present day.",
)
SHARES = (0.4, 0.35, 0.25)
"""Shares of the prompts that request a short, a middle and a long answer."""
BEFORE = ("Please help me. ", "Hi! ", "You are an expert. ", "Quick question: ")
AFTER = (" Keep it brief.", " Be thorough.", " Use bullet points.", " In one sentence.")


def prompts(count: int) -> list[str]:
    """``count`` different prompts of this module's forms, and as many of the further forms, to test the predictor."""
    return [*_first_prompts(count), *(text for text, _ in more_prompts(count, SEED + 4))]


def estimates() -> dict[str, float]:
    """Number of tokens that the author expects of an answer, by prompt (assumed)."""
    rows = (line.split("\t", 1) for line in ESTIMATES.read_text(encoding="utf-8").splitlines())
    return {json.loads(f'"{prompt}"'): float(tokens) for tokens, prompt in rows}


def word_vectors(texts: Iterable[str]) -> WordVectors:
    """Reduce an encoder's vectors of the commonest words to principal components, weighted by text counts."""
    encoder = minilm.PromptEncoder(layers=1)
    lines = encoder.words.read_text(encoding="utf-8").splitlines()
    found = [row for row, word in enumerate(lines) if re.fullmatch("[a-z]{2,}|a|i", word)][:VOCABULARY]
    table = np.asarray(encoder.weights["embeddings.word_embeddings.weight"][found], np.float64)
    table = table - table.mean(0)
    often = Counter(word for text in texts for word in set(re.findall("[a-z]+", text.lower())))
    weight = np.sqrt([often[lines[row]] + 0.1 for row in found])
    axes = np.linalg.svd(table * weight[:, None], full_matrices=False)[2][:WIDTH]
    vectors = table @ axes.T
    whole = np.round(vectors * (127.0 / np.abs(vectors).max())).astype(np.int8)
    name = f"words of {minilm.PACKAGE}, {len(found)} of {WIDTH} numbers, int8"
    return WordVectors(name, [lines[row] for row in found], whole)


def _first_prompts(count: int) -> list[str]:
    draw, found = random.Random(SEED), dict[str, None]()
    while len(found) < count:
        text = draw.choice(draw.choices((SHORT, MIDDLE, LONG), SHARES)[0]).format(**_filling(draw))
        if draw.random() < 0.12:
            text = draw.choice(BEFORE) + text
        if draw.random() < 0.12:
            text += draw.choice(AFTER)
        found[text] = None
    return list(found)


def _filling(draw: random.Random) -> dict[str, object]:
    """Draw values for the placeholders of a form."""
    t, u = draw.sample(THINGS, 2)
    place, name, adjective, word = (draw.choice(each) for each in (PLACES, NAMES, ADJECTIVES, WORDS))
    return {
        "t": t,
        "u": u,
        "p": place,
        "a": name,
        "adj": adjective,
        "w": word,
        "m": draw.randint(2, 99),
        "n": draw.randint(2, 99),
    }


def answer(file: Path, count: int) -> None:
    """Add the lengths of the model's answers to the prompts that the file lacks."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(smollm2.weights())
    params.n_parallel, params.n_ctx, params.kv_unified, params.verbosity = LANES, LANES * 1024, False, -1
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads, threads.poll = 1, 0
    server = xllamacpp.Server(params)
    known = {row["prompt"] for row in _rows(file)}
    with file.open("a") as out, ThreadPoolExecutor(LANES) as pool:

        def ask(prompt: str) -> None:
            messages = [{"role": "user", "content": prompt}]
            completion = server.handle_chat_completions(
                {"messages": messages, "max_tokens": MOST_TOKENS, "temperature": 0}
            )
            out.write(json.dumps({"prompt": prompt, "tokens": completion["usage"]["completion_tokens"]}) + "\n")
            out.flush()

        list(pool.map(ask, [prompt for prompt in prompts(count) if prompt not in known]))


def train(folder: Path) -> None:
    """Train the predictor on the estimates and write it to the folder."""
    known = estimates()
    lengths = AnswerLengths((ESTIMATED,), np.array([[tokens] for tokens in known.values()]))
    log = predictor_training.TrainingAnswers(tuple(known), tuple(range(len(known))), lengths)
    predictor = _rounded(predictor_training.train(log, word_vectors(known)))
    predictor_files.save(folder, predictor, log, [ESTIMATES], licence=LICENCE)
    sys.stdout.write(f"{len(known)} prompts, left out: {predictor.model.left_out}\n")


def judge_answers(folder: Path, file: Path) -> None:
    """Print the share of pairs of measured answers that the predictor in the folder orders correctly."""
    rows = {row["prompt"]: min(float(row["tokens"]), MOST_TOKENS) for row in _rows(file)}
    predictor, tokens = predictor_files.load(folder, predictor_files.kept_words(folder)), np.array(list(rows.values()))
    scores = np.array([predictor.scores(prompt)[-1] for prompt in rows])
    found = judge(scores, tokens, LengthClasses.of(tokens))
    sys.stdout.write(f"{len(rows)} measured answers: {found.pairwise:.1%} of pairs in order\n")


def _rounded(predictor: predictor_training.TrainedPredictor) -> predictor_training.TrainedPredictor:
    """The predictor with fewer digits, so that its file is small; scores change by less than a thousandth."""
    arrays = dict(predictor.model.arrays)
    points = np.round(arrays["points"] * 4096.0) / 4096.0
    arrays |= {"points": points, "norms": np.sum(points * points, 1)}
    single = {name: array.astype(np.float32) for name, array in arrays.items()}
    return replace(predictor, model=replace(predictor.model, arrays=single))


def _rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    if len(sys.argv) > 1:
        answer(ANSWERS, int(sys.argv[1]))
    train(predictor_files.DEFAULT)
    judge_answers(predictor_files.DEFAULT, ANSWERS)
