"""The limits of a machine's jobs: invented boards behind the real calls, real leases, invented time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from joulery.adapters.devices.power.nvidia_activity import NvidiaActivity
from joulery.adapters.devices.power.nvidia_power import NvidiaPower
from joulery.app.limits_config import LimitsConfig
from joulery.app.power_limits import job_limits
from joulery.app.wiring.limited_devices import limited_cpus
from joulery.domain.cluster import Placement
from joulery.domain.gpu.device import DeviceSpec
from joulery.policies.clocks.power_limit import PowerLimitTuner
from joulery.runtime.leasing.job_limits import JobLimits
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.leasing.limited_device import LimitedDevice
from joulery.store.jobs import JobLimitBook, NodeNotes
from joulery.store.leases import LeaseBook
from tests.fakes.nvml import NvmlFake, as_administrator, gpu
from tests.fakes.powercap import limits as powercap_limits
from tests.fakes.powercap import powercap_tree

A100 = "NVIDIA A100-SXM4-40GB"
TUNER = PowerLimitTuner(0.8, 1.1, period_s=2.0)


class NoWatchdog:
    """Stands for the watchdog process, which is tested with the leases."""

    pid, alive = 0, True

    def dismiss(self, *, wait: bool) -> None:
        return


class Node:
    """A node with two boards whose jobs draw up to their limit; time is moved by hand."""

    def __init__(self, folder: Path, shared: Path | None = None, **board: Any) -> None:
        self.shared = shared
        running = {"busy": 100, "demand_mw": 390_000, **board}
        self.nvml = NvmlFake(gpu(A100, **running), gpu(A100, 1, **running))
        self.now_s = 1000.0
        self.placed: tuple[Placement, ...] = ()
        self.reported: dict[int, tuple[float, float]] = {}
        self.said: list[Mapping[str, Any]] = []
        self.energy_j = [0.0, 0.0]
        self.holder = LeaseHolder(LeaseBook(folder / "leases"), 1e9, watch=lambda book, owner: NoWatchdog())  # type: ignore[arg-type,return-value]
        self.book = JobLimitBook(folder / "limits")
        self.limits = self.opened()

    def opened(self) -> JobLimits:
        gpus = {
            number: LimitedDevice(
                number,
                f"gpu:{number}",
                NvidiaPower(number, self.nvml),
                DeviceSpec("nvidia-power", {"gpu": number}),
                NvidiaActivity(number, self.nvml),
                A100,
                self.nvml.boards[number]["uuid"],
                400.0,
                100.0,
            )
            for number in range(2)
        }
        progress = lambda job: self.reported.get(job, (math.nan, math.nan))  # noqa: E731
        return JobLimits(
            TUNER,
            gpus,
            lambda: self.placed,
            progress,
            self.holder,
            self.book,
            self.said.append,
            notes=NodeNotes(self.shared) if self.shared else None,
        )

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Let the node run: boards count the energy that they draw."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.limits.step(self.now_s)
            self.now_s += TUNER.period_s
            for number, board in enumerate(self.nvml.boards):
                watts = min(board["demand_mw"], board["limit_mw"]) / 1e3
                board["energy_mj"] += 1e3 * watts * TUNER.period_s
                board.pop("drawn_s", None)
                self.energy_j[number] += watts * TUNER.period_s
            each()

    @property
    def limits_w(self) -> list[float]:
        return [board["limit_mw"] / 1e3 for board in self.nvml.boards]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("JOULERY_UNGUARDED", "1")
    as_administrator(monkeypatch)
    made = Node(tmp_path)
    yield made
    made.limits.close()


def on(job: int, *gpus: int, kind: str = "ann/train", nodes: int = 1) -> Placement:
    return Placement(job, (100 + job,), len(gpus), gpus, nodes, kind)


def test_a_job_without_reports_is_limited_by_its_busy_cycles_and_its_gpus_are_given_back(node: Node) -> None:
    """The fake's clock falls with the root of the power: at 75 % of 400 W it runs 1.14 times slower, at 83 % 1.08."""
    node.placed = (on(7, 0, 1),)
    node.run(1500.0)
    assert node.limits_w == [pytest.approx(333.0, abs=1), pytest.approx(333.0, abs=1)]
    assert len(node.holder.held) == 2
    last = [entry for entry in node.said if entry["kind"] == "limit"][-1]
    assert (last["job"], last["work"], last["ratio"]) == (7, "busy cycles", 0.833)
    node.placed = ()
    node.run(2.0)
    assert node.limits_w == [400.0, 400.0]
    assert node.holder.held == ()


def test_a_job_that_reports_progress_is_judged_by_it(node: Node) -> None:
    """It does not slow down with the clock, and so takes the lowest limit."""
    node.placed = (on(7, 0),)

    def report() -> None:
        node.reported[7] = (node.now_s / 1e5, node.now_s - 3600.0)  # by a disk whose clock is an hour behind

    node.run(1500.0, report)
    assert node.limits_w == [200.0, 400.0]
    assert [entry for entry in node.said if entry["kind"] == "limit"][-1]["work"] == "progress"


def test_a_job_that_reports_only_after_loading_its_data_is_judged_anew_by_its_progress(node: Node) -> None:
    """Its clock falls with the limit and its progress does not: by busy cycles it would stay at 83 %."""
    node.placed = (on(7, 0),)
    node.run(1500.0)
    assert node.limits_w[0] == pytest.approx(333.0, abs=1)
    by_cycles = node.book.read(f"ann/train on 1 × {A100} at 400 W by busy cycles")
    begun_s, limits_w = node.now_s, []

    def report() -> None:
        node.reported[7] = ((node.now_s - begun_s) / 1e5, node.now_s)
        limits_w.append(node.limits_w[0])

    node.run(2000.0, report)
    assert 400.0 in limits_w, "full power is measured by progress, too"
    assert node.limits_w[0] == 200.0
    by_progress = node.book.read(f"ann/train on 1 × {A100} at 400 W")
    assert by_cycles and by_progress and by_cycles != by_progress
    node.said.clear()
    node.placed = (on(8, 0),)
    node.run(1500.0, lambda: node.reported.update({8: (node.now_s / 1e5, node.now_s)}))
    assert {entry["ratio"] for entry in node.said if entry["kind"] == "limit" and entry["job"] == 8} == {0.5}


def test_a_job_whose_reports_stop_returns_to_full_power(node: Node) -> None:
    node.placed = (on(7, 0),)
    node.run(1500.0, lambda: node.reported.update({7: (node.now_s / 1e5, node.now_s)}))
    assert node.limits_w[0] == 200.0
    node.run(200.0)
    assert node.limits_w[0] == 400.0


def test_the_next_job_of_a_kind_starts_from_what_is_known(node: Node) -> None:
    node.placed = (on(7, 0),)
    node.run(1500.0)
    tried = {entry["ratio"] for entry in node.said if entry["kind"] == "limit"}
    node.said.clear()
    node.placed = (on(8, 0),)
    node.run(1500.0)
    again = [entry["ratio"] for entry in node.said if entry["kind"] == "limit" and entry["job"] == 8]
    assert len(tried) > 2
    assert set(again) == {0.833}
    node.placed = (on(9, 0, 1),)  # on another number of GPUs it is another kind
    node.said.clear()
    node.run(1500.0)
    assert len({entry["ratio"] for entry in node.said if entry["kind"] == "limit" and entry["job"] == 9}) > 1


@pytest.mark.parametrize(
    ("placed", "why"),
    [
        ((on(7, 0, nodes=2),), "2 nodes, and their agents share no folder"),
        ((on(7, 0), on(8, 0)), "shares"),
        ((on(7),), "no GPU"),
        ((on(7, 5),), "may not be set"),
    ],
)
def test_jobs_whose_limit_is_not_theirs_alone_keep_full_power(
    node: Node, placed: tuple[Placement, ...], why: str
) -> None:
    node.placed = placed
    node.run(1000.0)
    assert node.limits_w == [400.0, 400.0]
    assert [why in entry["text"] for entry in node.said] == [True] * len(placed)


def test_a_second_job_on_a_limited_gpu_gives_it_back_at_once(node: Node) -> None:
    node.placed = (on(7, 0),)
    node.run(1500.0)
    assert node.limits_w[0] < 400.0
    node.placed = (on(7, 0), on(8, 0))
    node.run(2.0)
    assert node.limits_w[0] == 400.0


def test_a_job_on_two_nodes_has_one_limit_on_all_its_boards_and_all_are_given_back(node: Node, tmp_path: Path) -> None:
    first, second = (Node(tmp_path / name, tmp_path / "shared") for name in ("g1", "g2"))
    second.nvml.boards[0]["demand_mw"] = 250_000  # below most limits: the first node is the slower one

    def run(seconds: float) -> None:
        for _ in range(round(seconds / TUNER.period_s)):
            first.run(TUNER.period_s)
            second.run(TUNER.period_s)

    def together(*gpus: int) -> list[tuple[Placement, ...]]:
        return [(replace(on(7, *gpus, nodes=2), hosts=("g1", "g2"), host=host),) for host in ("g1", "g2")]

    first.placed, _ = together(0, 1)
    run(200.0)
    assert ["agent of node g2 does not answer" in entry["text"] for entry in first.said] == [True]
    first.placed, second.placed = together(0, 1)
    run(3000.0)
    assert first.limits_w == second.limits_w == [pytest.approx(333.0, abs=1)] * 2
    assert len(list((tmp_path / "shared").iterdir())) == 2
    assert first.book.read("ann/train on 2 × " + A100 + " at 400 W on each of 2 nodes by busy cycles")

    second.placed = (*second.placed, on(8, 1))
    second.run(2.0)
    assert second.limits_w == [400.0, 400.0], "another job shares a board of the second node"
    assert first.limits_w[0] < 400.0
    run(4.0)
    assert first.limits_w == [400.0, 400.0]
    assert "g2" in [entry["text"] for entry in first.said if entry["kind"] == "limit"][-1]

    second.placed = second.placed[:1]
    run(3000.0)
    assert first.limits_w[0] == second.limits_w[0] < 400.0
    first.placed, second.placed = together(0)  # it is resized
    run(2.0)
    assert first.limits_w == second.limits_w == [400.0, 400.0]
    first.placed = second.placed = ()
    run(2.0)
    assert first.holder.held == second.holder.held == ()
    assert not list((tmp_path / "shared").iterdir())


def test_a_lease_that_another_process_reverts_is_set_anew(node: Node) -> None:
    node.placed = (on(7, 0),)
    node.run(1500.0)
    lease = node.holder.held[0].name
    node.nvml.boards[0]["limit_mw"] = 400_000
    (node.holder._book.folder / f"{lease}.json").unlink()  # as the watchdog does with an expired one
    node.limits.renew()
    assert node.holder.held == ()
    node.run(400.0)
    assert node.limits_w[0] < 400.0
    assert len(node.holder.held) == 1


def test_a_gpu_that_refuses_is_said_once_and_the_others_are_given_back(node: Node) -> None:
    node.placed = (on(7, 0, 1),)
    node.nvml.boards[1]["limits_mw"] = [395_000, 400_000]  # the driver takes less than it said
    node.run(1500.0)
    assert node.limits_w == [400.0, 400.0]
    assert node.holder.held == ()
    assert len([entry for entry in node.said if entry["kind"] == "note"]) == 1


def test_a_board_that_is_lost_ends_its_limit_and_nothing_else(node: Node) -> None:
    node.placed = (on(7, 0), on(8, 1))
    node.run(1500.0)
    assert max(node.limits_w) < 400.0
    node.nvml.boards[0]["lost"] = True
    node.run(300.0)
    assert node.limits_w[1] < 400.0
    assert any(entry["kind"] == "note" for entry in node.said)
    node.nvml.boards[0]["lost"] = False


def test_the_cpus_are_limited_for_a_job_that_is_alone_and_reports_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters wrap around meanwhile, and go on."""
    tree = powercap_tree(tmp_path / "powercap", tdp_w=100)
    monkeypatch.setenv("JOULERY_POWERCAP", str(tree))
    monkeypatch.setenv("JOULERY_UNGUARDED", "1")
    book = LeaseBook(tmp_path / "leases")
    holder = LeaseHolder(book, 1e9, watch=lambda book, owner: NoWatchdog())  # type: ignore[arg-type,return-value]
    device = limited_cpus(holder, book)
    assert (device.full_w, device.low_w, device.parts) == (100.0, 25.0, 2)
    placed, said, now_s = (Placement(7, (107,), 1),), [], 1000.0
    tuner = PowerLimitTuner(1.0, 1.1, period_s=2.0)
    limits = JobLimits(
        tuner,
        {0: device},
        lambda: placed,
        lambda job: (now_s / 1e5, now_s),
        holder,
        None,
        said.append,
        lambda one: (0,),
    )

    def run(seconds: float) -> None:
        nonlocal now_s
        end_s, wrap_uj = now_s + seconds, 262_143_328_850
        while now_s < end_s:
            limits.step(now_s)
            now_s += 2.0
            for zone in (tree / "intel-rapl:0", tree / "intel-rapl:1"):
                limit_uw = int((zone / "constraint_0_power_limit_uw").read_text())
                grown = int((zone / "energy_uj").read_text()) + 2 * min(limit_uw, 90_000_000)
                (zone / "energy_uj").write_text(f"{grown % wrap_uj}\n")

    (tree / "intel-rapl:0/energy_uj").write_text("262100000000\n")
    run(1500.0)
    assert set(powercap_limits(tree).values()) >= {"50000000"}
    assert said[-1]["limits_w"] == {"cpu": 50.0}
    assert said[-1]["work"] == "progress"
    placed = (*placed, Placement(8, (108,), 1))
    run(2.0)
    assert powercap_limits(tree)["intel-rapl:1/constraint_0_power_limit_uw"] == "100000000"
    assert holder.held == ()


def test_a_job_on_cpus_that_reports_nothing_keeps_full_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = powercap_tree(tmp_path / "powercap")
    monkeypatch.setenv("JOULERY_POWERCAP", str(tree))
    monkeypatch.setenv("JOULERY_UNGUARDED", "1")
    book, said = LeaseBook(tmp_path / "leases"), []
    holder = LeaseHolder(book, 1e9, watch=lambda book, owner: NoWatchdog())  # type: ignore[arg-type,return-value]
    before = powercap_limits(tree)
    silent = lambda job: (math.nan, math.nan)  # noqa: E731
    placed = (Placement(7, (107,), 1),)
    limits = JobLimits(
        TUNER, {0: limited_cpus(holder, book)}, lambda: placed, silent, holder, None, said.append, lambda one: (0,)
    )
    for now_s in range(0, 1000, 2):
        limits.step(float(now_s))
    assert powercap_limits(tree) == before
    assert ["too rarely" in entry["text"] for entry in said] == [True]


CONFIG = LimitsConfig(0.5, 1.1, 0.5, 60.0, 5.0, 2.0, 3600.0, 20.0)


def followed(nvml: NvmlFake, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Mapping[str, Any]]:
    """What is said where the limits of a machine are opened."""
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    monkeypatch.setenv("JOULERY_STATE", str(folder))
    said: list[Mapping[str, Any]] = []
    with job_limits(CONFIG, tuple, lambda job: folder / str(job), said.append, threading.Event()):
        pass
    return said


def test_without_rights_or_gpus_one_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULERY_UNGUARDED", "1")
    as_administrator(monkeypatch, may=False)
    (note,) = followed(NvmlFake(gpu(A100), root=False), monkeypatch, tmp_path)
    assert "sudo -E joulery" in note["text"]
    as_administrator(monkeypatch)
    assert len(followed(NvmlFake(), monkeypatch, tmp_path)) == 1
    assert len(followed(NvmlFake(gpu(A100, limits_mw=[])), monkeypatch, tmp_path)) == 1
    assert followed(NvmlFake(gpu(A100, limits_mw=[]), gpu(A100, 1)), monkeypatch, tmp_path) == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"points": [[2, 1, 1]]}', '{"points": [[0.5, NaN, 1]]}', "\x00"])
def test_a_damaged_file_of_a_kind_is_no_knowledge(tmp_path: Path, content: str) -> None:
    book = JobLimitBook(tmp_path / "limits")
    assert book.read("ann/train") == ()
    assert book.write("ann/train", [(0.75, 1.02, 0.8)])
    assert book.read("ann/train") == ((0.75, 1.02, 0.8),)
    next((tmp_path / "limits").glob("*.json")).write_text(content)
    assert book.read("ann/train") == ()
