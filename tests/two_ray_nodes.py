"""A Ray cluster of two nodes on this machine: each in a network of its own where that is permitted."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.ports import free_ports

_RAY = Path(sys.executable).with_name("ray")
_STORE = "--object-store-memory=100000000"


@dataclass(frozen=True)
class TwoNodes:
    """The cluster.

    Attributes:
        addresses: Of the head and of the other node.
        address: What a driver on the head's network joins.
        dashboard: URL of its dashboard.
        environ: Variables of whatever joins it.
        apart: Whether the nodes are in networks of their own.
        folder: Where it keeps its files.
        head: What starts its head, but for the folder of the head's files.
        join: What starts its other node.
    """

    addresses: tuple[str, str]
    address: str
    dashboard: str
    environ: dict[str, str]
    apart: bool
    folder: str
    head: tuple[str, ...] = ()
    join: tuple[str, ...] = ()

    def processes(self) -> list[psutil.Process]:
        """Every process of the cluster."""
        found = []
        for one in psutil.process_iter(["cmdline", "environ"]):
            line = " ".join(one.info["cmdline"] or [])
            if self.folder in line or (one.info["environ"] or {}).get("JOULERY_TEST_CLUSTER") == self.folder:
                found.append(one)
        return [one for one in found if one.pid != os.getpid()]

    def start_head(self, name: str = "first") -> None:
        """Start a head with its files in a folder of this name: after :meth:`kill_head` another one.

        Ray gives a head up that takes half a minute to start, as on a busy machine: it is tried three times.
        """
        for again in range(3):
            at = Path(self.folder, f"{name}-{again}")
            at.mkdir()
            try:
                _run(*self.head, f"--temp-dir={at}", environ=self.environ)
                return
            except RuntimeError as error:
                if again == 2 or "timed out during startup" not in str(error):
                    raise
                self.kill_head()

    def kill_head(self) -> None:
        """Kill the head's control process, its dashboard and its node."""
        own = f"--node_ip_address={self.addresses[0]}"
        for one in self.processes():
            line = " ".join(one.cmdline())
            if one.name() == "gcs_server" or "dashboard.py" in line or (one.name() == "raylet" and own in line):
                one.send_signal(signal.SIGKILL)

    def start_other_node(self) -> None:
        """Start the second node; for use after :meth:`kill_other_node` too."""
        joining = {name: value for name, value in self.environ.items() if name != "RAY_REDIS_ADDRESS"}
        _run(*self.join, environ=joining)

    def kill_other_node(self) -> None:
        """Kill the raylet of the second node; what it started ends with it."""
        for one in self.processes():
            if one.name() == "raylet" and f"--node_ip_address={self.addresses[1]}" in " ".join(one.cmdline()):
                one.send_signal(signal.SIGKILL)


def _run(*words: str, environ: dict[str, str] | None = None) -> None:
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")


@contextlib.contextmanager
def _networks() -> Iterator[tuple[tuple[str, str], tuple[str, ...]]]:
    """Addresses of two nodes, and what starts a program on the second one's network: nothing where both share one."""
    name = f"jr{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield ("127.0.0.2", "127.0.0.3"), ()
        return
    subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 256}"
    one, other = f"{subnet}.1", f"{subnet}.2"
    near, far = f"{name}a", f"{name}b"
    try:
        try:
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
            _run("ip", "addr", "add", f"{one}/24", "dev", near)
            _run("ip", "link", "set", near, "up")
            _run("ip", "-n", name, "addr", "add", f"{other}/24", "dev", far)
            _run("ip", "-n", name, "link", "set", far, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        except RuntimeError:
            yield ("127.0.0.2", "127.0.0.3"), ()
            return
        yield (one, other), ("ip", "netns", "exec", name)
    finally:
        for words in (("link", "del", near), ("netns", "del", name)):
            subprocess.run(("ip", *words), capture_output=True)


@contextlib.contextmanager
def two_ray_nodes(cpus: int = 2, *, head_cpus: int = 2, redis: str = "", gpus: int = 0) -> Iterator[TwoNodes]:
    """Start the cluster; every process of it ends with the block.

    Args:
        cpus, head_cpus: CPUs that the other node counts, and the head.
        gpus: GPUs that the other node says it has, and the head; there need be none.
        redis: Address of a Redis that outlives the head and keeps what it knows; empty for none.
    """
    with (
        _networks() as (addresses, prefix),
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as at,
    ):
        port, dashboard = free_ports(2)
        environ = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "JOULERY_TEST_CLUSTER": at,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        if redis:
            environ |= {"RAY_REDIS_ADDRESS": redis, "RAY_external_storage_namespace": Path(at).name}
        common = (_STORE, "--disable-usage-stats")
        head = (
            *(str(_RAY), "start", "--head", f"--node-ip-address={addresses[0]}", f"--port={port}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--include-dashboard=true"),
            *(f"--num-cpus={head_cpus}", f"--num-gpus={gpus}", *common),
        )
        address = f"{addresses[0]}:{port}"
        join = (
            *(*prefix, str(_RAY), "start", f"--address={address}", f"--node-ip-address={addresses[1]}"),
            *(f"--num-cpus={cpus}", f"--num-gpus={gpus}", *common),
        )
        made = TwoNodes(addresses, address, f"http://127.0.0.1:{dashboard}", environ, bool(prefix), at, head, join)
        try:
            made.start_head()
            made.start_other_node()
            yield made
        finally:
            for one in made.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
