"""A small language model on this machine under bursts: the shortest predicted first against first come first served.

All orders get the same requests at the same instants, through ``joulery serve``; clients state a token limit
(:mod:`benchmarks.llm_unlimited` has clients that do not). The time that the gateway itself adds, prediction included,
is the difference to direct requests to a server that answers at once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import httpx
import numpy as np

from benchmarks import Result
from benchmarks._llm_load import SEED, body, measured, requests, serving

OVERHEAD = 300
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
    """Measure the orders and the gateway's overhead."""
    about = "`max_tokens` as a client of each kind would state it (8, 64, 160, 320)"
    result = measured("A small language model under bursts, clients that state limits", requests(), about)
    overhead_ms = _overhead_ms()
    claim = f"the gateway adds at most 2 ms, prediction included (p50 {overhead_ms:.2f} ms)"
    return replace(result, checks=[*result.checks, (claim, overhead_ms <= 2.0)])


def _overhead_ms() -> float:
    """Time that the gateway adds to the median answer, milliseconds."""
    with subprocess.Popen(
        [sys.executable, "-c", INSTANT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as instant:
        assert instant.stdout is not None
        try:
            direct = f"http://127.0.0.1:{instant.stdout.readline().strip()}"
            engine = f'{{kind: openai, url: "{direct}", model: instant}}'
            with serving(engine, "{kind: ssjf}") as through:
                return _difference_ms(direct, through.url)
        finally:
            instant.terminate()


def _difference_ms(direct: str, through: str) -> float:
    load = requests(OVERHEAD, seed=SEED + 2)
    took: dict[str, list[float]] = {direct: [], through: []}
    with httpx.Client(timeout=30, trust_env=False) as client:
        for asked in load:
            for url, times in took.items():
                begun = time.perf_counter()
                client.post(f"{url}/v1/chat/completions", json=body(asked)).raise_for_status()
                times.append(time.perf_counter() - begun)
    return 1000 * float(np.median(took[through]) - np.median(took[direct]))
