"""Several gateways in the site file: what fits, what does not, and how their processes are found again."""

import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from joulery.adapters.engines.shared.control import Taken, Welcome
from joulery.adapters.engines.shared.controlled import ControlledEngine
from joulery.app.serving.gateways.handle import GatewayGroup, first_unstored
from joulery.app.serving.gateways.processes import LocalGateway, LocalGateways, gateways_folder
from joulery.app.serving.gateways.stored_marks import MARKS, StoredMarks
from joulery.app.serving.gateways.unmetered import UnmeteredRequests
from joulery.config import load
from joulery.config.serving import ServingConfig
from joulery.domain.errors import ConfigError
from joulery.domain.serving.charging import ChargeTable
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.ledger import LedgerBatch
from joulery.runtime.session.requests import ROW, RequestRecorder
from tests.runtime.site_files import toy_site


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
        ({"join_tls": {"certificate": Path(__file__), "key": Path(__file__)}}, "encrypts what nothing joins"),
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


@pytest.mark.parametrize(("rows", "first"), [(0, 7), (40, 7), (48, 7), (4 * 48 + 5, 9)])
def test_rows_that_a_killed_controller_wrote_last_are_not_taken_again(tmp_path: Path, rows: int, first: int) -> None:
    """Entry 5 is the first in its file; it reported entries below 7 as stored, and was killed."""
    (tmp_path / "requests.rows").write_bytes(bytes(rows))
    found = Welcome(1, "toys", None, 0.0, 7, (str(tmp_path), 5), 0.0, (), "i", {})
    assert first_unstored(found) == first
    assert first_unstored(replace(found, stored=("", 0))) == 7


def test_the_next_controller_knows_which_records_are_stored(tmp_path: Path) -> None:
    marks: dict[str, dict[str, int]] = {}
    kept = StoredMarks(tmp_path)
    for number in range(20):
        marks[f"server {number}"] = {}
        kept.write(marks)
        marks[f"server {number}"]["gateway"] = number
        kept.write(marks)
        assert StoredMarks(tmp_path).read()[f"server {number}"] == {"gateway": number}
    assert list(StoredMarks(tmp_path).read()) == [f"server {number}" for number in range(4, 20)]
    assert [file.name for file in tmp_path.iterdir()] == [MARKS]


@pytest.mark.parametrize(("written", "mark"), [(0, 1), (2, 1), (3, 5), (4, 5)])
def test_marks_hold_once_the_rows_are_there(tmp_path: Path, written: int, mark: int) -> None:
    """A controller that is killed between its rows and its marks is not counted again, nor is one that wrote none."""
    rows, kept = tmp_path / "requests.rows", StoredMarks(tmp_path)
    kept.write({"i": {"p": 1}, "j": {"q": 2}})
    kept.expect({rows: 3, tmp_path / "never made": 0}, {"i": {"p": 5}})
    if written:
        rows.write_bytes(bytes(written * ROW.itemsize))
    second = StoredMarks(tmp_path)
    assert second.read() == {"i": {"p": mark}, "j": {"q": 2}}
    rows.unlink(missing_ok=True)
    second.expect({rows: 1}, {"i": {"p": 9}})
    assert StoredMarks(tmp_path).read() == {"i": {"p": mark}, "j": {"q": 2}}, "what was found is kept"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"marks": 3, "once": 4}',
        b'{"marks": {"i": {"p": "x"}}, "once": {"rows": {}, "marks": {}}}',
        b'{"marks": {}, "once": {"rows": {"f": "x"}, "marks": {}}}',
        b"\xff",
    ],
)
def test_damaged_marks_are_no_marks(tmp_path: Path, content: bytes) -> None:
    assert StoredMarks(tmp_path).read() == {}
    (tmp_path / MARKS).write_bytes(content)
    assert StoredMarks(tmp_path).read() == {}
    StoredMarks(tmp_path).write({"i": {"p": 1}})
    assert StoredMarks(tmp_path).read() == {"i": {"p": 1}}


class EngineServerLink:
    """The connection to an engine server that has nothing to say."""

    connected = True

    async def ask(self, method: str, *_: object, within_s: float | None = None) -> Any:
        return Taken((), (), LedgerBatch(0), {}, {}, (), {}) if method == "take" else None

    def post(self, *_: object) -> None:
        pass


async def test_rows_on_disk_are_stored_though_the_controller_is_killed_at_once(tmp_path: Path) -> None:
    """Between its rows and its word that they are stored there is a moment: 37 requests were counted twice."""
    record = RequestRecord("sums", "small", "r", 1.0, 1.0, 2.0, Outcome.OK, 0.1, 0.1, 1, None)
    group: Any = object.__new__(GatewayGroup)
    group.site, group._writer = SimpleNamespace(name="toys", serving=serving(), language_models=()), _folder(tmp_path)
    group._link, group._found = EngineServerLink(), SimpleNamespace(instance="i", marks={}, zero_s=0)
    group._controlled, group._stored_marks, group._names = ControlledEngine(None), StoredMarks(tmp_path), []
    group._unmetered, group._session = UnmeteredRequests(_folder(tmp_path)), None
    group._closing, group._unknown = False, 0
    group.local, group.metrics = SimpleNamespace(joined=lambda _: True), SimpleNamespace(decision=None)
    recorder = RequestRecorder(tmp_path / "requests.rows")
    await group.open_to(
        SimpleNamespace(
            history=SimpleNamespace(requests=recorder),
            services={},
            watch=lambda _: None,
            on_decision=lambda _: None,
            charges=lambda _: ChargeTable(),
        )
    )
    group._controlled._taken = {"gateway": 2}
    recorder.add(record)
    assert StoredMarks(tmp_path).read() == {"i": {}}
    recorder.flush()
    assert StoredMarks(tmp_path).read() == {"i": {"gateway": 2}}
    group._controlled._taken = {"gateway": 3}
    group._unmetered.add(record)
    assert StoredMarks(tmp_path).read() == {"i": {"gateway": 2}}
    group._unmetered.flush()
    assert StoredMarks(tmp_path).read() == {"i": {"gateway": 3}}
    assert group._controlled.marks == {"i": {}}, "gateways forget what is stored, not what will be"


async def test_what_was_taken_is_on_disk_before_another_engine_server_is_started(tmp_path, monkeypatch) -> None:
    """Gateways forget it then. A controller that was killed before its next tick took it along."""
    recorder, on_disk = RequestRecorder(tmp_path / "requests.rows"), []
    recorder.add(RequestRecord("sums", "small", "r", 1.0, 1.0, 2.0, Outcome.OK, 0.1, 0.1, 1, None))

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
