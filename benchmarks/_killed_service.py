"""A service under load whose processes are killed while its layout changes: each request is followed to its end.

``joulery up`` with several gateways serves models of almost no work. A policy that tries layouts on the running service
switches every second or two, and later with the grid, as long as there is spare capacity. Clients send requests and
read each answer. Every few seconds one process is killed with SIGKILL: a replica, a gateway, the engine server, the
controller, which is then started again, or the head of a Ray cluster. At the end the clients' counts are compared with
the service's records.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

from joulery.app.profiling.service_profile import write_profile
from joulery.domain.quality import Quality
from joulery.domain.serving.profile import Profile, SliceProfile, Timings
from joulery.policies.serving.search.layout_space import cpu_slices
from joulery.runtime.session.requests import OUTCOMES, ROW
from joulery.store.run.directory import open_run

KILLS = ("replica", "gateway", "engine server", "controller")
RAY_KILLS = (
    *("Ray worker", "gateway", "Ray worker", "controller", "Ray worker", "Ray head"),
    *("Ray worker", "gateway", "Ray worker", "controller", "Ray worker", "engine server"),
)
"""Kinds of processes in the order in which they are killed. A cluster of Ray takes a minute to come back."""
ROOT = Path(__file__).parents[1]
VARIANTS = {"small": 0.1, "middle": 0.2, "large": 0.4}
"""Milliseconds of CPU time a request."""
PATIENCE_S, RAY_PATIENCE_S = 240.0, 900.0
_LOOK_S = 0.05
_RETRY_S = 0.25
"""Seconds that a client waits after a refusal before its next request."""
_STEP_S = 8.0
"""Seconds until the grid's intensity changes, and with it the layout."""
SITE = """
joulery: 1
name: killed
mode: act
carbon: {kind: file, path: grid.csv, zone: GB, replay: {day: "2020-06-10", duration: LENGTH s}}
meters: {use: [cpu-model], cpu_model: {idle: 20 W, max: 60 W}}
fleet: {cpu: {FLEET}}
services:
  - name: trivial
    family:
      variants:
FAMILY
    slo: {latency: 10 s}
    rate: 300 /s
    profile: profile.json
    warm_memory: 0 MiB
    audit: {share: 0 %}
    policy: {kind: clover, lambda: 5 %, base_intensity: 200 g/kWh, search: clover,
             trials: {count: 8, clock: 60 s, longest: 1 s, min_requests: 20, warm_up: 0.1 s}}
serving: {listen: "127.0.0.1:0", drain: 5 s, deadline: 60 s, gateways: {count: 3, state: state, outlive: 5 min}ENGINE}
"""


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Below:
    """The layer below the service that runs its replicas.

    Attributes:
        kills: Kinds of processes in the order in which they are killed.
        fleet, engine: Entries of the site file: the cores, and the engine where it is not the embedded one.
        python: Interpreter of ``joulery up``.
        environ: Its environment; None for this process's.
        patience_s: How long the service may take to return after a kill.
    """

    kills: tuple[str, ...] = KILLS
    fleet: str = "cores: 2"
    engine: str = ""
    python: str = sys.executable
    environ: Mapping[str, str] | None = None
    patience_s: float = PATIENCE_S

    @classmethod
    def ray(cls, python: str, environ: Mapping[str, str]) -> Below:
        """Ray Serve on its own cluster; changes of the layout are changes of the mix, and keep Ray's workers."""
        cpus = ", engine: {kind: ray, cpus: 4}"
        return cls(RAY_KILLS, "slices: [1, 1]", cpus, python, environ, RAY_PATIENCE_S)


@dataclass(slots=True)
class Counts:
    """Outcomes of the requests, as their clients counted them.

    Attributes:
        sent: Requests sent.
        again: Requests among them that a client sent again because its connection broke with a killed gateway.
        statuses: Answers by HTTP status.
        wrong: Answers that were not the request's own: another id, other numbers, or unexpected further bytes.
    """

    sent: int = 0
    again: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: int = 0

    @property
    def requests(self) -> int:
        """Requests, each counted once however often it was sent."""
        return self.sent - self.again

    @property
    def answered(self) -> int:
        """Requests with a result."""
        return self.statuses[200]

    @property
    def refused(self) -> int:
        """Requests that were answered with a status other than 200."""
        return self.statuses.total() - self.answered

    @property
    def lost(self) -> int:
        """Requests without any answer."""
        return self.requests - self.statuses.total()


class Clients:
    """Connections that send a request, wait for its answer, and send the next.

    Args:
        port: Port of the gateways.
        connections: Number of connections.
        pause_s: Seconds between two requests of a connection.
        patience_s: Seconds to wait for further answers.
    """

    def __init__(self, port: int, connections: int, pause_s: float, patience_s: float = PATIENCE_S) -> None:
        self.counts = Counts()
        self._port, self._pause_s, self._patience_s = port, pause_s, patience_s
        self._ended, self._refused = asyncio.Event(), [False] * connections
        self._connections: list[Connection | None] = [None] * connections
        self._tasks = [asyncio.create_task(self._client(index)) for index in range(connections)]

    async def stop(self) -> Counts:
        """Stop the clients after their current request, and return the counts."""
        self._ended.set()
        await asyncio.gather(*self._tasks)
        return self.counts

    async def more(self, count: int) -> None:
        """Wait until ``count`` more requests have a result.

        Raises:
            TimeoutError: The results did not arrive in time.
        """
        until = self.counts.answered + count
        await eventually(lambda: self.counts.answered >= until, f"{count} more answers", self._patience_s)

    async def _client(self, index: int) -> None:
        number = 0
        try:
            while not self._ended.is_set():
                number += 1
                await self._until_answered(index, f"{index}-{number}", float(number % 1_000_000))
                if number % 50 == 0:  # the next connection comes to another gateway
                    await self._close(index)
                if self._refused[index]:
                    await asyncio.sleep(_RETRY_S)
                elif self._pause_s:
                    await asyncio.sleep(self._pause_s)
        finally:
            await self._close(index)

    async def _until_answered(self, index: int, name: str, value: float) -> None:
        """Send one request, and send it again if its connection breaks."""
        counts, first = self.counts, True
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
        body = json.dumps({"id": name, "inputs": [tensor]}).encode()
        head = b"POST /v2/models/trivial/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        while True:
            try:
                reader, writer = await self._connection(index)
            except OSError:  # a gateway that was killed had it in its backlog: no request was sent
                await asyncio.sleep(_LOOK_S)
                continue
            counts.sent, counts.again, first = counts.sent + 1, counts.again + (not first), False
            try:
                writer.write(head + body)
                status, content, closes = await _answer(reader)
            except (OSError, asyncio.IncompleteReadError):
                await self._close(index)
                continue
            counts.statuses[status] += 1
            self._refused[index] = status != 200
            if status == 200:
                document = json.loads(content)
                right = document.get("id") == name and document["outputs"][0]["data"] == [value]
                counts.wrong += not right or bool(reader._buffer)  # type: ignore[attr-defined]
            if closes:
                await self._close(index)
            return

    async def _connection(self, index: int) -> Connection:
        """The connection of a client, opened if there is none.

        Raises:
            OSError: The connection cannot be opened.
        """
        connection = self._connections[index]
        if connection is None:
            connection = self._connections[index] = await asyncio.open_connection("127.0.0.1", self._port)
        return connection

    async def _close(self, index: int) -> None:
        connection, self._connections[index] = self._connections[index], None
        if connection is not None:
            connection[1].close()
            with suppress(OSError):
                await connection[1].wait_closed()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Read an answer: its status, its body, and whether the server closes the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length), b"connection: close" in head


async def eventually(condition: Callable[[], Any], what: str, patience_s: float) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: The condition was not true in time.
    """
    end_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} never came")
        await asyncio.sleep(_LOOK_S)


class Service:
    """The service in a folder, under one controller after another.

    Args:
        folder: An empty folder.
        below: The layer that runs its replicas.
    """

    def __init__(self, folder: Path, below: Below = Below()) -> None:
        self.folder, self.below, self.state, self.runs = folder, below, folder / "state", 0
        self.controller: asyncio.subprocess.Process | None = None
        self.port = 0
        variants = "\n".join(
            f"        - {{name: {name}, accuracy: {70 + 10 * ms:g} %, accuracy_source: assumed, "
            f'model: {{kind: python, target: "benchmarks._trivial:Busy", options: {{ms: {ms:g}}}}}}}'
            for name, ms in VARIANTS.items()
        )
        site = SITE.replace("FAMILY", variants).replace("LENGTH", f"{24 * _STEP_S:g}")
        site = site.replace("FLEET", below.fleet).replace("ENGINE", below.engine)
        (folder / "site.yaml").write_text(site)
        hours = (f"2020-06-10T{hour:02}:00Z,{100 if hour % 2 else 400}" for hour in range(24))
        (folder / "grid.csv").write_text("\n".join(("timestamp_utc,ci_lifecycle", *hours)) + "\n")
        write_profile(folder / "profile.json", profile())

    async def start(self) -> None:
        """Start a controller, and wait until the service answers.

        Raises:
            RuntimeError: The controller ended.
        """
        self.runs += 1
        run = self.folder / f"run-{self.runs}"
        line = ["-m", "joulery", "up", str(self.folder / "site.yaml"), "--stay", "--out", str(run)]
        line += ["--json-out", str(self.folder / f"report-{self.runs}.json")]
        with (self.folder / f"up-{self.runs}.log").open("wb") as log:
            self.controller = await asyncio.create_subprocess_exec(
                self.below.python,
                *line,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.below.environ,
            )
        await eventually(self._listens, "a controller that answers", self.below.patience_s)

    def _listens(self) -> bool:
        log_text = (self.folder / f"up-{self.runs}.log").read_text(errors="replace")
        if self.controller is None or self.controller.returncode is not None:
            raise RuntimeError(f"joulery up ended: {log_text[-500:]}")
        before, found, _ = log_text.partition("/dashboard")
        if found and not self.port:
            self.port = int(before.rpartition(":")[2])
        return bool(found)

    async def kill(self, what: str) -> None:
        """Kill a process of a kind; a controller is started again.

        Raises:
            RuntimeError: The next controller ended.
            TimeoutError: There is no process of that kind.
        """
        if what == "controller":
            assert self.controller is not None
            self.controller.kill()
            await self.controller.wait()
            await asyncio.sleep(1.0)  # the gateways serve without a controller
            await self.start()
            return
        victims: list[psutil.Process] = []

        def found() -> bool:
            with suppress(OSError, ValueError, psutil.Error):  # an engine server that comes up
                victims[:] = self.processes(what)
            return bool(victims)

        await eventually(found, f"a {what} to kill", self.below.patience_s)
        with suppress(psutil.NoSuchProcess):
            victims[self.runs % len(victims)].kill()

    def processes(self, what: str) -> list[psutil.Process]:
        """The processes of a kind."""
        engine = psutil.Process(int((self.state / "engine.pid").read_text()))
        if what == "engine server":
            return [engine]
        if what == "replica":
            return [one for one in engine.children() if "joulery.adapters.engines.embedded.worker" in one.cmdline()]
        if what.startswith("Ray"):
            name = "gcs_server" if what == "Ray head" else "ray::ServeReplica"
            return [one for one in engine.children(recursive=True) if name in " ".join(one.cmdline()[:1])]
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if "gateway" in process.cmdline() and process.cwd() == str(self.state):
                    found.append(process)
        return found

    async def stop(self) -> None:
        """Stop the controller in order, so that it writes its report.

        Raises:
            RuntimeError: The controller failed.
        """
        assert self.controller is not None
        self.controller.send_signal(signal.SIGINT)
        if await asyncio.wait_for(self.controller.wait(), self.below.patience_s):
            raise RuntimeError(f"joulery up failed: {(self.folder / f'up-{self.runs}.log').read_text()[-500:]}")

    def clear(self) -> None:
        """Kill all processes of the service that are left."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cwd() == str(self.state):
                    process.kill()
        if self.controller is not None and self.controller.returncode is None:
            self.controller.kill()

    def switches(self) -> int:
        """Changes of the layout that were carried out, by all controllers."""
        count = 0
        for index in range(1, self.runs + 1):
            folder = self.folder / f"run-{index}"
            if folder.exists():
                entries = open_run(folder).log("decision")
                kinds = (one["decision"]["kind"] for one in entries if one["outcome"] == "applied")
                count += sum(kind in ("set_layout", "try_layout") for kind in kinds)
        return count

    def recorded(self) -> Counter[str]:
        """Requests by outcome, as all controllers together have recorded them."""
        found: Counter[str] = Counter()
        for index in range(1, self.runs + 1):
            run = self.folder / f"run-{index}"
            for path in run.glob("requests*.parquet"):
                found.update(pq.read_table(path, columns=["outcome"])["outcome"].to_pylist())
            for path in run.glob("requests*.rows"):
                found.update(_outcomes_in(path))
        return found

    def report(self) -> dict[str, Any]:
        """The last controller's report."""
        return dict(json.loads((self.folder / f"report-{self.runs}.json").read_text()))


def _outcomes_in(path: Path) -> list[str]:
    """The outcomes of the complete rows of a file."""
    whole = path.stat().st_size // ROW.itemsize
    return [OUTCOMES[code].value for code in np.fromfile(path, ROW, whole)["outcome"].tolist()]


def profile() -> Profile:
    """A profile of the variants from their nominal times, so that the service starts without measuring."""
    entries = []
    for name, ms in VARIANTS.items():
        for cores in (1, 2):
            timings = Timings([ms / 1e3 + 1e-4], [ms / 1e3])
            entries.append(SliceProfile(name, cpu_slices((cores,))[0], timings, timings, 10.0))
    return Profile({}, tuple(entries), 20.0, Quality.MODELLED, "cpu-model")


@dataclass(frozen=True, slots=True)
class Played:
    """Result of a run with kills.

    Attributes:
        counts: Counts of the clients.
        recorded: Requests by outcome that the service recorded.
        switches: Changes of the layout.
        kills: Kills by kind.
        report: The last controller's report.
        duration_s: Length of the run, s.
    """

    counts: Counts
    recorded: Counter[str]
    switches: int
    kills: Counter[str]
    report: dict[str, Any]
    duration_s: float

    @property
    def refused_by_record(self) -> int:
        """Requests that the service recorded as refused."""
        return self.recorded.total() - self.recorded["ok"] - self.recorded["cancelled"]

    @property
    def agrees(self) -> bool:
        """Whether the service's records agree with the clients' counts.

        A client has no outcome for a request whose connection broke; the service has at most one record of such a
        request.
        """
        cut = self.recorded.total() - self.counts.statuses.total()
        answered = self.recorded["ok"] - self.counts.answered
        refused = self.refused_by_record - self.counts.refused
        return 0 <= cut <= self.counts.again and answered >= 0 and refused >= 0


async def play(
    folder: Path,
    *,
    requests: int,
    switches: int,
    kills: int,
    connections: int = 16,
    pause_s: float = 0.0,
    answers_between: int = 500,
    below: Below = Below(),
) -> Played:
    """Serve, kill and count until there were enough requests, switches and kills.

    Args:
        folder: An empty folder.
        requests: Least number of requests.
        switches: Least number of changes of the layout.
        kills: Least number of kills, of the kinds in turn.
        connections: Number of clients.
        pause_s: Pause between two requests of a client.
        answers_between: Least number of answers between two kills.
        below: The layer that runs the replicas.

    Raises:
        TimeoutError: The service did not return after a kill.
        RuntimeError: A process failed.
    """
    service, began_s = Service(folder, below), time.monotonic()
    done: Counter[str] = Counter()
    try:
        await service.start()
        clients = Clients(service.port, connections, pause_s, below.patience_s)
        try:
            await clients.more(answers_between)
            while done.total() < kills or clients.counts.requests < requests or service.switches() < switches:
                what = below.kills[done.total() % len(below.kills)]
                await service.kill(what)
                done[what] += 1
                left = max(0, kills - done.total())
                await clients.more(max(answers_between, (requests - clients.counts.requests) // (left + 1)))
        finally:
            counts = await clients.stop()
        await service.stop()
        found = service.switches(), done, service.report(), time.monotonic() - began_s
        return Played(counts, service.recorded(), *found)
    finally:
        service.clear()
