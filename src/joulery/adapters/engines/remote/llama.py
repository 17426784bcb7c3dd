"""A GGUF model on this machine's CPU: llama.cpp in a process of its own, used like any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from joulery.adapters.engines.remote.openai import OpenAiEngine, Upstream
from joulery.adapters.engines.remote.paused_answers import interruptible, interruptible_answer
from joulery.domain.errors import ActuationError, CapabilityError
from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.generation import (
    Dialect,
    EngineLoad,
    GenerationEvent,
    GenerationKind,
    GenerationRequest,
)

HOW = "pip install 'joulery[llm]'"
WORKER = "joulery.adapters.engines.remote.llama_worker"
_LEAVE_S = 2.0
_NOTICE_S = 3.0
"""Time to wait after a broken connection for the end of the process."""
_RESTART_S, _RESTART_MAX_S = 0.1, 10.0


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """Settings of a model that llama.cpp runs.

    Attributes:
        path: The .gguf file.
        name: What it is called in answers.
        threads: Threads of one step.
        max_num_seqs: Requests in one batch.
        context_tokens: Maximum tokens of prompt and answer of one request.
        launch_s: How long it may take to load, and a request may wait for it to come back after a crash.
        stderr: File descriptor for what it prints; None for standard error.
    """

    path: Path
    name: str
    threads: int = 1
    max_num_seqs: int = 1
    context_tokens: int = 4096
    launch_s: float = 120.0
    stderr: int | None = None


class LlamaEngine:
    """A llama.cpp process as a :class:`~joulery.domain.serving.generation.LLMEngine`; started again when it dies.

    Args:
        settings: What it runs.
        module: The module of the process, for tests.

    Attributes:
        pid: Its process; 0 while it has none.
        restarts: How often it was started again.
    """

    def __init__(self, settings: LlamaSettings, *, module: str = WORKER) -> None:
        self.settings = settings
        self.pid = 0
        self.restarts = 0
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: OpenAiEngine | None = None
        self._up = asyncio.Event()
        self._gone = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._spent_cpu_s = 0.0
        self._closed = False

    @property
    def name(self) -> str:
        """Its name."""
        return f"llama.cpp {self.settings.path.name}"

    @property
    def variant(self) -> str:
        """The model it runs."""
        return self.settings.name

    @property
    def dialect(self) -> Dialect:
        """Its priority scheme: none."""
        return Dialect.PLAIN

    @property
    def ready(self) -> bool:
        """Whether its process answers."""
        return self._up.is_set()

    def cpu_s(self) -> float:
        """CPU seconds of its processes, all threads, since the first began."""
        return self._spent_cpu_s + _process_cpu_s(self.pid)

    async def start(self) -> None:
        """Start the process and have it load the model.

        Raises:
            CapabilityError: llama.cpp is not installed, or cannot load the model.
            ActuationError: The process died, or took too long.
        """
        await self._spawn()
        self._life = asyncio.get_running_loop().create_task(self._live(), name=f"llama.cpp {self.pid}")

    async def load(self) -> EngineLoad | None:
        """None: joulery sends all of its requests itself, and so has its load."""
        return None

    @property
    def pauses(self) -> bool:
        """True: it continues interrupted answers from its cache."""
        return True

    async def generate(
        self, request: GenerationRequest, priority: int | None, pause: Callable[[], bool] | None = None, /
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The answer as it arrives; a request waits for a process that is being started again."""
        prompts = request.body.get("prompt") if request.kind is GenerationKind.COMPLETION else None
        if isinstance(prompts, list) and len(prompts) > 1 and not isinstance(prompts[0], int):
            # llama.cpp would write every answer and then send none of them.
            raise RequestError(f"{self.variant} answers one prompt a request, not {len(prompts)}", Outcome.INVALID)
        answer = (
            self._generate(request)
            if pause is None or not interruptible(request)
            else interruptible_answer(request, self._generate, pause)
        )
        async with aclosing(answer) as events:
            async for event in events:
                yield event

    async def _generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        try:
            async with asyncio.timeout(self.settings.launch_s):
                await self._up.wait()
        except TimeoutError:
            raise RequestError(f"{self.name} does not come up", Outcome.UNAVAILABLE, retry_after_s=5.0) from None
        if self._closed or self._asked is None:
            raise RequestError("the engine is closing", Outcome.UNAVAILABLE)
        gone = self._gone
        try:
            async with aclosing(self._asked.generate(request, None)) as events:
                async for event in events:
                    yield event
        except RequestError as error:
            if error.outcome is Outcome.CRASHED and isinstance(error.__cause__, httpx.TransportError):
                await self._notice(gone)
            raise

    async def close(self) -> None:
        """End the process. Safe to call twice."""
        self._closed = True
        life, self._life = self._life, None
        if life is not None:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
        await self._end()
        self._up.set()  # wakes the requests that still wait; they find the engine closed

    async def _notice(self, gone: asyncio.Event) -> None:
        """After a broken connection, wait briefly; keep new requests from the process if it has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_NOTICE_S):
                await gone.wait()
        if gone.is_set() and gone is self._gone:
            self._up.clear()

    async def _live(self) -> None:
        """Start a new process whenever one ends."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            await self._gone.wait()
            await self._end()
            if time.monotonic() - began_s > _RESTART_MAX_S:
                pause_s = 0.0
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(_RESTART_MAX_S, max(_RESTART_S, 2.0 * pause_s))
                self.restarts += 1
                try:
                    await self._spawn()
                    break
                except (ActuationError, CapabilityError):
                    # It died while loading: the next attempt comes after a longer pause, requests wait or time out.
                    continue

    async def _spawn(self) -> None:
        """Start a process and wait until it serves."""
        settings = self.settings
        process = self._launch()
        self._process, self.pid = process, process.pid
        self._gone = _end_of(process)
        try:
            async with asyncio.timeout(settings.launch_s):
                line = await _first_line(process)
            answer = json.loads(line or b"{}")
        except (TimeoutError, ValueError) as error:
            await self._end()
            raise ActuationError(f"{self.name} was not ready after {settings.launch_s:g} s") from error
        except BaseException:
            await self._end()
            raise
        if "url" not in answer:
            await self._end()
            why = answer.get("error", "it ended; see what it printed above")
            grant = HOW if answer.get("missing") else None
            raise CapabilityError(f"{self.name} did not start: {why}", resource=str(settings.path), grant=grant)
        upstream = Upstream(answer["url"], settings.name, stall_s=settings.launch_s)
        self._asked = OpenAiEngine(upstream, cpu_s=lambda: _process_cpu_s(process.pid))
        self._up.set()

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = self.settings
        options = {
            "path": str(settings.path),
            "name": settings.name,
            "threads": settings.threads,
            "max_num_seqs": settings.max_num_seqs,
            "context_tokens": settings.context_tokens,
        }
        return subprocess.Popen(
            (sys.executable, "-m", self._module, str(os.getpid()), json.dumps(options)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=settings.stderr,
            process_group=0,  # Ctrl-C in the terminal is for the gateway, which lets requests finish
        )

    async def _end(self) -> None:
        """End the process, if there is one, and clear its state."""
        self._up.clear()
        asked, self._asked = self._asked, None
        if asked is not None:
            await asked.close()
        process, self._process = self._process, None
        if process is None:
            return
        spent_s = _process_cpu_s(process.pid)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._gone.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await self._gone.wait()
        process.wait()
        self._spent_cpu_s += 0.0 if math.isnan(spent_s) else spent_s
        self.pid = 0


def _process_cpu_s(pid: int) -> float:
    """CPU seconds of a process of this machine, all threads, to the nanosecond; 0 where it is gone.

    The kernel's clock of a process has the number ``~pid << 3 | 2`` (``clock_getcpuclockid``).
    """
    if not pid:
        return 0.0
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


async def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    """The line that a process prints when it is ready; empty when it ends first."""
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    found: asyncio.Future[None] = loop.create_future()
    descriptor = process.stdout.fileno()
    os.set_blocking(descriptor, False)
    held = bytearray()

    def read() -> None:
        try:
            piece = os.read(descriptor, 65536)
        except BlockingIOError:
            return
        held.extend(piece)
        if (not piece or b"\n" in held) and not found.done():
            found.set_result(None)

    loop.add_reader(descriptor, read)
    try:
        await found
    finally:
        loop.remove_reader(descriptor)
    return bytes(held).split(b"\n")[0]


def _end_of(process: subprocess.Popen[bytes]) -> asyncio.Event:
    """An event that is set when the process has ended; its id is not reused until it is waited for."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    descriptor = os.pidfd_open(process.pid)

    def seen() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        ended.set()

    loop.add_reader(descriptor, seen)
    return ended
