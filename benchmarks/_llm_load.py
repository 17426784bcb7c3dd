"""Bursts of requests to a small language model behind ``joulery serve``, and their completion times in each order.

Prompts have 32 templates written for this benchmark, with their own things and towns; the default predictor was trained
on none of them. Three in ten ask for a word, three in ten for a sentence, a fifth for a paragraph, and the rest for a
long text. Each prompt has the ``max_tokens`` that a client of that kind would state.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt
import psutil

from benchmarks import Result
from joulery.policies.ordering import Aging, SpeculativeQueue

SITE = """
joulery: 1
language_models:
  - name: llm
    engine: {engine}
    order: {order}
    predictor: {{cache: {cache}}}
serving: {{listen: "127.0.0.1:0"}}
"""
BUNDLED = "{kind: llama.cpp, threads: 1}"
REQUESTS, LOAD, CV, SEED = 120, 0.9, 3.0, 11
_READ_TOTAL = "llamacpp:prompt_tokens_total "
ALONE_S = 105.0
"""The load is the requests answered one by one within this time, s; all orders together then take ten minutes."""
_KNOWN = "lengths known (asked before)"
_ORDERS = {
    "first come first served": "{kind: fcfs}",
    "shortest predicted first": "{kind: ssjf}",
    "short answers first by a bounded time (boost)": "{kind: boost, decay: %g s}",
    "revised while answers are written (rerank)": "{kind: rerank}",
}
"""Orders as a site file states them; %g is the decay, :data:`_DECAY_ANSWERS` mean answers."""
_DECAY_ANSWERS = 30.0
THINGS = (
    *("violins", "tides", "onions", "castles", "comets", "umbrellas", "turtles", "marathons", "ink", "canals"),
    *("marble", "skating", "beavers", "lanterns", "cotton", "harbours"),
)
PEOPLE, TOWNS = ("Clara", "Idris", "Yuki", "Bruno"), ("Turin", "Leeds", "Osaka", "Quito")
WORD = (
    "Is this message spam? Reply spam or fine.\n\nBuy {a} now, only today!!!",
    "Sentiment of this review, good or bad: The {a} in {town} were a delight.",
    "Which of animal, plant or thing are {a}? Reply with the kind alone.",
    "Does the text mention {a}? Reply true or false.\n\n{who} spent the summer in {town} and read about {b}.",
    "Detect the language of: {who} loves {a}. Reply with its name alone.",
    "Urgency from 1 to 3 of this ticket, as a digit: The order of {a} for {town} has not come.",
    "Reply with the plural of the word lantern and nothing else.",
    "Spell the word {a}.",
)
SENTENCE = (
    "Say in a single sentence what {a} are.",
    "Translate into German: {who} sells {a} in {town}.",
    "Think of a caption for a photo of {a}.",
    "Put this into one line: {who} lives in {town}, works with {a}, and on Sundays paints {b}.",
    "Reply to this message in a sentence: Hello, do you still sell {a}? Greetings, {who}",
    "What rhymes with {b}?",
    "Which town is named here: {who} took the train to {town} for the {a}.",
    "Ask me one question about {a}.",
)
PARAGRAPH = (
    "Tell me something surprising about {a}.",
    "In what way are {a} and {b} alike?",
    "How would you clean {a}?",
    "My neighbour in {town} collects {a}. What could be a present for them?",
    "I am writing to {who} about {a}. Begin the message for me.",
    "What happened first in the history of {a}?",
    "Sum up in a paragraph how {a} are made.",
    "Give some tips for photographing {a}.",
)
MUCH = (
    "Write a detailed article about {a}, with examples.",
    "Tell a long adventure story in which {a} and {b} meet.",
    "Explain step by step how somebody could learn everything about {a}.",
    "Discuss at length what sets {a} apart from {b}.",
    "Write a complete lesson plan on {a} for a school in {town}.",
    "Write a play in three acts about {who} and the {a} of {town}.",
    "Draw up a business plan for a shop that sells {a} in {town}.",
    "Write a legend, told by an old woman of {town}, about {a}.",
)
KINDS = ((0.30, 8, WORD), (0.30, 64, SENTENCE), (0.22, 160, PARAGRAPH), (0.18, 320, MUCH))
"""Share of the requests, ``max_tokens`` of a client that states a limit, templates of prompts."""


class Asked(NamedTuple):
    """One request: its text, and the most tokens its client takes."""

    prompt: str
    max_tokens: int


class Served(NamedTuple):
    """A gateway in a process of its own."""

    url: str
    process: psutil.Process

    def tokens_read(self) -> float:
        """Tokens of prompts and resumed answers that its llama.cpp has read, cached ones left out; NaN without it."""
        for each in self.process.children(recursive=True):
            if "joulery.adapters.engines.remote.llama_worker" in each.cmdline():
                ports = [found.laddr.port for found in each.net_connections("tcp") if found.status == "LISTEN"]
                text = httpx.get(f"http://127.0.0.1:{ports[0]}/metrics", trust_env=False).text
                return float(next(line.split()[1] for line in text.splitlines() if line.startswith(_READ_TOTAL)))
        return float("nan")


class Ended(NamedTuple):
    """An answered request: its arrival and end, s from the beginning; its tokens, true and predicted; joules."""

    at_s: float
    end_s: float
    tokens: float
    predicted: float
    energy_j: float


def requests(count: int = REQUESTS, max_tokens: int | None = None, seed: int = SEED) -> list[Asked]:
    """Different requests, all with ``max_tokens`` if it is given, else each with the limit of its kind."""
    draw, found = random.Random(seed), dict[str, int]()
    while len(found) < count:
        _, most, forms = draw.choices(KINDS, [kind[0] for kind in KINDS])[0]
        a, b = draw.sample(THINGS, 2)
        text = draw.choice(forms).format(a=a, b=b, who=draw.choice(PEOPLE), town=draw.choice(TOWNS))
        found[text] = most if max_tokens is None else max_tokens
    return [Asked(*each) for each in found.items()]


def measured(title: str, load: Sequence[Asked], about: str, alone_s: float = ALONE_S) -> Result:
    """Send the same bursts to each order; the bar is the gain of the default predictor over first come first served."""
    found: dict[str, list[Ended]] = {}
    read: dict[str, float] = {}
    with serving(BUNDLED, "{kind: ssjf}", cache=10_000) as served:
        took_s = _alone(served.url, load, alone_s)
        load = load[: len(took_s)]
        arrival_s = bursts(took_s)
        found[_KNOWN] = asyncio.run(_play(served.url, load, arrival_s))
    for name, order in _ORDERS.items():
        with serving(BUNDLED, order.replace("%g", f"{_DECAY_ANSWERS * took_s.mean():.3g}")) as served:
            found[name] = asyncio.run(_play(served.url, load, arrival_s))
            read[name] = served.tokens_read()
    known, first, ours, *_ = found.values()
    change = _mean_s(ours) / _mean_s(first) - 1
    rps = {name: len(each) / max(one.end_s for one in each) for name, each in found.items()}
    faster = max(rps.values()) / min(rps.values()) - 1
    names = (*_ORDERS, _KNOWN)
    return Result(
        title=title,
        columns=("order", "mean completion", "change", "p99", "longest", "throughput", "tokens", "energy a token"),
        rows=[_row(name, found[name], _mean_s(first), rps[name]) for name in names],
        checks=[
            (f"mean completion at least 25 % below first come first served ({100 * change:+.1f} %)", change <= -0.25),
            (f"throughput within 5 % ({100 * faster:.1f} %)", faster <= 0.05),
        ],
        notes=[
            f"SmolLM2-135M-Instruct (4 bits) on one core, {len(load)} prompts, none of a form that the default "
            f"predictor was trained on, {about}; Gamma arrivals of variability {CV:g}, scaled to "
            f"{100 * LOAD:.0f} % load ({np.mean(took_s):.2f} s an answer alone). All rows but the last began without "
            "any completion.",
            "Tokens that llama.cpp read, cached ones left out: "
            f"{', '.join(f'{name} {tokens:.0f}' for name, tokens in read.items())}. What rerank reads more than first "
            "come first served are the answers that it resumed.",
            _understood(load, arrival_s, took_s, ours, known),
        ],
    )


def bursts(alone_s: npt.NDArray[np.float64], seed: int = SEED) -> npt.NDArray[np.float64]:
    """Arrival times with Gamma gaps, scaled so that the work fills the share ``LOAD`` of the time, s."""
    gaps_s = np.random.default_rng(seed).gamma(1 / CV**2, CV**2, len(alone_s))
    at_s = np.cumsum(gaps_s) - gaps_s[0]
    return np.asarray(at_s / at_s[-1] * alone_s.sum() / LOAD, np.float64)


def _understood(
    load: Sequence[Asked],
    arrival_s: npt.NDArray[np.float64],
    alone_s: npt.NDArray[np.float64],
    ours: Sequence[Ended],
    known: Sequence[Ended],
) -> str:
    """Text on each prediction: pairs in the right order, and its gain if every answer took as long as alone."""
    tokens = np.array([each.tokens for each in known])
    predictions = {
        "`max_tokens` alone": np.array([float(each.max_tokens) for each in load]),
        "the prediction": np.array([each.predicted for each in ours]),
        "the true length": tokens,
    }
    first_s = _replayed_s(arrival_s, alone_s, np.zeros(len(alone_s)), Aging(1e6))
    parts = []
    for name, predicted in predictions.items():
        scale = alone_s.mean() / predicted.mean()
        change = _replayed_s(arrival_s, alone_s, predicted * scale, Aging()) / first_s - 1
        parts.append(f"{name} {100 * ranked(predicted, tokens):.0f} % and {100 * change:+.0f} %")
    return (
        "Pairs in the right order, and the change if every answer took as long as alone (simulated): "
        f"{', '.join(parts)}."
    )


def _replayed_s(
    arrival_s: npt.NDArray[np.float64],
    service_s: npt.NDArray[np.float64],
    expected_s: npt.NDArray[np.float64],
    aging: Aging,
) -> float:
    """Simulated mean completion time of one server that orders by these predictions, s."""
    queue, now_s, came, spent_s = SpeculativeQueue(aging), 0.0, 0, 0.0
    while came < len(arrival_s) or len(queue):
        while came < len(arrival_s) and (not len(queue) or arrival_s[came] <= now_s):
            now_s = max(now_s, float(arrival_s[came])) if not len(queue) else now_s
            queue.push(came, float(arrival_s[came]), float(expected_s[came]))
            came += 1
        number = queue.pop(now_s)
        now_s += float(service_s[number])
        spent_s += now_s - float(arrival_s[number])
    return spent_s / len(arrival_s)


def ranked(predicted: npt.NDArray[np.float64], tokens: npt.NDArray[np.float64]) -> float:
    """Share of pairs of different length that the prediction ranks right, a tie counting half."""
    apart = np.sign(tokens[:, None] - tokens)
    right = apart * np.sign(predicted[:, None] - predicted)
    pairs = apart != 0
    return float(np.mean((right[pairs] + 1) / 2))


def _mean_s(ended: Sequence[Ended]) -> float:
    return float(np.mean([each.end_s - each.at_s for each in ended]))


def _row(name: str, ended: Sequence[Ended], first_s: float, rps: float) -> tuple[str, ...]:
    took_s = np.array([each.end_s - each.at_s for each in ended])
    tokens = sum(each.tokens for each in ended)
    return (
        name,
        f"{took_s.mean():.2f} s",
        f"{100 * (took_s.mean() / first_s - 1):+.1f} %",
        f"{np.quantile(took_s, 0.99):.2f} s",
        f"{took_s.max():.2f} s",
        f"{rps:.3f} /s",
        f"{tokens:.0f}",
        f"{1000 * sum(each.energy_j for each in ended) / tokens:.1f} mJ",
    )


@contextmanager
def serving(engine: str, order: str, *, cache: int = 0) -> Iterator[Served]:
    """Run a gateway in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site.yaml")
        site.write_text(SITE.format(engine=engine, order=order, cache=cache))
        line = [sys.executable, "-m", "joulery", "serve", str(site), "--json"]
        with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                yield Served(json.loads(process.stdout.readline())["url"], psutil.Process(process.pid))
            finally:
                process.terminate()


def body(asked: Asked) -> dict[str, object]:
    """The JSON body of a client's request."""
    messages = [{"role": "user", "content": asked.prompt}]
    return {"model": "llm", "messages": messages, "max_tokens": asked.max_tokens, "temperature": 0}


def _alone(url: str, load: Sequence[Asked], within_s: float) -> npt.NDArray[np.float64]:
    """Seconds of each answer without other requests, as many as fit into the time."""
    took_s: list[float] = []
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        until_s = time.perf_counter() + within_s
        for asked in load:
            begun_s = time.perf_counter()
            if begun_s > until_s:
                break
            client.post("/v1/chat/completions", json=body(asked)).raise_for_status()
            took_s.append(time.perf_counter() - begun_s)
    return np.array(took_s)


async def _streamed(client: httpx.AsyncClient, asked: dict[str, object]) -> dict[str, Any]:
    """Stream an answer, and return the usage at its end."""
    usage: dict[str, Any] | None = None
    text = ""
    asked = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            text = line.removeprefix("data: ") or text
            if line.startswith("data: {"):
                usage = json.loads(text).get("usage") or usage
    if usage is None or text != "[DONE]":
        raise RuntimeError(f"a stream ended with {text[:200]}")
    return usage


async def _play(url: str, load: Sequence[Asked], arrival_s: npt.NDArray[np.float64]) -> list[Ended]:
    """Send the requests at their arrival times, and return them as they ended."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=3000, limits=limits, trust_env=False) as client:
        begun_s = time.perf_counter()

        async def one(asked: Asked, at_s: float) -> Ended:
            await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - begun_s)))
            usage = await _streamed(client, body(asked))
            cost = usage["joulery"]
            return Ended(
                at_s,
                time.perf_counter() - begun_s,
                usage["completion_tokens"],
                cost["predicted_tokens"],
                cost.get("energy_j", float("nan")),
            )

        return await asyncio.gather(*(one(*each) for each in zip(load, arrival_s.tolist(), strict=True)))
