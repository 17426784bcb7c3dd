"""A small language model on this machine under bursts: the shortest predicted first against first come first served.

Both orders get the same requests at the same instants, through ``joulery serve``. What the gateway itself adds,
prediction included, is the difference to asking a server that answers at once directly.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from benchmarks import Result
from joulery.runtime.text import length_files, length_training

REQUESTS, LEARNED, OVERHEAD = 90, 60, 300
LOAD, CV, SEED = 0.9, 3.0, 11
MOST_TOKENS = 256
SITE = """
joulery: 1
language_models:
  - name: llm
    engine: {engine}
    order: {{kind: {order}}}{more}
serving: {{listen: "127.0.0.1:0"}}
"""
BUNDLED = "{kind: llama.cpp, threads: 1}"
# None of these is among the prompts that the default predictor was trained on.
THINGS = ("violins", "tides", "onions", "castles", "comets", "umbrellas", "turtles", "marathons", "ink", "canals")
ASKED = (
    "Spell the word {a}.",
    "Reply with the single word {a}.",
    "Is it true that {a} exist? Yes or no.",
    "Translate {a} into Spanish, one word.",
    "Give a one-sentence definition of {a}.",
    "What colour are {a}? Be brief.",
    "In two sentences, say why people care about {a}.",
    "Write a limerick about {a}.",
    "Name three kinds of {a}.",
    "Write a detailed article about {a}, with examples.",
    "Tell a long adventure story in which {a} and {b} meet.",
    "Explain step by step how somebody could learn everything about {a}.",
    "Discuss at length the differences between {a} and {b}.",
    "Write a complete lesson plan on {a} for a school.",
)
INSTANT = """
import asyncio, json, sys
ANSWER = json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "instant", "choices": [{"index": 0,
    "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}}).encode()
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n"
REPLY = HEAD % len(ANSWER) + ANSWER

async def serve(reader, writer):
    while True:
        try:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
        except asyncio.IncompleteReadError:
            break
        lines = head.lower().split(b"\\r\\n")
        length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
        await reader.readexactly(length)
        writer.write(REPLY)
    writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


def run() -> Result:
    """Measure."""
    with tempfile.TemporaryDirectory() as folder:
        service_s = _learn(Path(folder))
        arrival_s = _arrivals(service_s)
        found = {}
        for name, order, predictor in (
            ("fcfs", "fcfs", None),
            ("ssjf, default predictor", "ssjf", None),
            ("ssjf, predictor trained on its log", "ssjf", folder),
        ):
            with _serving(BUNDLED, order, predictor) as url:
                found[name] = asyncio.run(_play(url, _prompts(REQUESTS), arrival_s))
    overhead_ms = _overhead_ms()
    first, shipped, ours = found.values()
    change = ours["mean_s"] / first["mean_s"] - 1
    return Result(
        title="A small language model under bursts, shortest predicted first",
        columns=("order", "mean completion", "p99", "longest", "throughput", "energy a token"),
        rows=[_row(name, each) for name, each in found.items()],
        checks=[
            (f"mean completion at least 25 % below first come first served ({100 * change:+.1f} %)", change <= -0.25),
            ("throughput within 5 %", abs(ours["rps"] / first["rps"] - 1) <= 0.05),
            (f"the gateway adds at most 2 ms, prediction included (p50 {overhead_ms:.2f} ms)", overhead_ms <= 2.0),
        ],
        notes=[
            f"SmolLM2-135M-Instruct (4 bits) on one core, {REQUESTS} prompts of at most {MOST_TOKENS} tokens, Gamma "
            f"arrivals of variability {CV:g} at {100 * LOAD:.0f} % load ({service_s:.2f} s an answer alone). "
            f"The log holds {LEARNED} others. Pairs in order: {100 * shipped['ranked']:.0f} % by the default "
            f"predictor, {100 * ours['ranked']:.0f} % by the trained one. Overhead is with the default one.",
        ],
    )


def _arrivals(service_s: float) -> np.ndarray:
    """When the requests come: bursts, at a share of what the engine can serve."""
    gaps_s = np.random.default_rng(SEED).gamma(1 / CV**2, CV**2 * service_s / LOAD, REQUESTS)
    return np.cumsum(gaps_s) - gaps_s[0]


def _learn(folder: Path) -> float:
    """Answer some prompts one by one with the log on, train a predictor on it; mean seconds of an answer alone."""
    log = folder / "answers.jsonl"
    others = dict.fromkeys(_prompts(4 * LEARNED, SEED + 1))
    prompts = [prompt for prompt in others if prompt not in _prompts(REQUESTS)][:LEARNED]
    with _serving(BUNDLED, "fcfs", log=log) as url:
        service_s = _alone(url, prompts)
    answers = length_training.read_answers([log], [])
    length_files.save(folder, length_training.train(answers, None), answers, [log])
    return service_s


def _row(name: str, each: dict[str, float]) -> tuple[str, ...]:
    return (
        name,
        f"{each['mean_s']:.2f} s",
        f"{each['p99_s']:.2f} s",
        f"{each['longest_s']:.2f} s",
        f"{each['rps']:.3f} /s",
        f"{each['energy_per_token_j'] * 1000:.1f} mJ",
    )


def _prompts(count: int, seed: int = SEED) -> list[str]:
    draw = random.Random(seed)
    return [draw.choice(ASKED).format(a=a, b=b) for a, b in (draw.sample(THINGS, 2) for _ in range(count))]


@contextmanager
def _serving(engine: str, order: str, predictor: str | None = None, log: Path | None = None) -> Iterator[str]:
    """A gateway in a process of its own; its address."""
    more = f"\n    predictor: {{path: {predictor}}}" if predictor else ""
    more += f"\n    log: {log}" if log else ""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site.yaml")
        site.write_text(SITE.format(engine=engine, order=order, more=more))
        line = [sys.executable, "-m", "joulery", "serve", str(site), "--json"]
        with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                yield json.loads(process.stdout.readline())["url"]
            finally:
                process.terminate()


def _body(prompt: str) -> dict[str, object]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "llm", "messages": messages, "max_tokens": MOST_TOKENS, "temperature": 0}


def _alone(url: str, prompts: list[str]) -> float:
    """Mean seconds of an answer with nobody else there."""
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        begun = time.perf_counter()
        for prompt in prompts:
            client.post("/v1/chat/completions", json=_body(prompt)).raise_for_status()
        return (time.perf_counter() - begun) / len(prompts)


async def _play(url: str, prompts: list[str], arrival_s: np.ndarray) -> dict[str, float]:
    """The requests at their instants; what became of them."""
    begun = time.perf_counter()

    async def one(client: httpx.AsyncClient, prompt: str, at_s: float) -> tuple[float, float, dict[str, float]]:
        await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - begun)))
        answer = await client.post("/v1/chat/completions", json=_body(prompt))
        answer.raise_for_status()
        return at_s, time.perf_counter() - begun, answer.json()["usage"]

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=3000, limits=limits, trust_env=False) as client:
        ended = await asyncio.gather(*(one(client, *each) for each in zip(prompts, arrival_s.tolist(), strict=True)))
    took = np.array([end_s - at_s for at_s, end_s, _ in ended])
    tokens = np.array([usage["completion_tokens"] for _, _, usage in ended], float)
    guessed = np.array([usage["joulery"]["predicted_tokens"] for _, _, usage in ended], float)
    joules = sum(usage["joulery"].get("energy_j", float("nan")) for _, _, usage in ended)
    return {
        "mean_s": float(took.mean()),
        "p99_s": float(np.quantile(took, 0.99)),
        "longest_s": float(took.max()),
        "rps": len(took) / max(end_s for _, end_s, _ in ended),
        "energy_per_token_j": joules / tokens.sum(),
        "ranked": _ranked(guessed, tokens),
    }


def _ranked(guessed: np.ndarray, tokens: np.ndarray) -> float:
    """Share of pairs of different length that the guess ranks right, a tie counting half."""
    apart = np.sign(tokens[:, None] - tokens)
    right = apart * np.sign(guessed[:, None] - guessed)
    pairs = apart != 0
    return float(np.mean((right[pairs] + 1) / 2))


def _overhead_ms() -> float:
    """What the gateway adds to an answer, milliseconds, median."""
    with subprocess.Popen(
        [sys.executable, "-c", INSTANT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as instant:
        assert instant.stdout is not None
        try:
            direct = f"http://127.0.0.1:{instant.stdout.readline().strip()}"
            engine = f'{{kind: openai, url: "{direct}", model: instant}}'
            with _serving(engine, "ssjf") as through:
                return _difference_ms(direct, through)
        finally:
            instant.terminate()


def _difference_ms(direct: str, through: str) -> float:
    prompts = _prompts(OVERHEAD, SEED + 2)
    took: dict[str, list[float]] = {direct: [], through: []}
    with httpx.Client(timeout=30, trust_env=False) as client:
        for prompt in prompts:
            for url, times in took.items():
                begun = time.perf_counter()
                client.post(f"{url}/v1/chat/completions", json=_body(prompt)).raise_for_status()
                times.append(time.perf_counter() - begun)
    return 1000 * float(np.median(took[through]) - np.median(took[direct]))
