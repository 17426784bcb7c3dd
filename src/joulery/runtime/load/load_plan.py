"""Load plans: requests and their send times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.serving.tensors import Tensor, datatype_of, to_bytes

MAX_REQUESTS = 5_000_000
"""A plan of more requests is refused: all outcomes are held in memory until the end."""

MAX_CONNECTIONS = 4096
"""Default limit of connections: up to this number of simultaneous requests, a load stays open-loop."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Parameters of one load.

    Attributes:
        url: The gateway, such as ``http://127.0.0.1:8080``.
        service: The service to call.
        inputs: An ``.npz`` file: arrays of equal length by input name; a request sends a row, batch dimension 1. For a
            language model a JSON file: a list of prompts.
        out: The Parquet file to write.
        rate_rps: Mean rate; with ``poisson`` exponential gaps, else equal ones. None with ``times``.
        poisson: Whether the gaps are exponential; else they are equal.
        times: A ``.npy`` file of arrival times in seconds from the start, instead of a rate.
        duration_s: How long to send.
        seed: Seed of the gaps.
        connections: How many requests may run at once. Further requests wait; the wait counts towards their latency,
            and the outcomes report how many had to wait.
        timeout_s: How long to wait for an answer once a request is sent.
        binary: Send and request tensors in binary; else in JSON.
        max_tokens: Most tokens to request from a language model; None where the service takes tensors.
        certificate: PEM file of the gateway's certificate, the only one that is trusted; None for those that this
            machine trusts.
        slo_s: Latency above which an answer is late; None for no SLO.
        closed: Not open-loop: every connection sends its next request as soon as the last is answered (benchmarks).
    """

    url: str
    service: str
    inputs: str
    out: str
    rate_rps: float | None = None
    poisson: bool = True
    times: str | None = None
    duration_s: float = 10.0
    seed: int = 1
    connections: int = MAX_CONNECTIONS
    timeout_s: float = 30.0
    binary: bool = True
    max_tokens: int | None = None
    closed: bool = False
    slo_s: float | None = None
    certificate: str | None = None

    def __post_init__(self) -> None:
        if sum((self.rate_rps is not None, self.times is not None, self.closed)) != 1:
            raise ConfigError("a load needs one of: a rate, a file of times, closed loop")
        positive = {"duration_s": self.duration_s, "connections": self.connections, "timeout_s": self.timeout_s}
        if self.rate_rps is not None:
            positive["rate_rps"] = self.rate_rps
        if self.max_tokens is not None:
            positive["max_tokens"] = self.max_tokens
        if self.slo_s is not None:
            positive["slo_s"] = self.slo_s
        for name, value in positive.items():
            if not 0 < value < float("inf"):
                raise ConfigError("must be positive", pointer=name, got=str(value))

    def times_s(self) -> FloatArray:
        """Due time of each request, seconds from the start, float64[n], increasing; none in a closed loop.

        Raises:
            ConfigError: There are more than ``MAX_REQUESTS``.
            DataError: The file of times cannot be read, or does not contain such times.
        """
        if self.closed:
            return np.zeros(0)
        if self.times is not None:
            return _read_times_s(self.times, self.duration_s)
        assert self.rate_rps is not None
        if self.rate_rps * self.duration_s > MAX_REQUESTS:
            count = f"{self.rate_rps * self.duration_s:.0f} requests"
            raise ConfigError("the load is too large", got=count, expected=f"at most {MAX_REQUESTS}")
        if self.poisson:
            return poisson_times_s(self.rate_rps, self.duration_s, self.seed)
        return constant_times_s(self.rate_rps, self.duration_s)


def poisson_times_s(rate_rps: float, duration_s: float, seed: int) -> FloatArray:
    """Arrivals of a Poisson process in ``[0, duration_s)``, float64[n]; the same for the same seed."""
    rng = np.random.default_rng(seed)
    expected = rate_rps * duration_s
    times_s = np.cumsum(rng.exponential(1 / rate_rps, int(expected + 10 * expected**0.5 + 20)))
    while times_s[-1] < duration_s:
        more_s = np.cumsum(rng.exponential(1 / rate_rps, len(times_s)))
        times_s = np.concatenate((times_s, times_s[-1] + more_s))
    return times_s[times_s < duration_s]


def constant_times_s(rate_rps: float, duration_s: float) -> FloatArray:
    """Arrivals at equal gaps in ``[0, duration_s)``, the first at 0, float64[n]."""
    times_s = np.arange(int(np.ceil(rate_rps * duration_s))) / rate_rps
    return times_s[times_s < duration_s]


def bodies_of(plan: LoadPlan) -> tuple[str, list[tuple[bytes, int | None]]]:
    """URL path of the requests, and their bodies as :func:`read_bodies` returns them.

    Raises:
        DataError: The inputs cannot be read.
    """
    if plan.max_tokens is None:
        return f"/v2/models/{plan.service}/infer", read_bodies(plan.inputs, binary=plan.binary)
    return "/v1/chat/completions", read_prompts(plan.inputs, plan.service, plan.max_tokens)


def read_prompts(path: str, model: str, max_tokens: int) -> list[tuple[bytes, int | None]]:
    """A chat request for every prompt of a JSON file.

    Raises:
        DataError: The file cannot be read, or is not a list of texts.
    """
    try:
        prompts = orjson.loads(Path(path).read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise DataError(f"the prompts cannot be read: {error}", file=path) from error
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise DataError("prompts are a list of texts, at least one", file=path)
    asked = {"model": model, "max_tokens": max_tokens}
    return [(orjson.dumps({**asked, "messages": [{"role": "user", "content": text}]}), None) for text in prompts]


def read_bodies(path: str, *, binary: bool) -> list[tuple[bytes, int | None]]:
    """The request body of every row of an ``.npz`` file, and the length of its JSON part when there is binary data.

    Raises:
        DataError: The file cannot be read, its arrays differ in length, or the protocol does not support their type.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"the inputs cannot be read: {error}", file=path) from error
    lengths = {len(array) if array.ndim else 0 for array in arrays.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise DataError("inputs are arrays of one length, a row a request", file=path)
    return [
        encode({name: array[row : row + 1] for name, array in arrays.items()}, binary=binary)
        for row in range(lengths.pop())
    ]


def encode(inputs: Mapping[str, Tensor], *, binary: bool) -> tuple[bytes, int | None]:
    """A request body of the Open Inference Protocol, and the length of its JSON part when there is binary data."""
    entries: list[dict[str, object]] = []
    raw: list[bytes] = []
    for name, array in inputs.items():
        entry: dict[str, object] = {"name": name, "datatype": datatype_of(array), "shape": array.shape}
        if binary:
            raw.append(to_bytes(array))
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            entry["data"] = [e.decode() if isinstance(e, bytes) else e for e in array.reshape(-1).tolist()]
        entries.append(entry)
    content: dict[str, object] = {"inputs": entries}
    if binary:
        content["parameters"] = {"binary_data_output": True}
    text = orjson.dumps(content)
    return (b"".join((text, *raw)), len(text)) if binary else (text, None)


def _read_times_s(path: str, duration_s: float) -> FloatArray:
    try:
        found = np.load(Path(path), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"the times cannot be read: {error}", file=path) from error
    if (
        not isinstance(found, np.ndarray)
        or found.ndim != 1
        or found.dtype.kind not in "fiu"
        or len(found) > MAX_REQUESTS
    ):
        raise DataError("times are one array of at most five million numbers", file=path)
    times_s: FloatArray = found.astype(np.float64)
    if len(times_s) and not (np.isfinite(times_s).all() and times_s[0] >= 0 and (np.diff(times_s) >= 0).all()):
        raise DataError("times count up from 0 s", file=path)
    return times_s[times_s < duration_s]


PROMPTS = (
    "Which month comes after June? Answer with one word.",
    "Is 91 a prime number? Answer yes or no.",
    "Name the three states of matter that water has in a kitchen.",
    "In one sentence: why does bread rise in the oven?",
    "Write a polite sentence that puts a meeting off until Thursday.",
    "List five tools that a bicycle mechanic uses every day, one a line.",
    "Explain to a child of eight why the sky is dark at night.",
    "Summarise in two sentences what a heat pump does and what it needs for that.",
    "Write a short poem about a train that leaves a small station in the snow.",
    "Compare renting and owning a washing machine for a person who moves every year. Give three points for each.",
    "Describe, step by step, how to change the tyre of a car on a slope, and what could go wrong at each step.",
    "Write a page of a story that begins with the words: the lighthouse had been sold, and the keeper did not know.",
)
"""Prompts where the site file names none: they request a word, a sentence, a list or a page."""
