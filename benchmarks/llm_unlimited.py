"""A small language model under bursts of clients that state no token limit."""

from __future__ import annotations

from benchmarks import Result
from benchmarks._llm_load import measured, requests

MOST_TOKENS, ALONE_S = 256, 65.0


def run() -> Result:
    """Measure the orders under this load."""
    load = requests(max_tokens=MOST_TOKENS)
    about = f"all with `max_tokens` {MOST_TOKENS}"
    return measured("A small language model under bursts, clients that state no limits", load, about, ALONE_S)
