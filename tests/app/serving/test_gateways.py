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

from joulery.adapters.engines.shared.control import Welcome
from joulery.app.serving.gateways.handle import GatewayGroup, first_unstored
from joulery.app.serving.gateways.processes import LocalGateway, LocalGateways, gateways_folder
from joulery.app.serving.gateways.stored_marks import MARKS, StoredMarks
from joulery.app.serving.gateways.unmetered import UnmeteredRequests
from joulery.config import load
from joulery.config.serving import ServingConfig
from joulery.domain.errors import ConfigError
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.runtime.session.requests import ROW, RequestRecorder
from tests.runtime.site_files import toy_site


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


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"i": 3}', b'{"i": {"p": "x"}}', b"\xff"])
def test_damaged_marks_are_no_marks(tmp_path: Path, content: bytes) -> None:
    assert StoredMarks(tmp_path).read() == {}
    (tmp_path / MARKS).write_bytes(content)
    assert StoredMarks(tmp_path).read() == {}
    StoredMarks(tmp_path).write({"i": {"p": 1}})
    assert StoredMarks(tmp_path).read() == {"i": {"p": 1}}


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
    group._unmetered, group.restarts, group._reviving = UnmeteredRequests(SimpleNamespace(path=tmp_path)), 0, None
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
