"""The processes of a controller: start, find and restart the engine server and the gateways.

They outlive the controller. A controller that starts finds them by the sockets in the state folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from joulery import __version__
from joulery.adapters.engines.shared.controlled import ControlLink
from joulery.adapters.engines.shared.messages import SILENT_S
from joulery.adapters.engines.shared.server import GatewayStatus
from joulery.app.serving.gateways.engine_process import (
    CONTROL_SOCKET,
    ENGINE_LOG,
    GATEWAY_SOCKET,
    EngineProcessConfig,
)
from joulery.config.serving import GatewaysConfig, ServingConfig, split_address
from joulery.config.site import Site
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.gateway.server import listening_socket
from joulery.runtime.process import process_command
from joulery.store.files import disk_errors

ENGINE_PROGRAM = "joulery.app.serving.gateways.engine_process"
_START_S = 60.0
"""Time limit for an engine server or a gateway to start, on a busy machine too."""
_LOOK_S = 0.05
_ORPHAN_S = 60.0
"""Seconds without its engine server after which a gateway of this machine ends."""
_TOKEN = "token"
_RESTART_S = 1.0


def gateways_folder(site: Site) -> Path:
    """Return the folder for the sockets and logs of the processes that outlive the controller; create it if missing.

    Raises:
        CapabilityError: The folder cannot be created.
        ConfigError: Other users may enter the folder, although its processes accept commands over sockets there.
    """
    assert site.serving.gateways is not None
    folder = site.serving.gateways.state.absolute()
    with disk_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ConfigError(
            "the state folder of the gateways must be its user's alone",
            pointer="serving.gateways.state",
            got=f"{folder}, mode {facts.st_mode & 0o777:o}",
            hint=f"chmod 700 {folder}",
        )
    return folder


@contextmanager
def reachable(folder: Path, name: str) -> Iterator[str]:
    """Yield a path of a socket that is short enough for the kernel, however long the folder's path is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class EngineServerProcess:
    """Starts and finds the engine server of a state folder.

    Attributes:
        folder: The state folder.
        config: Settings of the gateways.
        services: The site's services.
        process: Its process, where this controller started it; else None.
    """

    folder: Path
    config: GatewaysConfig
    services: Sequence[str]
    process: subprocess.Popen[bytes] | None = None

    async def connect(self, link: ControlLink, *, fresh: bool = False) -> bool:
        """Connect to the engine server, starting one if necessary; return whether it was already running.

        Args:
            link: The connection.
            fresh: Whether to start one without trying to connect first.

        Raises:
            CapabilityError: The engine server cannot be started, or has another controller.
        """
        if not fresh and await self._connected(link):
            return True
        self._start()
        until_s = time.monotonic() + _START_S
        while not await self._connected(link):
            assert self.process is not None
            if (status := self.process.poll()) is not None or time.monotonic() > until_s:
                how = "does not answer" if status is None else f"ended with status {status}"
                await self.ended(0.0)
                raise CapabilityError(
                    f"the engine server {how}: {last_line(self.folder / ENGINE_LOG)}",
                    resource=str(self.folder / ENGINE_LOG),
                )
            await asyncio.sleep(_LOOK_S)
        return False

    async def ended(self, within_s: float) -> None:
        """Wait for the end of the process that this controller started; kill it after ``within_s``."""
        if self.process is None:
            return
        try:
            await asyncio.to_thread(self.process.wait, within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    async def _connected(self, link: ControlLink) -> bool:
        if not (self.folder / CONTROL_SOCKET).exists():
            return False
        with reachable(self.folder, CONTROL_SOCKET) as path:
            try:
                await link.open(path)
            except (OSError, TimeoutError):
                return False
        return True

    def _start(self) -> None:
        token, tls = self.config.join_token_file, self.config.join_tls
        made = EngineProcessConfig(
            str(self.folder),
            self.config.join,
            None if token is None else str(token.absolute()),
            self.config.outlive_s,
            list(self.services),
            None if tls is None else (str(tls.certificate.absolute()), str(tls.key.absolute())),
        )
        self.process = _spawn(process_command(ENGINE_PROGRAM, made.to_json()), self.folder / ENGINE_LOG, self.folder)


@dataclass(slots=True)
class LocalGateway:
    """One gateway of this machine.

    Attributes:
        name: Its name.
        where: ``HOST:PORT``.
        process: Its process, where this controller started it; else None.
        pid: Its process id; 0 before it starts.
        alive_s: Time it last responded, on the monotonic clock.
        starts: Number of times that this controller started it.
        answers: Whether its process has joined; a starting process has more time.
    """

    name: str
    where: str
    process: subprocess.Popen[bytes] | None = None
    pid: int = 0
    alive_s: float = -1e9
    starts: int = 0
    answers: bool = False

    @property
    def running(self) -> bool:
        """Whether its process is alive."""
        if self.process is not None:
            return self.process.poll() is None
        return self.pid != 0 and _is_gateway(self.pid, self.name)


@dataclass(slots=True)
class LocalGateways:
    """Starts and supervises the gateways of this machine.

    Attributes:
        folder: The state folder.
        serving: Their addresses, tokens and TLS files.
        gateways: The gateways.
        reserved: Socket that reserves the shared port.
        stopped: Whether the gateways have been stopped.
    """

    folder: Path
    serving: ServingConfig
    gateways: list[LocalGateway] = field(default_factory=list)
    reserved: socket.socket | None = None
    stopped: bool = False

    def take_over(self, found: Sequence[GatewayStatus]) -> None:
        """Choose the addresses; take over the running gateways that were started with the same settings.

        Args:
            found: The gateways that the engine server knows.

        Raises:
            JouleryError: A port is not available.
        """
        config = self.serving.gateways
        assert config is not None
        there = {one.name: one for one in found if one.pid and one.connected and _is_gateway(one.pid, one.name)}
        if config.listen:
            self.gateways = [LocalGateway(f"gateway-{i + 1}", where) for i, where in enumerate(config.listen)]
        else:
            where = self._shared(list(there.values()))
            self.gateways = [LocalGateway(f"gateway-{i + 1}", where) for i in range(config.count)]
        for one in self.gateways:
            known = there.pop(one.name, None)
            if known is not None and known.start == self._start_of(one):
                one.pid, one.alive_s, one.answers = known.pid, time.monotonic(), True
            elif known is not None:
                _terminate(known.pid)
        for surplus in there.values():
            if surplus.name.startswith("gateway-"):
                _terminate(surplus.pid)
        for one in self.gateways:
            if config.listen and not one.pid and not one.where.endswith(":0"):
                host, port = split_address(one.where)
                listening_socket(host, port).close()

    @property
    def url(self) -> str:
        """URL of the first gateway."""
        scheme = "http" if self.serving.tls is None else "https"
        return f"{scheme}://{self.gateways[0].where}"

    def joined(self, seen: Sequence[GatewayStatus]) -> bool:
        """Whether all gateways have joined the engine server.

        Args:
            seen: The gateways as the engine server knows them.

        Raises:
            CapabilityError: A gateway ended and was started again more than once.
        """
        for one in self.gateways:
            if one.starts > 2:
                log = self.folder / f"{one.name}.log"
                raise CapabilityError(f"{one.name} does not stay: {last_line(log)}", resource=str(log))
        there = {one.name for one in seen if one.connected}
        return there >= {one.name for one in self.gateways}

    def supervise(self, seen: Sequence[GatewayStatus]) -> list[str]:
        """Start gateways that are not running and kill those that do not answer; return messages, one sentence each.

        Args:
            seen: The gateways as the engine server knows them.
        """
        now_s, remarks = time.monotonic(), []
        joined = {one.name: one for one in seen if one.connected and one.pid}
        for one in () if self.stopped else self.gateways:
            status = joined.get(one.name)
            if status is not None and (not one.pid or status.pid == one.pid):
                one.alive_s, one.answers = now_s - status.silent_s, True
            if one.running:
                patience_s = SILENT_S if one.answers else _START_S  # a busy machine takes seconds to import it
                if now_s - one.alive_s > patience_s:
                    remarks.append(f"{one.name} has not answered for {patience_s:g} s: it is ended and started again")
                    with suppress(ProcessLookupError):
                        os.kill(one.pid, signal.SIGKILL)
                    one.alive_s = now_s
                continue
            if one.starts and now_s - one.alive_s < _RESTART_S:
                continue
            if one.pid:
                remarks.append(f"{one.name} has ended: it is started again")
            self._spawn(one)
        return remarks

    async def stop(self) -> None:
        """Stop the gateways: no new connections, running requests finish. Safe to call twice."""
        gateways, self.stopped = self.gateways, True
        for one in gateways:
            if one.running:
                _terminate(one.pid)
        for _ in range(round((self.serving.drain_s + 5.0) / _LOOK_S)):
            if not any(one.running for one in gateways):
                break
            await asyncio.sleep(_LOOK_S)
        for one in gateways:
            if one.running:
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
            if one.process is not None:
                await asyncio.to_thread(one.process.wait)
        if self.reserved is not None:
            self.reserved.close()

    def _shared(self, there: Sequence[GatewayStatus]) -> str:
        """Address that all gateways share: that of the running ones where the site file leaves the port open."""
        host, port = self.serving.host, self.serving.port
        for one in there:
            known = one.url.partition("://")[2]
            if known and (not port or known == _joined(host, port)):
                host, port = split_address(known)
                return _joined(host, port)
        listener = listening_socket(host, port)  # in use by another program: an error now
        port = listener.getsockname()[1]
        listener.close()
        self.reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.reserved.bind((host, port))
        return _joined(host, port)

    def _spawn(self, one: LocalGateway) -> None:
        command = (*self._arguments(one), "--start", self._start_of(one))
        command = process_command("joulery", *command)
        one.process = _spawn(command, self.folder / f"{one.name}.log", self.folder)
        one.pid, one.alive_s, one.answers = one.process.pid, time.monotonic(), False
        one.starts += 1

    def _start_of(self, one: LocalGateway) -> str:
        """Hash of the version and the arguments that a gateway is started with."""
        return hashlib.sha256(repr((__version__, self._arguments(one))).encode()).hexdigest()[:16]

    def _arguments(self, one: LocalGateway) -> tuple[str, ...]:
        serving, assigned = self.serving, self.serving.gateways
        assert assigned is not None
        options = ["gateway", "--join", f"unix:{GATEWAY_SOCKET}", "--name", one.name, "--listen", one.where]
        options += ["--drain", f"{serving.drain_s:g}", "--give-up", f"{_ORPHAN_S:g}"]
        if not assigned.listen:
            options.append("--shared-port")
        if serving.grpc is not None:
            options += ["--grpc", serving.grpc]
        token = self._token_file()
        if token is not None:
            options += ["--token-file", str(token)]
        if serving.open_monitoring:
            options.append("--open-monitoring")
        if serving.tls is not None:
            options += ["--tls-certificate", str(serving.tls.certificate.absolute())]
            options += ["--tls-key", str(serving.tls.key.absolute())]
        return tuple(options)

    def _token_file(self) -> Path | None:
        """File with the clients' token; a token in the site file is written to the state folder."""
        serving = self.serving
        if serving.token_file is not None:
            return serving.token_file.absolute()
        if serving.token is None:
            return None
        path = self.folder / _TOKEN
        text = serving.token.get_secret_value()
        with disk_errors(path):
            if not path.exists() or path.read_text() != text:
                path.touch(mode=0o600)
                path.write_text(text)
        return path


def last_line(log: Path) -> str:
    """The last line of a log."""
    with suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        if lines:
            return lines[-1]
    return "its log is empty"


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _spawn(command: Sequence[str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one.

    Raises:
        CapabilityError: The process cannot be started, or its log cannot be written.
    """
    with disk_errors(log), log.open("ab") as file:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=folder,
                # Models may be modules of the folder that joulery runs in.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
                start_new_session=True,
            )
        except OSError as error:
            raise CapabilityError(f"no process can be started: {error}", resource=command[0]) from error


def _is_gateway(pid: int, name: str) -> bool:
    """Whether a process is the gateway of this name; its id may have been reused by another process."""
    with suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"gateway" in arguments and name.encode() in arguments
    return False


def _terminate(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGTERM)
