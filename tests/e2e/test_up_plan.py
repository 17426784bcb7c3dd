"""``joulery up --plan``: instances with shares and batches, a standby that takes over, services that come and go."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from joulery.adapters.cgroups import CpuGroups
from joulery.domain.errors import CapabilityError
from joulery.store.run.directory import open_run
from tests.e2e.test_up import Up
from tests.runtime.plan_files import planned_site, service
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("up")]


@pytest.fixture(autouse=True, scope="module")
def quotas():
    """Shares of a core are quotas of a control group."""
    try:
        groups = CpuGroups.find()
    except CapabilityError as error:
        pytest.skip(str(error))
    if not os.access(groups.base, os.W_OK):
        pytest.skip(f"{groups.base} may not be written: no share of a core can be given")


def planned(site: Path) -> Path:
    plan = site.parent / "plan.json"
    line = [sys.executable, "-m", "joulery", "plan", str(site), "--out", str(plan), "--json"]
    subprocess.run(line, check=True, capture_output=True)
    return plan


def logged(folder: Path, kind: str, wanted: Callable[[dict], bool]) -> dict:
    """The first entry of a kind that is wanted, once the log has it."""

    def found() -> dict | None:
        if not (folder / "manifest.json").exists():
            return None
        return next((entry for entry in open_run(folder).log(kind) if wanted(entry)), None)

    entry = wait_until(found, f"such a {kind} in the log")
    assert entry is not None
    return entry


def served(entry: dict, service: str) -> int:
    """Requests of a service in a tick."""
    return sum(one["requests"] for one in entry["services"] if one["service"] == service)


def test_an_slo_violation_is_ended_by_the_standby_and_services_come_and_go(tmp_path):
    """``hasty`` takes twenty times as long as its profile says; later it leaves and another service comes."""
    steady = service("steady", slo="4 s", duration=40)
    site = planned_site(tmp_path, steady, service("hasty", busy_s=0.04, slo="200 ms", duration=40))
    plan, run = planned(site), tmp_path / "run"
    with Up(site, tmp_path, "--plan", str(plan), "--json") as up:
        switched = logged(run, "decision", lambda entry: entry["decision"]["kind"] == "activate_standby")
        renewed = logged(run, "decision", lambda entry: entry["decision"]["kind"] == "renew_standby")
        planned_site(tmp_path, steady, service("late", duration=30))
        moved = logged(run, "decision", lambda entry: entry["decision"]["policy"] == "follow")
        logged(run, "tick", lambda entry: served(entry, "late") > 0)
        os.killpg(up.process.pid, signal.SIGINT)
        code, said, complaint = up.end()
        assert code == 0, complaint
        assert up.survivors() == []
    assert (switched["decision"]["target"], switched["outcome"]) == ("hasty/0", "applied")
    assert switched["detail"].startswith("0 processes started, 1 stopped"), "the standby was there already"
    assert moved["outcome"] == "applied" and moved["decision"]["reason"].startswith("1 start, 1 stop, 0 resize, 0 move")
    assert renewed["detail"].startswith("1 processes started, 0 stopped"), "a new standby, after the switch"
    assert moved["detail"].startswith("2 processes started, 2 stopped, 2 kept"), "steady and its standby ran on"
    summary = json.loads(said)
    by_name = {entry["service"]: entry for entry in summary["services"]}
    assert set(by_name) == {"steady", "hasty", "late"} and by_name["late"]["requests"] > 0
    assert all(by_name[name]["failed"] == by_name[name]["refused"] for name in ("steady", "late")), said
    parts = ("requests_j", "serving_j", "load_generator_j", "idle_j", "unattributed_j")
    assert sum(summary[name] for name in parts) == pytest.approx(summary["energy_j"], rel=1e-9)
    assert sum(entry["charged_j"] for entry in summary["services"]) == pytest.approx(summary["energy_j"], rel=1e-9)
    replay = [sys.executable, "-m", "joulery", "replay", str(run), "--json"]
    replayed = json.loads(subprocess.run(replay, capture_output=True, check=True).stdout)
    assert replayed["differences"] == [] and replayed["decisions"] >= 1
