"""The process of the engine server: ``python -m joulery.app.serving.gateways.engine_process CONFIG``.

It outlives the controller that starts it: it has its own session and no pipes to other processes. It ends when a
controller closes it, on SIGTERM or SIGINT, and when it has had no controller for ``outlive_s``.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

from joulery.adapters.engines.shared.control import ControlServer
from joulery.adapters.engines.shared.server import EngineServer
from joulery.app.wiring.engine import site_engine
from joulery.app.wiring.gpus import local_gpus
from joulery.app.wiring.leases import held_leases
from joulery.config.devices import GpuDeviceConfig
from joulery.config.serving import ServingConfig, split_address
from joulery.domain.ports import Engine, Places
from joulery.gateway.access import read_token
from joulery.gateway.joined.labels import SharedLabels
from joulery.gateway.tls import TlsFiles

GATEWAY_SOCKET, CONTROL_SOCKET, LOCK, PID = "gateway.sock", "control.sock", "engine.lock", "engine.pid"
ENGINE_LOG = "engine.log"
_WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineProcessConfig:
    """Settings of the engine server's process.

    Attributes:
        state: Folder of its sockets.
        join: ``HOST:PORT`` for gateways of other machines; None for none.
        join_token_file: File with their token.
        join_tls: Files of the certificate and the key that encrypt their connections; None for no encryption.
        outlive_s: Seconds without a controller after which the process ends.
        services: The site's services.
    """

    state: str
    join: str | None
    join_token_file: str | None
    outlive_s: float
    services: list[str] = field(default_factory=list)
    join_tls: tuple[str, str] | None = None

    def to_json(self) -> str:
        """The configuration as one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineProcessConfig:
        """The inverse of :meth:`to_json`."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Specification of the engine; pickled between processes of one version.

    Attributes:
        serving: Kind of the engine, and its limits.
        cores: CPU cores of an embedded engine.
        upstreams: Whether the services are on other servers.
        here: Of services with some variants on this machine and some on other servers, the cores of each replica.
        devices: GPUs of this machine that its replicas run on; none for CPU cores.
    """

    serving: ServingConfig
    cores: tuple[int, ...]
    upstreams: bool
    here: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    devices: tuple[GpuDeviceConfig, ...] = ()

    @classmethod
    def of(
        cls,
        serving: ServingConfig,
        cores: tuple[int, ...],
        *,
        upstreams: bool,
        here: Mapping[str, tuple[tuple[int, ...], ...]] = {},
        devices: tuple[GpuDeviceConfig, ...] = (),
    ) -> EnginePlan:
        """The plan of a site, without the gateways' addresses and tokens, which do not affect the engine."""
        gone = dict.fromkeys(("grpc", "token", "token_file", "tls", "gateways"))
        return cls(serving.model_copy(update={**gone, "listen": "127.0.0.1:0"}), cores, upstreams, here, devices)

    def engine(self, places: Places | None) -> Engine:
        """Create the engine; it runs no replicas yet.

        Args:
            places: Hands out slices of its GPUs; None where it has none.
        """
        return site_engine(
            self.serving,
            cores=self.cores,
            stderr=sys.stderr.fileno(),
            places=places,
            upstreams=self.upstreams,
            here=self.here,
        )


class EngineMaker:
    """Makes engines from plans, one at a time, and holds the leases of their GPUs."""

    def __init__(self) -> None:
        self._gpus = AsyncExitStack()

    async def make(self, plan: EnginePlan) -> Engine:
        """Create the engine of a plan, once the previous one has ended.

        Raises:
            JouleryError: A GPU is not available.
        """
        await self.close()
        if not plan.devices:
            return plan.engine(None)
        holder = await self._gpus.enter_async_context(held_leases(_say))
        found = await asyncio.to_thread(local_gpus, plan.devices, holder)
        self._gpus.callback(found.close)
        return plan.engine(found.places)

    async def close(self) -> None:
        """Release the GPUs. Safe to call twice."""
        await self._gpus.aclose()
        self._gpus = AsyncExitStack()


def main(argument: str) -> int:
    """Run the engine server until it is closed; return the exit code."""
    config = EngineProcessConfig.from_json(argument)
    os.chdir(config.state)  # the path of a socket has at most 107 bytes
    with Path(LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 1  # another one runs, and its controller finds that one
        Path(PID).write_text(f"{os.getpid()}\n")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config))
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


async def _serve(config: EngineProcessConfig) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    secret = None if config.join_token_file is None else read_token(Path(config.join_token_file)).encode()
    server = EngineServer(SharedLabels(), secret, config.services)
    maker = EngineMaker()
    control = ControlServer(server, maker.make, stop.set)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(maker.close)
        server.start()
        await stack.enter_async_context(_listening(server, control, config))
        while not stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _WATCH_S)
            if control.away_s > config.outlive_s:
                sys.stderr.write(f"no controller has come for {config.outlive_s:g} s: ending\n")
                break
        if server.engine is not None:
            await server.engine.close()
        await server.stop()


@asynccontextmanager
async def _listening(server: EngineServer, control: ControlServer, config: EngineProcessConfig) -> AsyncIterator[None]:
    """Open the sockets; those for this machine's processes are in a folder that only their user can enter."""
    loop = asyncio.get_running_loop()
    listeners: list[asyncio.AbstractServer] = []
    try:
        _remove_sockets()
        listeners.append(await loop.create_unix_server(server.protocol, GATEWAY_SOCKET))
        if config.join is not None:
            host, port = split_address(config.join)
            tls = None if config.join_tls is None else TlsFiles(*map(Path, config.join_tls)).server_context()
            listeners.append(await loop.create_server(lambda: server.protocol(guarded=True), host, port, ssl=tls))
        listeners.append(await asyncio.start_unix_server(control.connected, CONTROL_SOCKET, limit=1 << 26))
        yield
    finally:
        for one in listeners:
            one.close()
        _remove_sockets()


def _remove_sockets() -> None:
    for name in (GATEWAY_SOCKET, CONTROL_SOCKET):
        Path(name).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
