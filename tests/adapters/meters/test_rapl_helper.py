"""RAPL through the privileged helper: what it answers, for which users, and what a meter says when it is gone."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from joulery.adapters.meters import rapl_helper, rapl_server
from joulery.adapters.meters.rapl import open_rapl
from joulery.adapters.meters.rapl_helper import JOIN, RENEWED_S, RaplHelperMeter
from joulery.adapters.meters.rapl_server import MAX_CLIENTS, RaplServer, group_number, listening
from joulery.domain.errors import CapabilityError, ConfigError
from tests.adapters.meters.powercap import Powercap

UNPRIVILEGED, STRANGERS = 65534, 4242
"""A user without rights, and a group without members."""


@pytest.fixture
def cap(tmp_path: Path) -> Powercap:
    made = Powercap(tmp_path / "powercap")
    made.zone("intel-rapl:0", "package-0", 5_000_000, 9_000_000)
    made.zone("intel-rapl:0:0", "dram", 1_000_000)
    return made


@pytest.fixture
def path() -> Iterator[Path]:
    """A short path that other users may reach."""
    with tempfile.TemporaryDirectory(prefix="joulery-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "rapl.sock"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def served(cap: Powercap, path: Path, group: int = STRANGERS, now_s: Clock | None = None) -> Iterator[list[str]]:
    said: list[str] = []
    stop = threading.Event()
    with listening(path, group) as listener:
        clock = now_s or iter(range(10**9)).__next__
        server = RaplServer(open_rapl(cap.root, helper=None), listener, group, said.append, clock)
        thread = threading.Thread(target=server.serve, args=(stop,), daemon=True)
        thread.start()
        try:
            yield said
        finally:
            stop.set()
            thread.join()


def test_the_helper_shows_the_counters_that_the_kernel_shows(cap: Powercap, path: Path) -> None:
    own = open_rapl(cap.root)
    with served(cap, path):
        meter = RaplHelperMeter(path)
        assert [(c.device, c.component, c.kind, c.wrap_j) for c in meter.channels] == [
            (c.device, c.component, c.kind, c.wrap_j) for c in own.channels
        ]
        assert {c.update_s for c in meter.channels} == {RENEWED_S}
        for microjoules in (6_000_001, 8_999_999, 3):
            cap.set("intel-rapl:0", microjoules)
            assert meter.read() == own.read()
        meter.close()


def test_readings_are_no_finer_than_a_hundred_a_second(cap: Powercap, path: Path) -> None:
    clock = Clock()
    with served(cap, path, now_s=clock):
        meter = RaplHelperMeter(path)
        first = meter.read()
        cap.set("intel-rapl:0", 7_000_000)
        clock.now_s = RENEWED_S / 2
        assert meter.read() == first
        clock.now_s = RENEWED_S
        assert meter.read()[1] == 7.0
        meter.close()


def test_a_counter_that_fails_is_missing_and_said_once(cap: Powercap, path: Path) -> None:
    with served(cap, path) as said:
        meter = RaplHelperMeter(path)
        cap.set("intel-rapl:0", "broken")
        assert [math.isnan(value) for value in meter.read()] == [False, True]
        meter.read()
        assert meter.notes() == ("cpu:0 package: RAPL counter cannot be read any more",)
        cap.set("intel-rapl:0", 6_000_000)
        assert meter.read() == (1.0, 6.0)
        assert meter.notes() == ("cpu:0 package: RAPL counter can be read again",)
        meter.close()
    assert [line[:27] for line in said] == ["cpu:0 package: RAPL counter"] * 2


@pytest.mark.parametrize("sent", [b"", b"x", b"rr", b"r" * 4096])
def test_who_says_anything_else_is_hung_up_on(cap: Powercap, path: Path, sent: bytes) -> None:
    with served(cap, path), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(60)
        client.connect(str(path))
        assert json.loads(client.recv(4096))["channels"][0][:2] == ["cpu:0", "dram"]
        client.send(sent)
        assert client.recv(4096) == b""
        with closing(RaplHelperMeter(path)) as meter:
            assert meter.read()[0] == 1.0


def test_too_many_clients_are_turned_away_and_the_rest_is_served(cap: Powercap, path: Path) -> None:
    with served(cap, path), ExitStack() as stack:
        meters = [RaplHelperMeter(path) for _ in range(MAX_CLIENTS)]
        for meter in meters:
            stack.callback(meter.close)
        with pytest.raises(CapabilityError):
            RaplHelperMeter(path)
        assert all(meter.read()[0] == 1.0 for meter in meters)


def test_a_helper_that_ends_is_said_once_and_its_return_too(cap: Powercap, path: Path) -> None:
    clock = Clock()
    with served(cap, path):
        meter = RaplHelperMeter(path, clock)
        assert meter.read() == (1.0, 5.0)
    for _ in range(3):
        assert all(math.isnan(value) for value in meter.read())
        clock.now_s += 0.6
    assert len(meter.notes()) == 1
    cap.set("intel-rapl:0", 8_000_000)
    with served(cap, path):
        clock.now_s += 2.0
        assert meter.read() == (1.0, 8.0)
        assert meter.notes() == ("the RAPL helper answers again",)
        meter.close()


def test_another_helper_with_other_counters_is_not_believed(cap: Powercap, path: Path, tmp_path: Path) -> None:
    clock = Clock()
    with served(cap, path):
        meter = RaplHelperMeter(path, clock)
    assert math.isnan(meter.read()[0])
    other = Powercap(tmp_path / "other")
    other.zone("intel-rapl:0", "package-1", 1)
    with served(other, path):
        clock.now_s += 2.0
        assert all(math.isnan(value) for value in meter.read())
        assert meter.notes()[1:] == ()


def test_the_rapl_meter_takes_the_helper_only_where_the_kernel_denies(
    cap: Powercap, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(cap, path):
        assert not isinstance(open_rapl(cap.root, path), RaplHelperMeter)
        real_open = os.open

        def denied(file, flags, *rest):
            if str(file).endswith("energy_uj"):
                raise PermissionError(13, "Permission denied", str(file))
            return real_open(file, flags, *rest)

        monkeypatch.setattr(os, "open", denied)
        meter = open_rapl(cap.root, path)
        assert isinstance(meter, RaplHelperMeter)
        meter.close()
        with pytest.raises(CapabilityError, match="permission denied"):
            open_rapl(cap.root, path.with_name("none"))


def test_a_socket_of_another_user_is_not_believed(cap: Powercap, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(cap, path):
        monkeypatch.setattr(rapl_helper, "peer", lambda connection: (1, 77, 77))
        with pytest.raises(CapabilityError, match="neither root nor this user"):
            RaplHelperMeter(path)


@pytest.mark.parametrize(
    "packet", [b"hello", b"{}", b"[]", b'{"joulery_rapl": 2, "channels": []}', b'{"joulery_rapl": 1}']
)
def test_a_socket_that_is_no_helper(path: Path, packet: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.send(packet)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(CapabilityError, match="helper"):
            RaplHelperMeter(path)
        thread.join()


def test_what_is_in_the_way_of_a_socket(path: Path) -> None:
    with listening(path, STRANGERS), pytest.raises(ConfigError, match="another process"), listening(path, STRANGERS):
        pass
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"), listening(path, STRANGERS):
        pass
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="no such group"):
        group_number("no-such-group-here")
    assert (group_number("0"), group_number("root")) == (0, 0)


def test_a_group_is_identified_by_the_kernel(cap: Powercap, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rapl_server, "peer", lambda client: (1, 77, 88))
    with served(cap, path) as said:
        for _ in range(2):
            with pytest.raises(CapabilityError, match="refuses this user") as caught:
                RaplHelperMeter(path)
            assert caught.value.grant == JOIN
    assert said == [f"user 77 is refused: neither root nor a member of group {STRANGERS}"]
    monkeypatch.setattr(rapl_server, "peer_groups", lambda client: (5, STRANGERS))
    with served(cap, path), closing(RaplHelperMeter(path)) as meter:
        assert meter.read()[0] == 1.0


READ_AS = """
import json, os, sys
from pathlib import Path
from joulery.adapters.meters import rapl_helper
from joulery.adapters.meters.rapl import open_rapl
from joulery.domain.errors import CapabilityError

root, path, user, groups = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
os.setgroups(groups)
os.setgid(user)
os.setuid(user)
try:
    meter = open_rapl(Path(root), Path(path))
    print(f"{type(meter).__name__} {meter.read()}", end="")
except CapabilityError as error:
    print(error.message, end="")
"""


def read_as(root: Path, path: Path, *groups: int) -> str:
    """What a user without rights reads. Its process imports as root: its Python may be out of that user's reach."""
    words = [sys.executable, "-c", READ_AS, str(root), str(path), str(UNPRIVILEGED), json.dumps(groups)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def helper(root: Path, path: Path) -> subprocess.Popen[str]:
    flags = ["--listen", str(path), "--root", str(root), "--group", str(STRANGERS), "--json"]
    words = [sys.executable, "-m", "joulery", "rapl-helper", *flags]
    started = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert json.loads(started.stdout.readline())["counters"] == 2
    return started


@pytest.mark.e2e
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")
def test_users_without_root_read_through_the_helper_of_root_until_it_is_killed(path: Path) -> None:
    cap = Powercap(path.parent / "powercap")
    cap.zone("intel-rapl:0", "package-0", 5_000_000)
    cap.zone("intel-rapl:1", "package-1", 6_000_000)
    for zone in (0, 1):
        (cap.root / f"intel-rapl:{zone}/energy_uj").chmod(0o400)

    assert "permission denied" in read_as(cap.root, path, STRANGERS)
    running = helper(cap.root, path)
    try:
        status = Path(f"/proc/{running.pid}/status").read_text()
        assert f"Uid:\t{UNPRIVILEGED}\t{UNPRIVILEGED}" in status
        assert "CapEff:\t0000000000000000" in status
        assert read_as(cap.root, path, STRANGERS) == "RaplHelperMeter (5.0, 6.0)"
        assert read_as(cap.root, path) == "the RAPL helper refuses this user"
        path.chmod(0o666)
        assert read_as(cap.root, path) == "the RAPL helper refuses this user"
        clock = Clock()
        meter = RaplHelperMeter(path, clock)
        assert meter.read() == (5.0, 6.0)
        running.send_signal(signal.SIGKILL)
        running.communicate()
        assert all(math.isnan(value) for value in meter.read())
        assert "no RAPL helper answers" in read_as(cap.root, path, STRANGERS)
        running = helper(cap.root, path)
        clock.now_s += 2.0
        cap.set("intel-rapl:0", 7_000_000)
        assert meter.read() == (7.0, 6.0)
        assert len(meter.notes()) == 2
        meter.close()
        running.send_signal(signal.SIGTERM)
        running.communicate()
        assert running.returncode == 0
    finally:
        running.kill()
        running.communicate()
