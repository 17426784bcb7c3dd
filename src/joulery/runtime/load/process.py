"""Start, await and end the process of the load generator."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from joulery.domain.errors import ActuationError
from joulery.domain.json_numbers import known_numbers, or_nan
from joulery.runtime.load.load_plan import LoadPlan
from joulery.runtime.process import part_environment, process_command

TOKEN = "JOULERY_TOKEN"
"""Environment variable with the bearer token: command lines can be read by everyone."""
END_S = 10.0
"""Seconds that a load has to write its outcomes after it was requested to end."""
_COUNTS = ("planned", "sent", "answered", "failed", "refused", "abandoned", "late", "delayed")


def command(plan: LoadPlan, parent: int) -> tuple[str, ...]:
    """The command line of a process that sends ``plan`` and ends when its parent ``parent`` does.

    The process prints the summary of its outcomes, one JSON object. On SIGTERM it ends early, with the outcomes so far.
    """
    fields = orjson.dumps(plan).decode()
    return process_command("joulery.runtime.load", "--plan", fields, "--parent", str(parent))


def start(plan: LoadPlan, token: str | None = None) -> subprocess.Popen[bytes]:
    """Start the load generator as a child in its own process group, so that Ctrl-C reaches only the caller."""
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    if token is not None:
        environment[TOKEN] = token
    return subprocess.Popen(
        command(plan, os.getpid()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=part_environment(environment),
        process_group=0,
    )


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load, as measured by the client.

    Attributes:
        requests: Requests that were due.
        ok: Answered with a result.
        p95_s: 95th percentile of the latency from when a request was due; NaN for none.
        cpu_s: CPU seconds of the generator; NaN when not known.
        planned: Requests in the plan; the run may end before all of them are due.
        sent: Requests that were sent: ``answered``, ``failed`` and ``abandoned`` together.
        answered: Answered with a result; the same as ``ok``.
        failed: Answered with an error, timed out, or lost with their connection.
        refused: Those of ``failed`` that the gateway refused with 429.
        abandoned: Sent and without an answer when the load was stopped.
        late: Those of ``answered`` that took longer than the SLO, from when they were due.
        delayed: Sent later than they were due, for want of a connection or of CPU time: there the load was not
            open-loop.
        delay_max_s: Longest such delay.
    """

    requests: int = 0
    ok: int = 0
    p95_s: float = math.nan
    cpu_s: float = math.nan
    planned: int = 0
    sent: int = 0
    answered: int = 0
    failed: int = 0
    refused: int = 0
    abandoned: int = 0
    late: int = 0
    delayed: int = 0
    delay_max_s: float = 0.0

    @property
    def unsent(self) -> int:
        """Planned requests that were never sent."""
        return self.planned - self.sent

    @classmethod
    def together(cls, results: Sequence[LoadResult]) -> LoadResult:
        """Combine the results of several loads; the quantile is kept only for a single one."""
        return cls(
            p95_s=results[0].p95_s if len(results) == 1 else math.nan,
            cpu_s=math.fsum(result.cpu_s for result in results) if results else math.nan,
            delay_max_s=max((result.delay_max_s for result in results), default=0.0),
            **{name: sum(getattr(result, name) for result in results) for name in ("requests", "ok", *_COUNTS)},
        )

    def as_dict(self) -> dict[str, Any]:
        """The result as a JSON-ready dictionary; unknown numbers are null."""
        document: dict[str, Any] = known_numbers({**asdict(self), "unsent": self.unsent})
        return document


class Load:
    """A running load generator.

    Args:
        process: Its process.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ended = False

    async def wait(self) -> LoadResult:
        """Wait until the load generator has ended; return its result.

        Raises:
            ActuationError: The load generator failed; the reason is on standard error.
        """
        output, status, cpu_s = await asyncio.to_thread(self._reap)
        try:
            summary = orjson.loads(output)
        except orjson.JSONDecodeError as error:
            if self._ended:
                return LoadResult(cpu_s=cpu_s)
            raise ActuationError(f"the load generator failed: {_how_it_ended(status)}") from error
        p95_s = or_nan(summary["p95_s"])
        numbers = {name: summary[name] for name in ("requests", "ok", "delay_max_s", *_COUNTS)}
        return LoadResult(p95_s=p95_s, cpu_s=cpu_s, **numbers)

    def end(self) -> None:
        """End the load early; the process is killed if that takes too long. Safe to call twice."""
        if self._ended or self._process.returncode is not None:
            return
        self._ended = True
        self._process.send_signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(END_S, self._kill)

    def _kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    def _reap(self) -> tuple[bytes, int, float]:
        """Wait for the process; return its output, its exit code and its CPU seconds."""
        process = self._process
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return output, process.returncode, usage.ru_utime + usage.ru_stime


def _how_it_ended(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"ended by signal {-status}"
