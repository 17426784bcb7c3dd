"""Several gateways in front of GPUs that are not there: leased by the engine server, which outlives its controller."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from joulery.store.leases import LeaseBook
from tests.e2e.test_up import Up
from tests.e2e.test_up_gateways import Clients, _cwd, address, ended, health
from tests.e2e.test_up_gpus import on_gpu
from tests.fakes.mps import daemon, gpu_machine
from tests.fakes.nvml import NvmlFake, gpu
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("up")]
NAME = "NVIDIA A100-SXM4-40GB"
WORK_J = 400.0
PARTS = 20


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlFake]:
    boards = (gpu(NAME, idle_w=50.0), gpu(NAME, 1, idle_w=50.0))
    with gpu_machine(tmp_path, monkeypatch, *boards) as nvml:
        yield nvml


def gateways_on_gpu(folder: Path, device: str) -> Path:
    path = on_gpu(folder, device)
    text = path.read_text().replace("drain: 2 s}", "drain: 2 s, gateways: {count: 2, state: state-gw, outlive: 60 s}}")
    path.write_text(text.replace("load: {", "# load: {").replace("    slo:", "    rate: 20 /s\n    slo:"))
    return path


def holders() -> set[int]:
    """Processes that hold leases."""
    book = LeaseBook()
    found = (book.read(name) for name in book.names())
    return {lease.owner.pid for lease in found if lease is not None}


def engine_pid(state: Path) -> int:
    return int((state / "engine.pid").read_text())


def worked_j(nvml: NvmlFake) -> float:
    """What ran on the first board so far, above its idle power."""
    return float(nvml.boards[0]["energy_mj"]) / 1e3


def test_shares_of_a_gpu_outlive_the_controller_and_are_leased_anew_with_the_engine_server(
    tmp_path: Path, nvml: NvmlFake
) -> None:
    site, state = gateways_on_gpu(tmp_path, "{mode: mps, shares: [[60 %, 40 %]]}"), tmp_path / "state-gw"
    with ended(state):
        with Up(site, tmp_path, "--stay") as first:
            url = address(first)
            assert holders() == {engine_pid(state)}, "the controller has given back what it profiled on"
            with Clients(url) as clients:
                clients.more()
                served_by = daemon(tmp_path)
                os.kill(first.process.pid, signal.SIGKILL)
                wait_until(lambda: health(url).get("controller") == "lost", "a gateway that says so")
                clients.more()
                assert served_by is not None and daemon(tmp_path) == served_by
                folder = tmp_path / "second"
                folder.mkdir()
                before_j = worked_j(nvml)
                options = ("--stay", "--json-out", str(tmp_path / "report.json"))
                with Up(site, folder, *options, cache=first.folder / "cache") as second:
                    second.until("/dashboard")
                    wait_until(lambda: health(url)["controller"] == "connected", "a gateway that joined again")
                    begun_j = worked_j(nvml)
                    clients.more()
                    assert daemon(tmp_path) == served_by and holders() == {engine_pid(state)}
                    for _ in range(PARTS):  # a busy machine may have no request under way in an interval
                        nvml.worked(0, WORK_J / PARTS)
                        clients.more(1)
                    os.kill(engine_pid(state), signal.SIGKILL)
                    wait_until(lambda: clients.outcomes["503"] > 0, "a refused request")
                    clients.more()
                    assert holders() == {engine_pid(state)}, "the next engine server has them"
                    clients.__exit__()
                    second.process.send_signal(signal.SIGINT)
                    status, _, errors = second.end()
        assert status == 0, errors
        wait_until(lambda: not [one for one in psutil.process_iter() if _cwd(one) == str(state)], "the end of all")
    assert set(clients.outcomes) <= {"200", "503"}
    assert daemon(tmp_path) is None and holders() == set(), "the GPU is given back"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["engine_server_restarts"] == 1
    # Requests do some of the work; how much before the second run began its account is not known to a few requests.
    most_j, least_j = worked_j(nvml) - before_j, worked_j(nvml) - begun_j
    uncertain_j = 0.05 * report["energy_j"]
    assert least_j - uncertain_j < report["requests_j"] < most_j + uncertain_j, "what is above idle"
    assert least_j > WORK_J and "kept" in report["profile"], "it is measured while nothing else runs there"
    assert report["failed"] <= clients.outcomes["503"]


def test_two_services_on_slices_of_two_gpus(tmp_path: Path, nvml: NvmlFake) -> None:
    cuts = "mode: mig, mig_partitions: [[3g.20gb, 4g.20gb]]"
    site, state = gateways_on_gpu(tmp_path, f"{{gpu: 0, {cuts}}}, {{gpu: 1, {cuts}}}"), tmp_path / "state-gw"
    head, _, rest = site.read_text().partition("  - name: sums")
    service, ends, tail = rest.partition("serving:")
    twice = "".join(
        f"  - name: {name}{service}".replace("owner: tests", f"owner: tests\n    gpus: [{index}]")
        for index, name in enumerate(("sums", "more"))
    )
    site.write_text(head + twice + ends + tail)
    with ended(state):
        with Up(site, tmp_path, "--stay", "--json-out", str(tmp_path / "report.json")) as up:
            url = address(up)
            assert all(nvml.layout(index)[0] for index in range(2)), "both are partitioned"
            with Clients(url) as clients, Clients(url, "more") as others:
                clients.more(20)
                others.more(20)
            up.process.send_signal(signal.SIGINT)
            status, _, errors = up.end()
        assert status == 0, errors
    assert set(clients.outcomes) == set(others.outcomes) == {"200"}
    assert [nvml.layout(index) for index in range(2)] == [(False, ()), (False, ())], "given back"
    report = json.loads((tmp_path / "report.json").read_text())
    assert {each["service"] for each in report["services"] if each["requests"] >= 20} == {"sums", "more"}
