"""Leases and containers: processes of other PID namespaces, and what outlives a container that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from joulery.adapters.devices.cpufreq import CpufreqClock
from joulery.app.wiring.leases import guard_leases, lease_statuses, reset_everything, start_watchdog
from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.device import ClockSetting, DeviceSpec, Lease
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.leasing.watchdog import guard
from joulery.store.leases import Isolation, LeaseBook, LeaseState, lease_state, owner_of, state_folder
from tests.fakes.cpufreq import cpufreq_tree, settings
from tests.runtime.leasing.test_leases import HOLDER, no_watchdog
from tests.waiting import wait_until

CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A process with a PID namespace of its own, which ends with all its processes as a container does."""
MACHINE = Isolation(0xEFFFFFFC, 0xEFFFFFFB)
"""The namespaces of the machine itself."""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tree = cpufreq_tree(tmp_path / "cpu")
    monkeypatch.setenv("JOULERY_CPUFREQ", str(tree))
    return tree


@pytest.fixture
def book(tmp_path: Path) -> LeaseBook:
    return LeaseBook(tmp_path / "leases", MACHINE)


@pytest.fixture
def contain(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a holder in a container of its own; skips where namespaces need root."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("a PID namespace needs root")
    started: list[subprocess.Popen[bytes]] = []

    def start(tree: Path, lasts_s: float = 60.0, **environ: str) -> subprocess.Popen[bytes]:
        options = f'{{"root": "{tree}"}}'
        arguments = (str(tmp_path / "leases"), "cpufreq", options, str(lasts_s), "2000.0")
        line = [*CONTAINER, sys.executable, "-c", HOLDER, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(line, env={**os.environ, **environ}, **pipes))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def said(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def foreign(book: LeaseBook, tree: Path, lasts_s: float) -> Lease:
    """A lease of a process in another container, renewed now."""
    me = owner_of(os.getpid(), "joulery up")
    assert me is not None
    owner = replace(me, pid=7, start_ticks=5, pid_namespace=4026532000)
    lease = Lease(
        "cpu", DeviceSpec("cpufreq", {"root": str(tree)}), {}, "at most 2000 MHz", "why", owner, time.time(), lasts_s
    )
    book.write(lease)
    return lease


def test_a_container_without_a_guard_outside_sets_nothing(
    contain: Callable[..., subprocess.Popen[bytes]], tree: Path, book: LeaseBook
) -> None:
    before = settings(tree)
    _, errors = contain(tree).communicate()
    assert b"takes the watchdog" in errors
    assert settings(tree) == before
    assert book.names() == ()


def test_when_a_container_ends_the_guard_outside_reverts_its_clock(
    contain: Callable[..., subprocess.Popen[bytes]], tree: Path, book: LeaseBook
) -> None:
    before = settings(tree)
    environ = {**os.environ, "JOULERY_STATE": str(book.folder.parent)}
    line = [sys.executable, "-m", "joulery", "doctor", "--guard"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, env=environ) as guarding:
        try:
            assert str(book.folder).encode() in said(guarding)
            wait_until(lambda: (book.folder / ".guard.lock").exists())
            container = contain(tree, lasts_s=2.0)
            assert said(container).startswith(b"set ")
            assert settings(tree)["cpufreq/policy0/scaling_max_freq"] == "2000000"
            assert [one.state for one in lease_statuses(book)] == [LeaseState.HELD]
            container.kill()  # with its watchdog: it is the first process of its namespace
            container.wait()
            wait_until(lambda: book.names() == ())
            assert settings(tree) == before
        finally:
            guarding.terminate()


def test_a_process_of_another_container_is_not_taken_for_dead(
    contain: Callable[..., subprocess.Popen[bytes]], tree: Path, book: LeaseBook
) -> None:
    """Its number means nothing here: the lease is refused while it is renewed, from both sides."""
    container = contain(tree, JOULERY_UNGUARDED="1")
    assert said(container).startswith(b"set ")
    spec = DeviceSpec("cpufreq", {"root": str(tree)})
    with LeaseHolder(book, watch=start_watchdog) as mine, pytest.raises(CapabilityError, match="another container"):
        mine.set(CpufreqClock(str(tree)), spec, ClockSetting(1800.0), "mine")
    second = contain(tree, JOULERY_UNGUARDED="1")
    assert b"another container" in second.communicate()[1]
    assert settings(tree)["cpufreq/policy0/scaling_max_freq"] == "2000000"


def test_a_lease_of_another_container_expires_without_renewal(tree: Path, book: LeaseBook) -> None:
    lease = foreign(book, tree, 10.0)
    assert lease_state(lease, lease.renewed_s + 9.0) is LeaseState.HELD
    assert lease_state(lease, lease.renewed_s + 11.0) is LeaseState.EXPIRED
    rebooted = replace(lease, owner=replace(lease.owner, boot_id="another"))
    assert lease_state(rebooted, lease.renewed_s) is LeaseState.ABANDONED


def test_a_watchdog_leaves_the_lease_of_an_equal_number_elsewhere(tree: Path, book: LeaseBook) -> None:
    owner = replace(foreign(book, tree, 60.0).owner, pid=2**22 + 1)
    book.write(replace(foreign(book, tree, 60.0), owner=owner))
    line = [sys.executable, "-m", "joulery.app.wiring.lease_watchdog", str(book.folder), str(owner.pid), "5"]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert done.stdout == b"watching\n"
    assert book.names() == ("cpu.clock",)


def no_device(spec: DeviceSpec) -> CpufreqClock:
    raise AssertionError(f"{spec} was opened")


@pytest.mark.parametrize("outside", [Isolation(MACHINE.pid, MACHINE.cgroup), Isolation(4026532111, MACHINE.cgroup)])
def test_a_guard_counts_only_while_it_runs_and_from_outside(tmp_path: Path, outside: Isolation) -> None:
    inside = LeaseBook(tmp_path, Isolation(4026532000, 4026532001))
    guards = LeaseBook(tmp_path, outside)
    with guards.guarding():
        inside.require_guard("gpu:0")
        with pytest.raises(CapabilityError, match="another guard"), guards.guarding():
            pass
    with pytest.raises(CapabilityError, match="takes the watchdog") as caught:
        inside.require_guard("gpu:0")
    assert "doctor --guard" in (caught.value.grant or "")
    with inside.guarding(), pytest.raises(CapabilityError, match="takes the watchdog"):
        inside.require_guard("gpu:0")  # a guard inside ends with the container too


def test_what_is_a_container() -> None:
    assert not MACHINE.contained
    assert not Isolation(MACHINE.pid, 0).contained  # a kernel without namespaces of control groups
    assert Isolation(4026532000, MACHINE.cgroup).contained
    assert Isolation(MACHINE.pid, 4026532001).contained  # docker run --pid=host


def test_the_guard_reverts_silent_leases_and_leaves_those_that_are_renewed(tree: Path, book: LeaseBook) -> None:
    (tree / "cpufreq/policy0/scaling_max_freq").write_text("1600000\n")
    lease = foreign(book, tree, 60.0)
    guard(book, no_device, lambda seconds: True)
    assert book.names() == (lease.name,)
    book.write(replace(lease, lasts_s=-1.0, before=CpufreqClock(str(tree)).observe().memento))
    guard_leases(lambda seconds: True, book)
    assert book.names() == ()


def test_the_guard_opens_no_files_that_a_container_names(tree: Path, book: LeaseBook, tmp_path: Path) -> None:
    other = cpufreq_tree(tmp_path / "other")
    before = settings(other)
    lease = foreign(book, other, -1.0)
    guard_leases(lambda seconds: True, book)
    assert book.names() == (lease.name,)
    assert settings(other) == before


def test_roots_leases_lie_outside_its_home_and_another_user_respects_them(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JOULERY_STATE", raising=False)
    monkeypatch.setattr("joulery.store.leases.MACHINE_FOLDER", tmp_path / "machine")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert state_folder() == tmp_path / "machine"
    held = foreign(LeaseBook(), tree, 60.0)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    mine = LeaseBook(isolation=MACHINE)
    assert tmp_path / "home" in mine.folder.parents
    spec = DeviceSpec("cpufreq", {"root": str(tree)})
    with LeaseHolder(mine, watch=no_watchdog) as holder, pytest.raises(CapabilityError, match="leased by process 7"):
        holder.set(CpufreqClock(str(tree)), spec, ClockSetting(1800.0), "mine")
    assert LeaseBook(tmp_path / "machine/leases").names() == (held.name,)


def test_leases_in_roots_home_of_earlier_versions_are_still_found(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JOULERY_STATE", raising=False)
    monkeypatch.setattr("joulery.app.wiring.leases.MACHINE_FOLDER", tmp_path / "machine")
    monkeypatch.setattr("joulery.store.leases.MACHINE_FOLDER", tmp_path / "machine")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    foreign(LeaseBook(tmp_path / "home/.local/state/joulery/leases"), tree, 60.0)
    assert [one.name for one in lease_statuses()] == ["cpu.clock"]
    assert len(reset_everything()) == 1
    assert lease_statuses() == ()
