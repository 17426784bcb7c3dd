"""Several gateways in the site file: what fits, what does not, and how their processes are found again."""

import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from joulery.adapters.engines.shared.control import Taken
from joulery.app.serving.gateways.handle import GatewayGroup
from joulery.app.serving.gateways.processes import LocalGateway, LocalGateways, gateways_folder
from joulery.app.serving.gateways.stored_records import STORED, StoredRecords
from joulery.app.serving.gateways.unmetered import UnmeteredRequests
from joulery.config import load
from joulery.config.serving import ServingConfig
from joulery.domain.errors import ConfigError
from joulery.domain.serving.charging import ChargeTable
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.ledger import LedgerBatch, LedgerEntry, Stored
from joulery.runtime.session.requests import ROW, RequestRecorder
from joulery.steady_time import unix_s
from tests.runtime.site_files import toy_site

RECORD = RequestRecord("sums", "small", "r", 1.0, 1.0, 2.0, Outcome.OK, 0.1, 0.1, 1, None)


def _folder(path: Path) -> Any:
    """A run folder, as far as it is asked here."""
    return SimpleNamespace(path=path)


def serving(**gateways: object) -> ServingConfig:
    return ServingConfig.model_validate({"listen": "127.0.0.1:0", "gateways": gateways})


@pytest.mark.parametrize(
    ("gateways", "message"),
    [
        ({"count": 0}, "greater than or equal to 1"),
        ({"count": 65}, "less than or equal to 64"),
        ({"count": 3, "listen": ("127.0.0.1:1", "127.0.0.1:2")}, "2 addresses for 3 gateways"),
        ({"listen": ("127.0.0.1:1", "127.0.0.1:1")}, "an address twice"),
        ({"listen": ("0.0.0.0:1",)}, "needs a token"),
        ({"join": "10.0.0.5:8090"}, "need a token"),
        ({"join_tls": {"certificate": Path(__file__), "key": Path(__file__)}}, "has no effect without join"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(gateways: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        serving(**gateways)


@pytest.mark.parametrize(
    ("grpc", "gateways", "message"),
    [
        ("127.0.0.1:0", {}, "share the port of gRPC"),
        ("127.0.0.1:1", {"listen": ("127.0.0.1:2",)}, "share no port for gRPC"),
        ("0.0.0.0:1", {}, "needs a token"),
    ],
)
def test_grpc_has_one_port_for_all_gateways(grpc: str, gateways: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServingConfig.model_validate({"grpc": grpc, "gateways": gateways})
    assert ServingConfig.model_validate({"grpc": "127.0.0.1:1", "gateways": {}}).grpc == "127.0.0.1:1"


@pytest.mark.parametrize(("joined", "ago_s", "ended"), [(False, 20.0, False), (False, 90.0, True), (True, 20.0, True)])
def test_a_gateway_that_still_starts_is_not_silent(tmp_path: Path, joined: bool, ago_s: float, ended: bool) -> None:
    """A busy machine takes long to start it: it was killed after 6 s, twice, and the service did not come up."""
    with subprocess.Popen(["sleep", "60"]) as process:
        one = LocalGateway("gateway-1", "127.0.0.1:1", process, process.pid, time.monotonic() - ago_s, 1, joined)
        remarks = LocalGateways(tmp_path, serving(), [one]).supervise(())
        assert bool(remarks) is ended
        assert not ended or process.wait(30) == -9
        process.kill()


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    site = load(toy_site(tmp_path, changed={"drain: 2 s}": "drain: 2 s, gateways: {state: state}}"}))
    folder = gateways_folder(site)
    assert folder == tmp_path / "state" and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="its user's alone") as caught:
        gateways_folder(site)
    assert caught.value.hint == f"chmod 700 {folder}"


def test_the_next_controller_knows_which_records_are_stored(tmp_path: Path) -> None:
    stored, kept = Stored({}, {}), StoredRecords(tmp_path)
    for number in range(20):
        stored.marks[f"server {number}"] = {}
        kept.write(stored)
        stored.marks[f"server {number}"]["gateway"] = stored.entries[f"server {number}"] = number
        kept.write(stored)
        found = StoredRecords(tmp_path).take_over()
        assert found.marks[f"server {number}"] == {"gateway": found.entries[f"server {number}"]} == {"gateway": number}
    latest = [f"server {number}" for number in range(4, 20)]
    assert list(found.marks) == list(found.entries) == latest
    assert [file.name for file in tmp_path.iterdir()] == [STORED]


@pytest.mark.parametrize(("written", "mark", "left"), [(0, 1, 0), (2, 1, 1), (3, 5, 3), (4, 5, 4)])
def test_records_are_stored_once_their_rows_are_there(tmp_path: Path, written: int, mark: int, left: int) -> None:
    """A controller that is killed between its rows and its word is not counted again, nor is one that wrote a part."""
    rows, kept = tmp_path / "requests.rows", StoredRecords(tmp_path)
    kept.expect({rows: 1}, Stored({}, {}))
    rows.write_bytes(bytes(ROW.itemsize))
    kept.write(Stored({"i": {"p": 1}, "j": {"q": 2}}, {"i": 1}))
    kept.expect({rows: 3, tmp_path / "never made": 0}, Stored({"i": {"p": 5}}, {"i": 5}))
    rows.write_bytes(bytes(written * ROW.itemsize))
    kept.write(Stored({"i": {"p": 1}, "j": {"q": 2}}, {"i": 1}))  # another word, before the one on these rows
    second, found = StoredRecords(tmp_path), Stored({"i": {"p": mark}, "j": {"q": 2}}, {"i": mark})
    assert second.take_over() == found and rows.stat().st_size == left * ROW.itemsize
    second.expect({tmp_path / "its own": 1}, Stored({"i": {"p": 9}}, {"i": 9}))
    assert StoredRecords(tmp_path).take_over() == found, "what was found is kept"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"marks": 3, "entries": {}, "once": 4}',
        b'{"marks": {"i": {"p": "x"}}, "entries": {}, "once": {"rows": {}, "marks": {}, "entries": {}}}',
        b'{"marks": {}, "entries": {"i": "x"}, "once": {"rows": {}, "marks": {}, "entries": {}}}',
        b'{"marks": {}, "entries": {}, "once": {"rows": {"f": "x"}, "marks": {}, "entries": {}}}',
        b'{"marks": {}, "entries": {}, "once": {"rows": {"f": [0, "x"]}, "marks": {}, "entries": {}}}',
        b"\xff",
    ],
)
def test_a_damaged_file_is_none(tmp_path: Path, content: bytes) -> None:
    assert StoredRecords(tmp_path).take_over() == Stored({}, {})
    (tmp_path / STORED).write_bytes(content)
    assert StoredRecords(tmp_path).take_over() == Stored({}, {})
    StoredRecords(tmp_path).write(Stored({"i": {"p": 1}}, {"i": 2}))
    assert StoredRecords(tmp_path).take_over() == Stored({"i": {"p": 1}}, {"i": 2})


class EngineServerLink:
    """The connection to an engine server, whose ledger gives what a test puts in."""

    connected = True

    def __init__(self) -> None:
        self.entries: tuple[LedgerEntry, ...] = ()
        self.asked_from: list[int] = []

    async def ask(self, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        if method != "take":
            return None
        self.asked_from.append(arguments[0])
        return Taken((), (), LedgerBatch(arguments[0], self.entries), {}, {}, (), {})

    def post(self, *_: object) -> None:
        pass


class Played:
    """Gateways under a controller that may end between any two lines, in a state folder."""

    def __init__(self, folder: Path, run: Path) -> None:
        run.mkdir()
        self.link, self.requests = EngineServerLink(), RequestRecorder(run / "requests.rows")
        self.group: Any = object.__new__(GatewayGroup)
        group = self.group
        group.site, group._writer = SimpleNamespace(name="toys", serving=serving(), language_models=()), _folder(run)
        group._link, group._found = self.link, SimpleNamespace(instance="i", marks={}, zero_s=0.0, first=0)
        group._stored_records, group._names, group._session = StoredRecords(folder), [], None
        group._unmetered, group._closing, group._unknown = UnmeteredRequests(_folder(run)), False, 0
        group.local = SimpleNamespace(joined=lambda _: True)
        group.metrics = SimpleNamespace(decision=None, request=lambda _: None)
        group.engine(load(toy_site(run)), (0,))

    async def open(self) -> None:
        history = SimpleNamespace(requests=self.requests)
        await self.group.open_to(
            SimpleNamespace(
                history=history,
                services={},
                started_s=0.0,
                telemetry=self.requests.add,
                watch=lambda _: None,
                on_decision=lambda _: None,
                charges=lambda _: ChargeTable(),
            )
        )

    async def take(self, *ends_s: float) -> None:
        """Take requests that ended at these times, numbered on."""
        engine = self.group._controlled
        self.link.entries = tuple(
            LedgerEntry("g", RECORD._replace(end_s=end_s - unix_s() + time.monotonic()), "p", engine.next + 1 + place)
            for place, end_s in enumerate(ends_s)
        )
        await engine.refresh()
        self.link.entries = ()


async def test_rows_on_disk_are_stored_though_the_controller_is_killed_at_once(tmp_path: Path) -> None:
    """Between its rows and its word that they are stored there is a moment: 37 requests were counted twice."""
    first = Played(tmp_path, tmp_path / "first")
    await first.open()
    await first.take(1.0, 1.0)
    assert StoredRecords(tmp_path).take_over() == Stored({"i": {}}, {"i": 0})
    first.requests.flush()
    assert StoredRecords(tmp_path).take_over() == Stored({"i": {"p": 2}}, {"i": 2})
    await first.take(-1.0)  # one that a gateway had kept from before the session
    assert first.group._unmetered.count == 1
    assert StoredRecords(tmp_path).take_over().entries == {"i": 2}
    first.group._unmetered.flush()
    assert StoredRecords(tmp_path).take_over() == Stored({"i": {"p": 3}}, {"i": 3})
    assert first.group._controlled.marks == {"i": {}}, "gateways forget what is stored, not what will be"

    second = Played(tmp_path, tmp_path / "second")
    await second.open()
    assert second.link.asked_from == [3], "what has no row in the first file is not taken again either"


async def test_a_controller_killed_between_two_files_leaves_its_requests_to_the_next(tmp_path: Path) -> None:
    """Its own requests, and those from before it: the rows of the file that was written first counted twice."""
    first = Played(tmp_path, tmp_path / "first")
    await first.open()
    await first.take(1.0, -1.0)
    first.requests.flush()
    assert first.group._unmetered.count == 1 and first.requests.path.stat().st_size == ROW.itemsize

    second = Played(tmp_path, tmp_path / "second")
    await second.open()
    assert second.link.asked_from == [0] and first.requests.path.stat().st_size == 0


async def test_what_was_taken_is_on_disk_before_another_engine_server_is_started(tmp_path, monkeypatch) -> None:
    """Gateways forget it then. A controller that was killed before its next tick took it along."""
    recorder, on_disk = RequestRecorder(tmp_path / "requests.rows"), []
    recorder.add(RECORD)

    async def revived(_: GatewayGroup) -> bool:
        on_disk.append((tmp_path / "requests.rows").stat().st_size // ROW.itemsize)
        return True

    monkeypatch.setattr(GatewayGroup, "_revived", revived)
    group: Any = object.__new__(GatewayGroup)
    group._session = SimpleNamespace(warn=lambda _: None, history=SimpleNamespace(requests=recorder))
    group._controlled, group._found = None, SimpleNamespace(gateways=())
    group._former, group._former_unknown, group._unknown = Counter(), 0, 0
    group._unmetered, group.restarts, group._reviving = UnmeteredRequests(_folder(tmp_path)), 0, None
    await group._revive()
    assert on_disk == [1] and group.restarts == 1


def test_a_changed_site_file_starts_other_gateways(tmp_path: Path) -> None:
    """What a gateway was started with is its identity: a token, a certificate or an address makes another one."""
    starts = set()
    for fields in ({}, {"open_monitoring": True}, {"drain": "3 s"}, {"token": "a-long-token"}):
        made = ServingConfig.model_validate({"listen": "127.0.0.1:0", "gateways": {"count": 2}, **fields})
        local = LocalGateways(tmp_path, made)
        local.take_over([])
        starts |= {local._start_of(one) for one in local.gateways}
        assert local.reserved is not None
        local.reserved.close()
    assert len(starts) == 8
    token = tmp_path / "token"
    assert token.read_text() == "a-long-token" and token.stat().st_mode & 0o777 == 0o600
