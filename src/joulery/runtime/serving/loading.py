"""The load of a site file as a running process: started, ended early if need be, its outcome read."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from joulery.app.profiling.inputs import inputs_for, read_arrivals, read_prompts
from joulery.config.loadgen import ConstantLoad, LLMLoad, LoadConfig, TraceLoad
from joulery.domain.errors import ActuationError
from joulery.domain.serving.tensors import Tensor, TensorSpec
from joulery.runtime.load import LoadPlan, start
from joulery.store.files import disk_errors

END_S = 10.0
"""How long a load that was asked to end may take to write what it has."""
_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the client saw.

    Attributes:
        requests: Requests that were due.
        ok: Answered with a result.
        p95_s: Of the latency from when a request was due, as the client measured it; NaN for none.
        cpu_s: CPU seconds of the generator; NaN when not known.
    """

    requests: int = 0
    ok: int = 0
    p95_s: float = math.nan
    cpu_s: float = math.nan

    @classmethod
    def together(cls, results: Sequence[LoadResult]) -> LoadResult:
        """Several loads; a quantile only where there is one."""
        return cls(
            sum(result.requests for result in results),
            sum(result.ok for result in results),
            results[0].p95_s if len(results) == 1 else math.nan,
            math.fsum(result.cpu_s for result in results) if results else math.nan,
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; what is not known is null."""
        numbers = asdict(self).items()
        return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in numbers}


class Load:
    """A load generator that runs.

    Args:
        process: Its process.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ended = False

    async def wait(self) -> LoadResult:
        """Until it has ended.

        Raises:
            ActuationError: It failed; it said why on standard error.
        """
        said, status, cpu_s = await asyncio.to_thread(self._reap)
        try:
            summary = orjson.loads(said)
        except orjson.JSONDecodeError as error:
            if self._ended:
                return LoadResult(cpu_s=cpu_s)
            raise ActuationError(f"the load generator failed: {_how_it_ended(status)}") from error
        p95_s = summary["p95_s"]
        return LoadResult(summary["requests"], summary["ok"], math.nan if p95_s is None else p95_s, cpu_s)

    def end(self) -> None:
        """Ask it to send nothing more; killed if that takes too long. Safe to call twice."""
        if self._ended or self._process.returncode is not None:
            return
        self._ended = True
        self._process.send_signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(END_S, self._kill)

    def _kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    def _reap(self) -> tuple[bytes, int, float]:
        """What it said, how it ended and what CPU time it used."""
        process = self._process
        assert process.stdout is not None
        with process.stdout:
            said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return said, process.returncode, usage.ru_utime + usage.ru_stime


def _how_it_ended(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"ended by signal {-status}"


def start_load(
    config: LoadConfig,
    *,
    rate_rps: float,
    service: str,
    specs: Sequence[TensorSpec],
    url: str,
    token: str | None,
    folder: Path,
    scratch: Path,
    tag: str = "",
) -> Load:
    """Start sending.

    Args:
        config: The load section.
        rate_rps: The rate where the section names none.
        service: Whom to ask.
        specs: What the model takes.
        url: The gateway.
        token: Bearer token; None for none.
        folder: Where outcomes are kept.
        scratch: Where inputs may lie until it has ended.
        tag: What tells its files from those of other loads.

    Raises:
        ConfigError, DataError: The inputs do not fit, or cannot be read.
        CapabilityError: The disk refuses.
    """
    inputs = scratch / f"inputs{tag}.npz"
    _write_inputs(inputs, inputs_for(specs, config.inputs, seed=config.seed))
    rate: dict[str, Any] = {"rate_rps": getattr(config, "rate_rps", None) or rate_rps}
    if isinstance(config, TraceLoad):
        rate = {"times": str(_write_times(scratch / f"times{tag}.npy", config.path))}
    plan = LoadPlan(
        url=url,
        service=service,
        inputs=str(inputs),
        out=str(folder / f"client{tag}.parquet"),
        poisson=not isinstance(config, ConstantLoad),
        duration_s=config.duration_s,
        seed=config.seed,
        connections=_CONNECTIONS,
        **rate,
    )
    return Load(start(plan, token))


def start_text_load(
    config: LLMLoad,
    *,
    model: str,
    timeout_s: float,
    url: str,
    token: str | None,
    folder: Path,
    scratch: Path,
) -> Load:
    """Start sending prompts to a language model.

    Args:
        config: The load section.
        model: Whom to ask.
        timeout_s: How long an answer may take.
        url, token, folder, scratch: As for :func:`start_load`.

    Raises:
        DataError: The prompts cannot be read.
        CapabilityError: The disk refuses.
    """
    prompts = scratch / f"prompts-{model}.json"
    with disk_errors(prompts):
        prompts.write_bytes(orjson.dumps(read_prompts(config.prompts)))
    plan = LoadPlan(
        url=url,
        service=model,
        inputs=str(prompts),
        out=str(folder / f"client-text-{model}.parquet"),
        rate_rps=config.rate_rps,
        duration_s=config.duration_s,
        seed=config.seed,
        connections=_CONNECTIONS,
        timeout_s=timeout_s,
        max_tokens=config.max_tokens,
    )
    return Load(start(plan, token))


def _write_inputs(file: Path, inputs: Sequence[Mapping[str, Tensor]]) -> None:
    """A row a request, by input name."""
    columns = {name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]}
    with disk_errors(file):
        np.savez(file, allow_pickle=False, **columns)


def _write_times(file: Path, trace: Path) -> Path:
    """Recorded arrivals as the generator reads them."""
    with disk_errors(file):
        np.save(file, read_arrivals(trace))
    return file
